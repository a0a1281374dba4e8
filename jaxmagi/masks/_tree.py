"""Bands of a tree of token segments, packed one after another with every parent before its children.

The tokens that see a segment are its own and those of its descendants. They form one run where segments are
in depth-first order, and otherwise several. Each run is a band, in which ``k <= q`` hides what comes later in
the segment itself. Segments that follow one another and are seen by the same run share a band.
"""

import numpy as np

from .geometry import UNBOUNDED

_MAX_BANDS = 2**22


def depths(parents: np.ndarray) -> np.ndarray:
    """Returns the number of segments from the root to each segment, both included, by pointer doubling."""
    count = len(parents)
    above = np.append(np.where(parents < 0, count, parents), count)
    depth = np.append(np.ones_like(parents), 0)
    while (above < count).any():
        depth, above = depth + depth[above], above[above]
    return depth[:-1]


def tree_bands(parents: np.ndarray, lengths: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Returns bands int64 ``[n, 6]`` of segments with parents before them and with the given depths."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    rows = np.flatnonzero(lengths)
    if rows.size == 0:
        return np.zeros((0, 6), np.int64)
    parts, count = [], 0
    ancestor = rows  # of each segment in rows, the nearest one at most as deep as the level
    for level in range(depth.max(), 0, -1):
        at_level = depth[ancestor] == level
        first, last = _runs(ancestor[1:] != ancestor[:-1])
        keys = ancestor[first]
        kept = at_level[first] & (lengths[keys] > 0)
        runs = np.column_stack([begins[rows[first]], ends[rows[last]], begins[keys], ends[keys]])[kept]
        parts.append(runs)
        count += len(runs)
        if count > _MAX_BANDS:
            raise NotImplementedError(
                f"{len(parents)} segments need more than {_MAX_BANDS} bands: put them in depth-first order."
            )
        ancestor = np.where(at_level, parents[ancestor], ancestor)
    bands = _join_keys(np.concatenate(parts))
    return np.column_stack([bands, np.full(len(bands), -UNBOUNDED), np.zeros(len(bands), np.int64)])


def _join_keys(ranges: np.ndarray) -> np.ndarray:
    """Joins ``(q0, q1, k0, k1)`` of the same rows whose keys follow one another, and sorts them by rows.

    Rows that begin with the keys themselves (on the diagonal) count as the same when they end together.
    """
    q0, q1, k0, _ = ranges.T
    top = np.where(q0 == k0, -1, q0)
    order = np.lexsort((k0, q1, top))
    ranges, top = ranges[order], top[order]
    same_rows = (top[1:] == top[:-1]) & (ranges[1:, 1] == ranges[:-1, 1])
    first, last = _runs(~same_rows | (ranges[1:, 2] != ranges[:-1, 3]))
    joined = np.column_stack([ranges[first, :3], ranges[last, 3]])
    return joined[np.lexsort((joined[:, 2], joined[:, 0]))]


def _runs(is_cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the last index of each run, from whether a cut follows each item but the last."""
    cuts = np.flatnonzero(is_cut)
    return np.append(0, cuts + 1), np.append(cuts, len(is_cut))
