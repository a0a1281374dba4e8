"""Static sizes of a plan, rounded up so that different masks share one compilation."""

from dataclasses import dataclass

import numpy as np

from .._checks import integer, require_type

_MINIMUM = 8
_SIZES = ("bands", "copies", "pair_rows", "output_rows")

SAME_LEVELS = "give plan_context two_levels=plan.two_levels of one of them, and the same cost.ranks_per_host"
"""The advice for plans of which only some have transfers in two steps, or for different hosts."""

MAX_TABLE_BYTES = 2**32
"""The most bytes that the tables of a plan may be padded to."""


@dataclass(frozen=True)
class PlanCapacity:
    """The static sizes of a plan's arrays.

    Plans of one `ContextPlan.capacity`, length and shard length share one compilation.

    Attributes:
        bands: bands per rank.
        copies: row ranges per rank in the tables of the transfer.
        pair_rows: rows that one rank can send another.
        output_rows: rows that one rank can receive.
        across: sizes of the step across all ranks, in plans with two levels (``bands`` is 0). The other sizes
            are then those of the step inside hosts.
        ranks_per_host: the plans' `ContextPlan.ranks_per_host`, with ``across`` only. None matches any.

    Raises:
        ValueError: a size is not an integer from 0 to 2**30, ``across`` has anything but sizes, or
            ``ranks_per_host`` is there without ``across`` or no integer above zero.
    """

    bands: int
    copies: int
    pair_rows: int
    output_rows: int
    across: "PlanCapacity | None" = None
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        for name, value in self._sizes().items():
            integer(value, f"PlanCapacity.{name}")
        has_sizes_alone = isinstance(self.across, PlanCapacity) and self.across.across is None
        if self.across is not None and not has_sizes_alone:
            raise ValueError(
                "PlanCapacity.across must be None or a PlanCapacity without across and ranks_per_host, but "
                f"it is {self.across!r}."
            )
        if self.ranks_per_host is not None:
            integer(self.ranks_per_host, "PlanCapacity.ranks_per_host", minimum=1)
            if self.across is None:
                raise ValueError(f"PlanCapacity.ranks_per_host={self.ranks_per_host} needs across.")

    def _sizes(self) -> dict[str, int]:
        return {name: vars(self)[name] for name in _SIZES}

    def union(self, other: "PlanCapacity") -> "PlanCapacity":
        """Returns the larger of each size.

        Raises:
            ValueError: only one of the two has an ``across``, or they differ in ``ranks_per_host``.
        """
        self._check_same_kind(other)
        sizes = {name: max(size, getattr(other, name)) for name, size in self._sizes().items()}
        across = self.across and other.across and self.across.union(other.across)
        hosts = self.ranks_per_host or other.ranks_per_host
        return PlanCapacity(**sizes, across=across, ranks_per_host=hosts)

    def require(self, needed: "PlanCapacity") -> None:
        """Raises ValueError naming each size that is smaller than needed, or other levels."""
        self._check_same_kind(needed)
        short = self._shortages(needed, "")
        if short:
            raise ValueError(
                f"capacity is too small: {', '.join(short)}. PlanCapacity.union makes one that is large "
                "enough for both."
            )

    def check_tables(self, cp_size: int, plans: int = 1) -> None:
        """Raises ValueError if tables of these sizes take more than 2**32 bytes.

        Args:
            cp_size: the number of ranks.
            plans: how many plans are stacked.
        """
        copies = self.copies + (self.across.copies if self.across else 0)
        taken = 4 * plans * cp_size * (self.bands * 6 + copies * 9)
        if taken > MAX_TABLE_BYTES:
            raise ValueError(
                f"capacity is too large: with {self}, the tables of {cp_size} ranks take {taken} bytes, more "
                f"than {MAX_TABLE_BYTES}."
            )

    def _shortages(self, needed: "PlanCapacity", prefix: str) -> list[str]:
        needed_sizes = needed._sizes()
        short = [
            f"{prefix}{name}={size} (needs {needed_sizes[name]})"
            for name, size in self._sizes().items()
            if size < needed_sizes[name]
        ]
        if self.across is not None and needed.across is not None:
            short += self.across._shortages(needed.across, f"{prefix}across.")
        return short

    def _check_same_kind(self, other: "PlanCapacity") -> None:
        require_type(other, PlanCapacity, "other")
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
