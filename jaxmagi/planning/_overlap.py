"""Chooses how many attention calls a pass makes, and which received keys each of them gets."""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._cost import CostModel, Pass
from ._schedule import Work, busiest_links, count_tiles, schedule, transfer_times, work_of

if TYPE_CHECKING:
    from .._cpu import Routing, Staging

# Stages are cut at eighths of a rank's cells with received keys: 7 cuts for three stages, 21 for four, each
# in two orders. Eighths were chosen by trial: finer parts come closer to the best cut, but there are more to
# compare. With more than four stages all get equal parts, for there would be too many cuts.
_PARTS = 8
_MOST_CUT_STAGES = 4


class StageSplit(NamedTuple):
    """The attention calls of a pass, and how received keys are split over them.

    Attributes:
        num_stages: attention calls of a rank.
        shares: for each transfer, its share of a rank's cells with received keys.
        is_by_owner: whether a transfer brings the keys of the next ranks in a ring, instead of consecutive
            keys. All ranks then send in every transfer.
    """

    num_stages: int
    shares: tuple[int, ...]
    is_by_owner: bool = False


ONE_CALL = StageSplit(1, (1,))


class StagingCandidate:
    """A split of one routing and its cost, each part of which is computed when it is first used."""

    def __init__(self, staging: "Staging", split: StageSplit, shard_length: int, cost: CostModel):
        self.staging, self.split = staging, split
        self.shard_length, self.cost = shard_length, cost
        self._tiles: dict[Pass, np.ndarray] = {}
        self._works: dict[Pass, Work] = {}

    @functools.cached_property
    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """Bands of all ranks and stages, int32 ``[n, 6]``, and how many each has, ``[cp, num_stages]``."""
        return self.staging.bands()

    @functools.cached_property
    def traffic(self) -> np.ndarray:
        """Rows int64 ``[cp, num_transfers, 2, 2]``, as `busiest_links` takes them."""
        return self.staging.traffic(self.cost.ranks_per_host)

    @functools.cached_property
    def busiest(self) -> np.ndarray:
        """Rows on the busiest links: int64 ``[num_transfers, steps, 2]``."""
        return busiest_links(self.traffic)[:, None]

    def tiles(self, direction: Pass) -> np.ndarray:
        """Returns full and partial tiles: int64 ``[cp, num_stages, 2]``."""
        if direction not in self._tiles:
            self._tiles[direction] = count_tiles(*self.bands, direction)
        return self._tiles[direction]

    def work(self, direction: Pass) -> Work:
        """Returns the times of what ranks compute and transfer."""
        if direction not in self._works:
            tiles = self.tiles(direction)
            self._works[direction] = work_of(tiles, self.busiest, self.shard_length, self.cost, direction)
        return self._works[direction]

    def seconds(self, directions: Sequence[Pass]) -> float:
        """Returns the predicted time of all directions together."""
        return sum(float(schedule(self.work(direction)).seconds) for direction in directions)


