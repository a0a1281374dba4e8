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
    _pad,
    _round,
    _Size,
    _size,
    _take_block,
    softmax,
)
from .helpers import Operands

_FLOOR = 2.0**-6
_SCALES = 2.0 ** (np.arange(4) / 4)


class Gradients[Leaf](NamedTuple):
    """Gradients of query, key and value, or something for each."""

    query: Leaf  # [B, T, N, D]
    key: Leaf  # [B, S, K, D]
    value: Leaf  # [B, S, K, Dv]


class Cotangents(NamedTuple):
    out: jax.Array  # [B, T, N, Dv]
    lse: jax.Array  # [B, T, N]


class Deviation(NamedTuple):
    """Differences of a gradient from fp64, and of one that only rounds as it has to.

    That one rounds the probabilities, the output, the gradients of the logits and the result to the operands'
    dtype, and does the rest in fp64. Kernels may scale probabilities before they round them, which changes
    the error of large ones at random: the largest error over `_SCALES` and their mean square count.
    """

    largest: float
    rms: float
    rounded_largest: float
    rounded_rms: float
    largest_number: float
    rms_number: float
    wrong_zeros: int  # numbers of fully masked rows or keys that are not exactly 0


class _Sums(NamedTuple):
    """Over the rows of a block."""

    query: jax.Array  # [R, _DIM]
    key: jax.Array  # [S, _DIM]
    value: jax.Array  # [S, _DIM]


class _Result(NamedTuple):
    exact: _Sums
    rounded: _Sums  # [_SCALES, ...]
    masked: jax.Array  # [R]: fully masked rows
    visible_keys: jax.Array  # [S]
    sinks: jax.Array  # [R]: what each row adds to the gradient of its sink


@functools.partial(jax.jit, compiler_options=_QUICK_TO_COMPILE)
def _differentiate(
    block: _Block, dout: jax.Array, dlse: jax.Array, logits: Logits, is_half: jax.Array
) -> _Result:
    x = softmax(block, logits)
    dout, dlse = (
        jnp.where(x.masked.reshape(-1, *[1] * (y.ndim - 1)), 0, y.astype(jnp.float64)) for y in (dout, dlse)
    )
    dp = dout @ x.value.T

    def sums(p: jax.Array, ds: jax.Array) -> _Sums:
        return _Sums(logits.scale * (ds @ x.key), logits.scale * (ds.T @ x.query), p.T @ dout)

    def gradients_of_logits(delta: jax.Array) -> jax.Array:
        return x.p * x.slope * (dp - delta[:, None])

    def rounded(scale: jax.Array) -> _Sums:
        p = _round(x.p * scale, is_half) / scale
        delta = jnp.sum(_round(p @ x.value, is_half) * dout, axis=1) - dlse
        return sums(p, _round(gradients_of_logits(delta), is_half))

    delta = jnp.sum((x.p @ x.value) * dout, axis=1) - dlse
    return _Result(
        exact=sums(x.p, gradients_of_logits(delta)),
        rounded=jax.lax.map(rounded, jnp.asarray(_SCALES)),  # one by one: they are large
        masked=x.masked,
        visible_keys=x.visible_keys,
        sinks=jnp.where(x.masked, 0, -x.sink * delta),
    )


class _OfKeys(NamedTuple):
    """The sums over the rows of all blocks so far, [S, _DIM], or [_SCALES, S, _DIM] of rounded ones."""

    key: jax.Array
    value: jax.Array
    rounded_key: jax.Array
    rounded_value: jax.Array
    visible_keys: jax.Array  # [S]


@jax.jit
def _add_up(before: _OfKeys | None, result: _Result) -> _OfKeys:
    exact, rounded = result.exact, result.rounded
    now = _OfKeys(exact.key, exact.value, rounded.key, rounded.value, result.visible_keys)
    return now if before is None else jax.tree.map(jnp.add, before, now)  # of truth values: or


