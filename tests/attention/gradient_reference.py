"""Gradients of attention in fp64 on the device, a block of rows at a time, and how far a result is from them.

As in `device_reference`, whose blocks these are, sizes are padded so that tests share compiled programs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .device_reference import (
    _DIM,
    _QUICK_TO_COMPILE,
    Logits,
    _Block,
    _counts,
    _pad,
    _round,
    _Size,
    _size,
    _take_block,
)
from .helpers import Operands

_FLOOR = 2.0**-6
_SCALES = 2.0 ** (np.arange(4) / 4)


class Gradients[Leaf](NamedTuple):
    """Of each tensor, or something for each."""

    query: Leaf  # [B, T, N, D]
    key: Leaf  # [B, S, K, D]
    value: Leaf  # [B, S, K, Dv]


class Cotangents(NamedTuple):
    out: jax.Array  # [B, T, N, Dv]
    lse: jax.Array  # [B, T, N]


class Deviation(NamedTuple):
    """Differences of a gradient from fp64, and of one that only rounds as it has to.

    That one rounds the probabilities, the output, the gradients of the logits and the result to the operands'
    dtype, and does the rest in fp64. What probabilities are relative to when they are rounded is up to a
    kernel, and what becomes of large ones is luck then: of `_SCALES`, the largest error of all and their
    mean square count.
    """

    largest: float
    rms: float
    rounded_largest: float
    rounded_rms: float
    largest_number: float
    rms_number: float
    wrong_zeros: int  # numbers of what sees nothing, or is seen by nobody, that are not exactly 0


class _Sums(NamedTuple):
    """Over the rows of a block."""

    query: jax.Array  # [R, _DIM]
    key: jax.Array  # [S, _DIM]
    value: jax.Array  # [S, _DIM]


class _Result(NamedTuple):
    exact: _Sums
    rounded: _Sums  # [_SCALES, ...]
    blind: jax.Array  # [R]: rows that see nothing
    seen: jax.Array  # [S]: keys that a row of the block sees
    sinks: jax.Array  # [R]: what each row adds to the gradient of its sink


@functools.partial(jax.jit, compiler_options=_QUICK_TO_COMPILE)
def _differentiate(
    block: _Block, dout: jax.Array, dlse: jax.Array, logits: Logits, is_half: jax.Array
) -> _Result:
    counts = _counts(block.bands, block.rows, block.key.shape[0])
    visible, seen = counts > 0, (counts > 0).any(axis=0)
    blind = ~visible.any(axis=1) | (block.rows < 0)

    def wide(x: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x.astype(jnp.float64), 0)

    query, dout, dlse = (wide(x, ~blind) for x in (block.query, dout, dlse))
    key, value = wide(block.key, seen), wide(block.value, seen)
    raw = logits.scale * (query @ key.T)
    cap = jnp.where(logits.soft_cap > 0, logits.soft_cap, 1)
    s = jnp.where(logits.soft_cap > 0, cap * jnp.tanh(raw / cap), raw)
    peak = jnp.where(visible, s, -jnp.inf).max(axis=1)
    peak = jnp.where(blind, 0, peak)
    p = jnp.where(visible, counts * jnp.exp(s - peak[:, None]), 0)
    sink = jnp.exp(block.sinks.astype(jnp.float64) - peak)
    total = jnp.where(blind, 1, p.sum(axis=1) + sink)
    p = p / total[:, None]
    slope = jnp.where(logits.soft_cap > 0, 1 - (s / cap) ** 2, 1)
    dp = dout @ value.T

    def sums(p: jax.Array, ds: jax.Array) -> _Sums:
        return _Sums(logits.scale * (ds @ key), logits.scale * (ds.T @ query), p.T @ dout)

    def gradients_of_logits(delta: jax.Array) -> jax.Array:
        return p * slope * (dp - delta[:, None])

    def rounded(scale: jax.Array) -> _Sums:
        near = _round(p * scale, is_half) / scale
        delta = jnp.sum(_round(near @ value, is_half) * dout, axis=1) - dlse
        return sums(near, _round(gradients_of_logits(delta), is_half))

    delta = jnp.sum((p @ value) * dout, axis=1) - dlse
    return _Result(
        exact=sums(p, gradients_of_logits(delta)),
        rounded=jax.vmap(rounded)(jnp.asarray(_SCALES)),
        blind=blind,
        seen=seen,
        sinks=jnp.where(blind, 0, -sink / total * delta),
    )


@functools.partial(jax.jit, static_argnames="size")
def _take_cotangents(
    cotangents: Cotangents, rows: jax.Array, place: tuple[int, int, int], group: int, size: _Size
) -> tuple[jax.Array, jax.Array]:
    """dout [R, _DIM] and dlse [R] of the rows that `_take_block` takes."""
    example, head, number = place
    flat = number * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    row = rows[jnp.where(flat < rows.shape[0] * group, flat // group, 0)]
    heads = head * group + flat % group
    dout = cotangents.out[example, row, heads].astype(jnp.float32)
    return _pad(dout, size.rows, _DIM), cotangents.lse[example, row, heads]


class _Tally:
    """Deviations of one gradient, added up over the parts of it."""

    def __init__(self) -> None:
        self.largest, self.squares, self.numbers, self.wrong_zeros = np.zeros(3), np.zeros(3), 0, 0

    def add(
        self, got: jax.Array, exact: jax.Array, rounded: jax.Array, is_zero: jax.Array, dtype: object
    ) -> None:
        """A part [rows, dim], rounded [_SCALES, rows, dim]; rows that must be 0 by ``is_zero``."""
        got = got.astype(jnp.float64)
        kept = jnp.where(is_zero[:, None], 0, exact)
        result = rounded.astype(dtype).astype(jnp.float64)  # pyright: ignore[reportArgumentType]
        errors = jnp.where(is_zero[None, :, None], 0, result - exact[None])
        parts = [got - kept, errors, kept]
        self.largest = np.maximum(self.largest, [float(jnp.abs(x).max()) for x in parts])
        self.squares += [float(jnp.sum(x**2)) / (x.size / got.size) for x in parts]
        self.numbers += got.size
        self.wrong_zeros += int(jnp.sum(jnp.where(is_zero[:, None], got != 0, False)))

    def deviation(self) -> Deviation:
        rms = np.sqrt(self.squares / max(1, self.numbers))
        return Deviation(
            self.largest[0] if np.isfinite(rms[0]) else np.nan,
            rms[0],
            self.largest[1],
            rms[1],
            self.largest[2],
            rms[2],
            self.wrong_zeros,
        )


def judge_gradients(
    operands: Operands, logits: Logits, cotangents: Cotangents, got: Gradients[jax.Array]
) -> tuple[Gradients[Deviation], np.ndarray]:
    """Compares gradients with fp64; also returns the gradient of the sinks, float64[N]."""
    batch, q_len, heads, dim = operands.query.shape
    kv_len, kv_heads, v_dim = operands.value.shape[1:]
    group, dtype = heads // kv_heads, operands.query.dtype
    rows = np.arange(q_len, dtype=np.int32)
    size = _size(operands)
    is_half = jnp.asarray(dtype == jnp.float16)
    tallies = Gradients(_Tally(), _Tally(), _Tally())
    dsinks = np.zeros(heads)
    with jax.enable_x64(True):
        for example, head in np.ndindex(batch, kv_heads):
            keys: list[_Result] = []
            for number in range(-(-q_len * group // size.rows)):
                place = (example, head, number)
                block = _take_block(operands, cotangents.out, cotangents.lse, rows, place, size)
                result = _differentiate(
                    block, *_take_cotangents(cotangents, rows, place, group, size), logits, is_half
                )
                flat = number * size.rows + np.arange(size.rows)
                flat = flat[flat < q_len * group]
                index, taken = head * group + flat % group, slice(0, len(flat))
                exact, rounded = (x.query[..., taken, :dim] for x in (result.exact, result.rounded))
                mine = got.query[example, flat // group, index]
                tallies.query.add(mine, exact, rounded, result.blind[taken], dtype)
                np.add.at(dsinks, index, np.asarray(result.sinks[taken]))
                keys.append(result)
            unseen = ~functools.reduce(jnp.logical_or, (x.seen for x in keys))[:kv_len]
            for tally, name, width in ((tallies.key, "key", dim), (tallies.value, "value", v_dim)):
                exact, rounded = (
                    functools.reduce(jnp.add, (getattr(getattr(x, kind), name) for x in keys))
                    for kind in ("exact", "rounded")
                )
                exact, rounded = (x[..., :kv_len, :width] for x in (exact, rounded))
                tally.add(getattr(got, name)[example, :, head], exact, rounded, unseen, dtype)
    return Gradients(*(tally.deviation() for tally in tallies)), dsinks


def check_gradients(deviations: Gradients[Deviation], dtype: jax.typing.DTypeLike) -> None:
    """Asserts that gradients are right: at most twice the error that rounding makes, and exact zeros.

    Rounding makes no error where gradients are exactly 0, as those of rows with one key, but fp32 sums of
    numbers around 1 do: gradients are taken for ``_FLOOR`` at least.
    """
    eps = float(jnp.finfo(dtype).eps)
    for name, x in deviations._asdict().items():
        half_ulp = eps / 2 * 2.0 ** np.floor(np.log2(max(x.largest_number, _FLOOR)))
        assert np.isfinite(x).all(), f"d{name} is not finite: {x}"
        assert x.wrong_zeros == 0, f"d{name} of what nothing sees: {x}"
        assert x.largest <= 2 * max(x.rounded_largest, half_ulp), f"d{name}: {x}"
        assert x.rms <= 2 * x.rounded_rms + eps / 8 * max(x.rms_number, _FLOOR), f"d{name}: {x}"
