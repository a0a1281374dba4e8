"""The reference of gradients on GPUs agrees with the host's."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.attention import attention_reference_vjp
from tests.cases import tile_edge_bands

from . import device_reference
from .device_reference import Logits
from .gradient_reference import Cotangents, Deviation, Gradients, check_gradients, judge_gradients
from .helpers import Operands, make_inputs

Q_LEN, KV_LEN = 130, 170


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes two blocks for each key head, the second with padding."""
    monkeypatch.setattr(device_reference, "_MAX_ROWS", 256)


def problem(rng: np.random.Generator, logits: Logits) -> tuple[Operands, Cotangents, Gradients, np.ndarray]:
    """Returns operands in bfloat16, cotangents, and the gradients of the fp64 reference."""
    x = make_inputs(rng, q_len=Q_LEN, kv_len=KV_LEN, dtype=jnp.bfloat16)
    bands = tile_edge_bands(rng, Q_LEN, KV_LEN, 6)
    operands = Operands(*(jnp.asarray(y) for y in (x.query, x.key, x.value, bands[None], x.sinks)))
    *tensors, dsinks = attention_reference_vjp(
        x.query,
        x.key,
        x.value,
        bands[None],
        x.dout,
        x.dlse,
        scale=logits.scale,
        logits_soft_cap=logits.soft_cap or None,
        sinks=x.sinks,
    )
    cotangents = Cotangents(jnp.asarray(x.dout), jnp.asarray(x.dlse))
    return operands, cotangents, Gradients(*tensors), np.asarray(dsinks)


def judged(
    operands: Operands, logits: Logits, cotangents: Cotangents, tensors: Gradients
) -> tuple[Gradients[Deviation], np.ndarray]:
    got = Gradients(*(jnp.asarray(x, jnp.float32) for x in tensors))
    return judge_gradients(operands, logits, cotangents, got)


@pytest.mark.parametrize("logits", [Logits(0.3), Logits(0.3, 1.5), Logits(-0.2)])
def test_agrees_with_the_host(rng: np.random.Generator, logits: Logits) -> None:
    operands, cotangents, tensors, dsinks = problem(rng, logits)
    deviations, got_dsinks = judged(operands, logits, cotangents, tensors)
    for x in deviations:
        assert x.largest <= 1e-6 * x.largest_number and x.wrong_zeros == 0
        assert 0 < x.rounded_rms < 0.01 * x.rms_number
    np.testing.assert_allclose(got_dsinks, dsinks, rtol=1e-6, atol=1e-6)
    check_gradients(deviations, jnp.bfloat16)
