"""Geometry in closed form against the definition, cell by cell."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxmagi.masks import UNBOUNDED, geometry

from .dense import any_bands, coverage, hull

type Case = tuple[np.random.Generator, np.ndarray, int, int, np.ndarray]


@pytest.fixture(params=range(4))
def cases(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Returns generators, random bands, lengths, and the cells that each band covers."""
    rng = np.random.default_rng(request.param)

    def draw() -> Case:
        q_len, kv_len = rng.integers(1, 24, 2).tolist()
        bands = any_bands(rng, q_len, kv_len, int(rng.integers(1, 6)))
        return rng, bands, q_len, kv_len, coverage(bands, q_len, kv_len)

    return (draw() for _ in range(600))


def test_area_dense_and_emptiness(cases: Iterator[Case]) -> None:
    for _, bands, q_len, kv_len, cells in cases:
        areas = geometry.area(bands)
        assert areas.dtype == np.int64
        np.testing.assert_array_equal(areas, cells.sum((1, 2)))
        np.testing.assert_array_equal(geometry.is_empty(bands), ~cells.any((1, 2)))
        np.testing.assert_array_equal(geometry.to_dense(bands, q_len, kv_len), cells.sum(0))


def test_crop(cases: Iterator[Case]) -> None:
    for rng, bands, q_len, kv_len, cells in cases:
        q0, q1 = np.sort(rng.integers(0, q_len + 1, 2)).tolist()
        k0, k1 = np.sort(rng.integers(0, kv_len + 1, 2)).tolist()
        cropped = geometry.crop(bands, q0, q1, k0, k1)
        expected = np.zeros_like(cells)
        expected[:, q0:q1, k0:k1] = cells[:, q0:q1, k0:k1]
        assert cropped.dtype == np.int32
        np.testing.assert_array_equal(coverage(cropped, q_len, kv_len), expected)
        assert not cropped[(cropped[:, 0] == cropped[:, 1]) | (cropped[:, 2] == cropped[:, 3])].any()


def test_tighten_is_the_exact_hull(cases: Iterator[Case]) -> None:
    for _, bands, q_len, kv_len, cells in cases:
        tight = geometry.tighten(bands)
        np.testing.assert_array_equal(coverage(tight, q_len, kv_len), cells)
        for band, row, cell in zip(bands, tight, cells, strict=True):
            assert tuple(row[:4]) == hull(cell.any(1)) + hull(cell.any(0))
            assert tuple(row[4:]) == (tuple(band[4:]) if cell.any() else (0, 0))


def test_key_range_is_the_exact_hull(cases: Iterator[Case]) -> None:
    for rng, bands, q_len, _, cells in cases:
        q0, q1 = rng.integers(0, q_len + 1, 2).tolist()
        begin, end = geometry.key_range(bands, q0, q1)
        assert begin.dtype == end.dtype == np.int64
        assert list(zip(begin, end, strict=True)) == [hull(cell.any(0)) for cell in cells[:, q0:q1]]


def test_intersect_and_shift(cases: Iterator[Case]) -> None:
    for rng, bands, q_len, kv_len, cells in cases:
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
    u, window = UNBOUNDED, 4096 * n - 4096 * 4095 // 2
    limits = [(-u, u), (-u, 0), (0, u), (-4095, 0), (n - 1, u), (-u, 1 - n), (u, u), (-u, -u)]
    bands = np.array([(0, n, 0, n, *limit) for limit in limits])
    triangle = n * (n + 1) // 2
    assert geometry.area(bands).tolist() == [n * n, triangle, triangle, window, 1, 1, 0, 0]


def test_limits_out_of_reach_survive_a_shift_back() -> None:
    band = np.array([[0, 4, 0, 4, 1 - UNBOUNDED, UNBOUNDED]])
    moved = geometry.shift(geometry.shift(band, 100, 0), 0, 100)
    np.testing.assert_array_equal(coverage(moved, 104, 104)[:, 100:, 100:], coverage(band, 4, 4))
