"""Computes the tile schedule of a mask in numpy, which the custom call must equal bit for bit."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmagi.masks import UNBOUNDED

type Ints = NDArray[np.int64]

LONG_BAND_ROWS = 1024


class TileSchedule(NamedTuple):
    """Tight bands [C, 8] by first row, and tiles [n, 8]: tile, first band, end band, key blocks, rows, 0, 0.

    A tile whose rows see keys from own_len on is ~tile.
    """

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


def keys_of_rows(bands: Ints, begin: int, end: int) -> tuple[Ints, Ints]:
    """Returns for each tight band the first key visible from rows [begin, end), and the end of these keys."""
    q0, q1, k0, k1, lo, hi = bands.T
    q0, q1 = np.maximum(q0, begin), np.minimum(q1, end)
    first, stop = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    is_empty = (q0 >= q1) | (first >= stop)
    return np.where(is_empty, 0, first), np.where(is_empty, 0, stop)


def rows_of_tiles(bands: Ints, length: int, tile_rows: int, more_tiles: int) -> Ints:
    """Returns the rows [n, 2] of tiles that begin at multiples of their length.

    With ``more_tiles`` so many long bands at most begin tiles, too, if no band goes on there. Each leaves one
    number of a tile, more or less, to one without rows.
    """
    count = -(-length // tile_rows) + more_tiles
    behind = np.concatenate([[0], np.maximum.accumulate(bands[:, 1])])[: len(bands)]
    begins_tile = (bands[:, 0] > 0) & (bands[:, 1] - bands[:, 0] >= LONG_BAND_ROWS) & (behind <= bands[:, 0])
    starts = [0, *bands[begins_tile, 0][:more_tiles]]
    rows = np.zeros((count, 2), np.int64)
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], length], strict=True)):
        last = starts[i + 1] // tile_rows + i + 1 if i + 1 < len(starts) else count
        begins = start + tile_rows * np.arange(last - (start // tile_rows + i))
        rows[last - len(begins) : last] = np.minimum(np.stack([begins, begins + tile_rows], 1), end)
    return rows


def make_schedule(
    bands: Ints,
    q_len: int,
    kv_len: int,
    tile_rows: int,
    block_keys: int,
    own_len: int | None = None,
    more_tiles: int = 0,
) -> TileSchedule:
    """Returns the tile schedule of one mask [C, 6]."""
    own_len = kv_len if own_len is None else own_len
    tight = tighten(bands, q_len, kv_len)
    first_rows = np.where(tight[:, 0] < tight[:, 1], tight[:, 0], np.iinfo(np.int32).max)
    order = np.argsort(first_rows, kind="stable")
    tight, first_rows = tight[order], first_rows[order]
    rows = rows_of_tiles(tight, q_len, tile_rows, more_tiles)
    begins, ends = rows.T
    firsts = np.searchsorted(np.maximum.accumulate(tight[:, 1]), begins, side="right")
    stops = np.searchsorted(first_rows, ends, side="left")
    firsts, stops = np.where(firsts < stops, [firsts, stops], 0)
    tiles = np.zeros((len(begins), 8), np.int64)
    order_keys = np.zeros(len(begins), np.int64)
    for tile, (first, stop, begin, end) in enumerate(zip(firsts, stops, begins, ends, strict=True)):
        first_keys, end_keys = keys_of_rows(tight[first:stop], int(begin), int(end))
        blocks = (-(-(end_keys - first_keys) // block_keys)).sum()
        sees_received = end_keys.max(initial=0) > own_len
        tiles[tile] = ~tile if sees_received else tile, first, stop, blocks, begin, end, 0, 0
        order_keys[tile] = 1 + blocks if sees_received else -blocks
    return TileSchedule(np.pad(tight, ((0, 0), (0, 2))), tiles[np.argsort(order_keys, kind="stable")])
