"""Assigns chunks to ranks: equal counts, nearly equal areas, few rows to receive."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from ..masks.geometry import area
from ._compiled import planner
from ._cost import CostModel


class WeightedBands(NamedTuple):
    """The mask of ``weight`` layers, as bands."""

    bands: Int32[np.ndarray, "S 6"]
    weight: int

    @property
    def area(self) -> int:
        """Visible cells of one layer."""
        return int(area(self.bands).sum())


def balanced_owners(
    masks: Sequence[WeightedBands],
    length: int,
    cp_size: int,
    chunk: int,
    cost: CostModel | None = None,
    least_chunk: int | None = None,
) -> Int32[np.ndarray, " n"]:
    """Returns the rank of each chunk. Their number is a multiple of ``cp_size``: the last may be padding.

    `jaxmagi.plan_context` says how large a rank's area may be; it may be larger where chunks assigned largest
    first (LPT, Graham 1969) exceed that too. The slowest rank takes about as long as with LPT of the same
    groups of chunks, or less. ``csrc/planning/balance.h`` describes the search.

    Args:
        masks: the masks of layers that share the layout.
        length: length of the sequence.
        cp_size: number of ranks.
        chunk: tokens of a chunk.
        cost: the time of rows that travel and the tiles of the kernels; by default rows take no time and
            tiles are single cells.
        least_chunk: chunks may be halved down to this size where areas need it. The length of the result
            tells the size that was used. By default chunks stay whole.

    Raises:
        NotImplementedError: the chunks cut the mask into more than 2**22 pieces.
    """
    return planner().balanced_owners(
        [np.ascontiguousarray(mask.bands, np.int32) for mask in masks],
        [mask.weight for mask in masks],
        length,
        cp_size,
        (chunk, chunk if least_chunk is None else least_chunk),
        cost.cells_per_row(cp_size) if cost else 0,
        _kernels(cost) if cost else [],
    )


def _kernels(cost: CostModel) -> list[tuple[int, int, bool, float]]:
    passes = (cost.forward, cost.backward)
    return [(each.tile.rows, each.tile.keys, each.by_keys, float(cost.partial_tile_cost)) for each in passes]