class OverlapSolver:
    """Finds the split whose slowest rank is done first, under a model of the machine.

    There is one split for one, two and more than four calls. For three and four calls, the received keys of
    every rank can be cut at the same eighths of their cells, in the order of the keys or by owner. The first
    transfer should take as long as the attention to the own keys, each later one as long as the attention
    call before it, so the best cut depends on the mask.

    Counting the tiles of all cuts would take too long, so their times are interpolated: tiles are nearly
    proportional to cells, so a part with a share ``s`` of the cells takes ``s`` times the attention to all
    received keys in one call, plus the fixed time of a call and its merge; rows are summed over eighths. The
    best cut is then compared with one call and two calls by exact counts of tiles. For causal masks and
    packed documents, its exact time is within 2 % of the best (`tests/planning/test_overlap.py`).
    """

    def __init__(self, routing: "Routing", shard_length: int, cost: CostModel):
        self.routing, self._shard_length, self._cost = routing, shard_length, cost
        self._candidates: dict[StageSplit, StagingCandidate] = {}
        self._cut_rows: dict[tuple[int, bool], np.ndarray] = {}

    def best(self, counts: Sequence[int], directions: Sequence[Pass]) -> StagingCandidate:
        """Returns the split with the smallest predicted time of all directions, the first of equals."""
        simple = [count for count in counts if not _is_cut(count)]
        cut = [count for count in counts if _is_cut(count)]
        best, least = None, np.inf
        for count in simple:
            candidate = self.candidate(StageSplit(count, (1,) * max(1, count - 1)))
            seconds = candidate.seconds(directions)
            if seconds < least:
                best, least = candidate, seconds
        if cut and least > self.least_seconds(min(cut), directions):
            candidate = self._best_cut(cut, directions)
            if best is None or candidate.seconds(directions) < least:
                best = candidate
        assert best is not None
        return best

    def least_seconds(self, count: int, directions: Sequence[Pass]) -> float:
        """Returns a lower bound of the time of ``count`` calls or more: the work of one call, and merges."""
        merges = (count - 1) * self._cost.merge_seconds(self._shard_length)
        works = [self.candidate(ONE_CALL).work(direction) for direction in directions]
        return sum(float(work.compute.sum(axis=-1).max()) + merges for work in works)

    def candidate(self, split: StageSplit) -> StagingCandidate:
        """Returns the split with its cost."""
        if split not in self._candidates:
            self._candidates[split] = self.make_candidate(split)
        return self._candidates[split]

    def make_candidate(self, split: StageSplit) -> StagingCandidate:
        """Returns a new candidate."""
        return StagingCandidate(self.routing.stage(*split), split, self._shard_length, self._cost)

    def _best_cut(self, counts: Sequence[int], directions: Sequence[Pass]) -> StagingCandidate:
        """Returns the cut with the smallest interpolated time, the first of equals."""
        best, least = StageSplit(counts[0], _cuts(counts[0] - 1)[0]), np.inf
        for count, is_by_owner in itertools.product(counts, (False, True)):
            times = [self._interpolate(count, is_by_owner, direction) for direction in directions]
            seconds = np.sum(times, axis=0)
            index = int(seconds.argmin())
            if seconds[index] < least:
                best, least = StageSplit(count, _cuts(count - 1)[index], is_by_owner), seconds[index]
        return self.candidate(best)

    def _interpolate(self, count: int, is_by_owner: bool, direction: Pass) -> np.ndarray:
        """Returns the interpolated seconds of all cuts ``[C]``."""
        two = self.candidate(StageSplit(2, (1,))).work(direction).compute
        fixed = self._cost.merge_seconds(self._shard_length) + self._cost.latency_us * 1e-6
        remote = np.maximum(two[:, 1] - fixed, 0)
        shares = np.array(_cuts(count - 1))
        compute = np.empty((len(shares), len(two), count))
        compute[..., 0] = two[:, 0]
        compute[..., 1:] = remote[:, None] * shares[:, None] / _PARTS + fixed
        times = transfer_times(self.rows_of_cuts(count, is_by_owner), self._cost, direction)
        return schedule(Work(compute, *times)).seconds

    def rows_of_cuts(self, count: int, is_by_owner: bool) -> np.ndarray:
        """Returns the rows of all cuts on the busiest links: ``[C, num_transfers, 2]``."""
        key = (count, is_by_owner)
        if key not in self._cut_rows:
            traffic = self.candidate(StageSplit(1 + _PARTS, (1,) * _PARTS, is_by_owner)).traffic
            before = np.zeros((len(traffic), _PARTS + 1, *traffic.shape[2:]), np.int64)
            np.cumsum(traffic, axis=1, out=before[:, 1:])
            edges = np.cumsum([(0, *shares) for shares in _cuts(count - 1)], axis=1)
            self._cut_rows[key] = busiest_links(before[:, edges[:, 1:]] - before[:, edges[:, :-1]])
        return self._cut_rows[key]


def _is_cut(count: int) -> bool:
    """Returns whether there are several ways to cut the received keys for ``count`` calls."""
    return 2 < count <= _MOST_CUT_STAGES


@functools.cache
def _cuts(parts: int) -> list[tuple[int, ...]]:
    """Returns all ways to write ``_PARTS`` as a sum of ``parts`` positive numbers, the most equal first."""
    edges = [(0, *inner, _PARTS) for inner in itertools.combinations(range(1, _PARTS), parts - 1)]
    return sorted((tuple(np.diff(cut).tolist()) for cut in edges), key=max)
