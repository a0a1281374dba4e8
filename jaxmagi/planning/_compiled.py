"""The planner's compiled extension, and what it does to bands."""

from types import ModuleType

import numpy as np
from jaxtyping import Int32

from .._native import extension


def planner() -> ModuleType:
    """Returns the extension `jaxmagi._cpu`.

    Raises:
        ImportError: it was not built.
    """
    compiled = extension("cpu")
    if compiled is None:
        raise ImportError("planning needs the compiled extension jaxmagi._cpu, which is missing.")
    return compiled


def merge(bands: Int32[np.ndarray, "S 6"]) -> Int32[np.ndarray, "n 6"]:
    """Returns fewer bands with the same cells (and counts), sorted by ``(q0, k0)``, without empty ones.

    Two bands side by side, or one above the other, become the smallest band around both when that band has
    exactly as many cells as they have together. Bands that cover a cell twice stay as they are. The result is
    tight, and limits that restrict nothing are at `UNBOUNDED`.
    """
    return planner().merge_bands(np.ascontiguousarray(bands, np.int32))
