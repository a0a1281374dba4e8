"""Gradients: finite differences, exact zeros, NaN that does not spread, dtypes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxmagi import masks
from jaxmagi.attention import attention, attention_reference_vjp
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE

from .helpers import (
    CAPACITY,
    KV_LEN,
    Q_LEN,
    assert_close,
    backward,
    make_inputs,
    max_error,
    run,
    run_reference,
)

# Rows 20..90 see something, keys 5..100 are seen.
HOLES = [[20, 60, 5, 50, -20, 9], [60, 90, 40, 100, -(2**30), 2**30]]


def mask_with_holes() -> AttnMask:
    return AttnMask.from_bands(HOLES, q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY)


def test_equal_differences(rng: np.random.Generator, implementation: str, x64: None) -> None:
    x = make_inputs(rng, q_len=12, kv_len=14, dim=4, v_dim=6, dtype=np.float64)
    mask = AttnMask.from_bands([[0, 5, 0, 7, -3, 3], [2, 12, 7, 14, -2, 30]], q_len=12, kv_len=14)

    options: Any = {"logits_soft_cap": 1.7, "return_residual": True, "implementation": implementation}
    attend = jax.jit(lambda q, k, v, sinks: attention(q, k, v, mask, sinks=sinks, **options))
    check_grads(attend, tuple(map(jnp.asarray, x[:4])), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


def test_zero_where_masked(rng: np.random.Generator, implementation: str) -> None:
    mask = mask_with_holes()
    dense = mask.to_dense()
    masked, masked_keys = ~dense.any(axis=1), ~dense.any(axis=0)
    assert masked.any() and masked_keys.any()
    got = run(make_inputs(rng), mask, with_sinks=True, implementation=implementation)
    assert (got.query[:, masked] == 0).all()
    assert (got.key[:, masked_keys] == 0).all() and (got.value[:, masked_keys] == 0).all()
    assert (got.query[:, ~masked] != 0).any(axis=-1).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_in_masked_cells_does_not_spread(
    rng: np.random.Generator, implementation: str, poison: float
) -> None:
    mask = mask_with_holes()
    dense = mask.to_dense()
    masked, masked_keys = ~dense.any(axis=1), ~dense.any(axis=0)
    clean = make_inputs(rng)
    bad = clean.replace_with(np.copy)
    for rows in (bad.query, bad.dout, bad.dlse):
        rows[:, masked] = poison
    for keys in (bad.key, bad.value):
        keys[:, masked_keys] = poison
    for with_sinks in (False, True):
        got = run(bad, mask, with_sinks=with_sinks, implementation=implementation)
        want = run(clean, mask, with_sinks=with_sinks, implementation=implementation)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_overflowing_scores_are_masked(
    rng: np.random.Generator, implementation: str, with_sinks: bool
) -> None:
    """Logits of -inf from finite operands: as if the band of those rows were not there."""
    bands = [[60, 90, 50, 100, -(2**30), 2**30], [20, 60, 5, 50, -(2**30), 2**30]]
    both, rest = (
        AttnMask.from_bands(some, q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY) for some in (bands, bands[:1])
    )
    x = make_inputs(rng)
    x.query[:, 20:60], x.key[:, 5:50] = 1e30, -1e30
    got, want = (run(x, m, with_sinks=with_sinks, implementation=implementation) for m in (both, rest))
    assert np.isneginf(got.lse[:, 20:60]).all()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_infinite_keys_are_masked(
    rng: np.random.Generator, implementation: str, with_sinks: bool
) -> None:
    """A key head of one example is -inf: its rows get nothing and give nothing, all others are as ever."""
    x, mask = make_inputs(rng), mask_with_holes()
    x = x._replace(query=abs(x.query) + 0.1)
    x.key[0, :, 1] = -np.inf
    got = run(x, mask, with_sinks=with_sinks, implementation=implementation)
    assert np.isneginf(got.lse[0, :, 2:]).all()
    for rows in (got.out[0, :, 2:], got.query[0, :, 2:], got.key[0, :, 1], got.value[0, :, 1]):
        assert (rows == 0).all()
    assert_close(got, run_reference(x, mask, with_sinks=with_sinks), FP32_TOLERANCE)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_nan_in_one_query(rng: np.random.Generator, implementation: str, with_sinks: bool) -> None:
    """NaN reaches that row and no other."""
    clean, mask = make_inputs(rng, kv_len=Q_LEN), masks.causal(Q_LEN)
    bad = clean.replace_with(np.copy)
    bad.query[:, 70] = np.nan
    got = run(bad, mask, with_sinks=with_sinks, implementation=implementation)
    want = run(clean, mask, with_sinks=with_sinks, implementation=implementation)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert np.isnan(a[:, 70]).all()
        np.testing.assert_array_equal(np.delete(a, 70, axis=1), np.delete(b, 70, axis=1))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_nan_in_all_operands(
    rng: np.random.Generator, implementation: str, with_sinks: bool, holes: bool
) -> None:
    """NaN reaches exactly the visible rows."""
    mask = mask_with_holes() if holes else masks.causal(Q_LEN)
    x = make_inputs(rng, kv_len=mask.kv_len)
    x = x._replace(**{name: np.full_like(getattr(x, name), np.nan) for name in ("query", "key", "value")})
    got = run(x, mask, with_sinks=with_sinks, implementation=implementation)
    sees = mask.to_dense().any(axis=1)
    for rows in (got.out, got.query):
        assert np.isnan(rows[:, sees]).all() and (rows[:, ~sees] == 0).all()
    assert np.isnan(got.lse[:, sees]).all() and np.isneginf(got.lse[:, ~sees]).all()


def test_padding_inside_a_batch(rng: np.random.Generator, implementation: str) -> None:
    """Poison in masked cells of one example does not reach another, in which they are visible."""
    mask = AttnMask.stack([mask_with_holes(), masks.full(Q_LEN, KV_LEN).pad_to(CAPACITY)])
    clean = make_inputs(rng)
    bad = clean.replace_with(np.copy)
    bad.key[0, 120:], bad.value[0, 120:], bad.query[0, 100:] = np.nan, np.nan, np.nan
    got = run(bad, mask, implementation=implementation)
    want = run(clean, mask, implementation=implementation)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_cotangent_of_the_residual_alone(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng), mask_with_holes()
    x = x._replace(dout=np.zeros_like(x.dout))
    got = run(x, mask, with_sinks=True, implementation=implementation)
    assert (got.value == 0).all()
    assert_close(got, run_reference(x, mask, with_sinks=True), FP32_TOLERANCE)


def test_unused_residual(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng), mask_with_holes()
    op = functools.partial(attention, mask=mask, implementation=implementation)
    _, pull = jax.vjp(op, *map(jnp.asarray, x[:3]))
    for got, want in zip(pull(x.dout), attention_reference_vjp(*x[:3], mask, x.dout)[:3], strict=True):
        assert max_error(got, want) <= FP32_TOLERANCE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_sinks_in_any_dtype(rng: np.random.Generator, implementation: str, dtype: jnp.dtype) -> None:
    x, mask = make_inputs(rng), mask_with_holes()
    sinks = jnp.asarray(x.sinks, dtype)
    exact = attention_reference_vjp(*x[:3], mask, x.dout, sinks=sinks).sinks

    def loss(sinks: jax.Array) -> jax.Array:
        return (x.dout * attention(*x[:3], mask, sinks=sinks, implementation=implementation)).sum()

    gradient = jax.jit(jax.grad(loss))(sinks)
    assert gradient.dtype == dtype
    scale = max(1.0, float(np.abs(exact).max()))
    assert max_error(gradient, exact) <= max(FP32_TOLERANCE, float(jnp.finfo(dtype).eps)) * scale


def test_deterministic_is_bitwise(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng), mask_with_holes()
    runs = [run(x, mask, deterministic=True, implementation=implementation) for _ in range(3)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_wide_gradients_of_one_stage(rng: np.random.Generator, implementation: str) -> None:
    """bf16 operands with fp32 gradients, and lse and delta that span more than these keys."""
    x = make_inputs(rng, dtype=jnp.bfloat16)
    whole, part = (
        masks.full(Q_LEN, KV_LEN),
        AttnMask.from_bands([[0, Q_LEN, 0, 60, -(2**30), 2**30]], q_len=Q_LEN, kv_len=KV_LEN),
    )
    exact = run_reference(x, whole)
    delta = (np.asarray(x.dout, np.float64) * exact.out).sum(axis=-1) - x.dlse
    wide = functools.partial(backward, grad_dtype=jnp.float32, implementation=implementation)
    rows = (x.dout, exact.lse.astype(np.float32), delta.astype(np.float32))
    dq, dk, dv = jax.jit(wide)((*x[:3], part.bands[None], *rows))
    assert {dq.dtype, dk.dtype, dv.dtype} == {np.dtype(np.float32)}
    assert (dk[:, 60:] == 0).all() and (dv[:, 60:] == 0).all()
    assert max_error(dk[:, :60], exact.key[:, :60]) <= 0.02
    assert max_error(dv[:, :60], exact.value[:, :60]) <= 0.02
