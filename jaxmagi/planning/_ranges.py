"""Ranges of integers ``[begin, end)``, as pairs of arrays."""

import numpy as np


def union(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the union of any ranges as the fewest sorted, disjoint ones."""
    kept = np.flatnonzero(begin < end)
    order = kept[np.argsort(begin[kept], kind="stable")]
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    is_new = np.ones(len(order), bool)
    is_new[1:] = begin[1:] > reach[:-1]
    starts = np.flatnonzero(is_new)
    return begin[starts], reach[np.append(starts[1:], len(order)) - 1] if starts.size else begin


def meet(
    begin: np.ndarray, end: np.ndarray, other_begin: np.ndarray, other_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the parts that any ranges share with others, which are sorted and disjoint.

    Returns:
        The index of the range, the index of the other range, begin and end of each part, in the order of the
        ranges.
    """
    first = np.searchsorted(other_end, begin, side="right")
    last = np.searchsorted(other_begin, end, side="left")
    count = np.where(begin < end, np.maximum(last - first, 0), 0)
    index = np.repeat(np.arange(len(begin)), count)
    within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    other = first[index] + within
    begin, end = np.maximum(begin[index], other_begin[other]), np.minimum(end[index], other_end[other])
    return index, other, begin, end
