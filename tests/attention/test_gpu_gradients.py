"""The backward kernels where they differ from the forward kernel: few queries, long sequences, NaN."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.masks import UNBOUNDED
from tests.cases import tile_edge_bands

from .gpu_harness import (
    KERNEL_DIMS,
    Shape,
    assert_same,
    default_logits,
    make_operands,
    pad_bands,
    random_operands,
)
from .gradient_harness import gradients, make_cotangents, poison_both, run_and_check_both
from .gradient_reference import Cotangents, Gradients
from .helpers import Operands
from .test_gpu_operands import KV_LEN, Q_LEN

pytestmark = pytest.mark.gpu

MULTIPROCESSORS = 132  # of the GPUs that the kernels are for


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [5, 64, 79, 80, 81, 160])
def test_few_queries(rng: np.random.Generator, q_len: int, dim: int, deterministic: bool) -> None:
    """Less than a block of queries, whole blocks, and one more; the second example follows the last query."""
    shape = Shape(q_len, KV_LEN, 4, 2, dim, dim, batch=2)
    run_and_check_both(random_operands(rng, shape, count=8), shape, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_in_turn_at_long_sequences(rng: np.random.Generator, dim: int, deterministic: bool) -> None:
    """Queries of several chunks, at each of which the heads of a group take turns, or split work items."""
    shape = Shape(9000, 300, 8, 2, dim, dim)
    run_and_check_both(random_operands(rng, shape, count=8), shape, deterministic=deterministic)


@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_few_work_items(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """Fewer items than multiprocessors: each but those of D 192 is split, in the middle of bands."""
    shape = Shape(2000, 1900, 8, 1, dim, v_dim)
    for count in (1, 8, 40):
        operands, cotangents = poison_both(random_operands(rng, shape, count=count), shape, jnp.nan)
        run_and_check_both(operands, shape, cotangents=cotangents)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_short_documents(rng: np.random.Generator, dim: int, deterministic: bool) -> None:
    """Work items have all heads of a group, for tiles have few blocks of queries; some tiles have none."""
    shape = Shape(8192, 8192, 8, 2, dim, dim, batch=9)
    edges = np.cumsum(rng.integers(100, 400, 30))
    documents = [(begin, end, begin, end, -UNBOUNDED, 0) for begin, end in itertools.pairwise(edges)]
    operands, cotangents = poison_both(make_operands(shape, np.array(documents, np.int32)), shape, jnp.nan)
    run_and_check_both(operands, shape, cotangents=cotangents, deterministic=deterministic)


LONG_DOCUMENTS = (300, 1500, 40, 2000, 1027, 1026, 1024, 1023, 1300, 260)
"""Tiles of keys begin with those of at least 1024 positions that anybody sees."""


def long_documents(lengths: tuple[int, ...], gap: int) -> np.ndarray:
    """Every other document is causal; nobody sees the ``gap`` positions behind each."""
    edges = np.cumsum((0, *lengths))
    return np.array(
        [
            (begin, end - gap, begin, end - gap, -UNBOUNDED, UNBOUNDED * (i % 2))
            for i, (begin, end) in enumerate(itertools.pairwise(edges))
        ],
        np.int32,
    )


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_long_documents(rng: np.random.Generator, dim: int, v_dim: int, heads: int) -> None:
    """Tiles begin where documents do, with sums of gradients of keys and without, one mask and two masks."""
    length = sum(LONG_DOCUMENTS)
    shape = Shape(length, length, heads, 2, dim, v_dim, batch=2)
    shared = long_documents(LONG_DOCUMENTS, 3)
    operands, cotangents = poison_both(make_operands(shape, shared), shape, jnp.nan)
    run_and_check_both(operands, shape, cotangents=cotangents)
    own = np.stack([shared[::-1], long_documents(LONG_DOCUMENTS[::-1], 0)])
    run_and_check_both(make_operands(shape, own), shape)


@pytest.mark.parametrize("dim", [64, 128])
def test_long_documents_of_whole_groups(rng: np.random.Generator, dim: int) -> None:
    """Few multiprocessors have many work items: these have all heads of a group, which take turns."""
    length = sum(LONG_DOCUMENTS)
    shape = Shape(length, length, 16, 4, dim, dim, batch=2)
    bands = long_documents(LONG_DOCUMENTS, 0)
    bands[:, 5] = UNBOUNDED
    run_and_check_both(make_operands(shape, bands), shape, sm_margin=MULTIPROCESSORS - 12)


@pytest.mark.parametrize("long", [0, 8])
def test_one_long_example_among_short_documents(rng: np.random.Generator, long: int) -> None:
    """The masks of a batch decide together how many heads a work item has."""
    shape = Shape(8192, 8192, 8, 2, batch=9)
    edges = np.cumsum(rng.integers(100, 400, 30))
    documents = np.array([(q, k, q, k, -UNBOUNDED, 0) for q, k in itertools.pairwise(edges)], np.int32)
    bands = np.stack([documents] * 9)
    bands[long] = pad_bands(np.array([(0, 8192, 0, 8192, -UNBOUNDED, 0)], np.int32), len(documents))
    run_and_check_both(make_operands(shape, bands), shape)


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_masks_than_a_grid_is_high(rng: np.random.Generator, deterministic: bool) -> None:
    """A grid is at most 65535 high. All pairs of examples are the same."""
    shape, copies = Shape(5, 7, 1, 1, 64, 64, batch=2), 33_000
    bands = np.stack([pad_bands(tile_edge_bands(rng, 5, 7, 2), 2) for _ in range(2)])
    operands, cotangents = make_operands(shape, bands), make_cotangents(shape)
    _, want = run_and_check_both(operands, shape, deterministic=deterministic)

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.tile(x, (copies, *[1] * (x.ndim - 1)))

    many = Operands(*map(repeated, operands))._replace(sinks=operands.sinks)
    _, got, _ = gradients(many, default_logits(many), Cotangents(*map(repeated, cotangents)), deterministic)
    assert_same(got, Gradients(*map(repeated, want)))


@pytest.mark.parametrize(("dim", "v_dim"), KERNEL_DIMS)
def test_nan_that_nobody_sees(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """NaN is in fully masked keys, values and queries, and in the cotangents of the latter."""
    shape = Shape(Q_LEN, KV_LEN, 8, 2, dim, v_dim, batch=2)
    for count in (1, 2, 5, 9):
        operands = random_operands(rng, shape, count=count)
        for poison in (jnp.nan, jnp.inf):
            poisoned, cotangents = poison_both(operands, shape, poison)
            run_and_check_both(poisoned, shape, cotangents=cotangents)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_bands_begin_anywhere(dim: int, deterministic: bool) -> None:
    """Bands begin at every row of a block of 80 queries, with masked rows of NaN between them."""
    kv_len = 150
    bands = np.array([(q, q + 79, 0, kv_len, -UNBOUNDED, UNBOUNDED) for q in range(0, 80 * 83, 83)], np.int32)
    shape = Shape(80 * 83, kv_len, 8, 2, dim, dim)
    operands, cotangents = poison_both(make_operands(shape, bands), shape, jnp.nan)
    run_and_check_both(operands, shape, cotangents=cotangents, deterministic=deterministic)
