"""The backward kernels inside programs: order of sums, stages, margins, captured runs, shared plans."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import Partial, _cuda, attention, row_delta
from jaxmagi.masks import AttnMask

from .gpu_harness import (
    KERNEL_DIMS,
    Shape,
    assert_same,
    default_logits,
    forward,
    has_command_buffers,
    make_operands,
    random_operands,
    with_command_buffers,
)
from .gradient_harness import backward, gradients, make_cotangents
from .gradient_reference import Cotangents, Gradients, check_gradients, judge_gradients
from .helpers import Operands
from .test_gpu_stages import split_keys

pytestmark = pytest.mark.gpu

SHAPE = Shape(1111, 1234, 8, 2)
LONG = Shape(4099, 4093, 8, 2)


def check(operands: Operands, cotangents: Cotangents, got: Gradients[jax.Array]) -> None:
    deviations, _ = judge_gradients(operands, default_logits(operands), cotangents, got)
    check_gradients(deviations, operands.query.dtype)


def rows_of(operands: Operands, cotangents: Cotangents) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp and delta."""
    result = Partial(*forward(operands))
    return result.lse, row_delta(result, Partial(*cotangents))


@pytest.mark.parametrize(
    "mask",
    [masks.full(4099, 4093), masks.causal(4099, 4093), masks.sliding_window(4099, 600, 70, kv_len=4093)],
    ids=["full", "causal", "window"],
)
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_deterministic(mask: AttnMask, dim: int, v_dim: int) -> None:
    """Bit for bit, ten times over."""
    shape = LONG._replace(dim=dim, v_dim=v_dim)
    operands, cotangents = make_operands(shape, np.asarray(mask.bands)), make_cotangents(shape)
    first, _ = gradients(operands, default_logits(operands), cotangents, deterministic=True)
    check(operands, cotangents, first)
    for _ in range(9):
        assert_same(gradients(operands, default_logits(operands), cotangents, deterministic=True)[0], first)


def test_deterministic_under_many_bands(rng: np.random.Generator) -> None:
    operands, cotangents = random_operands(rng, LONG, count=60), make_cotangents(LONG)
    first, _ = gradients(operands, default_logits(operands), cotangents, deterministic=True)
    check(operands, cotangents, first)
    for _ in range(9):
        assert_same(gradients(operands, default_logits(operands), cotangents, deterministic=True)[0], first)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_one_sm(rng: np.random.Generator, dim: int, v_dim: int, deterministic: bool) -> None:
    """One CTA takes every tile."""
    check_one_sm(rng, Shape(1500, 1700, 4, 2, dim, v_dim), deterministic)


def test_one_sm_whose_section_is_less_than_a_head(rng: np.random.Generator) -> None:
    check_one_sm(rng, Shape(9000, 300, 8, 1), False)


def check_one_sm(rng: np.random.Generator, shape: Shape, deterministic: bool) -> None:
    operands, cotangents = random_operands(rng, shape, count=60), make_cotangents(shape)
    margin = jax.devices()[0].core_count - 1
    got = backward(
        operands, cotangents, *rows_of(operands, cotangents), sm_margin=margin, deterministic=deterministic
    )
    check(operands, cotangents, got)


@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (64, 64), (256, 256), (192, 128), (40, 72)])
def test_stages(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """Keys in three stages: fp32 parts, each from the log-sum-exp of all keys, add up to the whole."""
    shape = SHAPE._replace(dim=dim, v_dim=v_dim)
    operands, cotangents = random_operands(rng, shape, count=40), make_cotangents(shape)
    rows = rows_of(operands, cotangents)
    parts = [backward(stage, cotangents, *rows, grad_dtype=jnp.float32) for stage in split_keys(operands)]
    check(operands, cotangents, Gradients(*(functools.reduce(jnp.add, x) for x in zip(*parts, strict=True))))


def test_margin_out_of_range(rng: np.random.Generator) -> None:
    operands, cotangents = random_operands(rng, SHAPE), make_cotangents(SHAPE)
    rows = rows_of(operands, cotangents)
    with pytest.raises(ValueError, match="sm_margin must be at least 0, but is -1"):
        backward(operands, cotangents, *rows, sm_margin=-1)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"sm_margin must be at least 0 and less than .* got 1000"
    ):
        jax.block_until_ready(backward(operands, cotangents, *rows, sm_margin=1000))


def loss(x: jax.Array, mask: AttnMask) -> jax.Array:
    for _ in range(3):
        x = x + attention(x, x, x, mask, deterministic=True, implementation="ffi")
    return jnp.mean(x.astype(jnp.float32) ** 2)


def problem(rng: np.random.Generator) -> tuple[jax.Array, AttnMask]:
    x = jnp.asarray(rng.standard_normal((1000, 4, 128)), jnp.bfloat16)
    return x, masks.documents([300, 500, 200])


def test_one_plan_of_each_kind_for_all_layers(rng: np.random.Generator) -> None:
    text = jax.jit(jax.grad(loss)).lower(*problem(rng)).compile().as_text()
    assert text is not None
    calls = {
        name: text.count(f'custom_call_target="{name}"') for name in (_cuda.BACKWARD, _cuda.TILE_SCHEDULE)
    }
    assert calls == {_cuda.BACKWARD: 3, _cuda.TILE_SCHEDULE: 2}


def test_captured(rng: np.random.Generator, tmp_path: Path) -> None:
    """With and without command buffers, bit for bit, for several masks of one capacity."""
    x, mask = problem(rng)
    gradient: Any = jax.grad(loss)
    off = with_command_buffers(gradient, "", tmp_path / "off")
    on = with_command_buffers(gradient, "FUSION,CUSTOM_CALL", tmp_path / "on")
    others = [masks.causal(1000), masks.sliding_window(1000, 70)]
    for other in (mask, *(other.pad_to(mask.bands.shape[0]) for other in others)):
        want = off(x, other)
        for _ in range(3):
            assert bool(jnp.array_equal(on(x, other), want))
    assert has_command_buffers(tmp_path / "on") and not has_command_buffers(tmp_path / "off")
