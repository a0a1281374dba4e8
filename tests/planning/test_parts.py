"""The pieces that plans are made of."""

import itertools

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import geometry
from jaxmagi.planning._capacity import bucket
from jaxmagi.planning._compiled import merge
from jaxmagi.planning._layout import default_chunk_size
from jaxmagi.planning._ranges import union

from ..cases import random_bands


@pytest.mark.parametrize("seed", range(20))
def test_union(seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 60, seed % 7)
    end = begin + rng.integers(0, 9, seed % 7)
    first, last = union(begin, end)
    assert as_set(first, last) == as_set(begin, end)
    assert (first[1:] > last[:-1]).all()


def as_set(begin: np.ndarray, end: np.ndarray) -> set[int]:
    return {token for b, e in zip(begin, end, strict=True) for token in range(b, e)}


@pytest.mark.parametrize("seed", range(20))
def test_merge_keeps_the_cells(seed: int) -> None:
    bands = random_bands(np.random.default_rng(seed), 50, 60, 30)
    merged = merge(bands)
    np.testing.assert_array_equal(geometry.to_dense(merged, 50, 60), geometry.to_dense(bands, 50, 60))
    assert len(merged) <= len(bands)


@pytest.mark.parametrize(
    "mask",
    [masks.full(64), masks.causal(64), masks.sliding_window(64, 9, 3)],
    ids=["full", "causal", "window"],
)
def test_merge_restores_a_band_from_its_crops(mask: masks.AttnMask) -> None:
    edges = np.array([0, 5, 6, 20, 41, 64])
    bands = [geometry.crop(np.asarray(mask.bands), q0, q1, 0, 64) for q0, q1 in itertools.pairwise(edges)]
    assert len(merge(np.concatenate(bands))) == 1


def test_merge_keeps_cells_covered_twice() -> None:
    bands = np.array([[0, 4, 0, 4, -9, 9], [0, 4, 2, 6, -9, 9]])
    np.testing.assert_array_equal(geometry.to_dense(merge(bands), 4, 6), geometry.to_dense(bands, 4, 6))


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 8, 9, 16, 17, 33, 1000)] == [8, 8, 9, 16, 18, 36, 1024]
    sizes = np.arange(1, 5000)
    rounded = np.array([bucket(int(n)) for n in sizes])
    assert (rounded >= sizes).all()
    assert (rounded[sizes > 8] <= 1.125 * sizes[sizes > 8]).all()
    assert len(set(rounded[sizes >= 2048])) <= 12


@pytest.mark.parametrize(
    ("length", "cp_size", "chunk"),
    [
        (131072, 8, 1024),
        (1 << 20, 64, 1024),
        (4096, 8, 128),
        (1024, 4, 128),
        (1 << 20, 256, 256),
        (1 << 18, 2048, 64),
        (1 << 24, 1024, 1024),
        (1 << 26, 8192, 2048),
        (100, 4, 13),
        (1, 8, 1),
        (0, 2, 1),
    ],
)
def test_default_chunk_size(length: int, cp_size: int, chunk: int) -> None:
    assert default_chunk_size(length, cp_size) == chunk


def test_default_chunk_size_pads_little() -> None:
    for length in range(2048 * 8, 400_000, 3777):
        chunk = default_chunk_size(length, 8)
        padded = -(-(-(-length // chunk)) // 8) * 8 * chunk  # noqa: B002
        assert padded <= 1.07 * length
