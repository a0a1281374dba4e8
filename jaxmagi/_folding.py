"""Makes an axis that vmap maps over a part of the leading axis of an array, for batching rules."""

from typing import Any

import jax.numpy as jnp


def fold(x: Any, axis: int | None, size: int) -> Any:
    """Moves A from ``axis``, or broadcasts an array without A: [B, ...] → [A · B, ...]."""
    x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def unfold(x: Any, lead: tuple[int, int]) -> Any:
    """Inverts `fold`: [A · B, ...] → [A, B, ...]."""
    return x.reshape(*lead, *x.shape[1:])
