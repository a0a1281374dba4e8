"""Chunks to ranks: equal counts, nearly equal areas, few rows to receive."""

import heapq

import numpy as np

from ..masks.geometry import UNBOUNDED, area, crop, tighten
from ._runs import meetings
from ._swaps import MOST_CHUNKS, make_demand, reduce_rows

_AIM, _ACCEPTED = 1.01, 1.02
_FEWEST_GROUPS, _MOST_GROUPS = 8, 16


def balanced_owners(bands: np.ndarray, length: int, cp_size: int, chunk: int) -> np.ndarray:
    """The rank of each chunk: int64 ``[n]``, ``n`` a multiple of ``cp_size`` (the last may be padding).

    Many small chunks give a search too many ways to scatter what belongs together, and cost time. So groups
    of adjacent chunks are dealt first, 8 to 16 per rank if a rank's number of chunks has such a divisor;
    single chunks only when the largest area of a rank is then more than 2 % above the mean.
    """
    total = -(-max(1, -(-length // chunk)) // cp_size) * cp_size
    group = _group_size(total // cp_size)
    deal, areas = _deal_chunks(bands, length, cp_size, chunk * group, total // group)
    if group > 1 and _largest_area(deal, areas) > _ACCEPTED * areas.sum() / cp_size:
        group = 1
        deal, areas = _deal_chunks(bands, length, cp_size, chunk, total)
    return np.repeat(_owners(deal), group)


def _group_size(chunks: int) -> int:
    """How many of a rank's chunks to deal as one: as few as leave 8 to 16 groups, or 1."""
    counts = (count for count in range(_MOST_GROUPS, _FEWEST_GROUPS - 1, -1) if chunks % count == 0)
    return chunks // next(counts, chunks)


def _deal_chunks(
    bands: np.ndarray, length: int, cp_size: int, chunk: int, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """The chunks ``[cp, n / cp]`` of each rank and the area ``[n]`` of each chunk, for ``n = total`` chunks.

    Chunks dealt largest first, each to the rank with the smallest area so far (LPT, Graham 1969), give areas
    that are as equal as they get, but then ranks receive nearly everything. So the limit for areas is the LPT
    maximum, or 1 % above the mean where LPT does better, and swaps look for few rows (`reduce_rows`). They
    begin at contiguous or at zigzag chunks if those respect the limit. Otherwise they begin at contiguous
    chunks too and approach the limit while they go; if they end beyond it and more than 2 % above the mean,
    they begin again at LPT. With more than `MOST_CHUNKS` chunks there are no swaps: the beginning is the end.
    """
    pieces, owner = _chunk_pieces(bands, total, chunk)
    areas = np.zeros(total, np.int64)
    np.add.at(areas, owner, area(pieces))
    largest_first = _deal_largest_first(areas, cp_size)
    mean, most = areas.sum() / cp_size, _largest_area(largest_first, areas)
    limit = max(most, int(_AIM * mean))
    contiguous = np.arange(total).reshape(cp_size, -1)
    starts = (contiguous, _zigzag(contiguous))
    level = next((start for start in starts if _largest_area(start, areas) <= limit), None)
    if total > MOST_CHUNKS:
        return (largest_first if level is None else level), areas
    demand = make_demand(pieces, owner, areas, length, chunk)
    if level is not None:
        return reduce_rows(level, demand, limit, strict=True), areas
    deal = reduce_rows(contiguous, demand, limit, strict=False)
    if _largest_area(deal, areas) > max(most, _ACCEPTED * mean):
        deal = reduce_rows(largest_first, demand, limit, strict=True)
    return deal, areas


def _largest_area(deal: np.ndarray, areas: np.ndarray) -> int:
    return int(areas[deal].sum(axis=1).max())


def _zigzag(contiguous: np.ndarray) -> np.ndarray:
    """Each rank's chunks from either end of the sequence, ``[cp, n / cp]``."""
    half = contiguous.shape[1] // 2
    front = contiguous.ravel()[: len(contiguous) * half].reshape(len(contiguous), half)
    back = contiguous.ravel()[len(contiguous) * half :].reshape(len(contiguous), -1)
    return np.concatenate([front, back[::-1]], axis=1)


def _chunk_pieces(bands: np.ndarray, total: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The bands cut at chunks of rows: tight bands ``[n, 6]`` and the chunk ``[n]`` of each."""
    begin = np.arange(total) * chunk
    band, owner = meetings(bands[:, 0], bands[:, 1], begin, begin + chunk)
    pieces = tighten(crop(bands[band], begin[owner], begin[owner] + chunk, 0, UNBOUNDED))
    visible = pieces.any(axis=1)
    return pieces[visible], owner[visible]


def _deal_largest_first(areas: np.ndarray, cp_size: int) -> np.ndarray:
    """Chunks by descending area, each to the rank with the smallest sum that has room: ``[cp, n / cp]``."""
    hands: list[list[int]] = [[] for _ in range(cp_size)]
    heap = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-areas, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        hands[rank].append(chunk)
        if len(hands[rank]) < len(areas) // cp_size:
            heapq.heappush(heap, (load + int(areas[chunk]), rank))
    return np.array(hands)


def _owners(deal: np.ndarray) -> np.ndarray:
    """The rank of each chunk, from the chunks ``[cp, n / cp]`` of each rank."""
    owner = np.empty(deal.size, np.int64)
    owner[deal] = np.arange(len(deal))[:, None]
    return owner
