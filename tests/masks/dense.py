"""Dense definitions that do not use the library, and random bands."""

import numpy as np

UNBOUNDED = 2**30


def coverage(bands: np.ndarray, q_len: int, kv_len: int) -> np.ndarray:
    """Returns the cells of each band by its definition: bool ``[S, q_len, kv_len]``."""
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)
    q0, q1, k0, k1, lo, hi = np.asarray(bands, np.int64).T[:, :, None, None]
    return (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= k - q) & (k - q <= hi)


def any_bands(rng: np.random.Generator, q_len: int, kv_len: int, count: int) -> np.ndarray:
    """Returns int64 ``[count, 6]`` with overlaps, empty bands, reversed limits and limits out of reach."""
    rows = np.sort(rng.integers(0, q_len + 1, (count, 2)), axis=1)
    keys = np.sort(rng.integers(0, kv_len + 1, (count, 2)), axis=1)
    limits = rng.integers(-q_len - 2, kv_len + 3, (count, 2))
    ordered = rng.random(count) < 0.7
    limits[ordered] = np.sort(limits[ordered], axis=1)
    limits[rng.random(count) < 0.3, 0] = -UNBOUNDED
    limits[rng.random(count) < 0.3, 1] = UNBOUNDED
    return np.column_stack([rows, keys, limits])


def hull(visible: np.ndarray) -> tuple[int, int]:
    """Returns the first index that is set and one past the last, or ``(0, 0)`` when none is."""
    index = np.flatnonzero(visible)
    return (int(index[0]), int(index[-1]) + 1) if index.size else (0, 0)