@functools.partial(jax.jit, static_argnames="size")
def _take_rows(x: jax.Array, place: tuple[int, int, int], group: int, size: _Size) -> jax.Array:
    """The rows of x [B, T, N, ...] that `_take_block` takes of all rows; 0 in padding."""
    example, head, number = place
    flat = number * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    inside = flat < x.shape[1] * group
    flat = jnp.where(inside, flat, 0)
    taken = x[example, flat // group, head * group + flat % group].astype(jnp.float32)
    if taken.ndim == 1:
        return jnp.where(inside, taken, 0)
    return _pad(jnp.where(inside[:, None], taken, 0), size.rows, _DIM)


@functools.partial(jax.jit, static_argnames="size")
def _take_keys(x: jax.Array, place: tuple[int, int], size: _Size) -> jax.Array:
    """One key head of an example of x [B, S, K, D]: [S, _DIM], 0 in padding."""
    example, head = place
    return _pad(x[example, :, head].astype(jnp.float32), size.keys, _DIM)


@jax.jit
def _measure(
    got: jax.Array, exact: jax.Array, rounded: jax.Array, is_zero: jax.Array, is_half: jax.Array
) -> jax.Array:
    """Errors of a part of a gradient [rows, _DIM], rounded [_SCALES, rows, _DIM], for `_deviation`.

    ``is_zero`` marks rows that must be 0, as padding is.
    """
    got = got.astype(jnp.float64)
    kept = jnp.where(is_zero[:, None], 0, exact)
    errors = jnp.where(is_zero[None, :, None], 0, _round(rounded, is_half) - exact[None])
    parts = [got - kept, errors, kept]
    largest = [jnp.abs(x).max() for x in parts]
    squares = [jnp.sum(x**2) / (x.size // got.size) for x in parts]
    wrong_zeros = jnp.sum(jnp.where(is_zero[:, None], got != 0, False))
    return jnp.stack([*largest, *squares, wrong_zeros.astype(jnp.float64)])


def _deviation(measured: np.ndarray, numbers: int) -> Deviation:
    """The deviation of a gradient of so many numbers, from the rows of `_measure`."""
    largest, squares = measured[:, :3].max(axis=0), measured[:, 3:6].sum(axis=0)
    rms = np.sqrt(squares / max(1, numbers))
    if not np.isfinite(rms[0]):  # max may drop NaN, sums do not
        largest[0] = np.nan
    return Deviation(
        largest[0], rms[0], largest[1], rms[1], largest[2], rms[2], wrong_zeros=int(measured[:, 6].sum())
    )


def judge_gradients(
    operands: Operands, logits: Logits, cotangents: Cotangents, got: Gradients[jax.Array]
) -> tuple[Gradients[Deviation], np.ndarray]:
    """Compares gradients with fp64; also returns the gradient of the sinks, float64[N]."""
    batch, q_len, heads, _ = operands.query.shape
    kv_heads = operands.key.shape[2]
    group = heads // kv_heads
    rows = np.arange(q_len, dtype=np.int32)
    size = _size(operands)
    is_half = jnp.asarray(operands.query.dtype == jnp.float16)
    measured = Gradients[list[jax.Array]]([], [], [])
    sinks: list[jax.Array] = []
    with jax.enable_x64(True):
        for example, head in np.ndindex(batch, kv_heads):
            of_keys = None
            for number in range(-(-q_len * group // size.rows)):
                place = (example, head, number)
                block = _take_block(operands, cotangents.out, cotangents.lse, rows, place, size)
                dout, dlse, mine = (_take_rows(x, place, group, size) for x in (*cotangents, got.query))
                result = _differentiate(block, dout, dlse, logits, is_half)
                part = result.exact.query, result.rounded.query, result.masked
                measured.query.append(_measure(mine, *part, is_half))
                sinks.append(result.sinks)
                of_keys = _add_up(of_keys, result)
            assert of_keys is not None, "no queries"
            key, value = (_take_keys(x, (example, head), size) for x in (got.key, got.value))
            masked = ~of_keys.visible_keys
            measured.key.append(_measure(key, of_keys.key, of_keys.rounded_key, masked, is_half))
            measured.value.append(_measure(value, of_keys.value, of_keys.rounded_value, masked, is_half))
        stacked = Gradients(*(np.asarray(jnp.stack(x)) for x in measured))
        of_rows = np.asarray(jnp.stack(sinks)).reshape(batch, kv_heads, -1)
    of_rows = of_rows[..., : q_len * group].reshape(batch, kv_heads, q_len, group)
    deviations = Gradients(*(_deviation(x, y.size) for x, y in zip(stacked, got, strict=True)))
    return deviations, of_rows.sum(axis=(0, 2)).reshape(heads)


def check_gradients(deviations: Gradients[Deviation], dtype: jax.typing.DTypeLike) -> None:
    """Asserts that gradients are right: at most twice the error that rounding makes, and exact zeros.

    Rounding makes no error where gradients are exactly 0, as those of rows with one key, but fp32 sums of
    numbers around 1 do: gradients are taken for ``_FLOOR`` at least.
    """
    eps = float(jnp.finfo(dtype).eps)
    for name, x in deviations._asdict().items():
        half_ulp = eps / 2 * 2.0 ** np.floor(np.log2(max(x.largest_number, _FLOOR)))
        assert np.isfinite(x).all(), f"d{name} is not finite: {x}"
        assert x.wrong_zeros == 0, f"d{name} of fully masked rows or keys: {x}"
        assert x.largest <= 2 * max(x.rounded_largest, half_ulp), f"d{name}: {x}"
        assert x.rms <= 2 * x.rounded_rms + eps / 8 * max(x.rms_number, _FLOOR), f"d{name}: {x}"
