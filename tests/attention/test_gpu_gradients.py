"""The backward kernels against fp64: masks, head dimensions, dtypes, groups, options, NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from tests.cases import MaskCase, mask_cases, tile_edge_bands

from .device_reference import Logits
from .gpu_harness import (
    CAPACITY,
    KERNEL_DIMS,
    Shape,
    assert_same,
    both_dtypes,
    default_logits,
    fuzz,
    make_operands,
    pad_bands,
    poison_unseen,
    random_operands,
)
from .gradient_harness import gradients, make_cotangents, run_and_check_gradients
from .gradient_reference import Cotangents, Gradients
from .helpers import Operands
from .test_gpu_masks import LENGTHS, SHAPES, padded_bands
from .test_gpu_operands import DIMS, GROUPS, KV_LEN, Q_LEN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_mask(case: MaskCase) -> None:
    length = next(length for length in LENGTHS if max(case.q_len, case.kv_len) <= length)
    shape = Shape(length, length, 2, 1)
    run_and_check_gradients(make_operands(shape, padded_bands(case, length)), shape)


@pytest.mark.timeout(900)  # the longest shape takes a minute alone, and other tests may share the GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_masks(shape: Shape, rng: np.random.Generator) -> None:
    for index, operands in enumerate(fuzz(rng, shape)):
        try:
            run_and_check_gradients(operands, shape, deterministic=index % 3 == 0)
        except AssertionError as error:
            error.add_note(f"mask {index} of {shape}")
            raise


@both_dtypes
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_head_dimensions(rng: np.random.Generator, dim: int, v_dim: int, dtype: Any) -> None:
    shape = Shape(Q_LEN, KV_LEN, 4, 2, dim, v_dim, dtype)
    run_and_check_gradients(random_operands(rng, shape, with_sinks=True), shape)
    causal = pad_bands(np.asarray(masks.causal(Q_LEN, KV_LEN).bands), CAPACITY)
    run_and_check_gradients(make_operands(shape, causal), shape)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_groups(rng: np.random.Generator, heads: int, kv_heads: int, dim: int) -> None:
    shape = Shape(Q_LEN, KV_LEN, heads, kv_heads, dim, dim)
    run_and_check_gradients(random_operands(rng, shape, with_sinks=True), shape)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [5, 64, 79, 80, 81, 160])
def test_few_queries(rng: np.random.Generator, q_len: int, dim: int, deterministic: bool) -> None:
    """Less than a block of queries, whole blocks, and one more; the second example follows the last query."""
    shape = Shape(q_len, KV_LEN, 4, 2, dim, dim, batch=2)
    run_and_check_gradients(random_operands(rng, shape, count=8), shape, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_in_turn_at_long_sequences(rng: np.random.Generator, dim: int, deterministic: bool) -> None:
    """Queries of several chunks, at each of which the heads of a group take turns."""
    shape = Shape(9000, 300, 8, 2, dim, dim)
    run_and_check_gradients(random_operands(rng, shape, count=8), shape, deterministic=deterministic)


@pytest.mark.parametrize("per_example", [False, True])
def test_batch(rng: np.random.Generator, per_example: bool) -> None:
    shape = Shape(Q_LEN, KV_LEN, batch=3)
    each = [pad_bands(tile_edge_bands(rng, Q_LEN, KV_LEN, count), CAPACITY) for count in (40, 3, 0)]
    operands = make_operands(shape, np.stack(each) if per_example else each[0])
    for deterministic in (False, True):
        run_and_check_gradients(operands, shape, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_masks_than_a_grid_is_high(rng: np.random.Generator, deterministic: bool) -> None:
    """That is 65535; each pair of examples is the same."""
    shape, copies = Shape(5, 7, 1, 1, 64, 64, batch=2), 33_000
    bands = np.stack([pad_bands(tile_edge_bands(rng, 5, 7, 2), 2) for _ in range(2)])
    operands, cotangents = make_operands(shape, bands), make_cotangents(shape)
    want = run_and_check_gradients(operands, shape, deterministic=deterministic)

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.tile(x, (copies, *[1] * (x.ndim - 1)))

    many = Operands(*map(repeated, operands))._replace(sinks=operands.sinks)
    got, _ = gradients(many, default_logits(many), Cotangents(*map(repeated, cotangents)), deterministic)
    assert_same(got, Gradients(*map(repeated, want)))


@pytest.mark.parametrize("scale", [0.0, -0.2, 1.5])
def test_scale(rng: np.random.Generator, scale: float) -> None:
    shape = Shape(Q_LEN, KV_LEN)
    run_and_check_gradients(random_operands(rng, shape, with_sinks=True), shape, Logits(scale))


@both_dtypes
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_soft_cap(rng: np.random.Generator, dim: int, v_dim: int, dtype: Any) -> None:
    shape = Shape(Q_LEN, KV_LEN, 4, 2, dim, v_dim, dtype)
    run_and_check_gradients(random_operands(rng, shape, with_sinks=True), shape, Logits(0.1, 2.0))


def test_saturated_soft_cap(rng: np.random.Generator) -> None:
    shape = Shape(Q_LEN, KV_LEN)
    run_and_check_gradients(random_operands(rng, shape), shape, Logits(20.0, 5.0))


def test_cells_covered_twice(rng: np.random.Generator) -> None:
    """A cell counts once per band."""
    shape = Shape(Q_LEN, KV_LEN)
    bands = pad_bands(np.tile(tile_edge_bands(rng, Q_LEN, KV_LEN, 20), (3, 1)), CAPACITY)
    for deterministic in (False, True):
        run_and_check_gradients(make_operands(shape, bands), shape, deterministic=deterministic)


@pytest.mark.parametrize("capacity", [0, 1, 300])
def test_nothing_visible(capacity: int) -> None:
    shape = Shape(Q_LEN, KV_LEN)
    operands = make_operands(shape, np.zeros((capacity, 6), np.int32), np.ones(4))
    for x in run_and_check_gradients(operands, shape):
        assert not bool(jnp.any(x))


@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_nan_that_nobody_sees(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """In keys and values that no query sees, in queries that see nothing, and in what comes with those."""
    shape = Shape(Q_LEN, KV_LEN, dim=dim, v_dim=v_dim, batch=2)
    cotangents = make_cotangents(shape)
    for count in (1, 2, 5, 9):
        operands = random_operands(rng, shape, count=count)
        for poison in (jnp.nan, jnp.inf):
            poisoned, blind_queries = poison_unseen(operands, poison)
            out = jnp.where(blind_queries, poison, cotangents.out)
            run_and_check_gradients(poisoned, shape, cotangents=cotangents._replace(out=out))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_bands_begin_anywhere(dim: int, deterministic: bool) -> None:
    """At every row of a block of 80 queries; between two bands are rows with NaN, which see nothing."""
    no_limit, kv_len = 2**30, 150
    bands = np.array([(q, q + 79, 0, kv_len, -no_limit, no_limit) for q in range(0, 80 * 83, 83)], np.int32)
    shape = Shape(80 * 83, kv_len, dim=dim, v_dim=dim)
    operands, blind_queries = poison_unseen(make_operands(shape, bands), jnp.nan)
    cotangents = make_cotangents(shape)
    cotangents = cotangents._replace(out=jnp.where(blind_queries, jnp.nan, cotangents.out))
    run_and_check_gradients(operands, shape, cotangents=cotangents, deterministic=deterministic)


def test_logits_of_minus_infinity() -> None:
    """Rows whose every visible logit is -inf have no gradient, and give none."""
    shape = Shape(Q_LEN, KV_LEN)
    operands = make_operands(shape, np.asarray(masks.full(Q_LEN, KV_LEN).bands))
    operands = operands._replace(query=jnp.abs(operands.query) + 1, key=jnp.full_like(operands.key, -jnp.inf))
    got, _ = gradients(operands, default_logits(operands), make_cotangents(shape))
    for x in got:
        assert not bool(jnp.any(x))
