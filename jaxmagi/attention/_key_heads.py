"""Selects a device's key heads where the mesh splits query heads, but not the key heads alike."""

import jax
import jax.numpy as jnp


def heads_of(query_heads: jax.Array, first_key_head: jax.Array | int, group: int) -> jax.Array:
    """Returns which of its key heads a device attends with.

    Attention pairs adjacent query heads with key heads in equal groups. Where all query heads of a device lie
    in one group, they share that group's key head. Otherwise each query head gets a key head of its own.

    Args:
        query_heads: int32 [N], the numbers of the device's query heads: consecutive, from a multiple of N on.
        first_key_head: int32 [], the number of the first of its key heads.
        group: how many query heads share a key head.

    Returns:
        int32 [1] or [N], indices of key heads.
    """
    share_one = group % query_heads.shape[0] == 0
    return (query_heads[:1] if share_one else query_heads) // group - first_key_head


def take_heads(x: jax.Array, heads: jax.Array) -> jax.Array:
    """Returns keys or values [..., K, D] of these heads, [..., len(heads), D]."""
    return jnp.take(x, heads, axis=-2, mode="clip")


def add_heads(gradient: jax.Array, heads: jax.Array, count: int) -> jax.Array:
    """Transposes `take_heads`: [..., len(heads), D] → [..., count, D], 0 for heads that were not taken."""
    zeros = jax.lax.full_like(gradient, 0, shape=(*gradient.shape[:-2], count, gradient.shape[-1]))
    return zeros.at[..., heads, :].add(gradient, mode="promise_in_bounds")
