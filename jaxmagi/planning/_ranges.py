"""Ranges of integers ``[begin, end)``, as pairs of arrays."""

import numpy as np


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
