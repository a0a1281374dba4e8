"""Writes a set of bands with few bands."""

import numpy as np

from ..masks.geometry import UNBOUNDED, area, tighten


def merge(bands: np.ndarray) -> np.ndarray:
    """The same cells (and counts) in fewer bands, sorted by ``(q0, k0)``; empty bands are dropped.

    Two bands side by side, or one above the other, become the smallest band around both when that band has
    exactly as many cells as they have together. Bands that cover a cell twice stay as they are.
    """
    hulls = _hulls(bands)
    count = -1
    while len(hulls) != count:
        count = len(hulls)
        hulls = _join(hulls, order=(0, 1, 2), axis=2)
        hulls = _join(hulls, order=(4, 5, 0), axis=0)
        hulls = _join(hulls, order=(2, 3, 0), axis=0)
    return _loosened(hulls[np.lexsort(hulls.T[[5, 4, 3, 1, 2, 0]])])


def _hulls(bands: np.ndarray) -> np.ndarray:
    """Non-empty bands as int64, all six numbers exact hulls of the cells: rows, keys and ``k - q``."""
    tight = tighten(bands).astype(np.int64)
    q0, q1, k0, k1, lo, hi = tight[tight.any(axis=1)].T
    return np.column_stack([q0, q1, k0, k1, np.maximum(lo, k0 - q1 + 1), np.minimum(hi, k1 - 1 - q0)])


def _loosened(hulls: np.ndarray) -> np.ndarray:
    """Bands from hulls, with limits that restrict nothing at `UNBOUNDED`."""
    q0, q1, k0, k1, lo, hi = hulls.T
    lo = np.where(lo <= k0 - q1 + 1, -UNBOUNDED, lo)
    hi = np.where(hi >= k1 - 1 - q0, UNBOUNDED, hi)
    return np.column_stack([q0, q1, k0, k1, lo, hi]).astype(np.int32)


def _join(hulls: np.ndarray, *, order: tuple[int, int, int], axis: int) -> np.ndarray:
    """Joins neighbours in the order by columns ``order`` that touch along ``axis`` (0 rows, 2 keys)."""
    hulls = hulls[np.lexsort([hulls[:, column] for column in reversed(order)])]
    while True:
        first = _joinable(hulls, axis)
        if first.size == 0:
            return hulls
        hulls[first] = _around(hulls[first], hulls[first + 1])
        hulls = np.delete(hulls, first + 1, axis=0)


def _joinable(hulls: np.ndarray, axis: int) -> np.ndarray:
    """Indices ``i`` such that ``i`` and ``i + 1`` can be joined, no two of them neighbours."""
    first, second = hulls[:-1], hulls[1:]
    adjacent = first[:, axis + 1] == second[:, axis]
    candidates = np.flatnonzero(adjacent)
    a, b = first[candidates], second[candidates]
    exact = candidates[area(_around(a, b)) == area(a) + area(b)]
    # In a stretch of consecutive candidates, every other one.
    stretch_begin = np.diff(exact, prepend=-2) != 1
    position = np.arange(len(exact))
    since = position - np.maximum.accumulate(np.where(stretch_begin, position, 0))
    return exact[since % 2 == 0]


def _around(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The smallest bands around pairs of hulls."""
    hull = np.minimum(first, second)
    hull[:, 1::2] = np.maximum(first, second)[:, 1::2]
    return hull
