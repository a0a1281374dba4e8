"""Blockwise attention in plain JAX, for every backend: memory O(T · block), work only where the mask is.

Blocks of query rows are scanned; each visits the key blocks that some band reaches from it. Within a tile the
bands are added up to a count per cell, which is the mask and, where bands overlap, the weight.
Operands are padded to whole blocks; padding is covered by no band, so it is like any cell outside the mask.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._dtypes import accumulator_dtype
from ._tiles import Blocks, KeyBlocks, cut, key_blocks, tile_counts


class Logits(NamedTuple):
    """What turns q·k into logits; static."""

    scale: float
    soft_cap: float  # 0 for none


class _Softmax(NamedTuple):
    """Running softmax of a block of rows [B, K, G, q]."""

    out: jax.Array  # [..., Dv], not normalised
    peak: jax.Array
    total: jax.Array


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
    """The inverse of `_split_rows`."""
    num_q, b, k, g, q, *rest = x.shape
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return x.reshape(b, num_q * q, k * g, *rest)[:, :q_len]


def _keys_outside(x: jax.Array, blocks: Blocks) -> jax.Array:
    """[B, S, K, D] → [B, K, padded S, D]."""
    return _pad(jnp.moveaxis(x, 2, 1), blocks.num_k * blocks.k_size, 2)


def _keys_inside(x: jax.Array, kv_len: int) -> jax.Array:
    """The inverse of `_keys_outside`."""
    return jnp.moveaxis(x[:, :, :kv_len], 1, 2)


def _visible_keys(x: jax.Array, key_block: jax.Array, count: jax.Array) -> jax.Array:
    """A block of keys or values; those no row of the tile sees are 0, for NaN in them must not spread."""
    size = count.shape[1]
    tile = jax.lax.dynamic_slice_in_dim(x, key_block * size, size, axis=2)
    seen = jax.lax.broadcast_to_rank((count > 0).any(axis=0)[:, None], x.ndim)
    return jnp.where(seen, tile, jnp.zeros((), x.dtype))


def _logits(q: jax.Array, k: jax.Array, count: jax.Array, how: Logits) -> jax.Array:
    s = how.scale * _einsum("bkgqd,bksd->bkgqs", q, k)
    if how.soft_cap > 0:
        s = how.soft_cap * jnp.tanh(s / how.soft_cap)
    return jnp.where(jax.lax.broadcast_to_rank(count > 0, s.ndim), s, -jnp.inf)


def _finite(x: jax.Array) -> jax.Array:
    """0 for -inf, so that -inf - x is -inf and not NaN."""
    return jnp.where(jnp.isneginf(x), 0, x)


def _visit(state: _Softmax, s: jax.Array, v: jax.Array, count: jax.Array) -> _Softmax:
    """Takes one tile of logits and values into the running softmax."""
    peak = jnp.maximum(state.peak, s.max(axis=-1))
    shift = _finite(peak)
    p = jax.lax.broadcast_to_rank(count.astype(s.dtype), s.ndim) * jnp.exp(s - shift[..., None])
    fade = jnp.exp(state.peak - shift)
    out = fade[..., None] * state.out + _einsum("bkgqs,bksd->bkgqd", p.astype(v.dtype), v)
    return _Softmax(out, peak, fade * state.total + p.sum(axis=-1))


def _finish(state: _Softmax, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of a block of rows; sinks [1, K, G, 1]."""
    # XLA's max on CPU may drop NaN, and leave a row of NaN with the peak -inf: the total has the NaN.
    blind = jnp.isneginf(state.peak) & (state.total == 0)
    peak = jnp.where(blind, 0, jnp.maximum(state.peak, sinks))
    fade = jnp.exp(state.peak - peak)
    total = jnp.where(blind, 1, fade * state.total + jnp.exp(sinks - peak))
    out = jnp.where(blind[..., None], 0, (fade / total)[..., None] * state.out)
    return out, jnp.where(blind, -jnp.inf, peak + jnp.log(total))


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
    """Runs ``function(bands[C, 6], *operands)`` once for shared bands, else example by example.

    Examples with different bands visit different tiles: side by side, each would wait for the longest.
    """
    if bands.shape[1] == 0:  # no bands at all are as good as an empty one, and that can be indexed
        bands = jax.lax.full_like(bands, 0, shape=(bands.shape[0], 1, 6))
    if bands.shape[0] == 1:
        return function(bands[0], *operands)

    def one(example: tuple[jax.Array, ...]) -> Results:
        own_bands, *own = example
        return jax.tree.map(lambda x: x[0], function(own_bands, *(x[None] for x in own)))

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
    """Output [B, T, N, Dv] and log-sum-exp [B, T, N]; operands as in `attention_forward`."""
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
    k, v = _keys_outside(k, blocks), _keys_outside(v, blocks)
    sinks = sinks.reshape(1, kv_heads, n // kv_heads, 1)

    def rows(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, q_rows = block
        todo = key_blocks(bands, index * blocks.q_size, blocks)

        def tile(key_block: jax.Array, state: _Softmax) -> _Softmax:
            count = tile_counts(todo, key_block, blocks)
            s = _logits(q_rows, _visible_keys(k, key_block, count), count, how)
            return _visit(state, s, _visible_keys(v, key_block, count), count)

        # full_like keeps the type of the operand (its varying mesh axes), which zeros would not have.
        zero = functools.partial(jax.lax.full_like, q_rows, dtype=accumulator_dtype(q.dtype))
        start = _Softmax(
            out=zero(0, shape=(*q_rows.shape[:-1], v_dim)),
            peak=zero(-jnp.inf, shape=q_rows.shape[:-1]),
            total=zero(0, shape=q_rows.shape[:-1]),
        )
        out, lse = _finish(_visit_key_blocks(todo, tile, start), sinks)
        return out.astype(out_dtype), lse

    indices = jnp.arange(blocks.num_q, dtype=jnp.int32)
    out, lse = jax.lax.map(rows, (indices, _split_rows(q, kv_heads, blocks)))
    return _join_rows(out, q_len), _join_rows(lse, q_len)


class _Rows(NamedTuple):
    """The operands of the backward pass that go by query row, one block [B, K, G, q, ...]."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


def _hide_blind_rows(rows: _Rows) -> _Rows:
    """Zeroes what belongs to rows that see nothing or only logits of -inf: NaN in it must not spread."""
    blind = jnp.isneginf(rows.lse)

    def hide(x: jax.Array) -> jax.Array:
        return jnp.where(blind.reshape(blind.shape + (1,) * (x.ndim - blind.ndim)), 0, x)

    return _Rows(hide(rows.q), hide(rows.dout), rows.lse, hide(rows.delta))


def _logit_gradients(
    rows: _Rows, k: jax.Array, v: jax.Array, count: jax.Array, how: Logits
) -> tuple[jax.Array, jax.Array]:
    """Probabilities and the gradients of scale · q·k of one tile [B, K, G, q, s], in the input dtype."""
    s = _logits(rows.q, k, count, how)
    # A row with lse = -inf has no finite logit, even where the bands say that it sees something.
    count = jax.lax.broadcast_to_rank(count, s.ndim)
    visible = (count > 0) & ~jnp.isneginf(rows.lse)[..., None]
    p = jnp.where(visible, count.astype(s.dtype) * jnp.exp(s - _finite(rows.lse)[..., None]), 0)
    ds = p * (_einsum("bkgqd,bksd->bkgqs", rows.dout, v) - rows.delta[..., None])
    if how.soft_cap > 0:
        ds = ds * (1 - jnp.where(visible, s / how.soft_cap, 0) ** 2)
    return p.astype(k.dtype), jnp.where(visible, ds, 0).astype(k.dtype)


def _add_keys(total: jax.Array, key_block: jax.Array, part: jax.Array) -> jax.Array:
    start = key_block * part.shape[2]
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=2)


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
    """The gradients of q, k and v; operands as in `attention_backward`. Always deterministic."""
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
    keys, values = _keys_outside(k, blocks), _keys_outside(v, blocks)
    zero = functools.partial(jax.lax.full_like, fill_value=0, dtype=accumulator_dtype(q.dtype))

    def one_block(
        carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, _Rows]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, operands = block
        rows = _hide_blind_rows(operands)
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
    dk = (how.scale * _keys_inside(dk, kv_len)).astype(grad_dtype)
    return _join_rows(dq, q_len), dk, _keys_inside(dv, kv_len).astype(grad_dtype)
