"""Checks of the arguments of `context_attention`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import is_traced, numpy_array
from ..attention import accumulator_dtype
from ..collectives import check_options, check_wire_dtype
from ..planning import ContextPlan


def check_plan(plan: Any) -> None:
    """Raises ValueError unless ``plan`` is a `ContextPlan`."""
    if not isinstance(plan, ContextPlan):
        raise ValueError(
            f"plan must be a jaxmagi.ContextPlan, but it is {type(plan).__name__}: build one with "
            "jaxmagi.plan_context(mask, cp_size)."
        )


def check_fill(pad_value: Any, dtype: jnp.dtype, name: str) -> None:
    """Raises ValueError unless an array of this dtype can have the value, but for rounding to floats."""
    if is_traced(pad_value) or not _is_numeric(dtype):
        return
    given = numpy_array(pad_value, name)
    if not _is_numeric(given.dtype):
        fits = False
    elif jnp.issubdtype(dtype, np.inexact):
        fits = jnp.issubdtype(dtype, np.complexfloating) or not np.iscomplexobj(given)
    else:
        with np.errstate(invalid="ignore"):  # casts NaN, which equals nothing
            fits = bool((given.astype(dtype) == given).all())
    if not fits:
        raise ValueError(
            f"{name} must be a number that {jnp.dtype(dtype).name} has, but it is {pad_value!r}."
        )


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.bool_) or jnp.issubdtype(dtype, np.number)


def check_collectives(collectives: Any, dtype: jnp.dtype) -> None:
    """Raises ValueError unless these are `CollectiveOptions` for operands of this dtype."""
    check_options("collectives", collectives)
    check_wire_dtype(collectives, "the gradients of keys and values are", accumulator_dtype(dtype))


def check_batch(query: jax.Array, plan: ContextPlan) -> None:
    """Raises ValueError unless a stacked plan has a sequence for each example of query."""
    batch = plan.bands.shape[:-3]
    if len(batch) > query.ndim - 3 or (batch and batch != query.shape[:1]):
        raise ValueError(
            f"A plan stacked for {batch} sequences needs query [{batch[0]}, T, N, D] (or jax.vmap "
            f"over both), but it has shape {query.shape}."
        )


def check_ranks(plan: ContextPlan, axis_name: str, size: int) -> None:
    """Raises ValueError unless the plan is for as many ranks as the mesh axis has."""
    if plan.cp_size != size:
        raise ValueError(
            f"The plan is for cp_size={plan.cp_size}, but mesh axis {axis_name!r} has size {size}: build it "
            f"with jaxmagi.plan_context(mask, {size})."
        )


def check_lengths(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    plan: ContextPlan,
    axis_name: str,
    *,
    size: int,
    inside: bool,
) -> None:
    """Raises ValueError unless the plan is for this mesh axis and the arrays have its lengths."""
    check_ranks(plan, axis_name, size)
    expected = plan.shard_length if inside else plan.shard_length * size
    what = "the shards inside shard_map" if inside else "the global arrays outside of shard_map"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[-3] != expected:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens (shape {x.shape}), but {what} must have the {expected} of "
                f"the plan (cp_size={size}, shard_length={plan.shard_length}): see jaxmagi.dispatch."
            )
