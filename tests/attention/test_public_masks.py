"""Every public mask at its full length, in one compilation: sampled rows and keys against fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.attention import attention
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE, MaskCase, mask_cases

from .schedule_reference import transpose

LENGTH, CAPACITY, DIM, SAMPLES = 15_360, 4096, 8, 96
SCALE = DIM**-0.5


@functools.cache
def operands() -> list[np.ndarray]:
    """Unit-normal query, key, value and cotangent, [LENGTH, DIM]."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((LENGTH, DIM)).astype(np.float32) for _ in range(4)]


@jax.jit
def run(mask: AttnMask, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """out, lse, dq, dk, dv of one head."""
    query, key, value, dout = (x[:, None] for x in arrays)

    def op(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(query, key, value, mask, return_residual=True)

    (out, lse), pull = jax.vjp(op, query, key, value)
    return tuple(x[:, 0] for x in (out, lse, *pull((dout, jnp.zeros_like(lse)))))


def counts(bands: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The number of bands that make each key visible from each of ``rows``, float64 [rows, LENGTH]."""
    q0, q1, k0, k1, lo, hi = (column[:, None].astype(np.int64) for column in bands.T)
    first = np.maximum(k0, rows + lo)
    end = np.minimum(k1, rows + hi + 1)
    visible = (q0 <= rows) & (rows < q1) & (first < end)
    band, row = np.nonzero(visible)
    steps = np.zeros((len(rows), LENGTH + 1))
    np.add.at(steps, (row, first[band, row]), 1)
    np.add.at(steps, (row, end[band, row]), -1)
    return steps.cumsum(axis=1)[:, :LENGTH]


@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_mask(case: MaskCase) -> None:
    mask = case.mask(LENGTH).pad_to(CAPACITY)
    bands = np.asarray(mask.bands)
    arrays = operands()
    query, key, value, dout = (x.astype(np.float64) for x in arrays)
    out, lse, dq, dk, dv = (np.asarray(x, np.float64) for x in run(mask, *map(jnp.asarray, arrays)))
    rows = np.random.default_rng(1).choice(case.q_len, min(SAMPLES, case.q_len), replace=False)
    weight = counts(bands, rows)
    weights = weight * np.exp(SCALE * query[rows] @ key.T)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[rows], np.log(total[:, 0]), atol=FP32_TOLERANCE)
    p = weights / np.where(total > 0, total, 1)
    np.testing.assert_allclose(out[rows], p @ value, atol=FP32_TOLERANCE)
    ds = p * (dout[rows] @ value.T - np.sum(dout[rows] * (p @ value), axis=1, keepdims=True))
    np.testing.assert_allclose(dq[rows], SCALE * ds @ key, atol=FP32_TOLERANCE)
    assert (
        not out[case.q_len :].any() and np.isneginf(lse[case.q_len :]).all() and not dk[case.kv_len :].any()
    )

    keys = np.random.default_rng(2).choice(case.kv_len, min(SAMPLES, case.kv_len), replace=False)
    weight = counts(transpose(bands), keys)
    p = weight * np.exp(np.where(weight > 0, SCALE * key[keys] @ query.T - lse, -np.inf))
    ds = p * (value[keys] @ dout.T - np.sum(dout * out, axis=1))
    np.testing.assert_allclose(dv[keys], p @ dout, rtol=1e-4, atol=5 * FP32_TOLERANCE)
    np.testing.assert_allclose(dk[keys], SCALE * ds @ query, rtol=1e-4, atol=5 * FP32_TOLERANCE)
