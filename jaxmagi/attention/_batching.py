"""Batching rules of the primitives: the new axis is folded into B."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from .._folding import fold, unfold
from ._partial import Partial, accumulate, add_sinks
from ._sharding import bind_over_shards

_BANDS, _SINKS = 3, 4  # among the operands


def _fold_bands(bands: Any, axis: int | None, size: int, batch: int) -> Any:
    """Bands [1 or B, C, 6] with or without the new axis → [1 or A · B, C, 6]."""
    shared = bands.shape[0 if axis != 0 else 1] == 1
    if not shared:
        return fold(bands, axis, size)
    if axis is None:
        return bands
    bands = jnp.moveaxis(bands, axis, 0)
    return fold(jnp.broadcast_to(bands, (size, batch, *bands.shape[2:])), 0, size)


def _fold_operands(args: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], tuple[int, int]]:
    """Operands without sinks with the new axis folded in, and A and B."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    batch = args[0].shape[1 if axes[0] == 0 else 0]
    folded = [
        _fold_bands(x, axis, size, batch) if i == _BANDS else fold(x, axis, size)
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]
    return folded, (size, batch)


def _without_sinks[Item](items: Sequence[Item]) -> list[Item]:
    return [*items[:_SINKS], *items[_SINKS + 1 :]]


def batch_forward(
    primitive: Primitive, args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """Batches the forward primitive, over whichever of its operands."""
    if axes[_SINKS] is not None:
        return _batch_over_sinks(primitive, args, axes, **params)
    (q, k, v, bands, *previous), lead = _fold_operands(_without_sinks(args), _without_sinks(axes))
    results = bind_over_shards(primitive, q, k, v, bands, args[_SINKS], *previous, **params)
    return [unfold(x, lead) for x in results], [0, 0]


def _batch_over_sinks(
    primitive: Primitive,
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    out_dtype: jnp.dtype,
    **params: Any,
) -> tuple[list[Any], list[int]]:
    """The kernels take one row of sinks and add what was there before: both are done afterwards instead."""
    sinks = jnp.moveaxis(args[_SINKS], axes[_SINKS] or 0, 0)
    no_sinks = jnp.full_like(sinks, -jnp.inf).max(0, initial=-jnp.inf)  # there may be no example
    bind = functools.partial(bind_over_shards, primitive, out_dtype=sinks.dtype, **params)
    if all(axis is None for axis in axes[:_SINKS]):
        part = Partial(*(x[None] for x in bind(*args[:_SINKS], no_sinks)))
    else:
        folded, lead = _fold_operands(args[:_SINKS], axes[:_SINKS])
        part = Partial(*(unfold(x, lead) for x in bind(*folded, no_sinks)))
    part = add_sinks(part, sinks[:, None, None])
    if len(args) == _SINKS + 1:
        return [part.out.astype(out_dtype), part.lse], [0, 0]
    previous = zip(args[_SINKS + 1 :], axes[_SINKS + 1 :], strict=True)
    moved = (x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in previous)
    return list(accumulate(Partial(*moved), part)), [0, 0]


def batch_backward(
    primitive: Primitive, args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """Batches the backward primitive, over whichever of its operands."""
    folded, lead = _fold_operands(args, axes)
    return [unfold(x, lead) for x in bind_over_shards(primitive, *folded, **params)], [0, 0, 0]
