"""Computes attention in plain JAX on every platform, in O(T · block) memory and skipping masked blocks.

Blocks of query rows are scanned, and each visits the key blocks that are visible from it. Within a tile the
number of bands that cover a cell is its weight, 0 for masked cells. Operands are padded to whole blocks, and
padding is masked, since no band covers it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._dtypes import accumulator_dtype
from .._softmax import SoftmaxState, add_sinks_to_state, finite_or_zero, normalize, rescale
from ._tiles import Blocks, KeyBlocks, crop, cut, key_blocks, tile_counts


class Logits(NamedTuple):
    """The parameters that turn q·k into logits; static."""

    scale: float
    soft_cap: float  # 0 for none


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    # XLA would otherwise run fp32 matmuls in TF32 on GPU.
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else None
    accumulate = accumulator_dtype(x.dtype)
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=accumulate)


def _pad(x: jax.Array, length: int, axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def _split_rows(x: jax.Array, kv_heads: int, blocks: Blocks) -> jax.Array:
    """[B, T, N, ...] → [num_q, B, K, G, q, ...]."""
    b, _, n, *rest = x.shape
    x = _pad(x, blocks.num_q * blocks.q_size, 1)
    x = x.reshape(b, blocks.num_q, blocks.q_size, kv_heads, n // kv_heads, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))


def _join_rows(x: jax.Array, q_len: int) -> jax.Array:
    """Inverts `_split_rows`."""
    num_q, b, k, g, q, *rest = x.shape
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return x.reshape(b, num_q * q, k * g, *rest)[:, :q_len]


def _heads_first(x: jax.Array, blocks: Blocks) -> jax.Array:
    """[B, S, K, D] → [B, K, padded S, D]."""
    return _pad(jnp.moveaxis(x, 2, 1), blocks.num_k * blocks.k_size, 2)


def _heads_last(x: jax.Array, kv_len: int) -> jax.Array:
    """Inverts `_heads_first`."""
    return jnp.moveaxis(x[:, :, :kv_len], 1, 2)


def _visible_keys(x: jax.Array, key_block: jax.Array, count: jax.Array) -> jax.Array:
    """Returns a block of keys or values, 0 where fully masked in the tile, so that NaN does not spread."""
    size = count.shape[1]
    tile = jax.lax.dynamic_slice_in_dim(x, key_block * size, size, axis=2)
    visible = jax.lax.broadcast_to_rank((count > 0).any(axis=0)[:, None], x.ndim)
    return jnp.where(visible, tile, jnp.zeros((), x.dtype))


def _logits(q: jax.Array, k: jax.Array, count: jax.Array, how: Logits) -> jax.Array:
    s = how.scale * _einsum("bkgqd,bksd->bkgqs", q, k)
    if how.soft_cap > 0:
        s = how.soft_cap * jnp.tanh(s / how.soft_cap)
    return jnp.where(jax.lax.broadcast_to_rank(count > 0, s.ndim), s, -jnp.inf)


def _add_tile(state: SoftmaxState, s: jax.Array, v: jax.Array, count: jax.Array) -> SoftmaxState:
    """Adds one tile of logits and values to the softmax."""
    row_max = jnp.maximum(state.row_max, s.max(axis=-1))
    state = rescale(state, row_max)
    p = jax.lax.broadcast_to_rank(count.astype(s.dtype), s.ndim)
    p *= jnp.exp(s - finite_or_zero(row_max)[..., None])
    out = state.out + _einsum("bkgqs,bksd->bkgqd", p.astype(v.dtype), v)
    return SoftmaxState(out, row_max, state.row_sum + p.sum(axis=-1))


def _visit_key_blocks[State](
    todo: KeyBlocks, tile: Callable[[jax.Array, State], State], init: State
) -> State:
    """Folds ``tile(key_block, state)`` over the key blocks to visit."""
    return jax.lax.fori_loop(
        jnp.int32(0), todo.num_visits, lambda i, state: tile(todo.indices[i], state), init
    )


def _per_example[Results](
    function: Callable[..., Results], bands: jax.Array, *operands: jax.Array
) -> Results:
    """Runs ``function(bands[C, 6], *operands)`` once for shared bands, and otherwise example by example.

    Examples with different bands visit different tiles, and in one batch each would wait for the longest.
    """
    if bands.shape[1] == 0:  # an empty band can be indexed
        bands = jax.lax.full_like(bands, 0, shape=(bands.shape[0], 1, 6))
    if bands.shape[0] == 1:
        return function(bands[0], *operands)

    def one(example: tuple[jax.Array, ...]) -> Results:
        bands, *operands = example
        return jax.tree.map(lambda x: x[0], function(bands, *(x[None] for x in operands)))

    return jax.lax.map(one, (bands, *operands))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attention_forward` for one batch dimension."""
    function = functools.partial(
        _forward, sinks=sinks, how=Logits(scale, soft_cap), out_dtype=jnp.dtype(out_dtype)
    )
    return _per_example(function, bands, q, k, v)


