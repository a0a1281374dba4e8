"""The backward kernels inside programs: order of sums, stages, margins, captured runs, shared plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import Partial, row_delta
from jaxmagi.masks import AttnMask

from .gpu_harness import (
    KERNEL_DIMS,
    Shape,
    assert_same,
    default_logits,
    make_operands,
    random_operands,
)
from .gradient_harness import gradients, make_cotangents
from .gradient_reference import Cotangents, Gradients, check_gradients, judge_gradients
from .helpers import Operands, backward, forward
from .test_gpu_stages import split_keys

pytestmark = pytest.mark.gpu

SHAPE = Shape(1111, 1234, 8, 2)
LONG = Shape(4099, 4093, 8, 2)


def check(operands: Operands, cotangents: Cotangents, got: Gradients[jax.Array]) -> None:
    deviations, _ = judge_gradients(operands, default_logits(operands), cotangents, got)
    check_gradients(deviations, operands.query.dtype)


def arguments_of(operands: Operands, cotangents: Cotangents) -> list[jax.Array]:
    """The arguments of `attention_backward`."""
    result = Partial(*forward(operands))
    return [*operands[:4], cotangents.out, result.lse, row_delta(result, Partial(*cotangents))]


@pytest.mark.parametrize(
    "mask",
    [masks.full(4099, 4093), masks.causal(4099, 4093), masks.sliding_window(4099, 600, 70, kv_len=4093)],
    ids=["full", "causal", "window"],
)
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_deterministic(mask: AttnMask, dim: int, v_dim: int) -> None:
    """Bit for bit, ten times over."""
    shape = LONG._replace(dim=dim, v_dim=v_dim)
    check_deterministic(make_operands(shape, np.asarray(mask.bands)), make_cotangents(shape))


def test_deterministic_under_many_bands(rng: np.random.Generator) -> None:
    check_deterministic(random_operands(rng, LONG, count=60), make_cotangents(LONG))


def check_deterministic(operands: Operands, cotangents: Cotangents) -> None:
    logits = default_logits(operands)
    _, first, _ = gradients(operands, logits, cotangents, deterministic=True)
    check(operands, cotangents, first)
    for _ in range(9):
        assert_same(gradients(operands, logits, cotangents, deterministic=True)[1], first)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_one_sm(rng: np.random.Generator, dim: int, v_dim: int, deterministic: bool) -> None:
    """One CTA takes every tile, with both head sets of each key head (D 192 has one)."""
    check_sms(rng, Shape(1500, 1700, 8, 2, dim, v_dim), 1, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [3, 6])
def test_one_sm_with_odd_head_sets(rng: np.random.Generator, heads: int, deterministic: bool) -> None:
    """Three head sets of a key head, of one query head or of two."""
    check_sms(rng, Shape(1500, 1700, heads, 1), 1, deterministic)


def test_one_sm_whose_section_is_less_than_a_head_set(rng: np.random.Generator) -> None:
    check_sms(rng, Shape(17_000, 300, 8, 1), 1, deterministic=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_sections_of_head_sets(rng: np.random.Generator, dim: int, v_dim: int, deterministic: bool) -> None:
    """Two to eight sections: the last has the longest tiles first, or all others have mirrored tiles."""
    shape = Shape(2100, 1900, 64, 16, dim, v_dim)
    operands, cotangents = random_operands(rng, shape, count=60), make_cotangents(shape)
    if deterministic:
        check_deterministic(operands, cotangents)
    else:
        check(operands, cotangents, gradients(operands, default_logits(operands), cotangents)[1])


@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_last_round_is_split(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """13 CTAs have whole work items and, of those left over, parts (D 192 has no parts)."""
    check_sms(rng, Shape(1500, 1700, 8, 2, dim, v_dim), 13, deterministic=False)


def check_sms(rng: np.random.Generator, shape: Shape, sms: int, deterministic: bool) -> None:
    operands, cotangents = random_operands(rng, shape, count=60), make_cotangents(shape)
    margin = jax.devices()[0].core_count - sms
    got = backward(arguments_of(operands, cotangents), sm_margin=margin, deterministic=deterministic)
    check(operands, cotangents, Gradients(*got))


@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (64, 64), (256, 256), (192, 128), (40, 72)])
def test_stages(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """Keys in three stages: fp32 parts, each from the log-sum-exp of all keys, add up to the whole."""
    shape = SHAPE._replace(dim=dim, v_dim=v_dim)
    operands, cotangents = random_operands(rng, shape, count=40), make_cotangents(shape)
    rows = arguments_of(operands, cotangents)[4:]
    parts = [backward([*stage[:4], *rows], grad_dtype=jnp.float32) for stage in split_keys(operands)]
    check(operands, cotangents, Gradients(*(functools.reduce(jnp.add, x) for x in zip(*parts, strict=True))))
