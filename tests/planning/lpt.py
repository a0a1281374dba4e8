"""Chunks assigned largest first (LPT): the balance that plans are measured against."""

import heapq

import numpy as np

from jaxmagi.masks import geometry


def chunk_areas(bands: np.ndarray, chunk: int, count: int) -> np.ndarray:
    """Returns the visible cells of each chunk, int64 ``[count]``."""
    begin = np.arange(count)[:, None] * chunk
    return geometry.area(geometry.crop(bands, begin, begin + chunk, 0, geometry.UNBOUNDED)).sum(axis=1)


def largest_first_owners(areas: np.ndarray, cp_size: int) -> np.ndarray:
    """Returns the ranks int64 ``[n]`` of chunks, which go by descending area to the least rank with room."""
    owner = np.empty(len(areas), np.int64)
    counts = [0] * cp_size
    heap = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-areas, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owner[chunk] = rank
        counts[rank] += 1
        if counts[rank] < len(areas) // cp_size:
            heapq.heappush(heap, (load + int(areas[chunk]), rank))
    return owner
