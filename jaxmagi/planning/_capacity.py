"""Static sizes of a plan, rounded up so that different masks share one compilation."""

from dataclasses import dataclass

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
        backward: the same of the backward pass, in plans that stage it on its own.

    Raises:
        ValueError: a size is not an integer from 0 to 2**30, or ``backward`` has a ``backward``.
    """

    bands: int
    copies: int
    pair_rows: int
    output_rows: int
    backward: "PlanCapacity | None" = None

    def __post_init__(self) -> None:
        for name, value in self._sizes().items():
            integer(value, f"PlanCapacity.{name}")
        backward = self.backward
        if backward is not None and not (isinstance(backward, PlanCapacity) and backward.backward is None):
            raise ValueError(
                f"PlanCapacity.backward must be None or a PlanCapacity without one, but it is {backward!r}."
            )

    def _sizes(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if name != "backward"}

    def bucketed(self) -> "PlanCapacity":
        """Each size rounded up to an eighth of an octave, and to 8 at least."""
        backward = None if self.backward is None else self.backward.bucketed()
        sizes = {name: bucket(size) for name, size in self._sizes().items()}
        return PlanCapacity(**sizes, backward=backward)

    def union(self, other: "PlanCapacity") -> "PlanCapacity":
        """The larger of each size.

        Raises:
            ValueError: only one of the two has a ``backward``.
        """
        self._check_same_passes(other)
        backward = self.backward and other.backward and self.backward.union(other.backward)
        sizes = {name: max(size, getattr(other, name)) for name, size in self._sizes().items()}
        return PlanCapacity(**sizes, backward=backward)

    def require(self, needed: "PlanCapacity") -> None:
        """ValueError naming each size that is smaller than needed."""
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
        if (self.backward is None) != (other.backward is None):
            raise ValueError(
                "capacities of plans that stage the backward pass on its own do not go with others: "
                f"backward is {self.backward} and {other.backward}."
            )


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