def _forward(
    bands: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array,
    how: Logits,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    b, q_len, n, _ = q.shape
    _, kv_len, kv_heads, v_dim = v.shape
    blocks = cut(q_len, kv_len, b * n)
    bands = crop(bands, q_len, kv_len)
    k, v = _heads_first(k, blocks), _heads_first(v, blocks)
    sinks = sinks.reshape(1, kv_heads, n // kv_heads, 1)

    def rows(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, q_rows = block
        todo = key_blocks(bands, index * blocks.q_size, blocks)

        def tile(key_block: jax.Array, state: SoftmaxState) -> SoftmaxState:
            count = tile_counts(todo, key_block, blocks)
            s = _logits(q_rows, _visible_keys(k, key_block, count), count, how)
            return _add_tile(state, s, _visible_keys(v, key_block, count), count)

        # full_like keeps the type of the operand (its varying mesh axes), which zeros would not have.
        zero = functools.partial(jax.lax.full_like, q_rows, dtype=accumulator_dtype(q.dtype))
        start = SoftmaxState(
            out=zero(0, shape=(*q_rows.shape[:-1], v_dim)),
            row_max=zero(-jnp.inf, shape=q_rows.shape[:-1]),
            row_sum=zero(0, shape=q_rows.shape[:-1]),
        )
        out, lse = normalize(add_sinks_to_state(_visit_key_blocks(todo, tile, start), sinks))
        return out.astype(out_dtype), lse

    indices = jnp.arange(blocks.num_q, dtype=jnp.int32)
    out, lse = jax.lax.map(rows, (indices, _split_rows(q, kv_heads, blocks)))
    return _join_rows(out, q_len), _join_rows(lse, q_len)


class _Rows(NamedTuple):
    """A block [B, K, G, q, ...] of the operands of the backward pass that have query rows."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


def _zero_masked_rows(rows: _Rows) -> _Rows:
    """Zeroes rows that are fully masked or have only logits of -inf, so that NaN in them does not spread."""
    masked = jnp.isneginf(rows.lse)

    def zero(x: jax.Array) -> jax.Array:
        return jnp.where(masked.reshape(masked.shape + (1,) * (x.ndim - masked.ndim)), 0, x)

    return _Rows(zero(rows.q), zero(rows.dout), rows.lse, zero(rows.delta))


def _logit_gradients(
    rows: _Rows, k: jax.Array, v: jax.Array, count: jax.Array, how: Logits
) -> tuple[jax.Array, jax.Array]:
    """Returns P and dS [B, K, G, q, s] of one tile, in the input dtype."""
    s = _logits(rows.q, k, count, how)
    # A row with lse = -inf has no finite logit, even where bands make cells visible.
    count = jax.lax.broadcast_to_rank(count, s.ndim)
    visible = (count > 0) & ~jnp.isneginf(rows.lse)[..., None]
    p = jnp.where(visible, count.astype(s.dtype) * jnp.exp(s - finite_or_zero(rows.lse)[..., None]), 0)
    ds = p * (_einsum("bkgqd,bksd->bkgqs", rows.dout, v) - rows.delta[..., None])
    if how.soft_cap > 0:
        ds = ds * (1 - jnp.where(visible, s / how.soft_cap, 0) ** 2)
    return p.astype(k.dtype), jnp.where(visible, ds, 0).astype(k.dtype)


def _add_keys(gradient: jax.Array, key_block: jax.Array, part: jax.Array) -> jax.Array:
    start = key_block * part.shape[2]
    old = jax.lax.dynamic_slice_in_dim(gradient, start, part.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(gradient, old + part, start, axis=2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    grad_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `attention_backward` for one batch dimension, always deterministically."""
    function = functools.partial(_backward, how=Logits(scale, soft_cap), grad_dtype=jnp.dtype(grad_dtype))
    return _per_example(function, bands, q, k, v, dout, lse, delta)


def _backward(
    bands: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    how: Logits,
    grad_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    b, q_len, n, _ = q.shape
    _, kv_len, kv_heads, _ = k.shape
    blocks = cut(q_len, kv_len, b * n)
    bands = crop(bands, q_len, kv_len)
    keys, values = _heads_first(k, blocks), _heads_first(v, blocks)
    zero = functools.partial(jax.lax.full_like, fill_value=0, dtype=accumulator_dtype(q.dtype))

    def one_block(
        carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, _Rows]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, operands = block
        rows = _zero_masked_rows(operands)
        todo = key_blocks(bands, index * blocks.q_size, blocks)

        def tile(key_block: jax.Array, grads: tuple[jax.Array, jax.Array, jax.Array]):
            dq, dk, dv = grads
            count = tile_counts(todo, key_block, blocks)
            k_tile, v_tile = (_visible_keys(x, key_block, count) for x in (keys, values))
            p, ds = _logit_gradients(rows, k_tile, v_tile, count, how)
            return (
                dq + _einsum("bkgqs,bksd->bkgqd", ds, k_tile),
                _add_keys(dk, key_block, _einsum("bkgqs,bkgqd->bksd", ds, rows.q)),
                _add_keys(dv, key_block, _einsum("bkgqs,bkgqd->bksd", p, rows.dout)),
            )

        init = (zero(operands.q), *carry)  # jnp.where forgets the varying mesh axes of empty arrays
        dq, dk, dv = _visit_key_blocks(todo, tile, init)
        # 0 · inf of a key makes dq NaN where the row has only logits of -inf.
        dq = jnp.where(jnp.isneginf(rows.lse)[..., None], 0, how.scale * dq)
        return (dk, dv), dq.astype(grad_dtype)

    row_operands = _Rows(*(_split_rows(x, kv_heads, blocks) for x in (q, dout, lse, delta)))
    (dk, dv), dq = jax.lax.scan(
        one_block, (zero(keys), zero(values)), (jnp.arange(blocks.num_q, dtype=jnp.int32), row_operands)
    )
    dk = (how.scale * _heads_last(dk, kv_len)).astype(grad_dtype)
    return _join_rows(dq, q_len), dk, _heads_last(dv, kv_len).astype(grad_dtype)
