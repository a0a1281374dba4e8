"""Batches transfers: with shared tables the new axis becomes part of rows, otherwise more transfers.

Operands lead with G transfers, and the last two are sends and receives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .._folding import fold, unfold

type Axes = Sequence[int | None]


def batch(
    bind: Callable[..., Sequence[Any]], operands: Sequence[Any], axes: Axes
) -> tuple[list[Any], list[int | None]]:
    """Binds a primitive to operands with a mapped axis A at ``axes``.

    Returns:
        The results, and for each operand the place of A in results like it: 2 in arrays [G, rows, A, ...],
        None where there is no A, and 0 in all where tables differ.
    """
    if axes[-1] is None and axes[-2] is None:
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 2) for x, axis in zip(operands, axes, strict=True)
        ]
        return [*bind(*moved)], [None if axis is None else 2 for axis in axes]
    x, axis = next((x, axis) for x, axis in zip(operands, axes, strict=True) if axis is not None)
    lead = (x.shape[axis], x.shape[1 if axis == 0 else 0])
    folded = [fold(x, axis, lead[0]) for x, axis in zip(operands, axes, strict=True)]
    return [unfold(x, lead) for x in bind(*folded)], [0] * len(axes)
