"""A lower bound of the rows that any plan of a mask receives."""

import itertools

import numpy as np

from jaxmagi.masks import geometry


def fewest_received_rows(bands: np.ndarray, length: int, shard_length: int, largest_area: int) -> int:
    """Returns a lower bound of the rows that all ranks receive, if none has more tokens or area than this.

    For each part of the sequence that no band connects to others (a document): the rows that see ``t`` keys
    or more need a number of ranks that follows from their number and area, and each of these ranks needs
    ``t`` keys. So the sum over ``t`` of the numbers of ranks bounds the keys that ranks need, of which each
    is owned by one of them.

    Args:
        bands: int ``[S, 6]``, no cell covered twice.
        length: length of the sequence.
        shard_length: the most tokens of a rank.
        largest_area: the most cells of a rank.
    """
    keys = _keys_of_rows(bands, length)
    edges = _independent_parts(bands, length)
    parts = (keys[begin:end] for begin, end in itertools.pairwise(edges))
    return sum(_fewest_of_part(part, shard_length, largest_area) for part in parts)


def _keys_of_rows(bands: np.ndarray, length: int) -> np.ndarray:
    """Returns how many keys each row sees: int64 ``[length]``."""
    keys = np.zeros(length, np.int64)
    for q0, q1, k0, k1, lo, hi in np.asarray(bands, np.int64):
        rows = np.arange(q0, q1)
        keys[q0:q1] += np.maximum(np.minimum(k1, rows + hi + 1) - np.maximum(k0, rows + lo), 0)
    return keys


def _independent_parts(bands: np.ndarray, length: int) -> np.ndarray:
    """Returns the edges of the smallest parts that no band connects, 0 and ``length`` included."""
    tight = geometry.tighten(bands)
    q0, q1, k0, k1, *_ = geometry.columns(tight[tight.any(axis=1)])
    crossings = np.zeros(length + 2, np.int64)
    np.add.at(crossings, np.minimum(q0, k0) + 1, 1)
    np.add.at(crossings, np.maximum(q1, k1), -1)
    inside = np.flatnonzero(np.cumsum(crossings)[1:length] == 0) + 1
    return np.concatenate([[0], inside, [length]])


def _fewest_of_part(keys: np.ndarray, shard_length: int, largest_area: int) -> int:
    rows = np.bincount(keys)
    # In the arrays below, index t - 1 is for the rows that see t keys or more.
    count = np.cumsum(rows[::-1])[::-1][1:]
    cells = np.cumsum((rows * np.arange(len(rows)))[::-1])[::-1][1:]
    ranks = np.maximum(-(-count // shard_length), -(-cells // max(largest_area, 1)))
    return max(0, int(ranks.sum()) - len(keys))
