"""The distributed op with its derivative, on all devices and with or without a batch.

The derivative is defined around the shard_map, not inside, for autodiff of a shard_map within another failed
in JAX 0.11.2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._varying import vary_alike
from ..attention import Partial, accumulator_dtype, add_heads, axis_names, heads_of, take_heads
from ..collectives import on_this_rank
from ._sharding import Layout, Operands, map_over_mesh
from ._stages import Options, backward, forward


def _over_batch(function: Any, operands: Operands, *rows: Any) -> Any:
    """``function(operands of one sequence, *rows of one sequence)``, for a batch example by example."""
    if operands.query.ndim == 3:
        return function(operands, *rows)
    axes = Operands(0, 0, 0, 0 if operands.stages.stacked else None, None)
    return jax.vmap(function, in_axes=(axes, *[0] * len(rows)))(operands, *rows)


def _key_heads(operands: Operands, layout: Layout) -> jax.Array:
    """Returns the key heads of a device's query heads by `heads_of`, where it has all key heads."""
    count, rank = operands.query.shape[-2], jax.lax.axis_index(axis_names(layout.heads))
    group = count * jax.lax.axis_size(axis_names(layout.heads)) // operands.key.shape[-2]
    return heads_of(count * rank + jnp.arange(count, dtype=jnp.int32), 0, group)


def _take_key_heads(operands: Operands, layout: Layout) -> Operands:
    """Returns the operands with the key heads that a device attends with."""
    if not layout.shares_key_heads:
        return operands
    heads = _key_heads(operands, layout)
    key, value = vary_alike((operands.key, operands.value, heads))[:2]
    return operands._replace(key=take_heads(key, heads), value=take_heads(value, heads))


def _add_key_heads(gradients: Operands, operands: Operands, layout: Layout) -> Operands:
    """Returns the gradients of all key heads, added up over the devices that have some of them."""
    if not layout.shares_key_heads:
        return gradients
    heads = _key_heads(operands, layout)
    wide = accumulator_dtype(operands.key.dtype)
    parts = (
        add_heads(x.astype(wide), heads, operands.key.shape[-2]) for x in (gradients.key, gradients.value)
    )
    key, value = jax.lax.psum(tuple(parts), axis_names(layout.heads))
    return gradients._replace(key=key.astype(gradients.key.dtype), value=value.astype(gradients.value.dtype))


def _on_rank(operands: Operands, options: Options) -> Operands:
    """One rank's operands of one sequence, ready for its primitives."""
    stages = on_this_rank(operands.stages, options.axis_name, "the plan")
    return vary_alike(operands._replace(stages=stages))


# Jitted by static arguments, not by closures made anew, so that calls outside of jit compile only once. And
# without jit, shard_map over some of the axes failed when check_vma is off (jax 0.11.2).
@functools.partial(jax.jit, static_argnums=(1, 2))
def _forward(operands: Operands, layout: Layout, options: Options) -> Partial[jax.Array]:
    def one(operands: Operands) -> Partial[jax.Array]:
        return forward(_on_rank(operands, options), options)

    def local(operands: Operands) -> Partial[jax.Array]:
        return _over_batch(one, _take_key_heads(operands, layout))

    mapped = map_over_mesh(
        local,
        layout,
        in_specs=(layout.specs(operands),),
        out_specs=Partial(layout.rows, layout.row_numbers),
    )
    return mapped(operands)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _backward(
    operands: Operands,
    result: Partial[jax.Array],
    cotangents: Partial[jax.Array],
    layout: Layout,
    options: Options,
) -> Operands:
    def one(operands: Operands, result: Partial[jax.Array], cotangents: Partial[jax.Array]) -> Operands:
        return backward(_on_rank(operands, options), result, cotangents, options)

    def local(operands: Operands, *rows: Any) -> Operands:
        gradients = _over_batch(one, _take_key_heads(operands, layout), *rows)
        gradients = _add_key_heads(gradients, operands, layout)
        return gradients._replace(sinks=_sum_of_sharers(gradients.sinks, layout))

    rows = Partial(layout.rows, layout.row_numbers)
    specs = layout.specs(operands)
    mapped = map_over_mesh(local, layout, in_specs=(specs, rows, rows), out_specs=specs._replace(stages=None))
    return mapped(operands, result, cotangents)


def _sum_of_sharers(gradient: jax.Array | None, layout: Layout) -> jax.Array | None:
    """The gradient of the sinks, from [N] or those of a batch [B, N] on each device."""
    if gradient is None:
        return None
    gradient = gradient.sum(axis=0) if gradient.ndim > 1 else gradient
    return jax.lax.psum(gradient, layout.sharers) if layout.sharers else gradient


attend = jax.custom_vjp(_forward, nondiff_argnums=(1, 2))


def _attend_fwd(
    operands: Operands, layout: Layout, options: Options
) -> tuple[Partial[jax.Array], tuple[Operands, Partial[jax.Array]]]:
    out, lse = _forward(operands, layout, options)
    result = Partial(checkpoint_name(out, "jaxmagi_out"), checkpoint_name(lse, "jaxmagi_lse"))
    return result, (operands, result)


def _attend_bwd(
    layout: Layout, options: Options, residuals: tuple[Operands, Partial[jax.Array]], cotangents: Partial
) -> tuple[Operands]:
    return (_backward(*residuals, cotangents, layout, options),)


attend.defvjp(_attend_fwd, _attend_bwd)
