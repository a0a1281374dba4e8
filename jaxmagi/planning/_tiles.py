"""Counts tiles of the kernels: all that ranks compute, and those that need no received keys."""

from typing import NamedTuple

import numpy as np

from .._native import planner
from ..masks.geometry import UNBOUNDED, columns
from ._cost import Pass
from ._ranges import meet, union


class Tiles(NamedTuple):
    """Full and partial tiles of the ranks of a plan in a pass, each int64 ``[cp, 2]``.

    Own tiles are in a tile of the kernel's schedule that needs own keys alone: forward its queries see no
    received ones, backward it holds no received ones.

    Attributes:
        own: own tiles.
        others: all others.
        halves: the others over own keys alone, and over received ones alone: int64 ``[2, cp, 2]``; empty in
            a backward pass.
    """

    own: np.ndarray
    others: np.ndarray
    halves: np.ndarray

    @property
    def all(self) -> np.ndarray:
        return self.own + self.others


def count_tiles(bands: np.ndarray, counts: np.ndarray, direction: Pass) -> np.ndarray:
    """Returns the numbers of full and partial tiles of groups of bands.

    Args:
        bands: int32 ``[n, 6]``, the bands of all groups, one group after the other.
        counts: integers of any shape, the number of bands of each group.
        direction: the pass.

    Returns:
        int64 ``[*counts.shape, 2]``.
    """
    groups = np.ascontiguousarray(counts, np.int32).reshape(-1)
    tiles = planner().tile_counts(np.ascontiguousarray(bands), groups, *direction.tile, direction.by_keys)
    return tiles.reshape(*counts.shape, 2)


def tiles_of(bands: np.ndarray, counts: np.ndarray, own_keys: int, direction: Pass) -> Tiles:
    """Returns the tiles of the ranks of a plan.

    Args:
        bands: int32 ``[n, 6]``, the bands of all ranks, one rank after the other.
        counts: ``[cp]``, the number of bands of each rank.
        own_keys: the number of a rank's own keys, behind which are those that it receives.
        direction: the pass.
    """
    every = count_tiles(bands, counts, direction)
    if direction.by_keys:
        end = _end_of_own_tiles(bands, own_keys, direction.scheduled)
        own = count_tiles(_with_keys(bands, 0, end), counts, direction)
        return Tiles(own, every - own, np.zeros((0, *every.shape), np.int64))
    own = count_tiles(*_in_own_tiles(bands, counts, own_keys, direction.scheduled), direction)
    over_own = count_tiles(_with_keys(bands, 0, own_keys), counts, direction)
    over_received = count_tiles(_with_keys(bands, own_keys, UNBOUNDED), counts, direction)
    return Tiles(own, every - own, np.stack([over_own - own, over_received]))


def _end_of_own_tiles(bands: np.ndarray, own_keys: int, size: int) -> int:
    """Returns the end of the tiles of ``size`` keys that hold own ones alone.

    Where nothing is received these are all tiles.
    """
    return own_keys // size * size if (bands[:, 3] > own_keys).any() else own_keys


def _with_keys(bands: np.ndarray, begin: int, end: int) -> np.ndarray:
    cropped = bands.copy()
    np.maximum(cropped[:, 2], begin, out=cropped[:, 2])
    np.minimum(cropped[:, 3], end, out=cropped[:, 3])
    return cropped


def _in_own_tiles(
    bands: np.ndarray, counts: np.ndarray, own_keys: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts of bands in tiles of ``size`` queries that see no received keys, and their counts."""
    height = -(-own_keys // size) * size
    rank = np.repeat(np.arange(len(counts)), counts)
    first = rank * height  # queries of all ranks, one rank after the other
    begin, end = _queries_of_received_keys(bands, own_keys)
    sees = begin < end
    begin, end = union(first[sees] + begin[sees] // size * size, first[sees] - (-end[sees] // size) * size)
    own_begin, own_end = np.append(0, end), np.append(begin, len(counts) * height)
    band, _, begin, end = meet(first + bands[:, 0], first + bands[:, 1], own_begin, own_end)
    parts = bands[band]
    parts[:, 0], parts[:, 1] = begin - first[band], end - first[band]
    return parts, np.bincount(rank[band], minlength=len(counts))


def _queries_of_received_keys(bands: np.ndarray, own_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of queries that see received keys by each band, perhaps empty: int64 ``[n]``."""
    q0, q1, k0, k1, lo, hi = columns(bands)
    begin, end = np.maximum(q0, np.maximum(k0, own_keys) - hi), np.minimum(q1, k1 - lo)
    return begin, np.where((k1 > own_keys) & (lo <= hi), end, begin)
