"""group_reduce against a row-by-row simulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import GroupCastSpec

from .harness import cast_function, normal, reduce_function
from .routes import INPUT_ROWS, Transfer, random_transfer


def outputs(rng: np.random.Generator, transfer: Transfer, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return normal(rng, transfer.cp_size, transfer.spec.output_rows, *shape, dtype=dtype)


@pytest.mark.parametrize(("cp_size", "spec_sharded"), [(1, False), (3, True), (8, False)])
def test_sum_adds_in_rank_order(cp_size: int, spec_sharded: bool, rng: np.random.Generator) -> None:
    """Bit for bit: floating-point sums depend on their order."""
    reduce = reduce_function(cp_size, spec_sharded=spec_sharded)
    for _ in range(10):
        transfer = random_transfer(rng, cp_size)
        y = outputs(rng, transfer, 3)
        np.testing.assert_array_equal(reduce(y, transfer.spec, None, None), transfer.reduce_sum(y))


def test_sum_onto_what_is_there(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    y, start = outputs(rng, transfer, 3), normal(rng, 3, INPUT_ROWS, 3)
    out = reduce_function(3)(y, transfer.spec, None, start)
    np.testing.assert_array_equal(out, transfer.reduce_sum(y, start))


def test_half_precision_is_added_up_in_float32(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 8)
    y = outputs(rng, transfer, 3, dtype=jnp.bfloat16)
    exact = transfer.reduce_sum(y.astype(np.float32))
    narrow = reduce_function(8)(y, transfer.spec, None, None)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, exact.astype(jnp.bfloat16))
    start = normal(rng, 8, INPUT_ROWS, 3)
    wide = reduce_function(8)(y, transfer.spec, None, start)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, start + exact)


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_sum_in_its_own_dtype(dtype: Any, x64: None, rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    y = (9 * outputs(rng, transfer, 3, dtype=np.float64)).astype(dtype)
    out = reduce_function(3)(y, transfer.spec, None, None)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, transfer.reduce_sum(y))


def test_average(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    y, start = outputs(rng, transfer, 3), normal(rng, 3, INPUT_ROWS, 3)
    counts = transfer.counts()[..., None]
    assert (counts == 0).any() and (counts > 1).any()
    out = reduce_function(3, "avg")(y, transfer.spec, None, None)
    np.testing.assert_allclose(out, transfer.reduce_sum(y) / np.maximum(counts, 1), rtol=1e-6)
    out = reduce_function(3, "avg")(y, transfer.spec, None, start)
    np.testing.assert_allclose(out, transfer.reduce_sum(y, start) / (counts + 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_start", [True, False])
def test_merge_by_lse(with_start: bool, rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    y, lse = outputs(rng, transfer, 2, 4), 5 * outputs(rng, transfer, 2)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    y[np.isneginf(lse)] = np.nan
    start = None
    if with_start:
        start = (normal(rng, 3, INPUT_ROWS, 2, 4), normal(rng, 3, INPUT_ROWS, 2))
        start[1][rng.random(start[1].shape) < 0.3] = -np.inf
    out, out_lse = reduce_function(3, "lse")(y, transfer.spec, lse, start)
    expected, expected_lse = transfer.merge(y, lse, start)
    assert np.isneginf(expected_lse).any()
    np.testing.assert_array_equal(np.isneginf(out_lse), np.isneginf(expected_lse))
    assert (np.asarray(out)[np.isneginf(expected_lse)] == 0).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out_lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_merge_of_half_precision_is_computed_in_float32(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    y, lse = outputs(rng, transfer, 2, 4, dtype=jnp.bfloat16), outputs(rng, transfer, 2)
    out, out_lse = reduce_function(3, "lse")(y, transfer.spec, lse, None)
    assert (out.dtype, out_lse.dtype) == (jnp.bfloat16, np.float32)
    expected, _ = transfer.merge(y.astype(np.float32), lse)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2**-8, atol=1e-5)


def test_merge_of_a_row_sent_twice_to_one_rank(rng: np.random.Generator) -> None:
    spec = GroupCastSpec.from_splits([[1, 1], []], [[[1, 1], [0]], []], [[1], [2]], [[0], [0]])
    y, lse = normal(rng, 2, 2, 2, 4), normal(rng, 2, 2, 2)
    out, out_lse = reduce_function(2, "lse")(y, spec, lse, None)
    weights = np.exp(lse[1])
    expected = (weights[..., None] * y[1]).sum(0) / weights.sum(0)[..., None]
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(out_lse[0, 0], np.log(weights.sum(0)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[0, 1], y[0, 0], rtol=1e-6)


@pytest.mark.parametrize("with_start", [True, False])
@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
@pytest.mark.parametrize("empty", ["input_rows", "output_rows", "copies", "pair_rows"])
def test_nothing_to_reduce(op: Any, empty: str, with_start: bool) -> None:
    """A transfer without rows, of which some array or all are empty, leaves what is there already."""
    sizes = {"input_rows": 3, "output_rows": 4, "copies": 8, "pair_rows": 8} | {empty: 0}
    copies = sizes.pop("copies")
    spec = GroupCastSpec(np.zeros((2, copies, 5), np.int32), np.zeros((2, copies, 4), np.int32), **sizes)
    x, lse = np.ones((2, spec.output_rows, 2, 4), np.float32), np.zeros((2, spec.output_rows, 2), np.float32)
    shape = (2, spec.input_rows, 2, 4)
    start = np.full(shape, 2.0, np.float32), np.full(shape[:-1], 3.0, np.float32)
    nothing = np.zeros_like(start[0]), np.full_like(start[1], -np.inf)
    expected = start if with_start else nothing
    if op != "lse":
        start, expected = start[0], expected[0]
    out = reduce_function(2, op)(x, spec, lse if op == "lse" else None, start if with_start else None)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


def test_row_sent_twice_to_one_rank(rng: np.random.Generator) -> None:
    spec = GroupCastSpec.from_splits([[1, 1], []], [[[1, 1], [0]], []], [[1], [2]], [[0], [0]])
    y = normal(rng, 2, 2, 3)
    out = reduce_function(2)(y, spec, None, None)
    np.testing.assert_array_equal(out[0], np.stack([y[1, 0] + y[1, 1], y[0, 0]]))
    assert cast_function(2)(out, spec).shape == y.shape
