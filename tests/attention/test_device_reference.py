"""The reference of the GPU tests agrees with the host's, and detects errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import attention_reference
from jaxmagi.masks import AttnMask
from tests.cases import random_bands

from . import device_reference
from .device_reference import Logits, Report, check, judge
from .helpers import CAPACITY, KV_LEN, Q_LEN, Operands, make_inputs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes two blocks for each key head, the second with padding."""
    monkeypatch.setattr(device_reference, "_MAX_ROWS", 256)


def make_operands(rng: np.random.Generator, dtype: Any) -> Operands:
    """Operands with per-example bands, some cells covered twice, and NaN in fully masked rows and keys."""
    x = make_inputs(rng, dtype=dtype)
    bands = np.stack([random_bands(rng, Q_LEN, KV_LEN, CAPACITY) for _ in range(2)])
    bands[:, -1] = bands[:, 0]
    for example, one in enumerate(bands):
        dense = AttnMask.from_bands(one, q_len=Q_LEN, kv_len=KV_LEN, check=False).to_dense()
        x.query[example, ~dense.any(axis=1)] = np.nan
        x.key[example, ~dense.any(axis=0)] = np.nan
        x.value[example, ~dense.any(axis=0)] = np.nan
    return Operands(*map(jnp.asarray, (x.query, x.key, x.value, bands, x.sinks)))


def exact(operands: Operands, logits: Logits) -> tuple[jax.Array, jax.Array]:
    """Returns the host's output and log-sum-exp, in fp32."""
    query, key, value, bands, sinks = operands
    out, lse = attention_reference(
        query, key, value, bands, scale=logits.scale, logits_soft_cap=logits.soft_cap or None, sinks=sinks
    )
    return jnp.asarray(out, np.float32), jnp.asarray(lse, np.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_agrees_with_the_host(rng: np.random.Generator, dtype: Any, soft_cap: float) -> None:
    operands, logits = make_operands(rng, dtype), Logits(-0.3, soft_cap)
    report = judge(operands, logits, *exact(operands, logits))
    assert report.out.largest <= 1e-6 and report.lse <= 1e-6 and report.wrong_masked == 0
    assert report.largest_out > 1 and report.worst_row < 0.01 and report.visible > 100
    assert report.rms_out == pytest.approx(float(np.sqrt(np.mean(np.square(exact(operands, logits)[0])))))
    eps = float(jnp.finfo(dtype).eps)
    assert eps / 4 < report.rounded.largest < 2 * eps * report.largest_out
    check(report, dtype)


def spoil(out: jax.Array, lse: jax.Array, fault: str) -> tuple[jax.Array, jax.Array]:
    """Returns results with one wrong number, in a visible or in a fully masked row."""
    row, field, kind = fault.split()
    place = tuple(np.argwhere(np.isneginf(np.asarray(lse)) == (row == "masked"))[17])
    number = {"nan": jnp.nan, "zero": 0.0, "off": 0.1}[kind]
    if field == "out":
        return out.at[(*place, 5)].add(number), lse
    return out, lse.at[place].set(lse[place] + number if np.isfinite(lse[place]) else number)


@pytest.mark.parametrize(
    "fault",
    [
        "visible out nan",
        "visible out off",
        "visible lse nan",
        "visible lse off",
        "masked out nan",
        "masked lse zero",
    ],
)
def test_detects_errors(rng: np.random.Generator, fault: str) -> None:
    operands, logits = make_operands(rng, jnp.bfloat16), Logits(0.25)
    report: Report = judge(operands, logits, *spoil(*exact(operands, logits), fault))
    with pytest.raises(AssertionError):
        check(report, jnp.bfloat16)


def test_small_faults_in_late_rows_are_noticed(rng: np.random.Generator) -> None:
    """Only the tolerance of rows shows them: the first rows' numbers, and so their errors, are far larger."""
    logits = Logits(0.125)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 2048, 1, 64)), jnp.bfloat16) for _ in range(3))
    bands, sinks = masks.causal(2048).bands[None], np.full(1, -np.inf, np.float32)
    operands = Operands(query, key, value, bands, sinks)
    out, lse = exact(operands, logits)
    check(judge(operands, logits, out.astype(jnp.bfloat16), lse), jnp.bfloat16)
    out = out.at[:, -256:].multiply(1.02).astype(jnp.bfloat16)
    with pytest.raises(AssertionError, match="a row of the output"):
        check(judge(operands, logits, out, lse), jnp.bfloat16)
