"""How many attention calls a plan makes, and which received keys each of them gets."""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._cost import CostModel, Pass
from ._schedule import Work, busiest_links, count_tiles, schedule, transfer_times, work_of

if TYPE_CHECKING:
    from .._cpu import Routing, Staging

_PARTS = 8  # of a rank's cells with received keys, between which stages are cut
_MOST_CUT_STAGES = 4  # with more stages, all get equal parts


class Choice(NamedTuple):
    """How a pass is staged.

    Attributes:
        num_stages: attention calls of a rank.
        shares: of a rank's cells with received keys, for each transfer.
        is_by_owner: whether a transfer brings the keys of some ranks, counted from the receiving one, instead
            of consecutive keys.
    """

    num_stages: int
    shares: tuple[int, ...]
    is_by_owner: bool = False


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
        """Rows int64 ``[cp, num_transfers, 2, 2]``; see `jaxmagi.planning._schedule.busiest_links`."""
        return self.staging.traffic(self._cost.ranks_per_host)

    @functools.cached_property
    def _busiest(self) -> np.ndarray:
        """Rows on the busiest links: int64 ``[num_transfers, 2]``."""
        return busiest_links(self.traffic)

    def work(self, direction: Pass) -> Work:
        """What ranks compute and transfer."""
        if direction not in self._works:
            tiles = count_tiles(*self.bands, direction)
            self._works[direction] = work_of(tiles, self._busiest, self._shard_length, self._cost, direction)
        return self._works[direction]

    def seconds(self, directions: Sequence[Pass]) -> float:
        """The predicted time of all directions together."""
        return sum(float(schedule(self.work(direction)).seconds) for direction in directions)


class OverlapSolver:
    """Finds the staging whose slowest rank is done first, under a model of the machine.

    For one call, two and more than four there is one staging. For three and four it tries all ways to cut the
    received keys of every rank at the same eighths of their cells, in the order of the keys and by owner,
    and compares them by interpolation between these eighths. The winner is compared with one call and two
    calls by counts of the kernels' tiles.
    """

    def __init__(self, routing: "Routing", shard_length: int, cost: CostModel):
        self._routing, self._shard_length, self._cost = routing, shard_length, cost
        self._staged: dict[Choice, Staged] = {}
        self._cut_rows: dict[tuple[int, bool], np.ndarray] = {}

    def best(self, counts: Sequence[int], directions: Sequence[Pass]) -> Staged:
        """The staging with the smallest predicted time of all directions together; the first of equals."""
        simple = [count for count in counts if not _is_cut(count)]
        cut = [count for count in counts if _is_cut(count)]
        best, least = None, np.inf
        for count in simple:
            staged = self._of(Choice(count, (1,) * max(1, count - 1)))
            seconds = staged.seconds(directions)
            if seconds < least:
                best, least = staged, seconds
        if cut and least > self._least_seconds(min(cut), directions):
            staged = self._best_cut(cut, directions)
            if best is None or staged.seconds(directions) < least:
                best = staged
        assert best is not None
        return best

    def _least_seconds(self, count: int, directions: Sequence[Pass]) -> float:
        """A bound for ``count`` calls or more: the work of one, and merges."""
        merges = (count - 1) * self._cost.merge_seconds(self._shard_length)
        works = [self._of(Choice(1, (1,))).work(direction) for direction in directions]
        return sum(float(work.compute.sum(axis=-1).max()) + merges for work in works)

    def _of(self, choice: Choice) -> Staged:
        if choice not in self._staged:
            self._staged[choice] = Staged(self._routing, choice, self._shard_length, self._cost)
        return self._staged[choice]

    def _best_cut(self, counts: Sequence[int], directions: Sequence[Pass]) -> Staged:
        """The cut with the smallest interpolated time; the first of equals."""
        best, least = Choice(counts[0], _cuts(counts[0] - 1)[0]), np.inf
        for count, is_by_owner in itertools.product(counts, (False, True)):
            times = [self._interpolate(count, is_by_owner, direction) for direction in directions]
            seconds = np.sum(times, axis=0)
            index = int(seconds.argmin())
            if seconds[index] < least:
                best, least = Choice(count, _cuts(count - 1)[index], is_by_owner), seconds[index]
        return self._of(best)

    def _interpolate(self, count: int, is_by_owner: bool, direction: Pass) -> np.ndarray:
        """Predicted seconds of all cuts ``[C]``, by the work between the finest possible ones."""
        two = self._of(Choice(2, (1,))).work(direction).compute
        fixed = self._cost.merge_seconds(self._shard_length) + self._cost.latency_us * 1e-6
        remote = np.maximum(two[:, 1] - fixed, 0)
        shares = np.array(_cuts(count - 1))
        compute = np.empty((len(shares), len(two), count))
        compute[..., 0] = two[:, 0]
        compute[..., 1:] = remote[:, None] * shares[:, None] / _PARTS + fixed
        times = transfer_times(self._rows_of_cuts(count, is_by_owner), self._cost, direction)
        return schedule(Work(compute, *times)).seconds

    def _rows_of_cuts(self, count: int, is_by_owner: bool) -> np.ndarray:
        """Rows on the busiest links: int64 ``[C, num_transfers, 2]``."""
        key = (count, is_by_owner)
        if key not in self._cut_rows:
            traffic = self._of(Choice(1 + _PARTS, (1,) * _PARTS, is_by_owner)).traffic
            before = np.zeros((len(traffic), _PARTS + 1, *traffic.shape[2:]), np.int64)
            np.cumsum(traffic, axis=1, out=before[:, 1:])
            edges = np.cumsum([(0, *shares) for shares in _cuts(count - 1)], axis=1)
            self._cut_rows[key] = busiest_links(before[:, edges[:, 1:]] - before[:, edges[:, :-1]])
        return self._cut_rows[key]


def _is_cut(count: int) -> bool:
    """Whether there are several ways to cut the received keys for so many calls."""
    return 2 < count <= _MOST_CUT_STAGES


@functools.cache
def _cuts(parts: int) -> list[tuple[int, ...]]:
    """All ways to cut ``_PARTS`` into so many parts, the most equal first: the sizes of the parts."""
    edges = [(0, *inner, _PARTS) for inner in itertools.combinations(range(1, _PARTS), parts - 1)]
    return sorted((tuple(np.diff(cut).tolist()) for cut in edges), key=max)
