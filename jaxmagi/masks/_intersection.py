"""Intersects the bands of two masks, in time that grows with the pairs of bands whose rows (or keys) meet."""

from typing import Literal, NamedTuple

import numpy as np

from .geometry import intersect, tighten

_MAX_PAIRS = 2**22


class _Pairs(NamedTuple):
    """Holds pairs of indices: ``i`` with each of ``others[begin[i]:end[i]]``."""

    others: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def total(self) -> int:
        return int((self.end - self.begin).sum())

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the second index of every pair."""
        counts = self.end - self.begin
        first = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(first)) - np.repeat(np.cumsum(counts) - self.end, counts)
        return first, self.others[place]


class _Meetings(NamedTuple):
    """Holds all pairs of a first and a second range that meet, by which of the two begins later."""

    second_later: _Pairs  # or both begin at once
    first_later: _Pairs

    @property
    def total(self) -> int:
        return self.second_later.total + self.first_later.total

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of the first and of the second range of every pair."""
        a, b = self.second_later.indices()
        d, c = self.first_later.indices()
        return np.concatenate([a, c]), np.concatenate([b, d])


def intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns what each band of ``[S, 6]`` shares with each of ``[T, 6]``: int32 ``[n, 6]``, none empty.

    Raises:
        NotImplementedError: more than 2**22 pairs of bands have rows in common, and as many have keys.
    """
    first, second = _tight(first), _tight(second)
    rows, keys = (_meetings(first[:, axis], second[:, axis]) for axis in (slice(0, 2), slice(2, 4)))
    meetings = min(rows, keys, key=lambda meetings: meetings.total)
    if meetings.total > _MAX_PAIRS:
        raise NotImplementedError(
            f"{len(first)} and {len(second)} bands make {meetings.total} pairs with rows or keys in common, "
            f"more than {_MAX_PAIRS}: crop the masks to parts that meet."
        )
    a, b = meetings.indices()
    order = np.lexsort((b, a))
    shared = intersect(first[a[order]], second[b[order]])
    return shared[shared.any(axis=-1)]


def _tight(bands: np.ndarray) -> np.ndarray:
    bands = tighten(bands)
    return bands[bands.any(axis=-1)]


def _meetings(first: np.ndarray, second: np.ndarray) -> _Meetings:
    """Returns the pairs of ranges ``[S, 2]`` and ``[T, 2]`` that meet, none of which is empty."""
    return _Meetings(_beginning_inside(first, second, "left"), _beginning_inside(second, first, "right"))


def _beginning_inside(ranges: np.ndarray, others: np.ndarray, side: Literal["left", "right"]) -> _Pairs:
    """Pairs each range with the others that begin inside it, with it too if ``side`` is "left"."""
    order = np.argsort(others[:, 0], kind="stable")
    begins = others[order, 0]
    return _Pairs(order, np.searchsorted(begins, ranges[:, 0], side), np.searchsorted(begins, ranges[:, 1]))
