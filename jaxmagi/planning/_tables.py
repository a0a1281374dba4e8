"""The tables of transfers: the entries of all ranks in one list, and packed with a row for each rank."""

import numpy as np

from ._capacity import frozen


def longest(table: np.ndarray, cp_size: int) -> int:
    """Returns the largest number of entries of a rank."""
    return int(np.bincount(table[:, 0], minlength=cp_size).max(initial=0))


def largest_pair(table: np.ndarray) -> int:
    """Returns the largest number of rows between two ranks."""
    return int((table[:, 2] + table[:, 4]).max(initial=0))


def pack_table(table: np.ndarray, cp_size: int, copies: int) -> np.ndarray:
    """Returns int32 ``[cp, copies, k]`` of entries ``[n, 1 + k]``, which lead with their rank, sorted."""
    packed = np.zeros((cp_size, copies, table.shape[1] - 1), np.int32)
    rank = table[:, 0]
    packed[rank, np.arange(len(rank)) - np.searchsorted(rank, rank)] = table[:, 1:]
    return frozen(packed)


def pack_groups(rows: np.ndarray, counts: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int32 ``[*counts.shape, capacity, k]`` of rows ``[n, k]`` of groups, one after the other."""
    packed = np.zeros((*counts.shape, capacity, rows.shape[1]), np.int32)
    packed[np.arange(capacity) < counts[..., None]] = rows
    return packed
