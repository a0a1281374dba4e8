"""Geometry in closed form against the definition, cell by cell."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxmagi.masks import UNBOUNDED, geometry

from .dense import any_bands, coverage, hull

_SEEDS = range(4)
_MASKS_PER_SEED = 600


def _random_masks(seed: int) -> Iterator[tuple[np.random.Generator, np.ndarray, int, int]]:
    rng = np.random.default_rng(seed)
    for _ in range(_MASKS_PER_SEED):
        q_len, kv_len = rng.integers(1, 24, 2).tolist()
        yield rng, any_bands(rng, q_len, kv_len, int(rng.integers(1, 6))), q_len, kv_len


@pytest.mark.parametrize("seed", _SEEDS)
def test_area_dense_and_emptiness(seed: int) -> None:
    for _, bands, q_len, kv_len in _random_masks(seed):
        cells = coverage(bands, q_len, kv_len)
        areas = geometry.area(bands)
        assert areas.dtype == np.int64
        np.testing.assert_array_equal(areas, cells.sum((1, 2)))
        np.testing.assert_array_equal(geometry.is_empty(bands), ~cells.any((1, 2)))
        np.testing.assert_array_equal(geometry.to_dense(bands, q_len, kv_len), cells.sum(0))


@pytest.mark.parametrize("seed", _SEEDS)
def test_crop(seed: int) -> None:
    for rng, bands, q_len, kv_len in _random_masks(seed):
        q0, q1 = np.sort(rng.integers(0, q_len + 1, 2)).tolist()
        k0, k1 = np.sort(rng.integers(0, kv_len + 1, 2)).tolist()
        cropped = geometry.crop(bands, q0, q1, k0, k1)
        expected = np.zeros((len(bands), q_len, kv_len), bool)
        expected[:, q0:q1, k0:k1] = coverage(bands, q_len, kv_len)[:, q0:q1, k0:k1]
        assert cropped.dtype == np.int32
        np.testing.assert_array_equal(coverage(cropped, q_len, kv_len), expected)
        assert not cropped[(cropped[:, 0] == cropped[:, 1]) | (cropped[:, 2] == cropped[:, 3])].any()


@pytest.mark.parametrize("seed", _SEEDS)
def test_tighten_is_the_exact_hull(seed: int) -> None:
    for _, bands, q_len, kv_len in _random_masks(seed):
        tight = geometry.tighten(bands)
        cells = coverage(bands, q_len, kv_len)
        np.testing.assert_array_equal(coverage(tight, q_len, kv_len), cells)
        for band, row, cell in zip(bands, tight, cells, strict=True):
            assert tuple(row[:4]) == hull(cell.any(1)) + hull(cell.any(0))
            assert tuple(row[4:]) == (tuple(band[4:]) if cell.any() else (0, 0))


@pytest.mark.parametrize("seed", _SEEDS)
def test_key_range_is_the_exact_hull(seed: int) -> None:
    for rng, bands, q_len, kv_len in _random_masks(seed):
        q0, q1 = rng.integers(0, q_len + 1, 2).tolist()
        begin, end = geometry.key_range(bands, q0, q1)
        cells = coverage(bands, q_len, kv_len)[:, q0:q1]
        assert begin.dtype == end.dtype == np.int64
        assert list(zip(begin, end, strict=True)) == [hull(cell.any(0)) for cell in cells]


@pytest.mark.parametrize("seed", _SEEDS)
def test_intersect_and_shift(seed: int) -> None:
    for rng, bands, q_len, kv_len in _random_masks(seed):
        cells = coverage(bands, q_len, kv_len)
        both = geometry.intersect(bands, bands[::-1])
        np.testing.assert_array_equal(coverage(both, q_len, kv_len), cells & cells[::-1])
        dq, dk = rng.integers(0, 9, 2).tolist()
        shifted = geometry.shift(bands, dq, dk)
        expected = np.pad(cells, ((0, 0), (dq, 0), (dk, 0)))
        np.testing.assert_array_equal(coverage(shifted, q_len + dq, kv_len + dk), expected)
        np.testing.assert_array_equal(shifted[:, 4] == -UNBOUNDED, bands[:, 4] == -UNBOUNDED)


def test_unused_rows_stay_unused() -> None:
    unused = np.zeros((3, 6), np.int32)
    for result in (
        geometry.crop(unused, 0, 5, 0, 5),
        geometry.shift(unused, 3, 4),
        geometry.tighten(unused),
        geometry.intersect(unused, unused),
    ):
        np.testing.assert_array_equal(result, unused)
    assert not geometry.area(unused).any()


def test_arguments_broadcast(rng: np.random.Generator) -> None:
    bands = any_bands(rng, 40, 40, 5)
    starts = np.arange(0, 40, 8)
    pieces = geometry.crop(bands[:, None], starts, starts + 8, 0, UNBOUNDED)
    begin, end = geometry.key_range(bands[:, None], starts, starts + 8)
    assert pieces.shape == (5, 5, 6)
    np.testing.assert_array_equal(geometry.area(pieces).sum(1), geometry.area(bands))
    for i, start in enumerate(starts.tolist()):
        np.testing.assert_array_equal(pieces[:, i], geometry.crop(bands, start, start + 8, 0, UNBOUNDED))
        np.testing.assert_array_equal((begin[:, i], end[:, i]), geometry.key_range(bands, start, start + 8))


@pytest.mark.parametrize("n", [10**6, 2**20, 2**30])
def test_area_of_long_masks_is_exact(n: int) -> None:
    u = UNBOUNDED
    bands = np.array(
        [
            (0, n, 0, n, -u, u),
            (0, n, 0, n, -u, 0),
            (0, n, 0, n, 0, u),
            (0, n, 0, n, -4095, 0),
            (0, n, 0, n, n - 1, u),
            (0, n, 0, n, -u, 1 - n),
            (0, n, 0, n, u, u),
            (0, n, 0, n, -u, -u),
        ]
    )
    window = 4096 * n - 4096 * 4095 // 2
    assert geometry.area(bands).tolist() == [n * n, n * (n + 1) // 2, n * (n + 1) // 2, window, 1, 1, 0, 0]


def test_limits_out_of_reach_survive_a_shift_back() -> None:
    band = np.array([[0, 4, 0, 4, 1 - UNBOUNDED, UNBOUNDED]])
    moved = geometry.shift(geometry.shift(band, 100, 0), 0, 100)
    np.testing.assert_array_equal(coverage(moved, 104, 104)[:, 100:, 100:], coverage(band, 4, 4))
