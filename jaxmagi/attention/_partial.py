"""The algebra of softmax around the kernels: partial outputs, sinks, and the numbers their gradients need.

Arrays have any leading axes: outputs [..., N, Dv], log-sum-exps and other numbers per row [..., N].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial[Leaf](NamedTuple):
    """The output [..., N, Dv] of attention to some of the keys, and the log-sum-exp [..., N] of their logits.

    Or something for each of the two.
    """

    out: Leaf
    lse: Leaf


def _share(lse: jax.Array, total: jax.Array) -> jax.Array:
    """The weight [..., N, 1] of a part in the whole; 0 where there is nothing to see at all."""
    return jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total))[..., None]


def merge(first: Partial[jax.Array], second: Partial[jax.Array]) -> Partial[jax.Array]:
    """The attention to the keys of both. Where neither sees anything, output 0 and log-sum-exp -inf."""
    lse = jnp.logaddexp(first.lse, second.lse)
    return Partial(_share(first.lse, lse) * first.out + _share(second.lse, lse) * second.out, lse)


def accumulate(previous: Partial[jax.Array], part: Partial[jax.Array]) -> Partial[jax.Array]:
    """The attention to the keys of both, in the dtypes of ``previous``."""
    wide = Partial(previous.out.astype(part.out.dtype), previous.lse)
    out, lse = merge(wide, part)
    return Partial(out.astype(previous.out.dtype), lse)


def add_sinks(partial: Partial[jax.Array], sinks: jax.Array) -> Partial[jax.Array]:
    """The attention with sinks [N] (or what broadcasts), -inf for none. Rows that see nothing stay as is."""
    with_sinks = jnp.logaddexp(partial.lse, jax.lax.broadcast_to_rank(sinks, partial.lse.ndim))
    lse = jnp.where(jnp.isneginf(partial.lse), -jnp.inf, with_sinks)
    return Partial(_share(partial.lse, lse) * partial.out, lse)


def row_delta(result: Partial[jax.Array], cotangents: Partial[jax.Array]) -> jax.Array:
    """[..., N]: rowsum(dout · out) - dlse, what softmax subtracts from dP (FlashAttention-2, algorithm 2)."""
    out, lse = result
    dout, dlse = cotangents
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    return jnp.where(jnp.isneginf(lse), 0, delta - dlse)


def sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """[N]: a sink lowers every probability of its rows by its share in their sum."""
    logits = jax.lax.broadcast_to_rank(sinks.astype(lse.dtype), lse.ndim)
    share = jnp.exp(logits - jnp.where(jnp.isneginf(lse), jnp.inf, lse))
    return -(share * delta).sum(axis=range(lse.ndim - 1)).astype(sinks.dtype)
