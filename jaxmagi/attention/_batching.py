"""Defines the batching rules of the primitives: the new axis becomes the first of the batch dimensions."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from .._softmax import Partial, accumulate, add_sinks
from .._varying import vary_alike

_BANDS, _SINKS = 3, 4  # among the operands


def _lead(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Moves the new axis of operands other than sinks to the front; bands that examples share have size 1."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    return [
        jnp.moveaxis(x, axis, 0)
        if axis is not None
        else jnp.broadcast_to(x, (1 if i == _BANDS else size, *x.shape))
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]


def batch_forward(
    primitive: Primitive, args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """Batches the forward primitive over any of its operands."""
    if axes[_SINKS] is not None:
        return _batch_over_sinks(primitive, args, axes, **params)
    others = [i for i in range(len(args)) if i != _SINKS]
    operands = _lead([args[i] for i in others], [axes[i] for i in others])
    operands.insert(_SINKS, args[_SINKS])
    return primitive.bind(*vary_alike(operands), **params), [0, 0]


def _batch_over_sinks(
    primitive: Primitive,
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    out_dtype: jnp.dtype,
    **params: Any,
) -> tuple[list[Any], list[int]]:
    """Adds sinks and previous results afterwards, since the kernels take only one row of sinks."""
    sinks = jnp.moveaxis(args[_SINKS], axes[_SINKS] or 0, 0)
    no_sinks = jnp.full_like(sinks, -jnp.inf).max(0, initial=-jnp.inf)  # there may be no example
    operands = [*args[:_SINKS], no_sinks]
    if all(axis is None for axis in axes[:_SINKS]):
        results = primitive.bind(*vary_alike(operands), out_dtype=sinks.dtype, **params)
        part = Partial(*(x[None] for x in results))
    else:
        given = [*axes[:_SINKS], None]
        part = Partial(*batch_forward(primitive, operands, given, out_dtype=sinks.dtype, **params)[0])
    part = add_sinks(part, sinks.reshape(sinks.shape[0], *[1] * (part.lse.ndim - 2), sinks.shape[1]))
    if len(args) == _SINKS + 1:
        return [part.out.astype(out_dtype), part.lse], [0, 0]
    previous = zip(args[_SINKS + 1 :], axes[_SINKS + 1 :], strict=True)
    moved = (x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in previous)
    return list(accumulate(Partial(*moved), part)), [0, 0]


def batch_backward(
    primitive: Primitive, args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """Batches the backward primitive over any of its operands."""
    return primitive.bind(*vary_alike(_lead(args, axes)), **params), [0, 0, 0]
