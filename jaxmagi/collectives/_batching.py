"""Batches transfers: with shared tables the new axis becomes part of rows, otherwise more transfers.

Operands lead with G transfers, and the last two are sends and receives.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

type Axes = Sequence[int | None]


def share_tables(axes: Axes) -> bool:
    """Returns whether all examples have the same tables."""
    return axes[-1] is None and axes[-2] is None


def carry(operands: Sequence[Any], axes: Axes) -> list[Any]:
    """Moves the mapped axes A to [G, rows, A, ...]; operands without one stay as they are."""
    return [x if axis is None else jnp.moveaxis(x, axis, 2) for x, axis in zip(operands, axes, strict=True)]


def carried_axes(axes: Axes) -> list[int | None]:
    """Returns the mapped axes of results, from those of the arrays."""
    return [None if axis is None else 2 for axis in axes]


def batch_shape(operands: Sequence[Any], axes: Axes) -> tuple[int, int]:
    """Returns the sizes (A, G) of the mapped axis and of the axis of transfers."""
    x, axis = next((x, axis) for x, axis in zip(operands, axes, strict=True) if axis is not None)
    return x.shape[axis], x.shape[1 if axis == 0 else 0]
