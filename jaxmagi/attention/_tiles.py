"""Finds the visible tiles of the attention matrix, on the device and with static shapes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..masks import UNBOUNDED

_MAX_BLOCK = 512
_MIN_BLOCK = 64
_MAX_TILE_CELLS = 2**24  # logits of one tile over all examples and heads: 64 MiB in fp32


class Blocks(NamedTuple):
    """Sizes and numbers of the blocks of query rows and of keys; static."""

    q_size: int
    k_size: int
    num_q: int
    num_k: int


class KeyBlocks(NamedTuple):
    """The key blocks that are visible from one block of query rows."""

    bands: jax.Array  # int32[C, 6]
    q_begin: jax.Array  # first query row of the block
    first: jax.Array  # int32[C], first key block that each band makes visible
    last: jax.Array  # int32[C], last one; smaller than the first where there is none
    indices: jax.Array  # int32[num_k], the key blocks to visit, in order and then padding
    num_visits: jax.Array  # number of blocks to visit


def _block_size(length: int, rows: int) -> int:
    size = _MAX_BLOCK
    while size > _MIN_BLOCK and (size >= 2 * length or rows * size * size > _MAX_TILE_CELLS):
        size //= 2
    return size


def cut(q_len: int, kv_len: int, rows: int) -> Blocks:
    """Returns the blocks of a [q_len, kv_len] matrix, of which there are ``rows`` (batch times heads)."""
    q_size, k_size = _block_size(q_len, rows), _block_size(kv_len, rows)
    return Blocks(q_size, k_size, max(1, -(-q_len // q_size)), max(1, -(-kv_len // k_size)))


def crop(bands: jax.Array, q_len: int, kv_len: int) -> jax.Array:
    """Returns bands [C, 6] without what lies outside of the lengths, as compiled kernels take any bands."""
    least = (0, 0, 0, 0, -UNBOUNDED, -UNBOUNDED)
    most = (q_len, q_len, kv_len, kv_len, UNBOUNDED, UNBOUNDED)
    return jnp.clip(bands, jnp.array([least], bands.dtype), jnp.array([most], bands.dtype))


def _key_ranges(bands: jax.Array, q_begin: jax.Array, q_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and last key of each band visible from rows [q_begin, q_begin + q_size).

    The last key is smaller than the first where there is none.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    first_row = jnp.maximum(q0, q_begin)
    last_row = jnp.minimum(q1, q_begin + q_size) - 1
    first = jnp.maximum(k0, first_row + lo)
    last = jnp.minimum(k1 - 1, last_row + hi)
    visible = (first_row <= last_row) & (first <= last) & (lo <= hi)
    return jnp.where(visible, first, 0), jnp.where(visible, last, -1)


def key_blocks(bands: jax.Array, q_begin: jax.Array, blocks: Blocks) -> KeyBlocks:
    """Returns the key blocks that bands [C, 6] make visible from the block of rows at ``q_begin``."""
    first, last = _key_ranges(bands, q_begin, blocks.q_size)
    visible = first <= last
    first = jnp.where(visible, first // blocks.k_size, 0)
    last = jnp.where(visible, last // blocks.k_size, -1)
    # Each band adds 1 to a running sum at its first block and subtracts it after its last one.
    step = visible.astype(jnp.int32)
    counter = jax.lax.full_like(first, 0, shape=(blocks.num_k + 1,))
    counter = jnp.cumsum(counter.at[first].add(step).at[last + 1].add(-step))
    touched = counter[: blocks.num_k] > 0
    return KeyBlocks(bands, q_begin, first, last, _positions(touched), jnp.sum(touched, dtype=jnp.int32))


def _positions(flags: jax.Array) -> jax.Array:
    """Returns the indices of the true flags, in order, padded to the number of flags."""
    return jnp.flatnonzero(flags, size=flags.shape[0], fill_value=0).astype(jnp.int32)


def tile_counts(todo: KeyBlocks, key_block: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns how many bands cover each cell of a tile, int32[q_size, k_size]."""
    shape = (blocks.q_size, blocks.k_size)
    q = todo.q_begin + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    k = key_block * blocks.k_size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    reaching = (todo.first <= key_block) & (key_block <= todo.last)
    chosen = _positions(reaching)

    def add_band(i: jax.Array, count: jax.Array) -> jax.Array:
        q0, q1, k0, k1, lo, hi = todo.bands[chosen[i]]
        inside = (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= k - q) & (k - q <= hi)
        return count + inside.astype(jnp.int32)

    empty = jax.lax.full_like(todo.bands, 0, shape=shape)
    return jax.lax.fori_loop(jnp.int32(0), jnp.sum(reaching, dtype=jnp.int32), add_band, empty)
