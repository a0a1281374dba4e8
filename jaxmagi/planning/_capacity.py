"""Static sizes of a plan, rounded up so that different masks share one compilation."""

from dataclasses import dataclass, fields

import numpy as np

from ..masks._validation import integer

_MINIMUM = 8


@dataclass(frozen=True)
class PlanCapacity:
    """The static sizes of a plan's arrays.

    Plans of the same capacity, length and shard length share one compilation.

    Attributes:
        bands: bands per rank and stage.
        copies: row ranges per rank in the tables of a transfer.
        pair_rows: rows that one rank can send another in one transfer.
        output_rows: rows that one rank can receive in one transfer.

    Raises:
        ValueError: a size is not an integer from 0 to 2**30.
    """

    bands: int
    copies: int
    pair_rows: int
    output_rows: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            integer(value, f"PlanCapacity.{name}")

    def bucketed(self) -> "PlanCapacity":
        """Each size rounded up to an eighth of an octave, and to 8 at least."""
        return PlanCapacity(*(bucket(getattr(self, field.name)) for field in fields(self)))

    def union(self, other: "PlanCapacity") -> "PlanCapacity":
        """The larger of each size."""
        return PlanCapacity(
            *(max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        )

    def require(self, needed: "PlanCapacity") -> None:
        """ValueError naming each size that is smaller than needed."""
        short = [
            f"{field.name}={getattr(self, field.name)} (needs {getattr(needed, field.name)})"
            for field in fields(self)
            if getattr(self, field.name) < getattr(needed, field.name)
        ]
        if short:
            raise ValueError(f"capacity is too small: {', '.join(short)}.")


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
