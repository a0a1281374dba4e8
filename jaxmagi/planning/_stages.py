"""Bands to ranks and stages: what each rank computes, on which keys, in local coordinates."""

import itertools
from typing import NamedTuple

import numpy as np

from ..masks.geometry import UNBOUNDED, area, crop, shift, tighten
from ._merge import merge
from ._runs import Runs, joined, meetings, runs_in_order, runs_of_tokens, subtract, union


class Shard(NamedTuple):
    """One rank's part of the mask.

    Attributes:
        rows: the rank's own tokens; ``place`` is the row of the shard.
        pieces: int32 ``[n, 6]``, tight bands, each inside one of ``rows``, in global coordinates.
        row_run: int64 ``[n]``, the index in ``rows`` of each piece.
        remote: the keys that the pieces see and the rank does not own; ``place`` counts them.
    """

    rows: Runs
    pieces: np.ndarray
    row_run: np.ndarray
    remote: Runs


def make_shard(bands: np.ndarray, tokens: np.ndarray) -> Shard:
    """What the rank that owns ``tokens`` computes of the bands ``[S, 6]``.

    Each piece has consecutive rows, so the keys that it sees are consecutive too and the union of the pieces'
    key ranges is exactly the set of keys that some row needs.
    """
    rows = runs_of_tokens(tokens)
    band, run = meetings(bands[:, 0], bands[:, 1], rows.begin, rows.end)
    pieces = tighten(crop(bands[band], rows.begin[run], rows.end[run], 0, UNBOUNDED))
    kept = pieces.any(axis=1)
    pieces, run = pieces[kept], run[kept]
    needed = union(pieces[:, 2].astype(np.int64), pieces[:, 3].astype(np.int64))
    return Shard(rows, pieces, run, runs_in_order(*subtract(*needed, rows)))


def split_remote(shard: Shard, num_parts: int) -> list[Runs]:
    """The remote keys in ``num_parts`` consecutive parts with nearly equal numbers of visible cells."""
    if num_parts == 1:
        return [shard.remote]
    cuts = np.concatenate([[0], _equal_area_cuts(shard, num_parts), [UNBOUNDED]])
    return [_between(shard.remote, lower, upper) for lower, upper in itertools.pairwise(cuts)]


def key_buffers(shard: Shard, parts: list[Runs], num_stages: int, shard_length: int) -> list[Runs]:
    """The keys of each stage: own and received together, or own first and then each part."""
    if num_stages == 1:
        return [joined(shard.rows, parts[0], shard_length)]
    return [shard.rows, *parts]


def stage_area(shard: Shard, keys: Runs) -> int:
    """Visible cells of the shard's rows and these keys."""
    piece, run = meetings(shard.pieces[:, 2], shard.pieces[:, 3], keys.begin, keys.end)
    return int(area(crop(shard.pieces[piece], 0, UNBOUNDED, keys.begin[run], keys.end[run])).sum())


def local_bands(shard: Shard, keys: Runs) -> np.ndarray:
    """The bands between the shard's rows and a key buffer, in local coordinates: int32 ``[n, 6]``."""
    piece, run = meetings(shard.pieces[:, 2], shard.pieces[:, 3], keys.begin, keys.end)
    row_run = shard.row_run[piece]
    cropped = crop(shard.pieces[piece], 0, UNBOUNDED, keys.begin[run], keys.end[run])
    dq = shard.rows.place[row_run] - shard.rows.begin[row_run]
    return merge(shift(tighten(cropped), dq, keys.place[run] - keys.begin[run]))


def _equal_area_cuts(shard: Shard, num_parts: int) -> np.ndarray:
    """The smallest keys below which at least 1, 2, … parts of the remote area lie, by bisection."""
    piece, run = meetings(shard.pieces[:, 2], shard.pieces[:, 3], shard.remote.begin, shard.remote.end)
    visible = crop(shard.pieces[piece], 0, UNBOUNDED, shard.remote.begin[run], shard.remote.end[run])
    target = int(area(visible).sum()) * np.arange(1, num_parts) // num_parts
    lower = np.zeros(num_parts - 1, np.int64)
    upper = np.full(num_parts - 1, shard.remote.end.max(initial=0))
    while (lower < upper).any():
        middle = (lower + upper) // 2
        below = area(crop(visible[None], 0, UNBOUNDED, 0, middle[:, None])).sum(axis=1)
        lower = np.where(below < target, middle + 1, lower)
        upper = np.where(below < target, upper, middle)
        upper = np.maximum(lower, upper)
    return lower


def _between(runs: Runs, lower: int, upper: int) -> Runs:
    """The part of the runs in ``[lower, upper)``, filling a buffer of its own."""
    begin, end = np.maximum(runs.begin, lower), np.minimum(runs.end, upper)
    kept = begin < end
    return runs_in_order(begin[kept], end[kept])
