"""The oracle itself: against another implementation, against a formula written out, against differences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import attention_reference, attention_reference_vjp
from jaxmagi.masks import AttnMask
from tests.cases import random_bands

from .helpers import Inputs, make_inputs

OVERLAPPING = np.array([[0, 7, 0, 9, -4, 4], [2, 6, 1, 5, -(2**30), 2**30], [3, 5, 2, 9, 0, 1]], np.int32)


def small(rng: np.random.Generator) -> Inputs:
    return make_inputs(rng, q_len=7, kv_len=9, dim=5, v_dim=3, dtype=np.float64)


def written_out(x: Inputs, b: int, t: int, n: int, cap: float | None) -> tuple[np.ndarray, float]:
    """One row by the definition, a loop over keys and bands."""
    kv_head = n // (x.query.shape[2] // x.key.shape[2])
    total, out = np.exp(x.sinks[n]), 0.0
    for s, (q0, q1, k0, k1, lo, hi) in itertools.product(range(x.key.shape[1]), OVERLAPPING):
        if q0 <= t < q1 and k0 <= s < k1 and lo <= s - t <= hi:
            logit = x.query[b, t, n] @ x.key[b, s, kv_head] / np.sqrt(x.query.shape[-1])
            weight = np.exp(logit if cap is None else cap * np.tanh(logit / cap))
            total, out = total + weight, out + weight * x.value[b, s, kv_head]
    return np.asarray(out / total), float(np.log(total))


@pytest.mark.parametrize("cap", [None, 0.7])
def test_equals_the_definition(rng: np.random.Generator, cap: float | None) -> None:
    x = small(rng)
    out, lse = attention_reference(x.query, x.key, x.value, OVERLAPPING, logits_soft_cap=cap, sinks=x.sinks)
    for b, t, n in np.ndindex(lse.shape):
        want_out, want_lse = written_out(x, b, t, n, cap)
        np.testing.assert_allclose(out[b, t, n], want_out, atol=1e-12)
        np.testing.assert_allclose(lse[b, t, n], want_lse, atol=1e-12)


def test_equals_jax_nn(rng: np.random.Generator, x64: None) -> None:
    x = make_inputs(rng, v_dim=16, dtype=np.float64)
    mask = masks.causal(x.query.shape[1], x.key.shape[1])

    with jax.numpy_dtype_promotion("standard"):
        other = functools.partial(jax.nn.dot_product_attention, mask=jnp.asarray(mask.to_dense())[None, None])
        want, pull = jax.vjp(other, *map(jnp.asarray, x[:3]))
    out, _ = attention_reference(*x[:3], mask)
    np.testing.assert_allclose(out, want, atol=1e-6)  # its softmax is in fp32
    gradients = attention_reference_vjp(*x[:3], mask, x.dout)
    for got, one in zip(gradients[:3], pull(x.dout), strict=True):
        np.testing.assert_allclose(got, one, atol=2e-6)


@pytest.mark.parametrize("cap", [None, 0.7])
def test_gradients_equal_differences(rng: np.random.Generator, cap: float | None) -> None:
    x = small(rng)

    def loss(query: np.ndarray, key: np.ndarray, value: np.ndarray, sinks: np.ndarray) -> float:
        out, lse = attention_reference(query, key, value, OVERLAPPING, logits_soft_cap=cap, sinks=sinks)
        return float((out * x.dout).sum() + (lse * x.dlse).sum())

    gradients = attention_reference_vjp(
        *x[:3], OVERLAPPING, x.dout, x.dlse, logits_soft_cap=cap, sinks=x.sinks
    )
    for i, gradient in enumerate(gradients):
        direction, step = rng.standard_normal(x[i].shape), 1e-6
        ahead, back = (
            loss(*(y + sign * step * direction if j == i else y for j, y in enumerate(x[:4])))
            for sign in (1, -1)
        )
        slope = (ahead - back) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-8)


def test_accepts_all_layouts(rng: np.random.Generator) -> None:
    x = small(rng)
    bands = [random_bands(rng, 7, 9, 3) for _ in range(2)]
    stacked = AttnMask.stack([AttnMask.from_bands(one, q_len=7, kv_len=9, check=False) for one in bands])
    out, lse = attention_reference(*x[:3], stacked)
    dq, *_ = attention_reference_vjp(*x[:3], stacked, x.dout)
    for b in range(2):
        query, key, value = (y[b] for y in x[:3])
        one_out, one_lse = attention_reference(query, key, value, bands[b])
        np.testing.assert_array_equal(out[b], one_out)
        np.testing.assert_array_equal(lse[b], one_lse)
        one_dq = attention_reference_vjp(query, key, value, bands[b], x.dout[b]).query
        np.testing.assert_array_equal(dq[b], one_dq)
