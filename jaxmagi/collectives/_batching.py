"""Batches of transfers: with shared tables the new axis travels in the rows, else it becomes more transfers.

Of operands that lead with G transfers, the last two being sends and receives.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

type Axes = Sequence[int | None]


def share_tables(axes: Axes) -> bool:
    """Whether the examples have the same tables."""
    return axes[-1] is None and axes[-2] is None


def carry(operands: Sequence[Any], axes: Axes) -> list[Any]:
    """[..., A, ...] with A at their axes → [G, rows, A, ...]; the others as they are."""
    return [x if axis is None else jnp.moveaxis(x, axis, 2) for x, axis in zip(operands, axes, strict=True)]


def carried_axes(axes: Axes) -> list[int | None]:
    """Of the results, by those of the arrays."""
    return [None if axis is None else 2 for axis in axes]


def batch_shape(operands: Sequence[Any], axes: Axes) -> tuple[int, int]:
    """A and G."""
    x, axis = next((x, axis) for x, axis in zip(operands, axes, strict=True) if axis is not None)
    return x.shape[axis], x.shape[1 if axis == 0 else 0]
