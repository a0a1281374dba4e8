"""The forward kernel where many tiles pass through one CTA: sections of heads, empty tiles, one SM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import Partial
from jaxmagi.masks import UNBOUNDED

from .device_reference import check, judge
from .gpu_harness import (
    KERNEL_DIMS,
    Shape,
    assert_same,
    default_logits,
    make_operands,
    pad_bands,
    random_operands,
    run_and_check,
)
from .helpers import Operands, forward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 5), (3, 3)])
def test_sections_of_heads(rng: np.random.Generator, batch: int, kv_heads: int) -> None:
    """8192 keys of two heads fill a section: the last section is a ragged one."""
    shape = Shape(400, 8192, 2 * kv_heads, kv_heads, batch=batch)
    run_and_check(random_operands(rng, shape))


def check_on_one_sm(operands: Operands) -> None:
    """Right, and equal to what all of them compute."""
    num_sms = jax.devices()[0].core_count
    out, lse = forward(operands, sm_margin=num_sms - 1)
    check(judge(operands, default_logits(operands), out, lse), operands.query.dtype)
    assert_same((out, lse), forward(operands))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (16, 1)])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_one_sm(rng: np.random.Generator, dim: int, v_dim: int, heads: int, kv_heads: int) -> None:
    """One CTA takes every tile, those with runs to be cleaned, and items behind the last position."""
    shape = Shape(1500, 1700, heads, kv_heads, dim, v_dim)
    check_on_one_sm(random_operands(rng, shape, count=60))


EDGES = {
    "causal": lambda: masks.causal(2100),
    "window": lambda: masks.sliding_window(2100, 37),
    "documents": lambda: masks.documents([70] * 30),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_that_not_all_see(name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Some warpgroups see nothing of the first blocks of a tile, and pass over them."""
    mask = EDGES[name]()
    shape = Shape(mask.q_len, mask.kv_len, heads, kv_heads, dim, dim)
    check_on_one_sm(make_operands(shape, np.asarray(mask.bands)))


def few_rows_see(rng: np.random.Generator, q_len: int, kv_len: int) -> np.ndarray:
    """Single rows, far apart, that see some keys; all others are fully masked."""
    rows = np.sort(rng.choice(q_len, 40, replace=False))
    first = rng.integers(0, kv_len - 300, len(rows))
    last = first + rng.integers(1, 300, len(rows))
    limits = np.full((len(rows), 2), [-UNBOUNDED, UNBOUNDED])
    return np.column_stack([rows, rows + 1, first, last, limits]).astype(np.int32)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_runs_of_empty_tiles(rng: np.random.Generator, dim: int) -> None:
    """Only stores hold the warps of a CTA together there; long outputs and a previous result slow them."""
    shape = Shape(40_000, 2_000, 16, 4, dim, dim)
    operands = make_operands(shape, pad_bands(few_rows_see(rng, shape.q_len, shape.kv_len), 64))
    rows_shape = (1, shape.q_len, shape.heads)
    previous = Partial(
        jax.random.normal(jax.random.key(0), (*rows_shape, dim), jnp.float32),
        jax.random.normal(jax.random.key(1), rows_shape, jnp.float32),
    )
    expected_out, expected_lse = forward(operands, out_dtype=jnp.float32)
    seen = jnp.isfinite(expected_lse)
    assert 0 < int(seen.sum()) <= 40 * shape.heads
    assert not bool(jnp.any(jnp.where(seen[..., None], 0, expected_out)))
    for _ in range(10):
        assert_same((expected_out, expected_lse), forward(operands, out_dtype=jnp.float32))
        out, lse = forward(operands, out_dtype=jnp.float32, previous=previous)
        assert bool(jnp.all(jnp.where(seen[..., None], True, out == previous.out)))
        assert bool(jnp.all(jnp.where(seen, lse >= previous.lse, lse == previous.lse)))
