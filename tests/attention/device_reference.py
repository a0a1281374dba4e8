"""Attention in fp64 on the device, a block of rows at a time, and how far a result is from it.

A block has the rows of all query heads of a key head, and every size is padded to one of a few, so that all
tests of a session share a handful of compiled programs. Only `_take_block` is compiled for each shape.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .helpers import Operands

LSE_TOLERANCE = 1e-4

# The largest error of a row, in units of `Exact.unit`. Simulated kernels (blocks of keys, lazy rescale, fp32
# sums) reach 1.54 over a million rows of 2 to 1024 keys in 8 to 128 dimensions.
ROW_TOLERANCE = 2.25

_DIM = 256  # all head dimensions are padded to it
_MAX_ROWS, _MAX_CELLS = 4096, 2**26
_MIN_KEYS, _MIN_BANDS = 1024, 512

# On GPUs most of the time would go to trying kernels for products of float64; the first of cuBLAS will do.
_QUICK_TO_COMPILE: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}


class Logits(NamedTuple):
    """The parameters that turn q·k into logits; soft_cap 0 for none."""

    scale: float
    soft_cap: float = 0.0


class Deviation(NamedTuple):
    """Largest and root-mean-square difference from fp64."""

    largest: float
    rms: float


class Report(NamedTuple):
    """The distance of a result from fp64, and of one that only rounds where it must.

    ``rounded`` rounds the probabilities, normalised as a plain implementation has them, and the output to the
    operands' dtype and does the rest in fp64.
    """

    out: Deviation
    rounded: Deviation
    lse: float  # largest difference; relative to |lse| / 128 where that is above 1
    largest_out: float
    rms_out: float
    worst_row: float  # largest error of a row, in units of `Exact.unit`
    visible: int  # rows that see something
    wrong_masked: int  # numbers of fully masked rows that are not exactly 0 (output) or -inf (log-sum-exp)


class _Block(NamedTuple):
    """Some rows of the query heads of one key head, in fp32, padded."""

    rows: jax.Array  # int32[R], -1 in padding
    query: jax.Array  # [R, _DIM]
    sinks: jax.Array  # [R]
    key: jax.Array  # [S, _DIM]
    value: jax.Array  # [S, _DIM]
    bands: jax.Array  # int32[C, 6]
    out: jax.Array  # [R, _DIM], the result to be judged
    lse: jax.Array  # [R]


class _Size(NamedTuple):
    """Padded sizes of a block."""

    rows: int
    keys: int
    bands: int


class Softmax(NamedTuple):
    """The fp64 softmax of a block, and operands in fp64 in which fully masked rows and keys are 0."""

    query: jax.Array  # [R, _DIM]
    key: jax.Array  # [S, _DIM]
    value: jax.Array  # [S, _DIM]
    p: jax.Array  # [R, S], probabilities
    slope: jax.Array  # [R, S], derivative of the soft cap
    sink: jax.Array  # [R], probability of the sink
    row_max: jax.Array  # [R], 0 for masked rows
    lse: jax.Array  # [R]
    masked: jax.Array  # [R], rows without a finite logit
    visible_keys: jax.Array  # [S]


class Exact(NamedTuple):
    """fp64 attention of a block; ``rounded`` is the output of `Report.rounded`."""

    out: jax.Array  # [R, _DIM]
    rounded: jax.Array  # [R, _DIM]
    lse: jax.Array  # [R]
    unit: jax.Array  # [R], about the error of the output that rounding explains


def _up_to_power(length: int, least: int) -> int:
    return max(least, 1 << (length - 1).bit_length())


def _size(operands: Operands) -> _Size:
    keys = _up_to_power(operands.key.shape[1], _MIN_KEYS)
    bands = _up_to_power(operands.bands.shape[1], _MIN_BANDS)
    return _Size(min(_MAX_ROWS, _MAX_CELLS // keys), keys, bands)


def _pad(x: jax.Array, *lengths: int) -> jax.Array:
    return jnp.pad(x, [(0, length - size) for length, size in zip(lengths, x.shape, strict=True)])


@functools.partial(jax.jit, static_argnames="size")
def _take_block(
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    rows: jax.Array,
    place: tuple[int, int, int],
    size: _Size,
) -> _Block:
    """Block ``place`` = (example, key head, number of the block) of the given rows."""
    example, head, number = place
    group = operands.query.shape[2] // operands.key.shape[2]
    flat = number * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    inside = flat < rows.shape[0] * group
    row = rows[jnp.where(inside, flat // group, 0)]
    heads = head * group + flat % group

    def of_rows(x: jax.Array) -> jax.Array:
        return x[example, row, heads].astype(jnp.float32)

    def of_keys(x: jax.Array) -> jax.Array:
        return _pad(x[example, :, head].astype(jnp.float32), size.keys, _DIM)

    return _Block(
        rows=jnp.where(inside, row, -1),
        query=_pad(of_rows(operands.query), size.rows, _DIM),
        sinks=operands.sinks[heads],
        key=of_keys(operands.key),
        value=of_keys(operands.value),
        bands=_pad(operands.bands[example % operands.bands.shape[0]], size.bands, 6),
        out=_pad(of_rows(out), size.rows, _DIM),
        lse=of_rows(lse),
    )


def _running_sum(x: jax.Array) -> jax.Array:
    """Along axis 1, a power of two, by two products with triangles: faster to compile and run than a scan."""
    rows, length = x.shape
    inner = 1 << length.bit_length() // 2
    x = x.reshape(rows, length // inner, inner)
    within = x @ jnp.triu(jnp.ones((inner, inner)))
    before = within[..., -1] @ jnp.triu(jnp.ones((length // inner,) * 2), 1)
    return (within + before[..., None]).reshape(rows, length)


def _counts(bands: jax.Array, rows: jax.Array, length: int) -> jax.Array:
    """The number of bands that make each key visible from each row, float64 [R, length]."""
    q0, q1, k0, k1, lo, hi = (column[None] for column in bands.T)
    row = rows[:, None]
    first, end = jnp.maximum(k0, row + lo), jnp.minimum(k1, row + hi + 1)
    visible = (q0 <= row) & (row < q1) & (first < end)
    index = jax.lax.broadcasted_iota(jnp.int32, visible.shape, 0)
    steps = jnp.zeros((rows.shape[0], length + 1))
    nowhere = length + 1
    steps = steps.at[index, jnp.where(visible, first, nowhere)].add(1, mode="drop")
    steps = steps.at[index, jnp.where(visible, end, nowhere)].add(-1, mode="drop")
    return _running_sum(steps[:, :length])


def _round(x: jax.Array, to_half: jax.Array) -> jax.Array:
    """Rounds to float16 or bfloat16. XLA might leave out an astype there and back."""
    normal = jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)  # flushes what is below 2^-14
    as_half = jnp.where(jnp.abs(x) < 2.0**-14, jnp.round(x * 2.0**24) * 2.0**-24, normal)
    return jnp.where(to_half, as_half, jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))


def softmax(block: _Block, logits: Logits) -> Softmax:
    """The softmax of a block, under x64."""
    counts = _counts(block.bands, block.rows, block.key.shape[0])
    visible, visible_keys = counts > 0, (counts > 0).any(axis=0)

    def wide(x: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.where(keep[:, None], x.astype(jnp.float64), 0)

    query = wide(block.query, visible.any(axis=1))
    key, value = wide(block.key, visible_keys), wide(block.value, visible_keys)
    s = logits.scale * (query @ key.T)
    cap = jnp.where(logits.soft_cap > 0, logits.soft_cap, 1)
    s = jnp.where(logits.soft_cap > 0, cap * jnp.tanh(s / cap), s)
    slope = jnp.where(logits.soft_cap > 0, 1 - (s / cap) ** 2, 1)
    row_max = jnp.where(visible, s, -jnp.inf).max(axis=1)
    masked = jnp.isneginf(row_max)
    row_max = jnp.where(masked, 0, row_max)
    p = jnp.where(visible, counts * jnp.exp(s - row_max[:, None]), 0)
    sink = jnp.exp(block.sinks.astype(jnp.float64) - row_max)
    row_sum = jnp.where(masked, 1, p.sum(axis=1) + sink)
    lse = jnp.where(masked, -jnp.inf, row_max + jnp.log(row_sum))
    p, sink = p / row_sum[:, None], sink / row_sum
    return Softmax(query, key, value, p, slope, sink, row_max, lse, masked, visible_keys)


@functools.partial(jax.jit, compiler_options=_QUICK_TO_COMPILE)
def _exact(block: _Block, logits: Logits, is_half: jax.Array) -> Exact:
    x = softmax(block, logits)
    out = x.p @ x.value
    return Exact(
        out=out,
        rounded=_round(_round(x.p, is_half) @ x.value, is_half),
        lse=x.lse,
        unit=_unit(out, jnp.sqrt(x.p**2 @ x.value**2), x.row_max, is_half),
    )


def _unit(out: jax.Array, noise: jax.Array, row_max: jax.Array, is_half: jax.Array) -> jax.Array:
    """The error of a row that rounding explains.

    It is half an ulp of the row's largest number and of the independent roundings of its probabilities, and
    the error that rounding large logits to fp32 makes in these.

    Output below the dtype's normal numbers is rounded to a multiple of the smallest, or flushed in bfloat16.
    """
    half_ulp = jnp.where(is_half, 2.0**-11, 2.0**-8)
    least = jnp.where(is_half, 2.0**-14, 2.0**-118)
    largest, noise = jnp.abs(out).max(axis=1), noise.max(axis=1)
    return half_ulp * jnp.maximum(least, jnp.hypot(largest, noise)) + 2.0**-22 * jnp.abs(row_max) * noise


@jax.jit
def _measure(block: _Block, exact: Exact) -> jax.Array:
    """Largest and summed square errors of the output and of the rounded one, and so on: see `_report`."""
    rows = block.rows >= 0
    masked = rows & jnp.isneginf(exact.lse)
    visible = rows & ~masked
    out, lse = block.out.astype(jnp.float64), block.lse.astype(jnp.float64)
    errors = [jnp.where(rows[:, None], x - exact.out, 0) for x in (out, exact.rounded)]
    exact_lse = jnp.where(visible, exact.lse, 0)
    # Beyond 128, the rounding of float32 itself comes near the tolerance.
    lse_error = jnp.where(visible, lse - exact_lse, 0) / jnp.maximum(1, jnp.abs(exact_lse) / 128)
    wrong_masked = jnp.sum(jnp.where(masked[:, None], out != 0, False))
    wrong_masked += jnp.sum(jnp.where(masked, ~jnp.isneginf(lse), False))
    exact_out = jnp.where(rows[:, None], exact.out, 0)
    of_rows = jnp.where(visible, jnp.abs(errors[0]).max(axis=1) / exact.unit, 0)
    largest = [jnp.abs(x).max() for x in (*errors, lse_error, exact_out, of_rows)]
    sums = [*(jnp.sum(x**2) for x in (*errors, exact_out)), jnp.sum(visible), wrong_masked]
    # max may drop NaN, sums do not.
    return jnp.stack([*largest, jnp.sum(lse_error), *(x.astype(jnp.float64) for x in sums)])


def _report(measured: np.ndarray, numbers: int) -> Report:
    """The report on an output of so many numbers, from the rows of `_measure`."""
    largest, sums = measured[:, :5].max(axis=0), measured[:, 6:].sum(axis=0)
    lse = largest[2] if np.isfinite(measured[:, 5]).all() else np.nan
    rms = np.sqrt(sums[:3] / max(1, numbers))
    if np.isnan(sums[0]):
        largest[[0, 4]] = np.nan
    return Report(
        out=Deviation(largest[0], rms[0]),
        rounded=Deviation(largest[1], rms[1]),
        lse=lse,
        largest_out=largest[3],
        rms_out=rms[2],
        worst_row=largest[4],
        visible=int(sums[3]),
        wrong_masked=int(sums[4]),
    )


def judge(
    operands: Operands, logits: Logits, out: jax.Array, lse: jax.Array, rows: ArrayLike | None = None
) -> Report:
    """Compares a result [B, T, N, Dv], [B, T, N] with fp64 at some rows (by default all), in all heads.

    Every example is judged under its own bands. A result in a wider dtype than the operands' is held to what
    the operands' dtype allows.
    """
    batch, q_len, heads, _ = operands.query.shape
    kv_heads = operands.key.shape[2]
    row_list = np.arange(q_len, dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    size = _size(operands)
    num_blocks = -(-len(row_list) * (heads // kv_heads) // size.rows)
    is_half = jnp.asarray(operands.query.dtype == jnp.float16)
    measured = []
    with jax.enable_x64(True):
        for place in np.ndindex(batch, kv_heads, num_blocks):
            block = _take_block(operands, out, lse, row_list, place, size)
            measured.append(_measure(block, _exact(block, logits, is_half)))
        stacked = np.asarray(jnp.stack(measured))
    return _report(stacked, batch * len(row_list) * heads * out.shape[-1])


def check(report: Report, dtype: jax.typing.DTypeLike) -> None:
    """Asserts that the result is right: at most twice the error that rounding makes, and exact zeros.

    Rounding may happen to make next to no error where few rows have large outputs (those that see few keys),
    so it is taken for half an ulp of the largest output at least. That says nothing of the other rows: hence
    the root mean square, and each row by itself.
    """
    eps = float(jnp.finfo(dtype).eps)
    half_ulp = eps / 2 * 2.0 ** np.floor(np.log2(max(report.largest_out, 1e-30)))
    compared = (
        *report.out,
        *report.rounded,
        report.lse,
        report.largest_out,
        report.rms_out,
        report.worst_row,
    )
    assert np.isfinite(compared).all(), f"not finite: {report}"
    assert report.wrong_masked == 0, f"rows that see nothing: {report}"
    assert report.out.largest <= 2 * max(report.rounded.largest, half_ulp), f"output: {report}"
    assert report.out.rms <= 2 * report.rounded.rms + eps / 8 * report.rms_out, f"output: {report}"
    assert report.worst_row <= ROW_TOLERANCE, f"a row of the output: {report}"
    assert report.lse <= LSE_TOLERANCE, f"log-sum-exp: {report}"
