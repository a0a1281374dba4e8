"""The overlap check finds all overlaps and no others, reports a real cell, and is fast on hard inputs."""

import itertools
import time

import numpy as np
import pytest

from jaxmagi.masks import UNBOUNDED, AttnMask
from jaxmagi.masks._overlap import find_overlap

from ..cases import random_bands
from .dense import any_bands, coverage

_MANY = 10**5


@pytest.fixture(params=range(4))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def _check(bands: np.ndarray, q_len: int, kv_len: int) -> bool:
    """Compares with the dense count; returns whether there is an overlap."""
    cells = coverage(bands, q_len, kv_len)
    overlap = find_overlap(bands)
    assert (overlap is not None) == bool((cells.sum(0) > 1).any())
    if overlap is not None:
        assert overlap.first < overlap.second
        assert cells[overlap.first, overlap.q, overlap.k] and cells[overlap.second, overlap.q, overlap.k]
    return overlap is not None


def test_few_bands(rng: np.random.Generator) -> None:
    found = 0
    for _ in range(500):
        q_len, kv_len = rng.integers(1, 20, 2).tolist()
        found += _check(any_bands(rng, q_len, kv_len, int(rng.integers(1, 7))), q_len, kv_len)
    assert 100 < found < 400


def test_disjoint_sets_and_one_cell_more(rng: np.random.Generator) -> None:
    found = 0
    for _ in range(150):
        q_len, kv_len = rng.integers(8, 48, 2).tolist()
        bands = random_bands(rng, q_len, kv_len, int(rng.integers(8, 30)))
        assert not _check(bands, q_len, kv_len)
        q, k = rng.integers(0, q_len), rng.integers(0, kv_len)
        cell = np.array([[q, q + 1, k, k + 1, -UNBOUNDED, UNBOUNDED]])
        found += _check(rng.permutation(np.concatenate([bands, cell])), q_len, kv_len)
    assert 10 < found < 140


def _pieces(rng: np.random.Generator, bands: np.ndarray, cuts: int) -> np.ndarray:
    """Cuts each band at random rows, into many different row ranges with slanted neighbours."""
    pieces = []
    for band in bands:
        rows = np.unique(np.concatenate([band[:2], rng.integers(band[0], band[1] + 1, cuts)]))
        for q0, q1 in itertools.pairwise(rows):
            pieces.append([q0, q1, *band[2:]])
    return np.array(pieces)


def test_slanted_neighbours(rng: np.random.Generator) -> None:
    for _ in range(60):
        edges = np.unique(rng.integers(-40, 41, 8))
        strips = np.array([(0, 40, 0, 40, lo, hi - 1) for lo, hi in itertools.pairwise(edges)])
        bands = _pieces(rng, strips, 4)
        assert not _check(rng.permutation(bands), 40, 40)
        touched = bands.copy()
        touched[rng.integers(len(bands)), 5] += 1
        _check(touched, 40, 40)


def test_edges() -> None:
    assert find_overlap(np.zeros((0, 6), np.int32)) is None
    assert find_overlap(np.zeros((5, 6), np.int32)) is None
    band = [0, 2**30, 0, 2**30, -UNBOUNDED, UNBOUNDED]
    assert find_overlap(np.array([band])) is None
    assert find_overlap(np.array([band, band])) == (0, 1, 0, 0)


def _hard_sets() -> dict[str, np.ndarray]:
    i, rng = np.arange(_MANY), np.random.default_rng(0)
    rows = np.sort(rng.integers(0, 10**6, (_MANY, 2)), axis=1) + np.array([0, 1])
    begin, end = rows.T
    sets = {
        "documents": (i * 8, i * 8 + 8, i * 8, i * 8 + 8, -UNBOUNDED, 0),
        "single rows": (i, i + 1, 0, i + 1, -UNBOUNDED, UNBOUNDED),
        "shared rows": (0, 1000, i * 3, i * 3 + 2, -UNBOUNDED, UNBOUNDED),
        "diagonals": (0, _MANY, 0, _MANY, i - _MANY // 2, i - _MANY // 2),
        "nested rows": (i, 2 * _MANY - i, i * 2, i * 2 + 2, -UNBOUNDED, UNBOUNDED),
        "any rows": (begin, end, i * 3, i * 3 + 2, -UNBOUNDED, UNBOUNDED),
        "any rows, slanted": (begin, end, 0, 2**21, i * 2, i * 2 + 1),
    }
    return {name: np.stack(np.broadcast_arrays(*band), axis=-1) for name, band in sets.items()}


@pytest.mark.parametrize("name", _hard_sets())
def test_many_bands_are_fast(name: str) -> None:
    bands = np.random.default_rng(1).permutation(_hard_sets()[name])
    seconds: list[float] = []
    # The slowest set takes 0.93 s of the processor's time, which other work makes little longer.
    while not seconds or (min(seconds) >= 2.0 and len(seconds) < 3):
        start = time.process_time()
        mask = AttnMask.from_bands(bands, q_len=2**21, kv_len=2**21)
        seconds.append(time.process_time() - start)
        assert mask.num_bands > 0.99 * _MANY
    assert min(seconds) < 2.0, f"{seconds=}"
