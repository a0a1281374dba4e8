"""Static sizes of a plan, rounded up so that different masks share one compilation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._checks import integer, require_type

_MINIMUM = 8
_SIZES = ("bands", "copies", "pair_rows", "output_rows")
_PARTS = ("backward", "across")
_SAME = ("num_stages", "ranks_per_host")

SAME_STAGES = "give plan_context num_stages=plan.stage_counts of one of them, or an integer"
"""The advice for plans with different numbers of stages, in messages of errors."""

SAME_LEVELS = "give plan_context two_levels=plan.two_levels of one of them, and the same cost.ranks_per_host"
"""The advice for plans of which only some have transfers in two steps, or for different hosts."""

MAX_RANKS = 4096
"""The most ranks of a plan: its tables have an entry for about every pair of ranks that exchange rows."""

MAX_STAGES = 256
"""The most attention calls of a rank in a pass: each is compiled, and has tables of its own."""

MAX_TABLE_BYTES = 2**32
"""The most bytes that the tables of a plan may be padded to."""

type StageCounts = int | tuple[int, int]
"""Attention calls of a rank: in both passes, or in the forward and in the backward pass."""


@dataclass(frozen=True)
class PlanCapacity:
    """The static sizes of a plan's arrays.

    Plans of one `ContextPlan.capacity`, length and shard length share one compilation.

    Attributes:
        bands: bands per rank and stage.
        copies: row ranges per rank in the tables of a transfer.
        pair_rows: rows that one rank can send another in one transfer.
        output_rows: rows that one rank can receive in one transfer.
        backward: sizes of the backward pass, in plans where it has stages of its own.
        num_stages: the plans' `ContextPlan.stage_counts`: a pair with ``backward``, otherwise one integer.
            None matches any.
        across: sizes of the step across all ranks, in plans with two levels (``bands`` is 0). The other sizes
            are then those of the step inside hosts.
        ranks_per_host: the plans' `ContextPlan.ranks_per_host`, with ``across`` only. None matches any.

    Raises:
        ValueError: a size is not an integer from 0 to 2**30, ``num_stages`` is neither None nor an integer
            from 1 to 256 or a pair of such, ``backward`` has a ``backward`` or ``num_stages``, ``across`` has
            anything but sizes, or ``ranks_per_host`` is there without ``across`` or no integer above zero.
    """

    bands: int
    copies: int
    pair_rows: int
    output_rows: int
    backward: "PlanCapacity | None" = None
    num_stages: StageCounts | None = None
    across: "PlanCapacity | None" = None
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        for name, value in self._sizes().items():
            integer(value, f"PlanCapacity.{name}")
        _check_part("backward", self.backward, without=("backward", "num_stages"))
        _check_part("across", self.across, without=("backward", "num_stages", "across", "ranks_per_host"))
        if self.ranks_per_host is not None:
            integer(self.ranks_per_host, "PlanCapacity.ranks_per_host", minimum=1)
            if self.across is None:
                raise ValueError(f"PlanCapacity.ranks_per_host={self.ranks_per_host} needs across.")
        if self.num_stages is None:
            return
        passes = counts_of_passes(self.num_stages, "PlanCapacity.num_stages")
        if (len(passes) > 1) != (self.backward is not None):
            raise ValueError(
                "PlanCapacity.num_stages must be a pair with backward and an integer without, "
                f"but num_stages={self.num_stages} and backward={self.backward}."
            )

    def _sizes(self) -> dict[str, int]:
        return {name: vars(self)[name] for name in _SIZES}

    def _parts(self) -> "dict[str, PlanCapacity]":
        return {name: vars(self)[name] for name in _PARTS if vars(self)[name] is not None}

    def bucketed(self) -> "PlanCapacity":
        """Returns each size rounded up to an eighth of an octave, and to 8 at least."""
        sizes = {name: bucket(size) for name, size in self._sizes().items()}
        return replace(self, **sizes, **{name: part.bucketed() for name, part in self._parts().items()})

    def union(self, other: "PlanCapacity") -> "PlanCapacity":
        """Returns the larger of each size.

        Raises:
            ValueError: only one of the two has a ``backward``, or an ``across``, or they differ in
                ``num_stages`` or ``ranks_per_host``.
        """
        self._check_same_kind(other)
        sizes = {name: max(size, getattr(other, name)) for name, size in self._sizes().items()}
        parts: Any = {name: part.union(getattr(other, name)) for name, part in self._parts().items()}
        same: Any = {name: getattr(self, name) or getattr(other, name) for name in _SAME}
        return PlanCapacity(**sizes, **parts, **same)

    def require(self, needed: "PlanCapacity") -> None:
        """Raises ValueError naming each size that is smaller than needed, or other numbers of stages."""
        self._check_same_kind(needed)
        short = self._shortages(needed, "")
        if short:
            raise ValueError(
                f"capacity is too small: {', '.join(short)}. PlanCapacity.union makes one that is large "
                "enough for both."
            )

    def check_tables(self, cp_size: int, passes: Sequence[int], plans: int = 1) -> None:
        """Raises ValueError if tables of these sizes take more than 2**32 bytes.

        Args:
            cp_size: the number of ranks.
            passes: the number of stages of both passes, or of each.
            plans: how many plans are stacked.
        """
        parts = (self, self.backward or self)
        numbers = [part._numbers_of_rank(count) for part, count in zip(parts, passes, strict=False)]
        taken = 4 * plans * cp_size * sum(numbers)
        if taken > MAX_TABLE_BYTES:
            raise ValueError(
                f"capacity is too large: with {self}, the tables of {cp_size} ranks and num_stages="
                f"{passes[0] if len(passes) == 1 else tuple(passes)} take {taken} bytes, more than "
                f"{MAX_TABLE_BYTES}."
            )

    def _numbers_of_rank(self, num_stages: int) -> int:
        """Returns how many numbers the tables of a rank and pass have."""
        copies = self.copies + (self.across.copies if self.across else 0)
        return num_stages * self.bands * 6 + max(1, num_stages - 1) * copies * 9

    def _shortages(self, needed: "PlanCapacity", prefix: str) -> list[str]:
        needed_sizes, needed_parts = needed._sizes(), needed._parts()
        short = [
            f"{prefix}{name}={size} (needs {needed_sizes[name]})"
            for name, size in self._sizes().items()
            if size < needed_sizes[name]
        ]
        for name, part in self._parts().items():
            short += part._shortages(needed_parts[name], f"{prefix}{name}.")
        return short

    def _check_same_kind(self, other: "PlanCapacity") -> None:
        require_type(other, PlanCapacity, "other")
        if self.num_stages and other.num_stages and self.num_stages != other.num_stages:
            raise ValueError(
                f"plans of num_stages={self.num_stages} and num_stages={other.num_stages} share no "
                f"compilation: {SAME_STAGES}."
            )
        if (self.backward is None) != (other.backward is None):
            raise ValueError(
                "capacities of plans that stage the backward pass on its own do not go with others: "
                f"backward is {self.backward} and {other.backward}."
            )
        if (self.across is None) != (other.across is None):
            raise ValueError(
                "capacities of plans with two levels do not go with others: "
                f"{SAME_LEVELS}. across is {self.across} and {other.across}."
            )
        if self.ranks_per_host and other.ranks_per_host and self.ranks_per_host != other.ranks_per_host:
            raise ValueError(
                f"plans of ranks_per_host={self.ranks_per_host} and ranks_per_host={other.ranks_per_host} "
                f"share no compilation: {SAME_LEVELS}."
            )
        if self.backward is not None and other.backward is not None:
            self.backward._check_same_kind(other.backward)


def counts_of_passes(num_stages: Any, name: str) -> list[int]:
    """Returns one integer for both passes, or one for each of them."""
    if isinstance(num_stages, tuple) and len(num_stages) == 2:
        pairs = zip(num_stages, ("forward", "backward"), strict=True)
        return [_stage_count(count, f"{name} of the {direction} pass") for count, direction in pairs]
    return [_stage_count(num_stages, name)]


def _stage_count(count: Any, name: str) -> int:
    return integer(count, name, minimum=1, maximum=MAX_STAGES)


def checked_ranks(cp_size: Any) -> int:
    """Returns the number of ranks as an int; ValueError unless it is one from 1 to 4096."""
    return integer(cp_size, "cp_size", minimum=1, maximum=MAX_RANKS)


def _check_part(name: str, part: Any, without: tuple[str, ...]) -> None:
    """Raises ValueError unless a part is None or a capacity that leaves some fields at None."""
    if part is None:
        return
    if not isinstance(part, PlanCapacity) or any(vars(part)[field] is not None for field in without):
        raise ValueError(
            f"PlanCapacity.{name} must be None or a PlanCapacity without {', '.join(without[:-1])} and "
            f"{without[-1]}, but it is {part!r}."
        )


def bucket(size: int) -> int:
    """Returns ``size`` rounded up to an eighth of an octave: at most 12.5 % more, 8 at least."""
    if size <= _MINIMUM:
        return _MINIMUM
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def resize_axis(array: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Returns a copy of ``array``, cut off or filled up with zeros along ``axis`` to ``size``."""
    kept = [slice(None)] * array.ndim
    kept[axis] = slice(size)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, max(0, size - array.shape[axis]))
    return frozen(np.pad(array[tuple(kept)], widths))


def used_length(used: np.ndarray) -> int:
    """Returns one past the last index of the last axis that is used anywhere, from bool ``[..., n]``."""
    return int(1 + np.flatnonzero(used.reshape(-1, used.shape[-1]).any(axis=0)).max(initial=-1))


def frozen(array: np.ndarray) -> np.ndarray:
    """Returns the array, made read-only, because jax may alias it."""
    array.flags.writeable = False
    return array
