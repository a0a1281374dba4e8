"""Chooses numbers of attention calls, and one level or two, by the predicted time of a plan."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._checks import require_type
from ._capacity import PlanCapacity, StageCounts, counts_of_passes
from ._cost import CostModel
from ._overlap import OverlapSolver, StagingCandidate
from ._two_levels import TwoLevelSolver

_MOST_AUTO_STAGES = 4
# Two levels take memory for rows on their way, so they must save at least this part of the predicted time.
_LEAST_GAIN = 0.01

type NumStages = StageCounts | Literal["auto"]
"""The number of attention calls of a rank."""

type TwoLevels = bool | Literal["auto"]
"""Says whether rows cross to another host once and are sent on there."""


class Choices(NamedTuple):
    """Lists the alternatives from which the fastest is chosen.

    Attributes:
        passes: numbers of stages, for both passes together or for each of them.
        two_levels: False, True or both.
    """

    passes: list[list[int]]
    two_levels: list[bool]

    @classmethod
    def of(
        cls, num_stages: Any, two_levels: Any, capacity: PlanCapacity | None, cp_size: int, cost: CostModel
    ) -> "Choices":
        """Returns the choices of a user; ValueError if there are none."""
        if capacity is not None:
            require_type(capacity, PlanCapacity, "capacity")
        levels = _levels_to_try(two_levels, capacity, cp_size, cost.ranks_per_host)
        return cls(_stages_to_try(num_stages, capacity), levels)


def fastest(
    direct: OverlapSolver, choices: Choices, shard_length: int, cost: CostModel
) -> Sequence[StagingCandidate]:
    """Returns the fastest calls by prediction: one candidate for both passes, or one for each of them."""
    relayed = TwoLevelSolver(direct, shard_length, cost)
    if choices.two_levels == [True]:
        return _fastest_calls(relayed, choices.passes, cost)
    chosen = _fastest_calls(direct, choices.passes, cost)
    if True not in choices.two_levels:
        return chosen
    enough, passes = (1 - _LEAST_GAIN) * _seconds(chosen, cost), (cost.forward, cost.backward)
    may_pay = direct.least_seconds(1, passes) <= enough and relayed.saves_rows()
    if not may_pay or relayed.least_of_all(passes) > enough:
        return chosen
    other = _fastest_calls(relayed, choices.passes, cost)
    return other if _seconds(other, cost) <= enough else chosen


def _fastest_calls(
    solver: OverlapSolver, passes: list[list[int]], cost: CostModel
) -> Sequence[StagingCandidate]:
    if len(passes) == 1:
        return [solver.best(passes[0], (cost.forward, cost.backward))]
    forward, backward = (
        solver.best(counts, (direction,))
        for counts, direction in zip(passes, (cost.forward, cost.backward), strict=True)
    )
    is_one = forward is backward and len(passes[0]) > 1
    return [forward] if is_one else [forward, backward]


def _seconds(chosen: Sequence[StagingCandidate], cost: CostModel) -> float:
    """Returns the predicted time of both passes."""
    return chosen[0].seconds((cost.forward,)) + chosen[-1].seconds((cost.backward,))


def _stages_to_try(num_stages: Any, capacity: PlanCapacity | None) -> list[list[int]]:
    if isinstance(num_stages, str) and num_stages == "auto":
        if capacity is None:
            return [list(range(1, _MOST_AUTO_STAGES + 1))] * 2
        num_stages = _stages_of(capacity)
    passes = counts_of_passes(num_stages, 'num_stages (if not "auto")')
    if capacity is not None and capacity.num_stages and counts_of_passes(capacity.num_stages, "") != passes:
        raise ValueError(
            f"num_stages={num_stages}, but the capacity is for plans with num_stages={capacity.num_stages}: "
            'leave num_stages at "auto", or give a capacity without.'
        )
    return [[count] for count in passes]


def _stages_of(capacity: PlanCapacity) -> StageCounts:
    if capacity.num_stages is None:
        raise ValueError(
            'num_stages="auto" takes the numbers of stages of the plan whose capacity it gets, but '
            f"{capacity} has none: give num_stages as an integer, or the capacity of a plan."
        )
    return capacity.num_stages


def _levels_to_try(
    two_levels: Any, capacity: PlanCapacity | None, cp_size: int, ranks_per_host: int
) -> list[bool]:
    is_auto = isinstance(two_levels, str) and two_levels == "auto"
    if not is_auto and not isinstance(two_levels, bool | np.bool_):
        raise ValueError(f'two_levels must be True, False or "auto", but it is {two_levels!r}.')
    if capacity is None:
        levels = _auto_levels(cp_size, ranks_per_host) if is_auto else [bool(two_levels)]
    else:
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
