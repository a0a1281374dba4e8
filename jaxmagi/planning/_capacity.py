"""Static sizes of a plan, rounded up so that different masks share one compilation."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..masks._validation import integer

_MINIMUM = 8
_SIZES = ("bands", "copies", "pair_rows", "output_rows")

SAME_STAGES = "give plan_context num_stages=plan.stage_counts of one of them, or an integer"
"""What to do about plans with different numbers of stages."""

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
        backward: the same of the backward pass, in plans that stage it on its own.
        num_stages: the plans' `ContextPlan.stage_counts`: a pair with ``backward``, else one integer. None
            goes with any.

    Raises:
        ValueError: a size is not an integer from 0 to 2**30, ``num_stages`` is neither None nor such an
            integer above zero or pair, or ``backward`` has a ``backward`` or ``num_stages``.
    """

    bands: int
    copies: int
    pair_rows: int
    output_rows: int
    backward: "PlanCapacity | None" = None
    num_stages: StageCounts | None = None

    def __post_init__(self) -> None:
        for name, value in self._sizes().items():
            integer(value, f"PlanCapacity.{name}")
        if self.backward is not None and not _is_plain(self.backward):
            raise ValueError(
                "PlanCapacity.backward must be None or a PlanCapacity without backward and num_stages, "
                f"but it is {self.backward!r}."
            )
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

    def bucketed(self) -> "PlanCapacity":
        """Each size rounded up to an eighth of an octave, and to 8 at least."""
        backward = None if self.backward is None else self.backward.bucketed()
        sizes = {name: bucket(size) for name, size in self._sizes().items()}
        return replace(self, **sizes, backward=backward)

    def union(self, other: "PlanCapacity") -> "PlanCapacity":
        """The larger of each size.

        Raises:
            ValueError: only one of the two has a ``backward``, or they differ in ``num_stages``.
        """
        self._check_same_passes(other)
        backward = self.backward and other.backward and self.backward.union(other.backward)
        sizes = {name: max(size, getattr(other, name)) for name, size in self._sizes().items()}
        return PlanCapacity(**sizes, backward=backward, num_stages=self.num_stages or other.num_stages)

    def require(self, needed: "PlanCapacity") -> None:
        """ValueError naming each size that is smaller than needed, or other numbers of stages."""
        self._check_same_passes(needed)
        short = self._shortages(needed, "")
        if self.backward is not None and needed.backward is not None:
            short += self.backward._shortages(needed.backward, "backward.")
        if short:
            raise ValueError(f"capacity is too small: {', '.join(short)}.")

    def _shortages(self, needed: "PlanCapacity", prefix: str) -> list[str]:
        sizes, needed_sizes = self._sizes(), needed._sizes()
        return [
            f"{prefix}{name}={size} (needs {needed_sizes[name]})"
            for name, size in sizes.items()
            if size < needed_sizes[name]
        ]

    def _check_same_passes(self, other: "PlanCapacity") -> None:
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


def counts_of_passes(num_stages: Any, name: str) -> list[int]:
    """One integer for both passes, or one for each of them."""
    if isinstance(num_stages, tuple) and len(num_stages) == 2:
        pairs = zip(num_stages, ("forward", "backward"), strict=True)
        return [integer(count, f"{name} of the {direction} pass", minimum=1) for count, direction in pairs]
    return [integer(num_stages, name, minimum=1)]


def _is_plain(capacity: Any) -> bool:
    """Whether it has nothing but sizes."""
    return isinstance(capacity, PlanCapacity) and capacity.backward is None and capacity.num_stages is None


def bucket(size: int) -> int:
    """``size`` rounded up to an eighth of an octave: at most 12.5 % more, 8 at least."""
    if size <= _MINIMUM:
        return _MINIMUM
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def resize_axis(array: np.ndarray, size: int, axis: int) -> np.ndarray:
    """A copy of ``array``, cut off or filled up with zeros along ``axis`` to ``size``."""
    kept = [slice(None)] * array.ndim
    kept[axis] = slice(size)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, max(0, size - array.shape[axis]))
    return frozen(np.pad(array[tuple(kept)], widths))


def used_length(used: np.ndarray) -> int:
    """One past the last index of the last axis that is used somewhere, from bool ``[..., n]``."""
    return int(1 + np.flatnonzero(used.reshape(-1, used.shape[-1]).any(axis=0)).max(initial=-1))


def frozen(array: np.ndarray) -> np.ndarray:
    """The array made read-only, because jax may alias it."""
    array.flags.writeable = False
    return array
