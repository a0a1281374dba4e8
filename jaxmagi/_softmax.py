"""Online softmax, merging by log-sum-exp, and what gradients of softmax need.

A softmax over some of the keys is either unnormalised, a `SoftmaxState` (FlashAttention-2, algorithm 1), or
finished, a `Partial`. Arrays have any leading axes: outputs [..., N, Dv], numbers per row [..., N].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial[Leaf](NamedTuple):
    """The result of attention to some of the keys, or something for each of its two parts."""

    out: Leaf  # [..., N, Dv]
    lse: Leaf  # [..., N], log-sum-exp of the logits


class SoftmaxState(NamedTuple):
    """An unnormalised softmax over some of the keys."""

    out: jax.Array  # [..., N, Dv], sum of exp(logit - row_max) · value
    row_max: jax.Array  # [..., N]
    row_sum: jax.Array  # [..., N], sum of exp(logit - row_max)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """Replaces -inf by 0. Subtracting the result from -inf then gives -inf and not NaN."""
    return jnp.where(jnp.isneginf(x), 0, x)


def rescale(state: SoftmaxState, row_max: jax.Array) -> SoftmaxState:
    """Returns the state relative to another row_max, which is at least its own."""
    correction = jnp.exp(state.row_max - finite_or_zero(row_max))
    out = correction[..., None].astype(state.out.dtype) * state.out
    return SoftmaxState(out, row_max, correction * state.row_sum)


def normalize(state: SoftmaxState) -> Partial[jax.Array]:
    """Returns the output and the log-sum-exp; 0 and -inf for rows that are fully masked."""
    # XLA's max on CPU may drop NaN and leave a row of NaN with row_max -inf, but row_sum has the NaN.
    masked = jnp.isneginf(state.row_max) & (state.row_sum == 0)
    row_sum = jnp.where(masked, 1, state.row_sum)
    out = jnp.where(masked[..., None], 0, state.out / row_sum[..., None].astype(state.out.dtype))
    return Partial(out, jnp.where(masked, -jnp.inf, state.row_max + jnp.log(row_sum)))


def to_state(partial: Partial[jax.Array]) -> SoftmaxState:
    """Inverts `normalize`, with row_max = lse and row_sum = 1. Outputs with lse -inf may be anything."""
    masked = jnp.isneginf(partial.lse)
    out = jnp.where(masked[..., None], 0, partial.out)
    return SoftmaxState(out, partial.lse, (~masked).astype(partial.lse.dtype))


def add_states(first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
    """Returns the softmax over the keys of both, which must have the same row_max."""
    return SoftmaxState(first.out + second.out, first.row_max, first.row_sum + second.row_sum)


def merge(first: Partial[jax.Array], second: Partial[jax.Array]) -> Partial[jax.Array]:
    """Returns the attention to the keys of both; 0 and -inf where both are fully masked."""
    # The result does not depend on row_max, so neither do gradients.
    row_max = jax.lax.stop_gradient(jnp.maximum(first.lse, second.lse))
    return normalize(add_states(rescale(to_state(first), row_max), rescale(to_state(second), row_max)))


def accumulate(previous: Partial[jax.Array], part: Partial[jax.Array]) -> Partial[jax.Array]:
    """Returns the attention to the keys of both, in the dtypes of ``previous``."""
    wide = Partial(previous.out.astype(part.out.dtype), previous.lse)
    out, lse = merge(wide, part)
    return Partial(out.astype(previous.out.dtype), lse)


def add_sinks_to_state(state: SoftmaxState, sinks: jax.Array) -> SoftmaxState:
    """Returns the softmax with sinks that broadcast against its rows. Fully masked rows stay as they are."""
    masked = jnp.isneginf(state.row_max)
    sinks = jnp.where(masked, -jnp.inf, jax.lax.broadcast_to_rank(sinks, masked.ndim))
    state = rescale(state, jnp.maximum(state.row_max, sinks))
    return state._replace(row_sum=state.row_sum + jnp.exp(sinks - finite_or_zero(state.row_max)))


def add_sinks(partial: Partial[jax.Array], sinks: jax.Array) -> Partial[jax.Array]:
    """Returns the attention with sinks [N] (or what broadcasts), which are -inf for none."""
    return normalize(add_sinks_to_state(to_state(partial), sinks))


def row_delta(result: Partial[jax.Array], cotangents: Partial[jax.Array]) -> jax.Array:
    """Returns rowsum(dout · out) - dlse, [..., N]: D of FlashAttention-2, minus the cotangent of lse."""
    out, lse = result
    dout, dlse = cotangents
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    return jnp.where(jnp.isneginf(lse), 0, delta - dlse)


def sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns the gradients of sinks, [N]: minus the sum over rows of the sink's probability times delta."""
    logits = jax.lax.broadcast_to_rank(sinks.astype(lse.dtype), lse.ndim)
    probability = jnp.exp(logits - jnp.where(jnp.isneginf(lse), jnp.inf, lse))
    return -(probability * delta).sum(axis=range(lse.ndim - 1)).astype(sinks.dtype)
