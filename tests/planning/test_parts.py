"""The pieces that plans are made of."""

import itertools

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import geometry
from jaxmagi.planning._balance import balanced_owners
from jaxmagi.planning._capacity import bucket
from jaxmagi.planning._layout import default_chunk_size
from jaxmagi.planning._merge import merge
from jaxmagi.planning._runs import Runs, meetings, runs_of_tokens, subtract, union

from ..cases import document_lengths, random_bands


def as_set(begin: np.ndarray, end: np.ndarray) -> set[int]:
    return {token for b, e in zip(begin, end, strict=True) for token in range(b, e)}


def random_ranges(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    begin = rng.integers(0, 60, count)
    return begin, begin + rng.integers(0, 9, count)


@pytest.mark.parametrize("seed", range(20))
def test_ranges(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = random_ranges(rng, seed % 7), random_ranges(rng, seed % 5)
    merged, others = union(*first), union(*second)
    assert as_set(*merged) == as_set(*first)
    assert (merged[0][1:] > merged[1][:-1]).all()
    runs = Runs(*others, place=others[0])
    assert as_set(*subtract(*merged, runs)) == as_set(*first) - as_set(*second)
    pairs = {
        (i, j)
        for i in range(len(first[0]))
        for j in range(len(others[0]))
        if max(first[0][i], others[0][j]) < min(first[1][i], others[1][j])
    }
    assert set(zip(*meetings(*first, *others), strict=True)) == pairs


def test_runs_of_tokens() -> None:
    runs = runs_of_tokens(np.array([4, 5, -1, 6, 2, 1, -1]))
    np.testing.assert_array_equal(np.column_stack(runs), [[1, 2, 5], [2, 3, 4], [4, 6, 0], [6, 7, 3]])


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
        (1 << 20, 256, 512),
        (1 << 18, 2048, 128),
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


@pytest.mark.parametrize("chunk", [128, 512, 1024, 3000])
def test_ranks_get_equal_counts_and_areas(chunk: int) -> None:
    length, cp_size = 1 << 16, 4
    bands = np.asarray(masks.documents(document_lengths(length)).bands)
    owner = balanced_owners(bands, length, cp_size, chunk)
    counts = np.bincount(owner, minlength=cp_size)
    assert (counts == counts[0]).all()
    assert counts.sum() * chunk >= length
    areas = [
        geometry.area(geometry.crop(bands, c * chunk, (c + 1) * chunk, 0, length)).sum()
        for c in range(len(owner))
    ]
    load = np.bincount(owner, weights=areas)
    assert load.max() <= 1.05 * load.mean()
