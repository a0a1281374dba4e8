"""The bands of a mask for ranks that hold any parts of a sequence."""

from collections.abc import Sequence

import numpy as np

from jaxmagi.masks import geometry
from jaxmagi.planning._plan_context import merge


def zigzag(length: int, cp_size: int) -> np.ndarray:
    """Returns the tokens of each rank r, the r-th chunk from either end: int32 [cp, length / cp].

    Raises:
        ValueError: two chunks for each rank do not divide the length.
    """
    if length % (2 * cp_size):
        raise ValueError(f"a length of {length} cannot be cut into {2 * cp_size} equal chunks.")
    chunks = np.arange(length, dtype=np.int32).reshape(2 * cp_size, -1)
    return np.concatenate([chunks[:cp_size], chunks[: cp_size - 1 : -1]], axis=1)


def visible(bands: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns bands over tokens as bands over the places of the queries and keys that a rank holds.

    Args:
        bands: int32 [S, 6].
        queries: the token at each place, -1 for none.
        keys: the token at each place, -1 for none.
    """
    q_token, q_place, q_length = _runs(queries).T[..., None, None]
    k_token, k_place, k_length = _runs(keys).T[:, None, :, None]
    cropped = geometry.crop(bands, q_token, q_token + q_length, k_token, k_token + k_length)
    moved = geometry.shift(geometry.tighten(cropped), q_place - q_token, k_place - k_token)
    flat = moved.reshape(-1, 6)
    return merge(flat[flat.any(axis=1)])


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Returns first token, first place and length of each stretch of consecutive tokens, int64 [n, 3]."""
    place = np.concatenate([[0], 1 + np.flatnonzero(np.diff(tokens) != 1)])
    return np.column_stack([tokens[place], place, np.diff(place, append=len(tokens))])


def stacked(tables: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Returns tables [n, 6] of ranks and steps as one, int32 [cp, steps, most, 6]; unused rows are zero."""
    most = max(1, *(len(table) for row in tables for table in row))
    padded = [[np.pad(table, ((0, most - len(table)), (0, 0))) for table in row] for row in tables]
    return np.array(padded, np.int32)
