"""Layouts, the orders of tokens over ranks: balanced and other named ones, and orders of the user."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from .._checks import integer, is_traced, numpy_array
from .._native import planner
from ..masks.geometry import UNBOUNDED
from ._cost import CostModel

_TILE = 128
_FEWEST_CHUNKS_PER_RANK, _MOST_CHUNKS_PER_RANK = 10, 16
_MOST_CHUNKS = 2**15
_MOST_PARTS = 4  # parts of a chunk where areas need smaller ones
_MOST_SMALL_CHUNKS = 2**13  # parts of the sequence then


class WeightedBands(NamedTuple):
    """The mask of ``weight`` layers, as bands."""

    bands: Int32[np.ndarray, "S 6"]
    weight: int


def make_layout(
    masks: Sequence[WeightedBands],
    length: int,
    cp_size: int,
    layout: Any,
    chunk_size: int | None,
    cost: CostModel,
) -> Int32[np.ndarray, " T_padded"]:
    """Returns the token at each dispatched position, -1 for padding, as in `plan_context`."""
    if chunk_size is not None and (not isinstance(layout, str) or layout != "balanced"):
        raise ValueError('chunk_size is for layout="balanced" only; other layouts set their own.')
    if not isinstance(layout, str):
        return _user_order(layout, length, cp_size)
    if layout == "contiguous":
        return _place_chunks(np.arange(cp_size), length, cp_size, _ceil_div(length, cp_size))
    if layout == "zigzag":
        ranks = np.arange(cp_size)
        owner = np.concatenate([ranks, ranks[::-1]])
        return _place_chunks(owner, length, cp_size, _ceil_div(length, 2 * cp_size))
    if layout == "balanced":
        return _balanced(masks, length, cp_size, chunk_size, cost)
    raise ValueError(f'layout must be "balanced", "zigzag", "contiguous" or an array, but it is {layout!r}.')


def _balanced(
    masks: Sequence[WeightedBands], length: int, cp_size: int, chunk_size: int | None, cost: CostModel
) -> np.ndarray:
    if chunk_size is None:
        chunk = default_chunk_size(length, cp_size)
        least = max(_TILE, chunk // _MOST_PARTS, _ceil_div(length, _MOST_SMALL_CHUNKS))
    else:
        chunk = least = _checked_chunk_size(chunk_size, length, cp_size)
    owner = balanced_owners(masks, length, cp_size, chunk, cost, least)
    shard = _ceil_div(_ceil_div(length, chunk), cp_size) * chunk
    return _place_chunks(owner, length, cp_size, shard * cp_size // len(owner))


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
    cells_per_row, kernels = 0, []
    if cost is not None:
        cells_per_row, passes = cost.cells_per_row(cp_size), (cost.forward, cost.backward)
        kernels = [(*each.tile, each.by_keys, float(cost.partial_tile_cost)) for each in passes]
    return planner().balanced_owners(
        [np.ascontiguousarray(mask.bands, np.int32) for mask in masks],
        [mask.weight for mask in masks],
        length,
        cp_size,
        (chunk, chunk if least_chunk is None else least_chunk),
        cells_per_row,
        kernels,
    )


def default_chunk_size(length: int, cp_size: int) -> int:
    """Returns the multiple of 128 with 10 to 16 chunks per rank that pads least, the largest of equals.

    128 is a tile of the GPU kernels. It is the size if it gives fewer than 10 chunks per rank; if it gives
    fewer than 2, the size is half a shard. Where this makes more than 2**15 chunks, ranks get fewer each, at
    least 1, which keeps the search for few rows below some seconds.
    """
    shard = _ceil_div(length, cp_size)
    most = int(np.clip(_MOST_CHUNKS // cp_size, 1, _MOST_CHUNKS_PER_RANK))
    if shard < 2 * _TILE:
        return _ceil_div(shard, min(2, most))
    smallest = _ceil_div(_ceil_div(shard, most), _TILE)
    largest = max(smallest, shard // (_FEWEST_CHUNKS_PER_RANK * _TILE))
    sizes = np.arange(largest, smallest - 1, -1) * _TILE
    padded_shard = np.ceil(np.ceil(length / sizes) / cp_size) * sizes
    return int(sizes[padded_shard.argmin()])


def _checked_chunk_size(chunk: Any, length: int, cp_size: int) -> int:
    chunk, shard = integer(chunk, "chunk_size", minimum=1), _ceil_div(length, cp_size)
    if chunk > shard:
        raise ValueError(
            f"chunk_size must be at most a rank's share of the tokens, ceil({length} / {cp_size}) = {shard}, "
            f"but it is {chunk}: larger chunks only add padding."
        )
    return chunk


def _check_padded_length(padded: int) -> None:
    if padded > UNBOUNDED:
        raise ValueError(f"a layout has at most {UNBOUNDED} positions, padding included, but has {padded}.")


def _ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up, and at least 1, so that every chunk has room."""
    return max(1, -(-a // b))


def _place_chunks(owner: np.ndarray, length: int, cp_size: int, chunk: int) -> np.ndarray:
    """Returns the token order of chunks given to their owners, ascending within each rank."""
    _check_padded_length(len(owner) * chunk)
    return planner().token_order(owner.astype(np.int32), length, cp_size, chunk)


def _user_order(layout: Any, length: int, cp_size: int) -> np.ndarray:
    """Returns the user's order as int32; ValueError unless it is a permutation of tokens and padding."""
    if is_traced(layout):
        raise ValueError("layout is traced, but plan_context needs host data: plan outside jit.")
    order = numpy_array(layout, "layout")
    if order.dtype.kind not in "iu" or order.ndim != 1:
        raise ValueError(f"layout must be integers [T_padded], but it is {order.dtype} {list(order.shape)}.")
    if order.size == 0 or order.size % cp_size:
        raise ValueError(
            f"layout has {order.size} positions, which is no positive multiple of "
            f"cp_size={cp_size}: pad it with -1."
        )
    _check_padded_length(order.size)
    outside = order[(order < -1) | (order >= length)]
    if outside.size:
        raise ValueError(f"layout has {outside[0]}, which is neither -1 nor a token below {length}.")
    counts = np.bincount(order[order >= 0], minlength=length)
    wrong = np.flatnonzero(counts != 1)
    if wrong.size:
        raise ValueError(
            f"layout must have every token once, but it has token {wrong[0]} {counts[wrong[0]]} times."
        )
    return order.astype(np.int32)
