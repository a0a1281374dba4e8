"""Plans with two levels: the time of transfers in which rows cross to another host once."""

import functools
from collections.abc import Sequence

import numpy as np

from ._capacity import bucket
from ._cost import CostModel, Pass
from ._overlap import ONE_CALL, OverlapSolver, StageSplit, StagingCandidate
from ._relay import Copies, relay
from ._schedule import busiest_links
from ._spec import RelayedSpec


class TwoLevelCandidate(StagingCandidate):
    """A split whose transfers go across all ranks, then inside hosts; those of `StagingCandidate` go once."""

    def __init__(self, direct: StagingCandidate):
        super().__init__(direct.staging, direct.split, direct.shard_length, direct.cost)
        self._direct = direct

    @functools.cached_property
    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """The bands of the split with one step, which computes the same."""
        return self._direct.bands

    def tiles(self, direction: Pass) -> np.ndarray:
        """Returns the tiles of the split with one step, which computes the same."""
        return self._direct.tiles(direction)

    @functools.cached_property
    def busiest(self) -> np.ndarray:
        """Rows on the busiest links: int64 ``[num_transfers, 2, 2]``, of the step across all ranks first."""
        traffic = [[self._traffic(step) for step in steps] for steps in self._steps]
        return busiest_links(np.moveaxis(np.array(traffic), 2, 0))

    def transfers(self) -> list[RelayedSpec]:
        """Returns the transfers, each with static sizes of its own."""
        sizes = {"input_rows": self.shard_length, "output_rows": bucket(self.staging.most_received())}
        hosts = self.cost.ranks_per_host
        return [RelayedSpec.of(*steps, self._cp_size, hosts, **sizes) for steps in self._steps]

    @functools.cached_property
    def _steps(self) -> list[tuple[Copies, Copies]]:
        """The copies of both steps of each transfer."""
        tables = (self.staging.transfer_tables(index)[0] for index in range(len(self.split.shares)))
        return [
            relay(_copies(table), self._cp_size, self.cost.ranks_per_host, self.shard_length)
            for table in tables
        ]

    @property
    def _cp_size(self) -> int:
        return len(self.bands[1])

    def _traffic(self, step: Copies) -> np.ndarray:
        """Returns rows sent and received, within a host and between hosts: int64 ``[cp, 2, 2]``."""
        hosts = [rank // self.cost.ranks_per_host for rank in (step.src, step.dst)]
        levels = [(step.src != step.dst) & (hosts[0] == hosts[1]), hosts[0] != hosts[1]]
        traffic = [
            [np.bincount(rank, weights=step.length * level, minlength=self._cp_size) for level in levels]
            for rank in (step.src, step.dst)
        ]
        return np.moveaxis(np.array(traffic), 2, 0).astype(np.int64)


class TwoLevelSolver(OverlapSolver):
    """Finds the split with two levels whose slowest rank is done first; `OverlapSolver` has one level.

    To interpolate between cuts, rows of each part are taken to cross less often in the same proportion as
    those of one call.
    """

    def __init__(self, direct: OverlapSolver, shard_length: int, cost: CostModel):
        super().__init__(direct.routing, shard_length, cost)
        self._direct = direct

    def make_candidate(self, split: StageSplit) -> TwoLevelCandidate:
        return TwoLevelCandidate(self._direct.candidate(split))

    def rows_of_cuts(self, count: int, is_by_owner: bool) -> np.ndarray:
        rows = np.array(self._direct.rows_of_cuts(count, is_by_owner), np.float64)
        (one,), (two, _) = (solver.candidate(ONE_CALL).busiest[0] for solver in (self._direct, self))
        rows[..., 1] *= two[1] / max(one[1], 1)
        return rows

    def saves_rows(self) -> bool:
        """Returns whether the busiest rank sends or receives fewer rows between hosts, all in one call."""
        one, two = (solver.candidate(ONE_CALL).busiest[0, 0, 1] for solver in (self._direct, self))
        return bool(two < one)

    def least_of_all(self, directions: Sequence[Pass]) -> float:
        """Returns a lower bound of the time of any split, by way of one call."""
        one_call = self.candidate(ONE_CALL)
        return sum(min(one_call.seconds([each]), self.least_seconds(2, [each])) for each in directions)


def _copies(sends: np.ndarray) -> Copies:
    """Returns the copies of a table of `Staging.transfer_tables`."""
    src, dst, _, row, length, dst_row = sends.astype(np.int64).T
    return Copies(src, dst, row, dst_row, length)
