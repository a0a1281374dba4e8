"""The reference of the GPU tests against the host's, and that it notices what is wrong."""

import functools
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
    """Two for each key head, the second with padding."""
    monkeypatch.setattr(device_reference, "_MAX_ROWS", 256)


def make_operands(rng: np.random.Generator, dtype: Any) -> Operands:
    """Per-example bands, some cells covered twice; NaN in what nobody sees and in what sees nothing."""
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
    """The host's output and log-sum-exp, in fp32."""
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
    assert report.out.largest <= 1e-6 and report.lse <= 1e-6 and report.wrong_blind == 0
    assert report.largest_out > 1 and report.worst_row < 0.01 and report.seen > 100
    assert report.rms_out == pytest.approx(float(np.sqrt(np.mean(np.square(exact(operands, logits)[0])))))
    eps = float(jnp.finfo(dtype).eps)
    assert eps / 4 < report.rounded.largest < 2 * eps * report.largest_out
    check(report, dtype)


def test_some_rows(rng: np.random.Generator) -> None:
    operands, logits = make_operands(rng, jnp.bfloat16), Logits(0.25)
    out, lse = exact(operands, logits)
    assert judge(operands, logits, out.at[:, 3].add(1), lse, rows=[0, 7, 149]).out.largest <= 1e-6
    assert judge(operands, logits, out.at[:, 7].add(1), lse, rows=[0, 7, 149]).out.largest > 0.9


def spoil(out: jax.Array, lse: jax.Array, fault: str) -> tuple[jax.Array, jax.Array]:
    """One wrong number, in a row that sees something or in one that does not."""
    row, field, kind = fault.split()
    place = tuple(np.argwhere(np.isneginf(np.asarray(lse)) == (row == "blind"))[17])
    number = {"nan": jnp.nan, "zero": 0.0, "off": 0.1}[kind]
    if field == "out":
        return out.at[(*place, 5)].add(number), lse
    return out, lse.at[place].set(lse[place] + number if np.isfinite(lse[place]) else number)


@pytest.mark.parametrize(
    "fault",
    ["seen out nan", "seen out off", "seen lse nan", "seen lse off", "blind out nan", "blind lse zero"],
)
def test_faults_are_noticed(rng: np.random.Generator, fault: str) -> None:
    operands, logits = make_operands(rng, jnp.bfloat16), Logits(0.25)
    report: Report = judge(operands, logits, *spoil(*exact(operands, logits), fault))
    with pytest.raises(AssertionError):
        check(report, jnp.bfloat16)


LONG = 4096


@functools.cache
def long_causal() -> tuple[Operands, np.ndarray, jax.Array, jax.Array]:
    """Thousands of rows, the probabilities, and the result of a kernel that rounds as it has to."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, LONG, 1, 64)), jnp.bfloat16) for _ in range(3))
    operands = Operands(query, key, value, masks.causal(LONG).bands[None], np.full(1, -np.inf, np.float32))
    q, k, v = (np.asarray(x[0, :, 0], np.float32) for x in (query, key, value))
    s = np.where(np.tri(LONG, dtype=bool), q @ k.T / 8, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    total = p.sum(axis=1, keepdims=True)
    out = np.asarray(jnp.asarray(p, jnp.bfloat16), np.float32) @ v / total
    lse = s.max(axis=1) + np.log(total[:, 0])
    return operands, p / total, jnp.asarray(out)[None, :, None], jnp.asarray(lse)[None, :, None]


def mutate(mutant: str) -> jax.Array:
    """The output of `long_causal`, wrong by little where it is small."""
    operands, p, out, _ = long_causal()
    if mutant == "half of the rows":
        return out.at[:, LONG // 2 :].multiply(1.05)
    if mutant == "late rows":
        return out.at[:, -LONG // 8 :].multiply(1.02)
    if mutant == "eight keys":
        keys = slice(LONG - 128, LONG - 120)
        return out.at[0, :, 0].add(-p[:, keys] @ np.asarray(operands.value[0, keys, 0], np.float32))
    return out


@pytest.mark.parametrize("mutant", ["none", "half of the rows", "eight keys", "late rows"])
def test_small_faults_in_late_rows_are_noticed(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """Which no maximum over all rows shows: the first rows' numbers, and so their errors, are far larger."""
    monkeypatch.setattr(device_reference, "_MAX_ROWS", 1024)
    operands, *_, lse = long_causal()
    report = judge(operands, Logits(0.125), mutate(mutant).astype(jnp.bfloat16), lse)
    assert report.out.largest <= 2 * report.rounded.largest
    if mutant == "none":
        return check(report, jnp.bfloat16)
    with pytest.raises(AssertionError, match="output"):
        check(report, jnp.bfloat16)
    assert report.worst_row > 1.5 * device_reference.ROW_TOLERANCE
