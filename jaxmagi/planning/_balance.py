"""Chunks to ranks: equal counts, nearly equal areas, few rows to receive."""

import heapq

import numpy as np

from ..masks.geometry import UNBOUNDED, area, crop, tighten
from ._runs import meetings
from ._swaps import MOST_CHUNKS, make_demand, reduce_rows

_AIM, _ACCEPTED = 1.01, 1.02


def balanced_owners(bands: np.ndarray, length: int, cp_size: int, chunk: int) -> np.ndarray:
    """The rank of each chunk: int64 ``[n]``, ``n`` a multiple of ``cp_size`` (the last may be padding).

    Chunks dealt largest first, each to the rank with the smallest area so far (LPT, Graham 1969), give areas
    that are as equal as they get, but then ranks receive nearly everything. So the limit for areas is the LPT
    maximum, or 1 % above the mean where LPT does better, and swaps look for few rows (`reduce_rows`). They
    begin at contiguous or at zigzag chunks if those respect the limit. Otherwise they begin at contiguous
    chunks too and approach the limit while they go; if they end beyond it and more than 2 % above the mean,
    they begin again at LPT.
    """
    count = max(1, -(-length // chunk))
    total = -(-count // cp_size) * cp_size
    pieces, owner = _chunk_pieces(bands, total, chunk)
    areas = np.zeros(total, np.int64)
    np.add.at(areas, owner, area(pieces))
    largest_first = _deal_largest_first(areas, cp_size)
    if total > MOST_CHUNKS or total == cp_size:
        return _owners(largest_first)
    demand = make_demand(pieces, owner, areas, length, chunk)
    mean, most = areas.sum() / cp_size, _largest_area(largest_first, areas)
    limit = max(most, int(_AIM * mean))
    contiguous = np.arange(total).reshape(cp_size, -1)
    for start in (contiguous, _zigzag(contiguous)):
        if _largest_area(start, areas) <= limit:
            return _owners(reduce_rows(start, demand, limit, strict=True))
    deal = reduce_rows(contiguous, demand, limit, strict=False)
    if _largest_area(deal, areas) > max(most, _ACCEPTED * mean):
        deal = reduce_rows(largest_first, demand, limit, strict=True)
    return _owners(deal)


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
