"""The forward kernel merging its result into a previous one: attention to keys in several stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import Partial
from jaxmagi.masks import UNBOUNDED

from .device_reference import check, judge
from .gpu_harness import (
    Shape,
    assert_same,
    both_dtypes,
    default_logits,
    make_operands,
    random_operands,
)
from .helpers import Operands, forward, max_error

pytestmark = pytest.mark.gpu

SHAPE, CUTS = Shape(1111, 1234, 8, 2), [400, 431]


def without_sinks(operands: Operands) -> Operands:
    return operands._replace(sinks=jnp.full_like(operands.sinks, -jnp.inf))


def split_keys(operands: Operands) -> list[Operands]:
    """The bands cut into those of keys [0, cut), [cut, next cut), and so on."""
    parts = []
    for first, end in zip([0, *CUTS], [*CUTS, UNBOUNDED], strict=True):
        bands = np.array(operands.bands)
        bands[..., 2:4] = np.clip(bands[..., 2:4], first, end)
        parts.append(operands._replace(bands=jnp.asarray(bands)))
    return parts


def run_stages(stages: list[Operands], donate: bool = False) -> Partial[jax.Array]:
    """Each merged into the result so far."""

    def accumulate(previous: Partial[jax.Array], operands: Operands) -> Partial[jax.Array]:
        return Partial(*forward(operands, previous=previous, out_dtype=jnp.float32))

    accumulate = jax.jit(accumulate, donate_argnums=0 if donate else ())
    result = Partial(*forward(stages[0], out_dtype=jnp.float32))
    for stage in stages[1:]:
        result = accumulate(result, stage)
    return result


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (64, 64), (256, 256), (192, 128), (40, 72)])
def test_stages_accumulate(rng: np.random.Generator, dim: int, v_dim: int, donate: bool) -> None:
    """The keys in three stages are as good as all keys at once."""
    operands = random_operands(rng, SHAPE._replace(dim=dim, v_dim=v_dim), count=40)
    result = run_stages(split_keys(operands), donate)
    check(judge(operands, default_logits(operands), result.out, result.lse), operands.query.dtype)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 2), (12, 1), (64, 1)])
def test_groups_accumulate(rng: np.random.Generator, heads: int, kv_heads: int, dim: int) -> None:
    """A tile holds several heads, and results are in place."""
    operands = random_operands(rng, Shape(333, 1234, heads, kv_heads, dim, dim), count=40)
    result = run_stages(split_keys(operands), donate=True)
    check(judge(operands, default_logits(operands), result.out, result.lse), operands.query.dtype)


@pytest.mark.parametrize("with_sinks", [0, 1, 2])
def test_sinks_in_one_stage(rng: np.random.Generator, with_sinks: int) -> None:
    """They count once for every row that sees a key there: here all."""
    bands = np.asarray(masks.full(SHAPE.q_len, SHAPE.kv_len).bands)
    operands = make_operands(SHAPE, bands, 3 * rng.standard_normal(SHAPE.heads))
    stages = split_keys(operands)
    stages = [stage if i == with_sinks else without_sinks(stage) for i, stage in enumerate(stages)]
    result = run_stages(stages)
    check(judge(operands, default_logits(operands), result.out, result.lse), operands.query.dtype)


def test_a_stage_that_sees_nothing(rng: np.random.Generator) -> None:
    """The previous result stays as it is, sinks or not."""
    operands = random_operands(rng, SHAPE, count=40, with_sinks=True)
    previous = Partial(*forward(operands))
    nothing = operands._replace(bands=jnp.zeros_like(operands.bands))
    assert_same(forward(nothing, previous=previous), previous)


def ulps_apart(a: jax.Array, b: jax.Array) -> int:
    """The most numbers of a 16-bit dtype between two of theirs."""

    def ordinal(x: jax.Array) -> np.ndarray:
        bits = np.asarray(x.view(jnp.int16), np.int64)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return int(np.abs(ordinal(a) - ordinal(b)).max())


@both_dtypes
def test_accumulates_in_16_bits(dtype: jnp.dtype) -> None:
    """The result is that in float32, rounded once."""
    bands = np.asarray(masks.causal(SHAPE.q_len, SHAPE.kv_len).bands)
    first, second, _ = split_keys(make_operands(SHAPE._replace(dtype=dtype), bands))
    previous = Partial(*forward(first))
    out, lse = forward(second, previous=previous)
    wide = previous._replace(out=previous.out.astype(jnp.float32))
    want, want_lse = forward(second, previous=wide, out_dtype=jnp.float32)
    assert int(jnp.sum(jnp.isfinite(previous.lse) & (want_lse > previous.lse))) > 100  # rows that see both
    assert out.dtype == dtype and ulps_apart(out, want.astype(dtype)) <= 1
    assert max_error(lse, want_lse) <= 1e-6
