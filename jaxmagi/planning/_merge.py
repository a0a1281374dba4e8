"""Writes a set of bands with few bands."""

import numpy as np

from ._compiled import planner


def merge(bands: np.ndarray) -> np.ndarray:
    """The same cells (and counts) in fewer bands, sorted by ``(q0, k0)``; empty bands are dropped.

    Two bands side by side, or one above the other, become the smallest band around both when that band has
    exactly as many cells as they have together. Bands that cover a cell twice stay as they are.

    Args:
        bands: int32 ``[S, 6]``.

    Returns:
        int32 ``[n, 6]``, tight, with limits that restrict nothing at `UNBOUNDED`.
    """
    return planner().merge_bands(np.ascontiguousarray(bands, np.int32))
