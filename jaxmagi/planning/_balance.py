"""Chunks to ranks: equal counts, nearly equal areas, few rows to receive."""

import numpy as np

from ._compiled import planner


def balanced_owners(
    bands: np.ndarray, length: int, cp_size: int, chunk: int, cells_per_row: int = 0
) -> np.ndarray:
    """The rank of each chunk: int32 ``[n]``, ``n`` a multiple of ``cp_size`` (the last may be padding).

    The largest area of a rank is at most 1 % above the mean (4.7 % where there are many ranks and areas
    differ much along the sequence), or that of chunks dealt largest first (LPT, Graham 1969) where that is
    larger. Under a model in which rows take time, the slowest rank takes at most as long as with LPT of the
    same groups of chunks; without, at most as many rows are received. ``csrc/planning/balance.h`` says how.

    Args:
        bands: int32 ``[S, 6]``.
        length: of the sequence.
        cp_size: number of ranks.
        chunk: tokens of a chunk.
        cells_per_row: how many visible cells take as long as a row that travels; 0 if that takes no time.

    Raises:
        NotImplementedError: the chunks cut the mask into more than 2**22 pieces.
    """
    return planner().balanced_owners(
        np.ascontiguousarray(bands, np.int32), length, cp_size, chunk, cells_per_row
    )
