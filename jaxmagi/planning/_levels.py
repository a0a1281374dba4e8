"""One level or two: the ways in which rows may travel, their predicted times, and the choice between them."""

import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._checks import require_type
from ._capacity import PlanCapacity, bucket
from ._cost import CostModel, Pass
from ._ranges import Copies
from ._relay import relay
from ._schedule import busiest_links, schedule, work_of
from ._spec import GroupCastSpec, RelayedSpec, spec_of_tables
from ._tiles import Tiles, tiles_of

if TYPE_CHECKING:
    from .._cpu import Routing

# Two levels take memory for rows on their way, so they must save at least this part of the predicted time.
_LEAST_GAIN = 0.01

type LevelChoice = bool | Literal["auto"]
"""Says whether rows cross to another host once and are sent on there."""


class OneLevel:
    """Rows go directly to the ranks that need them. What is computed is computed when it is first used."""

    def __init__(self, routing: "Routing", shard_length: int, cost: CostModel):
        self.routing, self.shard_length, self.cost = routing, shard_length, cost

    @functools.cached_property
    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """Bands of all ranks, int32 ``[n, 6]``, and how many each has, ``[cp]``."""
        return self.routing.bands()

    @property
    def cp_size(self) -> int:
        return len(self.bands[1])

    @functools.cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The sends and the receives of all ranks, as `spec_of_tables` takes them."""
        return self.routing.transfer_tables()

    @functools.cached_property
    def busiest(self) -> np.ndarray:
        """Rows on the busiest links of each step: int64 ``[steps, 2]``."""
        return busiest_links(self.routing.traffic(self.cost.ranks_per_host))[None]

    @functools.cached_property
    def output_rows(self) -> int:
        """The most rows that a rank receives, rounded up."""
        return bucket(self.routing.most_received())

    @functools.cached_property
    def tiles(self) -> dict[Pass, Tiles]:
        """The tiles of each pass."""
        passes = self.cost.forward, self.cost.backward
        return {each: tiles_of(*self.bands, self.shard_length, each) for each in passes}

    def seconds(self) -> float:
        """Returns the predicted time of both passes."""
        return sum(
            schedule(work_of(tiles, self.busiest, self.cost, direction)).seconds
            for direction, tiles in self.tiles.items()
        )

    def transfer(self) -> GroupCastSpec | RelayedSpec:
        """Returns the transfer, with static sizes that are rounded up."""
        sends, receives = self.tables
        return spec_of_tables(sends, receives, self.cp_size, self.shard_length, self.output_rows)


class TwoLevels(OneLevel):
    """Rows cross to another host once, across all ranks, and are sent on inside hosts."""

    def __init__(self, direct: OneLevel):
        super().__init__(direct.routing, direct.shard_length, direct.cost)
        self._direct = direct

    @functools.cached_property
    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """The bands with one level, where ranks compute the same."""
        return self._direct.bands

    @functools.cached_property
    def tiles(self) -> dict[Pass, Tiles]:
        """The tiles with one level, where ranks compute the same."""
        return self._direct.tiles

    @functools.cached_property
    def busiest(self) -> np.ndarray:
        """Rows on the busiest links: int64 ``[2, 2]``, of the step across all ranks first."""
        sizes = self.cp_size, self.cost.ranks_per_host
        return np.stack([busiest_links(step.traffic(*sizes)) for step in self._steps])

    def saves_rows(self) -> bool:
        """Returns whether the busiest rank sends or receives fewer rows between hosts."""
        return bool(self.busiest[0, 1] < self._direct.busiest[0, 1])

    def transfer(self) -> RelayedSpec:
        across, inside = self._steps
        hosts = self.cost.ranks_per_host
        return RelayedSpec.of(across, inside, self.cp_size, hosts, self.shard_length, self.output_rows)

    @functools.cached_property
    def _steps(self) -> tuple[Copies, Copies]:
        """The copies of both steps."""
        sends = self._direct.tables[0]
        copies = Copies.of_entries(sends[:, 0], sends[:, 1:])
        return relay(copies, self.cp_size, self.cost.ranks_per_host, self.shard_length)


def fastest(direct: OneLevel, levels: list[bool]) -> OneLevel:
    """Returns the fastest of the levels to try by prediction: False for one, True for two."""
    if levels == [False]:
        return direct
    relayed = TwoLevels(direct)
    if levels == [True]:
        return relayed
    pays = relayed.saves_rows() and relayed.seconds() <= (1 - _LEAST_GAIN) * direct.seconds()
    return relayed if pays else direct


def levels_to_try(
    two_levels: Any, capacity: PlanCapacity | None, cp_size: int, ranks_per_host: int
) -> list[bool]:
    """Returns the levels that a user's choice leaves; ValueError if there are none."""
    is_auto = isinstance(two_levels, str) and two_levels == "auto"
    if not is_auto and not isinstance(two_levels, bool | np.bool_):
        raise ValueError(f'two_levels must be True, False or "auto", but it is {two_levels!r}.')
    if capacity is None:
        levels = _auto_levels(cp_size, ranks_per_host) if is_auto else [bool(two_levels)]
    else:
        require_type(capacity, PlanCapacity, "capacity")
        levels = [_level_of(two_levels, is_auto, capacity, ranks_per_host)]
    if True in levels and cp_size % ranks_per_host:
        raise ValueError(
            f"two levels need whole hosts, but cp_size={cp_size} is no multiple of "
            f"cost.ranks_per_host={ranks_per_host}."
        )
    return levels


def _auto_levels(cp_size: int, ranks_per_host: int) -> list[bool]:
    has_hosts = cp_size > ranks_per_host and cp_size % ranks_per_host == 0
    return [False, True] if has_hosts else [False]


def _level_of(two_levels: Any, is_auto: bool, capacity: PlanCapacity, ranks_per_host: int) -> bool:
    """Returns whether plans of a capacity have two levels."""
    level = capacity.across is not None
    if not is_auto and bool(two_levels) != level:
        raise ValueError(
            f"two_levels={bool(two_levels)}, but the capacity is for plans with two_levels={level}: leave "
            'two_levels at "auto", or give the capacity of such a plan.'
        )
    if capacity.ranks_per_host not in (None, ranks_per_host):
        raise ValueError(
            f"the capacity is for plans with ranks_per_host={capacity.ranks_per_host}, but "
            f"cost.ranks_per_host={ranks_per_host}."
        )
    return level
