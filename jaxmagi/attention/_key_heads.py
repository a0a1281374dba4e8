"""The key heads of a device that has some of the query heads, where the mesh does not split both alike."""

import jax
import jax.numpy as jnp


def heads_of(query_heads: jax.Array, first_key_head: jax.Array, group: int) -> jax.Array:
    """The key heads that a device attends with, among those that it has.

    Attention pairs adjacent query heads with key heads in equal groups. Query heads of a device that begin or end
    within a group get a key head each; such as lie within one group share one.

    Args:
        query_heads: int32 [N], the numbers of the device's query heads, N consecutive ones from a multiple of N.
        first_key_head: int32 [], the number of the first of its key heads.
        group: how many query heads share a key head.

    Returns:
        int32 [1] or [N], indices of key heads.
    """
    share_one = group % query_heads.shape[0] == 0
    return (query_heads[:1] if share_one else query_heads) // group - first_key_head


def take_heads(x: jax.Array, heads: jax.Array) -> jax.Array:
    """Keys or values [..., K, D] of these heads."""
    return jnp.take(x, heads, axis=-2, mode="clip")


def add_heads(gradient: jax.Array, heads: jax.Array, count: int) -> jax.Array:
    """The transpose of `take_heads`: [..., len(heads), D] → [..., count, D], 0 for heads that were not taken."""
    zeros = jax.lax.full_like(gradient, 0, shape=(*gradient.shape[:-2], count, gradient.shape[-1]))
    return zeros.at[..., heads, :].add(gradient, mode="promise_in_bounds")
