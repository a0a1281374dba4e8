"""The distributed op with its derivative, on all devices and with or without a batch.

The derivative is defined around the shard_map and not inside, because autodiff of nested shard_maps failed
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
from ._passes import ContextOptions, Received, backward, forward
from ._sharding import ContextOperands, OperandSharding, map_over_mesh


def _over_batch(function: Any, operands: ContextOperands, *rows: Any) -> Any:
    """Calls ``function(operands, *rows)`` of one sequence, mapped over the batch if there is one."""
    if operands.query.ndim == 3:
        return function(operands, *rows)
    axes = ContextOperands(0, 0, 0, 0 if operands.work.stacked else None, None)
    return jax.vmap(function, in_axes=(axes, *[0] * len(rows)))(operands, *rows)


def _key_heads(operands: ContextOperands, sharding: OperandSharding) -> jax.Array:
    """Returns the indices of the key heads that a device's query heads use, out of all key heads."""
    count, rank = operands.query.shape[-2], jax.lax.axis_index(axis_names(sharding.heads))
    group = count * jax.lax.axis_size(axis_names(sharding.heads)) // operands.key.shape[-2]
    return heads_of(count * rank + jnp.arange(count, dtype=jnp.int32), 0, group)


def _take_key_heads(operands: ContextOperands, sharding: OperandSharding) -> ContextOperands:
    """Returns the operands with only the key heads that the device's query heads use."""
    if not sharding.shares_key_heads:
        return operands
    heads = _key_heads(operands, sharding)
    key, value = vary_alike((operands.key, operands.value, heads))[:2]
    return operands._replace(key=take_heads(key, heads), value=take_heads(value, heads))


def _add_key_heads(
    gradients: ContextOperands, operands: ContextOperands, sharding: OperandSharding
) -> ContextOperands:
    """Returns the gradients of all key heads, summed over the devices that use them."""
    if not sharding.shares_key_heads:
        return gradients
    heads = _key_heads(operands, sharding)
    wide = accumulator_dtype(operands.key.dtype)
    parts = (
        add_heads(x.astype(wide), heads, operands.key.shape[-2]) for x in (gradients.key, gradients.value)
    )
    key, value = jax.lax.psum(tuple(parts), axis_names(sharding.heads))
    return gradients._replace(key=key.astype(gradients.key.dtype), value=value.astype(gradients.value.dtype))


def _on_rank(operands: ContextOperands, options: ContextOptions) -> ContextOperands:
    """Selects the work of this rank, and lets all operands vary over the same mesh axes."""
    work = on_this_rank(operands.work, options.axis_name, "the plan")
    return vary_alike(operands._replace(work=work))


# jit with static arguments, not with a new closure per call, lets calls outside of jit compile only once.
# Without jit, shard_map over some of the axes fails when check_vma is off (jax 0.11.2).
@functools.partial(jax.jit, static_argnums=(1, 2))
def _forward(
    operands: ContextOperands, sharding: OperandSharding, options: ContextOptions
) -> tuple[Partial[jax.Array], Received]:
    def one(operands: ContextOperands) -> tuple[Partial[jax.Array], Received]:
        return forward(_on_rank(operands, options), options)

    def local(operands: ContextOperands) -> tuple[Partial[jax.Array], Received]:
        return _over_batch(one, _take_key_heads(operands, sharding))

    mapped = map_over_mesh(
        local,
        sharding,
        in_specs=(sharding.specs(operands),),
        out_specs=(Partial(sharding.row_spec, sharding.lse_spec), sharding.row_spec),
    )
    return mapped(operands)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _backward(
    operands: ContextOperands,
    result: Partial[jax.Array],
    received: Received,
    cotangents: Partial[jax.Array],
    sharding: OperandSharding,
    options: ContextOptions,
) -> ContextOperands:
    def one(operands: ContextOperands, result: Any, received: Any, cotangents: Any) -> ContextOperands:
        return backward(_on_rank(operands, options), result, received, cotangents, options)

    def local(operands: ContextOperands, *rows: Any) -> ContextOperands:
        gradients = _over_batch(one, _take_key_heads(operands, sharding), *rows)
        gradients = _add_key_heads(gradients, operands, sharding)
        return gradients._replace(sinks=_sum_sink_gradients(gradients.sinks, sharding))

    rows = Partial(sharding.row_spec, sharding.lse_spec)
    specs = sharding.specs(operands)
    in_specs = specs, rows, sharding.row_spec, rows
    mapped = map_over_mesh(local, sharding, in_specs=in_specs, out_specs=specs._replace(work=None))
    return mapped(operands, result, received, cotangents)


def _sum_sink_gradients(gradient: jax.Array | None, sharding: OperandSharding) -> jax.Array | None:
    """Sums the gradient of the sinks, [N] or [B, N] on each device, over batch and tokens."""
    if gradient is None:
        return None
    gradient = gradient.sum(axis=0) if gradient.ndim > 1 else gradient
    return jax.lax.psum(gradient, sharding.sink_axes) if sharding.sink_axes else gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend(
    operands: ContextOperands, sharding: OperandSharding, options: ContextOptions
) -> Partial[jax.Array]:
    """Returns the output and the log-sum-exp of all queries."""
    return _forward(operands, sharding, options._replace(keeps_received=False))[0]


type _Residuals = tuple[ContextOperands, Partial[jax.Array], Received]


def _attend_fwd(
    operands: ContextOperands, sharding: OperandSharding, options: ContextOptions
) -> tuple[Partial[jax.Array], _Residuals]:
    (out, lse), received = _forward(operands, sharding, options)
    result = Partial(checkpoint_name(out, "jaxmagi_out"), checkpoint_name(lse, "jaxmagi_lse"))
    return result, (operands, result, tuple(checkpoint_name(x, "jaxmagi_received") for x in received))


def _attend_bwd(
    sharding: OperandSharding,
    options: ContextOptions,
    residuals: _Residuals,
    cotangents: Partial,
) -> tuple[ContextOperands]:
    return (_backward(*residuals, cotangents, sharding, options),)


attend.defvjp(_attend_fwd, _attend_bwd)
