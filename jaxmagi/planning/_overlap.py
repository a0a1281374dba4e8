"""How many attention calls a plan makes, and which received keys each of them gets."""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._cost import CostModel, Pass
from ._schedule import Schedule, Work, count_tiles, schedule, transfer_times, work_of

if TYPE_CHECKING:
    from .._cpu import Routing, Staging

_PARTS = 12  # of a rank's cells with received keys, between which stages are cut
_MOST_CUT_STAGES = 4  # with more stages, all get equal parts


class Choice(NamedTuple):
    """How a pass is staged.

    Attributes:
        num_stages: attention calls of a rank.
        shares: of a rank's cells with received keys, for each transfer.
    """

    num_stages: int
    shares: tuple[int, ...]


class Staged:
    """A choice for one routing, and what it costs; everything is found when it is first asked for."""

    def __init__(self, routing: "Routing", choice: Choice, shard_length: int, cost: CostModel):
        self.choice = choice
        self.staging: Staging = routing.stage(*choice)
        self._shard_length, self._cost = shard_length, cost
        self._works: dict[Pass, Work] = {}

    @functools.cached_property
    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of all ranks and stages, int32 ``[n, 6]``, and how many each has, ``[cp, num_stages]``."""
        return self.staging.bands()

    @functools.cached_property
    def traffic(self) -> np.ndarray:
        """Rows int64 ``[cp, num_transfers, 2, 2]``; see `jaxmagi.planning._schedule.work_of`."""
        return self.staging.traffic(self._cost.ranks_per_host)

    def work(self, direction: Pass) -> Work:
        """What ranks compute and transfer."""
        if direction not in self._works:
            tiles = self._tiles(direction)
            self._works[direction] = work_of(tiles, self.traffic, self._shard_length, self._cost, direction)
        return self._works[direction]

    def seconds(self, directions: Sequence[Pass]) -> float:
        """The predicted time of all directions together."""
        return sum(float(schedule(self.work(direction)).seconds) for direction in directions)

    def _tiles(self, direction: Pass) -> np.ndarray:
        """Full and partial tiles: int64 ``[cp, num_stages, 2]``."""
        bands, per_stage = self.bands
        before = np.zeros((len(bands) + 1, 2), np.int64)
        np.cumsum(count_tiles(bands, direction), axis=0, out=before[1:])
        ends = np.cumsum(per_stage.reshape(-1))
        return (before[ends] - before[ends - per_stage.reshape(-1)]).reshape(*per_stage.shape, 2)


class OverlapSolver:
    """Finds the staging whose slowest rank is done first, under a model of the machine.

    It tries every number of stages that it is given and, for three and four, all ways to cut the received
    keys of every rank at the same twelfths of their cells. Ways to cut are compared by interpolation between
    these twelfths, numbers of stages by counts of the kernels' tiles.
    """

    def __init__(self, routing: "Routing", shard_length: int, cost: CostModel):
        self._routing, self._shard_length, self._cost = routing, shard_length, cost
        self._staged: dict[Choice, Staged] = {}

    def best(self, counts: Sequence[int], directions: Sequence[Pass]) -> Staged:
        """The staging with the smallest predicted time of all directions together; the first of equals."""
        first = best = self._stage(counts[0], directions)
        for count in counts[1:]:
            if best.seconds(directions) <= self._least_seconds(first, count, directions):
                return best
            other = self._stage(count, directions)
            if other.seconds(directions) < best.seconds(directions):
                best = other
        return best

    def _least_seconds(self, staged: Staged, count: int, directions: Sequence[Pass]) -> float:
        """A bound for ``count`` calls or more: the work of this staging, which has fewer, and more merges."""
        merges = (count - staged.choice.num_stages) * self._cost.merge_seconds(self._shard_length)
        works = [staged.work(direction) for direction in directions]
        return sum(float(work.compute.sum(axis=-1).max()) + merges for work in works)

    def _stage(self, count: int, directions: Sequence[Pass]) -> Staged:
        """The best of the stagings with so many calls."""
        transfers = max(1, count - 1)
        if not 2 <= transfers < _MOST_CUT_STAGES:
            return self._of(Choice(count, (1,) * transfers))
        edges = _cuts(transfers)
        seconds = sum(self._interpolate(edges, direction).seconds for direction in directions)
        return self._of(Choice(count, tuple(np.diff(edges[np.argmin(seconds)]).tolist())))

    def _of(self, choice: Choice) -> Staged:
        if choice not in self._staged:
            self._staged[choice] = Staged(self._routing, choice, self._shard_length, self._cost)
        return self._staged[choice]

    def _interpolate(self, edges: np.ndarray, direction: Pass) -> Schedule:
        """The schedules of cuts ``[C, num_transfers + 1]``, by the work between the finest possible ones."""
        two = self._of(Choice(2, (1,))).work(direction).compute
        fixed = self._cost.merge_seconds(self._shard_length) + self._cost.latency_us * 1e-6
        remote = np.maximum(two[:, 1] - fixed, 0)
        compute = np.empty((len(edges), len(two), edges.shape[1]))
        compute[..., 0] = two[:, 0]
        compute[..., 1:] = remote[:, None] * np.diff(edges, axis=1)[:, None] / _PARTS + fixed
        traffic = self._of(Choice(1 + _PARTS, (1,) * _PARTS)).traffic
        before = np.zeros((len(traffic), _PARTS + 1, *traffic.shape[2:]), np.int64)
        np.cumsum(traffic, axis=1, out=before[:, 1:])
        rows = np.moveaxis(np.diff(before[:, edges], axis=2), 0, -3)  # [C, num_transfers, cp, 2, 2]
        return schedule(Work(compute, *transfer_times(rows, self._cost, direction)))


@functools.cache
def _cuts(parts: int) -> np.ndarray:
    """All ways to cut ``0 .. _PARTS`` into so many parts, the most equal first: int ``[C, parts + 1]``."""
    cuts = [(0, *inner, _PARTS) for inner in itertools.combinations(range(1, _PARTS), parts - 1)]
    cuts.sort(key=lambda edges: max(np.diff(edges)))
    return np.array(cuts)
