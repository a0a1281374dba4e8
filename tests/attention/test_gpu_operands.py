"""Both passes on all kinds of operands: head dimensions, dtypes, groups, options, extreme numbers."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import UNBOUNDED
from tests.cases import tile_edge_bands

from .device_reference import Logits
from .gpu_harness import (
    CAPACITY,
    KERNEL_DIMS,
    Shape,
    both_dtypes,
    default_logits,
    make_operands,
    pad_bands,
    poison_masked,
    random_operands,
    run,
    run_and_check,
)
from .gradient_harness import gradients, make_cotangents, run_and_check_both
from .helpers import Operands

pytestmark = pytest.mark.gpu

Q_LEN, KV_LEN = 333, 401
SHAPE = Shape(Q_LEN, KV_LEN)
DIMS = [
    *KERNEL_DIMS,
    *[(dim, dim) for dim in (8, 40, 72, 80, 100, 160, 224)],
    (64, 128),
    (256, 64),
    (36, 100),
]


@both_dtypes
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_head_dimensions(rng: np.random.Generator, dim: int, v_dim: int, dtype: Any) -> None:
    shape = Shape(Q_LEN, KV_LEN, 4, 2, dim, v_dim, dtype)
    run_and_check_both(random_operands(rng, shape, with_sinks=True), shape)
    causal = pad_bands(np.asarray(masks.causal(Q_LEN, KV_LEN).bands), CAPACITY)
    run_and_check_both(make_operands(shape, causal), shape)


GROUPS = [(1, 1), (6, 6), (8, 2), (8, 1), (16, 2), (3, 1), (6, 1), (24, 2), (32, 2), (64, 1)]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_groups(rng: np.random.Generator, heads: int, kv_heads: int, dim: int) -> None:
    """A tile holds several heads of a group."""
    shape = Shape(Q_LEN, KV_LEN, heads, kv_heads, dim, dim)
    for deterministic in (False, True):
        run_and_check_both(random_operands(rng, shape, with_sinks=True), shape, deterministic=deterministic)
    run_and_check(random_operands(rng, shape._replace(q_len=5), with_sinks=True))


@pytest.mark.parametrize("per_example", [False, True])
def test_batch(rng: np.random.Generator, per_example: bool) -> None:
    shape = Shape(Q_LEN, KV_LEN, batch=3)
    each = [pad_bands(tile_edge_bands(rng, Q_LEN, KV_LEN, count), CAPACITY) for count in (40, 3, 0)]
    operands = make_operands(shape, np.stack(each) if per_example else each[0])
    for deterministic in (False, True):
        run_and_check_both(operands, shape, deterministic=deterministic)


@pytest.mark.parametrize("scale", [0.0, -0.2, 1.5])
def test_scale(rng: np.random.Generator, scale: float) -> None:
    run_and_check_both(random_operands(rng, SHAPE, with_sinks=True), SHAPE, Logits(scale))


@both_dtypes
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_soft_cap(rng: np.random.Generator, dim: int, v_dim: int, dtype: Any) -> None:
    shape = Shape(Q_LEN, KV_LEN, 8, 2, dim, v_dim, dtype)
    run_and_check_both(random_operands(rng, shape, with_sinks=True), shape, Logits(0.1, 2.0))


@pytest.mark.parametrize(("scale", "soft_cap"), [(0.1, 50.0), (-0.1, 30.0), (0.0, 2.0)])
def test_scale_of_capped_logits(rng: np.random.Generator, scale: float, soft_cap: float) -> None:
    run_and_check(random_operands(rng, SHAPE, with_sinks=True), Logits(scale, soft_cap))


def test_saturated_soft_cap(rng: np.random.Generator) -> None:
    run_and_check_both(random_operands(rng, SHAPE), SHAPE, Logits(20.0, 5.0))


def test_large_sinks(rng: np.random.Generator) -> None:
    operands = random_operands(rng, SHAPE)
    for sinks in ([100.0, -100.0, 30.0, -np.inf], [5.0, -5.0, 80.0, -80.0]):
        run_and_check(operands._replace(sinks=jnp.asarray(sinks, jnp.float32)))


@both_dtypes
def test_huge_logits(rng: np.random.Generator, dtype: Any) -> None:
    """Logits of thousands: each row comes down to a key or two."""
    operands = random_operands(rng, Shape(Q_LEN, KV_LEN, dtype=dtype))
    run_and_check(operands._replace(query=operands.query * 64), Logits(1.0))


LAGS = {  # from block to block of keys, in units of log 2; a reference lags behind the maximum by up to 8
    "just below 8": [7.75],
    "just above 8": [8.25],
    "exactly 8": [8.0],
    "slowly": [1.5],
    "huge": [100.0],
    "falling": [-8.25],
    "falling steeply": [-100.0],
    "up and down": [7.75, 7.75, -20.0],
    "steeply up and down": [100.0, -90.0],
}


def with_rising_logits(operands: Operands, steps: list[float], block: int, lowest: int) -> Operands:
    """The logits, with scale log 2, are a level per block of keys in units of log 2, and little else.

    Levels are within 120 of the lowest. The first two dimensions hold the level, in sixteens and units: one
    number of 16 bits would not.
    """
    kv_len = operands.key.shape[1]
    blocks = -(-kv_len // block)
    # Beyond that, float32 sums in the tensor cores no longer resolve 1e-4.
    level = lowest + np.mod(np.cumsum(np.resize(steps, blocks)), 120).repeat(block)[:kv_len]
    sixteens, units = (jnp.asarray(x, operands.key.dtype)[None, :, None] for x in np.divmod(level, 16))
    key = (0.005 * operands.key).at[..., 0].set(sixteens).at[..., 1].set(units)
    return operands._replace(query=operands.query.at[..., 0].set(16).at[..., 1].set(1), key=key)


@both_dtypes
@pytest.mark.parametrize("lowest", [0, -60, -120])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_maximum_that_rises(dim: int, lowest: int, dtype: Any) -> None:
    """Negative logits, whose maxima are found another way, among them."""
    shape = Shape(2500, 2500, 2, 1, dim, dim, dtype)
    operands = make_operands(shape, np.asarray(masks.causal(2500).bands))
    for name, steps in LAGS.items():
        for block in (80, 128):
            try:
                run_and_check(with_rising_logits(operands, steps, block, lowest), Logits(math.log(2)))
            except AssertionError as error:
                error.add_note(f"{name}, blocks of {block} keys")
                raise


def test_large_values(rng: np.random.Generator) -> None:
    operands = random_operands(rng, SHAPE)
    run_and_check(operands._replace(value=operands.value * 1e30))


def test_cells_covered_twice(rng: np.random.Generator) -> None:
    """A cell counts once per band."""
    bands = pad_bands(np.tile(tile_edge_bands(rng, Q_LEN, KV_LEN, 20), (3, 1)), CAPACITY)
    for deterministic in (False, True):
        run_and_check_both(make_operands(SHAPE, bands), SHAPE, deterministic=deterministic)


@pytest.mark.parametrize("capacity", [0, 1, 300])
def test_nothing_visible(capacity: int) -> None:
    operands = make_operands(SHAPE, np.zeros((capacity, 6), np.int32), np.ones(4))
    report, got = run_and_check_both(operands, SHAPE)
    assert report.visible == 0 and not any(bool(jnp.any(x)) for x in got)


def test_logits_of_minus_infinity() -> None:
    """Rows whose every visible logit is -inf are masked; with one finite logit they have that key's value."""
    operands = make_operands(SHAPE, np.asarray(masks.full(Q_LEN, KV_LEN).bands), np.ones(4))
    operands = operands._replace(query=jnp.abs(operands.query) + 1, key=jnp.full_like(operands.key, -jnp.inf))
    out, lse = run(operands, default_logits(operands))
    assert not bool(jnp.any(out)) and bool(jnp.isneginf(lse).all())
    _, got, _ = gradients(operands, default_logits(operands), make_cotangents(SHAPE))
    assert not any(bool(jnp.any(x)) for x in got)
    operands = operands._replace(key=operands.key.at[:, 200].set(0.25), sinks=jnp.full(4, -jnp.inf))
    out, _ = run(operands, default_logits(operands))
    want = jnp.repeat(operands.value[:, 200], 2, axis=1)[:, None]
    assert bool(jnp.array_equal(out, jnp.broadcast_to(want, out.shape)))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_left_overs_in_one_block(dim: int, v_dim: int, soft_cap: float) -> None:
    """Two ranges of keys, each with a few more than whole blocks of any size, and NaN outside of them."""
    for block_keys in (64, 80, 96, 112, 128):
        ranges = (7, 7 + block_keys + 5), (160, 160 + block_keys + 20)
        rows = (0, 300), (50, Q_LEN)
        bands = [(*q, *k, -UNBOUNDED, UNBOUNDED) for q, k in zip(rows, ranges, strict=True)]
        operands = make_operands(Shape(Q_LEN, KV_LEN, dim=dim, v_dim=v_dim), np.array(bands, np.int32))
        run_and_check(poison_masked(operands, jnp.nan)[0], Logits(0.1, soft_cap))


def test_nan_that_is_seen_is_not_lost() -> None:
    operands = make_operands(SHAPE, np.asarray(masks.causal(Q_LEN, KV_LEN).bands))
    logits = default_logits(operands)
    out, lse = run(operands._replace(key=operands.key.at[0, 300, 0].set(jnp.nan)), logits)
    first = 300 - (KV_LEN - Q_LEN)  # the first row that sees the key
    assert bool(jnp.isnan(lse[0, first:, :2]).all()) and bool(jnp.isnan(out[0, first:, :2]).all())
    assert bool(jnp.isfinite(out[0, :, 2:]).all())
    assert bool(jnp.isfinite(lse[0, :first, :2]).all()) and bool(jnp.isfinite(out[0, :first, :2]).all())
