"""Finds a cell that two bands share, exactly, in O(n log² n) vectorised steps for n bands.

Tightened bands have a key in each of their rows, and their edges never move left and by at most one key per
row. Therefore bands that fill the same rows and are disjoint in one row keep their order until two
*neighbours* meet, and testing neighbours is enough. A segment tree over the row boundaries cuts every band
into O(log n) pieces that fill all rows of a node (the band is "long" in that node), and lists the O(log n)
nodes above them, of whose rows the band fills only some (it is "short" in these nodes). For any row and any
two bands in it there is a node in which one band is long and the other one is long or short. Level by level,
long bands are sorted and tested against their neighbours, and short bands against their two neighbours
among the long ones.
"""

from typing import NamedTuple

import numpy as np

from .geometry import columns, intersect, is_empty, tighten


class Overlap(NamedTuple):
    """Holds the indices of two bands, ``first < second``, and a cell that both cover."""

    first: int
    second: int
    q: int
    k: int


class _Bands(NamedTuple):
    """Holds tightened bands, and the leaves ``[begin, end)`` of the tree that their rows fill."""

    columns: np.ndarray  # int64 [6, n]
    begin: np.ndarray  # int64 [n]
    end: np.ndarray

    def left_edge(self, index: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Returns the first key of bands ``index`` in rows ``row``."""
        return np.maximum(self.columns[2][index], row + self.columns[4][index])


class _Entries(NamedTuple):
    """Holds bands in the nodes of one tree level, as int64 arrays of one length."""

    node: np.ndarray
    band: np.ndarray
    row: np.ndarray  # the band's first row in the node


def find_overlap(bands: np.ndarray) -> Overlap | None:
    """Returns a cell covered by two of the bands ``[S, 6]``, or None when there is no such cell."""
    index = np.flatnonzero(~is_empty(bands))
    index = index[np.argsort(bands[index, 0])]  # in row order the lookups below are nearly sequential
    tight = tighten(bands[index])
    boundaries, leaves = np.unique(tight[:, :2].astype(np.int64), return_inverse=True)
    leaves = leaves.reshape(-1, 2)
    tree = _Bands(np.stack(columns(tight)), leaves[:, 0].copy(), leaves[:, 1].copy())
    for level in range(len(boundaries).bit_length()):
        first, second = _neighbours(tree, boundaries, level)
        hits = np.flatnonzero(_share_cells(tree.columns, first, second))
        if hits.size:
            a, b = sorted(index[[first[hits[0]], second[hits[0]]]].tolist())
            q0, _, k0, _, lo, _ = intersect(bands[a], bands[b]).tolist()
            return Overlap(a, b, q0, max(k0, q0 + lo))
    return None


def _share_cells(columns: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    q0, k0, lo = (np.maximum(columns[i][first], columns[i][second]) for i in (0, 2, 4))
    q1, k1, hi = (np.minimum(columns[i][first], columns[i][second]) for i in (1, 3, 5))
    return (q0 < q1) & (lo <= hi) & (np.maximum(k0, q0 + lo) < np.minimum(k1, q1 + hi))


def _neighbours(tree: _Bands, boundaries: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of bands to test at one level.

    If no pair shares a cell, then no two bands share one in a node of this level that one of them fills.
    """
    long = _long_entries(tree, boundaries, level)
    short = _short_entries(tree, boundaries, level)
    side_by_side = np.flatnonzero(long.node[1:] == long.node[:-1])
    nodes = np.searchsorted(long.node, np.arange((len(boundaries) >> level) + 2))
    lower, upper = nodes[short.node], nodes[short.node + 1]
    place = _count_left(tree, long.band, short, lower, upper)
    left, right = place > lower, place < upper
    first = [long.band[side_by_side], long.band[place[left] - 1], short.band[right]]
    second = [long.band[side_by_side + 1], short.band[left], long.band[place[right]]]
    return np.concatenate(first), np.concatenate(second)


def _long_entries(tree: _Bands, boundaries: np.ndarray, level: int) -> _Entries:
    """Lists the nodes that bands fill without filling the parent, two a band at most, by node and edge."""
    begin, end = -(-tree.begin >> level), tree.end >> level
    left = np.flatnonzero((begin & 1 == 1) & (begin < end))
    right = np.flatnonzero((end & 1 == 1) & (begin < end))
    node, band = np.concatenate([begin[left], end[right] - 1]), np.concatenate([left, right])
    row = boundaries[node << level]
    order = np.argsort((node << 32) + tree.left_edge(band, row))
    return _Entries(node[order], band[order], row[order])


def _short_entries(tree: _Bands, boundaries: np.ndarray, level: int) -> _Entries:
    """Lists the nodes that bands fill in part: at most those of their first and of their last row."""
    first, last = tree.begin >> level, (tree.end - 1) >> level
    cut_first = (first << level < tree.begin) | (first + 1 << level > tree.end)
    cut_last = (last + 1 << level > tree.end) & (first != last)
    left, right = np.flatnonzero(cut_first), np.flatnonzero(cut_last)
    node, band = np.concatenate([first[left], last[right]]), np.concatenate([left, right])
    return _Entries(node, band, np.maximum(boundaries[node << level], tree.columns[0][band]))


def _count_left(
    tree: _Bands, long: np.ndarray, short: _Entries, lower: np.ndarray, upper: np.ndarray
) -> np.ndarray:
    """Returns the place of each short band among the long ones ``[lower, upper)`` of its node.

    Edges are compared in the short band's first row of the node, by binary searches in lockstep.
    """
    target = tree.left_edge(short.band, short.row)
    place = lower.copy()
    open_ = np.flatnonzero(lower < upper)
    lower, upper, row, target = lower[open_], upper[open_], short.row[open_], target[open_]
    for _ in range(int((upper - lower).max(initial=0)).bit_length()):
        middle = (lower + upper) // 2
        is_left = (middle < upper) & (tree.left_edge(long[np.minimum(middle, len(long) - 1)], row) <= target)
        lower, upper = np.where(is_left, middle + 1, lower), np.where(is_left, upper, middle)
    place[open_] = lower
    return place
