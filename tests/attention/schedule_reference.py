"""Computes the tile schedule of a mask in numpy, which the custom call must equal bit for bit."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmagi.masks import UNBOUNDED

type Ints = NDArray[np.int64]


class TileSchedule(NamedTuple):
    """Tight bands [C, 8] by first row, and tiles [n, 4]: tile, first band, end band, key blocks."""

    bands: Ints
    tiles: Ints


def tighten(bands: Ints, q_len: int, kv_len: int) -> Ints:
    """Shrinks bands [C, 6] to their visible rows and keys; empty ones become all zero."""
    q0, q1, k0, k1, lo, hi = np.asarray(bands, np.int64).T
    q0, q1, k0, k1 = np.maximum(q0, 0), np.minimum(q1, q_len), np.maximum(k0, 0), np.minimum(k1, kv_len)
    lo, hi = (np.clip(x, -UNBOUNDED, UNBOUNDED) for x in (lo, hi))
    rows = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    keys = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    visible = (q0 < q1) & (k0 < k1) & (lo <= hi) & (rows[0] < rows[1])
    return np.where(visible, np.stack([*rows, *keys, lo, hi]), 0).T


def transpose(bands: Ints) -> Ints:
    """Returns bands [C, 6] with queries and keys exchanged."""
    return bands[:, [2, 3, 0, 1, 5, 4]] * [1, 1, 1, 1, -1, -1]


def blocks_of_rows(bands: Ints, begin: int, end: int, block_keys: int) -> Ints:
    """Returns for each tight band the number of key blocks visible from rows [begin, end)."""
    q0, q1, k0, k1, lo, hi = bands.T
    q0, q1 = np.maximum(q0, begin), np.minimum(q1, end)
    size = np.minimum(k1, q1 + hi) - np.maximum(k0, q0 + lo)
    return np.where(q0 < q1, -(-np.maximum(size, 0) // block_keys), 0)


def make_schedule(bands: Ints, q_len: int, kv_len: int, tile_rows: int, block_keys: int) -> TileSchedule:
    """Returns the tile schedule of one mask [C, 6]."""
    tight = tighten(bands, q_len, kv_len)
    first_rows = np.where(tight[:, 0] < tight[:, 1], tight[:, 0], np.iinfo(np.int32).max)
    order = np.argsort(first_rows, kind="stable")
    tight, first_rows = tight[order], first_rows[order]
    begins = np.arange(0, q_len, tile_rows)
    ends = np.minimum(begins + tile_rows, q_len)
    firsts = np.searchsorted(np.maximum.accumulate(tight[:, 1]), begins, side="right")
    stops = np.searchsorted(first_rows, ends, side="left")
    firsts, stops = np.where(firsts < stops, [firsts, stops], 0)
    blocks = [
        blocks_of_rows(tight[first:stop], int(begin), int(end), block_keys).sum()
        for first, stop, begin, end in zip(firsts, stops, begins, ends, strict=True)
    ]
    tiles = np.stack([np.arange(len(begins)), firsts, stops, np.asarray(blocks, np.int64)], axis=1)
    tiles = tiles[np.lexsort((tiles[:, 0], -tiles[:, 3]))]
    return TileSchedule(np.pad(tight, ((0, 0), (0, 2))), tiles)
