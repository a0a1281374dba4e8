"""Sorted, disjoint ranges of tokens, and where they lie in a local buffer."""

from typing import NamedTuple

import numpy as np

_MOST_MEETINGS = 2**22


class Runs(NamedTuple):
    """Disjoint global ranges ``[begin, end)`` in ascending order, each contiguous in some local buffer.

    Attributes:
        begin: int64 ``[n]``.
        end: int64 ``[n]``.
        place: int64 ``[n]``, the index of ``begin`` in the local buffer.
    """

    begin: np.ndarray
    end: np.ndarray
    place: np.ndarray

    @property
    def rows(self) -> int:
        return int((self.end - self.begin).sum())


def runs_of_tokens(tokens: np.ndarray) -> Runs:
    """The longest runs of consecutive tokens in a local buffer of global indices (-1 for padding)."""
    place = np.flatnonzero(tokens >= 0)
    token = tokens[place].astype(np.int64)
    is_new = (np.diff(token) != 1) | (np.diff(place) != 1)
    starts = np.flatnonzero(np.concatenate([np.ones(min(token.size, 1), bool), is_new]))
    begin = token[starts]
    order = np.argsort(begin)
    lengths = np.diff(starts, append=token.size)
    return Runs(begin[order], (begin + lengths)[order], place[starts][order])


def runs_in_order(begin: np.ndarray, end: np.ndarray) -> Runs:
    """Runs that fill a buffer from index 0, one after the other."""
    lengths = end - begin
    return Runs(begin, end, np.cumsum(lengths) - lengths)


def joined(first: Runs, second: Runs, offset: int) -> Runs:
    """The runs of a buffer in which ``second`` begins at ``offset``."""
    columns = zip(first, second._replace(place=second.place + offset), strict=True)
    begin, end, place = (np.concatenate(pair) for pair in columns)
    order = np.argsort(begin)
    return Runs(begin[order], end[order], place[order])


def meetings(
    begin: np.ndarray, end: np.ndarray, run_begin: np.ndarray, run_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (range, run) that share a token, for any ranges and runs that are sorted and disjoint.

    Returns:
        Indices of ranges and of runs, sorted by range, then run.

    Raises:
        NotImplementedError: there are more than 2**22 pairs.
    """
    first = np.searchsorted(run_end, begin, "right")
    last = np.searchsorted(run_begin, end, "left")
    lengths = np.where(begin < end, np.maximum(last - first, 0), 0)
    if lengths.sum() > _MOST_MEETINGS:
        raise NotImplementedError(
            f"the layout's {len(run_begin)} runs of consecutive tokens cut {len(begin)} pieces of the mask "
            f"into {lengths.sum()}, more than {_MOST_MEETINGS}: use longer runs (larger chunks)."
        )
    return expand(first, lengths)


def expand(begin: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All members of the ranges ``[begin, begin + length)``, in order: the range and the value of each."""
    item = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(item)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return item, begin[item] + within


def union(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of any ranges as the fewest sorted, disjoint ones."""
    kept = np.flatnonzero(begin < end)
    order = kept[np.argsort(begin[kept], kind="stable")]
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    is_new = np.ones(len(order), bool)
    is_new[1:] = begin[1:] > reach[:-1]
    starts = np.flatnonzero(is_new)
    return begin[starts], reach[np.append(starts[1:], len(order)) - 1] if starts.size else begin


def subtract(begin: np.ndarray, end: np.ndarray, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Sorted, disjoint ranges without the tokens of ``runs``."""
    limit = np.iinfo(np.int64).max
    gap_begin = np.concatenate([np.zeros(1, np.int64), runs.end])
    gap_end = np.append(runs.begin, limit)
    item, gap = meetings(begin, end, gap_begin, gap_end)
    lower, upper = np.maximum(begin[item], gap_begin[gap]), np.minimum(end[item], gap_end[gap])
    kept = lower < upper
    return lower[kept], upper[kept]
