"""Partial attention outputs into one, by their log-sum-exps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial[Leaf](NamedTuple):
    """The output [T, N, Dv] of attention to some of the keys, and the log-sum-exp [T, N] of their logits.

    Or something for each of the two.
    """

    out: Leaf
    lse: Leaf


def _share(lse: jax.Array, total: jax.Array) -> jax.Array:
    """The weight [T, N, 1] of a part in the whole; 0 where there is nothing to see at all."""
    return jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total))[..., None]


def merge(first: Partial[jax.Array], second: Partial[jax.Array]) -> Partial[jax.Array]:
    """The attention to the keys of both. Where neither sees anything, output 0 and log-sum-exp -inf."""
    lse = jnp.logaddexp(first.lse, second.lse)
    return Partial(_share(first.lse, lse) * first.out + _share(second.lse, lse) * second.out, lse)


def add_sinks(partial: Partial[jax.Array], sinks: jax.Array) -> Partial[jax.Array]:
    """The attention with a sink per head [N], -inf for none. Rows that see nothing stay as they are."""
    lse = jnp.where(jnp.isneginf(partial.lse), -jnp.inf, jnp.logaddexp(partial.lse, sinks))
    return Partial(_share(partial.lse, lse) * partial.out, lse)
