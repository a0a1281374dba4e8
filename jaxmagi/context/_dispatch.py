"""Converts arrays from the global order of tokens to the dispatched order and back."""

import functools
import math
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Shaped

from .._checks import MAX_LENGTH, check_unmasked, integer
from ..attention import axis_names
from ..planning import ContextPlan
from ._validation import check_fill, check_plan

PADDING = -1
"""Stands in a token order where there is no token."""


@overload
def dispatch(
    x: Shaped[np.ndarray, "..."], plan: ContextPlan, *, axis: int = 0, pad_value: ArrayLike = 0
) -> Shaped[np.ndarray, "..."]: ...
@overload
def dispatch(
    x: Shaped[Array, "..."], plan: ContextPlan, *, axis: int = 0, pad_value: ArrayLike = 0
) -> Shaped[Array, "..."]: ...
def dispatch(
    x: Shaped[Array | np.ndarray, "..."], plan: ContextPlan, *, axis: int = 0, pad_value: ArrayLike = 0
) -> Shaped[Array | np.ndarray, "..."]:
    """Puts the tokens of a global array into the plan's order, in which equal shards go to the ranks.

    It works on the host and under ``jax.jit``, is differentiable, and keeps the sharding over Explicit axes.

    Args:
        x: array with the ``plan.length`` tokens of the sequence at ``axis``.
        plan: a whole plan.
        axis: where the tokens are.
        pad_value: the value at padding positions, one that the dtype of x has.

    Returns:
        The array with ``T_padded`` tokens at ``axis``: numpy for numpy, unless the plan is traced.

    Raises:
        ValueError: the number of tokens differs, x cannot hold ``pad_value``, or the plan is stacked or a
            part.
    """
    order = _whole_order(plan, "dispatch")
    _check_tokens("dispatch", x, axis, plan.length, "plan.length")
    check_fill(pad_value, x.dtype if hasattr(x, "dtype") else np.result_type(x), "pad_value")
    if _on_host(x, order):
        return _take(np, x, np.asarray(order), axis, pad_value)
    return _take_sharded(jnp.asarray(x), _replicated(order), axis, pad_value)


@overload
def undispatch(
    x: Shaped[np.ndarray, "..."], plan: ContextPlan, *, axis: int = 0
) -> Shaped[np.ndarray, "..."]: ...
@overload
def undispatch(x: Shaped[Array, "..."], plan: ContextPlan, *, axis: int = 0) -> Shaped[Array, "..."]: ...
def undispatch(
    x: Shaped[Array | np.ndarray, "..."], plan: ContextPlan, *, axis: int = 0
) -> Shaped[Array | np.ndarray, "..."]:
    """Puts the tokens of a dispatched array back into their global order, without the padding.

    This is the inverse of `dispatch` with the same plan. Nothing in an array says which plan it was
    dispatched by: with another plan of the same length, tokens come out in a wrong order without an error. So
    keep plan and batch together, as `jaxmagi.prefetch_plans` does.

    It works on the host and under ``jax.jit``, and is differentiable. Over Explicit axes it keeps the
    sharding, except at ``axis`` where that does not divide ``plan.length``.

    Args:
        x: array with the ``T_padded`` dispatched tokens at ``axis``.
        plan: a whole plan.
        axis: where the tokens are.

    Returns:
        The array with ``plan.length`` tokens at ``axis``: numpy for numpy, unless the plan is traced.

    Raises:
        ValueError: the number of tokens differs, or the plan is stacked or a part.
    """
    order = _whole_order(plan, "undispatch")
    _check_tokens("undispatch", x, axis, order.shape[0], "the padded length")
    if _on_host(x, order):
        order = np.asarray(order)
        positions = np.zeros(plan.length, np.int32)
        positions[order[order != PADDING]] = np.flatnonzero(order != PADDING)
        return _take(np, x, positions, axis, 0)
    order = _replicated(order)
    place = jnp.arange(order.shape[0], dtype=jnp.int32)
    positions = jnp.zeros(plan.length, jnp.int32)
    positions = positions.at[order].set(place, mode="drop", wrap_negative_indices=False, unique_indices=True)
    return _take_sharded(jnp.asarray(x), positions, axis, 0)


def _replicated(order: Any) -> jax.Array:
    """Replicates the token order: indices sharded over Explicit axes would make a gather ambiguous."""
    order = jnp.asarray(order)
    if all(axes is None for axes in jax.typeof(order).sharding.spec):
        return order
    return jax.sharding.reshard(order, P())


def _whole_order(plan: ContextPlan, name: str) -> Any:
    check_plan(plan)
    if np.ndim(plan.token_order) != 1:
        raise ValueError(
            f"{name} takes the plan of one sequence, but this one is stacked "
            f"(token_order {plan.token_order.shape}): use jax.vmap({name}) over x and plan."
        )
    if plan.token_order.shape[0] != plan.shard_length * plan.cp_size:
        raise ValueError(
            f"{name} works on global arrays, but this plan is one rank's part (token_order "
            f"{plan.token_order.shape}): call it outside jax.shard_map."
        )
    return plan.token_order


def _check_tokens(name: str, x: Any, axis: int, expected: int, what: str) -> None:
    check_unmasked(x, "x")
    integer(axis, "axis", minimum=-MAX_LENGTH)
    if not -np.ndim(x) <= axis < np.ndim(x):
        raise ValueError(f"{name}: axis {axis} is out of bounds for shape {np.shape(x)}.")
    if np.shape(x)[axis] != expected:
        raise ValueError(
            f"{name}: x has {np.shape(x)[axis]} tokens at axis {axis}, but {what} is {expected} "
            f"(x is {np.shape(x)})."
        )


def _on_host(x: Any, order: Any) -> bool:
    return not isinstance(x, jax.Array) and not isinstance(order, Tracer)


def _take(xp: Any, x: Any, order: Any, axis: int, pad_value: ArrayLike) -> Any:
    """Gathers entries of x at ``axis``, with ``pad_value`` for padding."""
    x = xp.moveaxis(xp.asarray(x), axis, 0)
    if x.shape[0] == 0:
        taken = xp.full((*order.shape, *x.shape[1:]), pad_value, x.dtype)
    else:
        padding = (order == PADDING).reshape(-1, *[1] * (x.ndim - 1))
        taken = xp.where(padding, xp.asarray(pad_value, x.dtype), x[xp.maximum(order, 0)])
    return xp.moveaxis(taken, 0, axis)


def _take_sharded(x: jax.Array, order: jax.Array, axis: int, pad_value: ArrayLike) -> Any:
    """Does what `_take` does for jax arrays, whose gathers over Explicit axes need the result's sharding."""
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    axis %= x.ndim
    if spec[axis] is None:
        return _take(jnp, x, order, axis, pad_value)
    if order.shape[0] % math.prod(sharding.mesh.shape[name] for name in axis_names(spec[axis])):
        spec[axis] = None
    return _take_over_mesh(x, order, jnp.asarray(pad_value, x.dtype), axis, sharding.mesh, P(*spec))


# Only jit finds the devices of a mesh that jax.set_mesh has not set.
@functools.partial(jax.jit, static_argnames=("axis", "mesh", "spec"))
def _take_over_mesh(
    x: jax.Array, order: jax.Array, pad_value: jax.Array, axis: int, mesh: Any, spec: P
) -> Any:
    with jax.sharding.use_abstract_mesh(mesh):
        gather: Any = jax.sharding.auto_axes(
            lambda x, order, pad_value: _take(jnp, x, order, axis, pad_value), out_sharding=spec
        )
        return gather(x, order, pad_value)
