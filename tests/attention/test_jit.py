"""One trace for all masks of a capacity; what each platform lowers to; the extension's presence."""

import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import _native, masks
from jaxmagi.attention import attention, attention_reference, attention_reference_vjp
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE, random_bands

from .helpers import CAPACITY, KV_LEN, Q_LEN, assert_close, make_inputs, max_error, run, run_reference

LEARNING_RATE = 0.1

type Operands = tuple[Any, Any, Any]
TARGETS = ("jaxmagi_attention_forward", "jaxmagi_attention_backward")


def op(implementation: str | None) -> Any:
    return functools.partial(attention, implementation=implementation)


def gradients(implementation: str | None) -> Any:
    def loss(query: jax.Array, key: jax.Array, value: jax.Array, mask: AttnMask) -> jax.Array:
        return op(implementation)(query, key, value, mask).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def test_one_trace_for_many_masks(rng: np.random.Generator, implementation: str) -> None:
    """Twenty steps of training, each with another mask."""
    traces = 0
    x = make_inputs(rng)

    def score(operands: Operands, mask: AttnMask) -> jax.Array:
        return (attention(*operands, mask, implementation=implementation) * x.dout).sum()

    @jax.jit
    def train_step(operands: Operands, mask: AttnMask) -> tuple[jax.Array, Operands]:
        nonlocal traces
        traces += 1
        value, gradients = jax.value_and_grad(score)(operands, mask)
        return value, jax.tree.map(lambda x, gradient: x - LEARNING_RATE * gradient, operands, gradients)

    operands: Operands = x[:3]
    for count in range(1, 21):
        bands = random_bands(rng, Q_LEN, KV_LEN, min(count, CAPACITY))
        mask = AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN, check=False).pad_to(CAPACITY)
        out, _ = attention_reference(*operands, mask)
        gradients = attention_reference_vjp(*operands, mask, x.dout, np.zeros(x.dlse.shape))
        value, updated = train_step(operands, mask)
        np.testing.assert_allclose(value, (out * x.dout).sum(), rtol=FP32_TOLERANCE, atol=1e-3)
        for old, new, gradient in zip(operands, updated, gradients[:3], strict=True):
            assert max_error(new, old - LEARNING_RATE * gradient) <= FP32_TOLERANCE
        operands = jax.device_get(updated)
    assert traces == 1


def test_without_jit(rng: np.random.Generator, implementation: str) -> None:
    """The primitives are programs of their own, also for who debugs step by step."""
    x = make_inputs(rng)
    bands = random_bands(rng, Q_LEN, KV_LEN, CAPACITY)
    mask = AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN, check=False)
    with jax.disable_jit():
        got = run(x, mask, with_sinks=True, implementation=implementation)
        mapped = jax.vmap(functools.partial(op(implementation), mask=mask))(x.query, x.key, x.value)
    assert_close(got, run_reference(x, mask, with_sinks=True), FP32_TOLERANCE)
    assert max_error(mapped, attention_reference(*x[:3], mask)[0]) <= FP32_TOLERANCE


@pytest.mark.skipif(
    not _native.has_handler(TARGETS[0], "cpu"), reason="the compiled extension jaxmagi._cpu is missing"
)
@pytest.mark.parametrize("implementation, calls", [("ffi", True), (None, True), ("xla", False)])
def test_custom_calls_on_cpu(implementation: str | None, calls: bool) -> None:
    x, mask = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32), masks.causal(8)
    text = gradients(implementation).lower(x, x, x, mask).as_text()
    assert [target in text for target in TARGETS] == [calls, calls]


def test_platforms_without_handler() -> None:
    x, mask = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32), masks.causal(8)
    for implementation in (None, "xla"):
        lowered = gradients(implementation).trace(x, x, x, mask).lower(lowering_platforms=("cpu", "tpu"))
        assert "stablehlo.while" in lowered.as_text()
    for platforms in (("tpu",), ("cpu", "tpu")):
        with pytest.raises(
            NotImplementedError, match=r"jaxmagi_attention_forward cannot run on platform tpu"
        ):
            gradients("ffi").trace(x, x, x, mask).lower(lowering_platforms=platforms)


def test_missing_extension(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(sys.modules, "jaxmagi._cpu", None)
    assert _native._load("jaxmagi._cpu", "cpu") is None
    monkeypatch.setitem(_native._EXTENSIONS, "cpu", None)
    x = jax.ShapeDtypeStruct((1, 9, 1, 4), jnp.float32)
    assert "custom_call" not in gradients(None).lower(x, x, x, masks.causal(9)).as_text()
    with pytest.raises(
        NotImplementedError, match=r"platform cpu: the compiled extension jaxmagi\._cpu is missing"
    ):
        gradients("ffi").lower(x, x, x, masks.causal(9))


def test_broken_extension_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ImportError, match="undefined symbol"):
        _native._load("jaxmagi._cpu", "cpu")
