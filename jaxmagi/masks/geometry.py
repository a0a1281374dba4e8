"""Exact geometry of bands, in closed form and vectorised over numpy arrays.

A band ``(q0, q1, k0, k1, lo, hi)`` is the set of cells ``(q, k)`` with ``q0 <= q < q1``, ``k0 <= k < k1`` and
``lo <= k - q <= hi``. In row ``q`` it covers the keys from ``max(k0, q + lo)`` to ``min(k1, q + hi + 1)``,
so both of its edges stand still or move by one key per row. Every function takes bands ``[..., 6]`` of any
integer dtype, computes in int64 and broadcasts its other arguments against ``bands.shape[:-1]``; bands come
back as int32.
"""

import numpy as np

from .._checks import MAX_LENGTH as _MAX_LENGTH

UNBOUNDED = _MAX_LENGTH
"""The largest length, and the limit ``hi`` (or ``-lo``) that restricts nothing."""

type _Index = int | np.integer | np.ndarray
"""A token index, or an array of them."""


def columns(bands: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the six columns ``q0, q1, k0, k1, lo, hi`` as int64 arrays ``[...]``."""
    return tuple(np.ascontiguousarray(np.moveaxis(bands, -1, 0), dtype=np.int64))


def is_empty(bands: np.ndarray) -> np.ndarray:
    """Returns whether each band has no cell: bool ``[...]``."""
    q0, q1, k0, k1, lo, hi = columns(bands)
    return (q0 >= q1) | (lo > hi) | (np.maximum(k0, q0 + lo) >= np.minimum(k1, q1 + hi))


def crop(bands: np.ndarray, q0: _Index, q1: _Index, k0: _Index, k1: _Index) -> np.ndarray:
    """Returns the part of each band in rows ``[q0, q1)`` and keys ``[k0, k1)``.

    Returns:
        int32 ``[..., 6]``. Bands left without a row or without a key are all zero; others may still be empty
        because of their limits (see `tighten`).
    """
    a0, a1, b0, b1, lo, hi = columns(bands)
    a0, a1 = np.maximum(a0, q0), np.minimum(a1, q1)
    b0, b1 = np.maximum(b0, k0), np.minimum(b1, k1)
    return _pack(a0, a1, b0, b1, lo, hi, keep=(a0 < a1) & (b0 < b1))


def intersect(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cells that two bands share, which form a band again: int32 ``[..., 6]``, tightened."""
    a, b = columns(first), columns(second)
    lower = [np.maximum(a[i], b[i]) for i in (0, 2, 4)]
    upper = [np.minimum(a[i], b[i]) for i in (1, 3, 5)]
    return tighten(_pack(*(column for pair in zip(lower, upper, strict=True) for column in pair)))


def shift(bands: np.ndarray, dq: _Index, dk: _Index) -> np.ndarray:
    """Returns each band moved down by ``dq`` rows and right by ``dk`` keys.

    The limits of ``k - q`` move by ``dk - dq``, except those at `UNBOUNDED`, which stay. Bands that are all
    zero (unused) stay all zero.
    """
    q0, q1, k0, k1, lo, hi = columns(bands)
    used = np.asarray(bands).any(axis=-1)
    lo, hi = _shift_limit(lo, dk - dq), _shift_limit(hi, dk - dq)
    return _pack(q0 + dq, q1 + dq, k0 + dk, k1 + dk, lo, hi, keep=used)


def tighten(bands: np.ndarray) -> np.ndarray:
    """Shrinks the ranges of each band to the exact hull of its visible rows and keys, with the same cells.

    Returns:
        int32 ``[..., 6]``. Empty bands are all zero; ``lo`` and ``hi`` of the others are left as they are.
    """
    q0, q1, k0, k1, lo, hi = columns(bands)
    rows = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    keys = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    return _pack(*rows, *keys, lo, hi, keep=(q0 < q1) & (lo <= hi) & (keys[0] < keys[1]))


def key_range(bands: np.ndarray, q0: _Index, q1: _Index) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact hull ``[begin, end)`` of the keys that rows ``[q0, q1)`` see through each band.

    Returns:
        ``(begin, end)``, int64 ``[...]``; ``(0, 0)`` where these rows see nothing.
    """
    a0, a1, k0, k1, lo, hi = columns(bands)
    a0, a1 = np.maximum(a0, q0), np.minimum(a1, q1)
    begin, end = np.maximum(k0, a0 + lo), np.minimum(k1, a1 + hi)
    visible = (a0 < a1) & (lo <= hi) & (begin < end)
    return np.where(visible, begin, 0), np.where(visible, end, 0)


def area(bands: np.ndarray) -> np.ndarray:
    """Returns the number of cells of each band: int64 ``[...]``, exact up to lengths of 2**30."""
    q0, q1, k0, k1, lo, hi = columns(bands)
    rows, keys = (q0, q1), (k0, k1)
    below_hi = _cells_up_to(np.clip(hi, k0 - q1, k1 - 1 - q0), rows, keys)
    below_lo = _cells_up_to(np.clip(lo, k0 - q1 + 1, k1 - q0) - 1, rows, keys)
    return np.where((q0 < q1) & (k0 < k1) & (lo <= hi), below_hi - below_lo, 0)


def to_dense(bands: np.ndarray, q_len: int, kv_len: int) -> np.ndarray:
    """Counts the bands that cover each cell: int32 ``[q_len, kv_len]``, from bands ``[S, 6]``.

    Time and memory grow with ``q_len * kv_len`` and with the rows of all bands together.
    """
    q0, q1, k0, k1, lo, hi = columns(crop(bands, 0, q_len, 0, kv_len))
    heights = q1 - q0
    band = np.repeat(np.arange(len(heights)), heights)
    row = np.arange(len(band)) - np.repeat(np.cumsum(heights) - heights - q0, heights)
    begin = np.maximum(k0[band], row + lo[band])
    end = np.maximum(begin, np.minimum(k1[band], row + hi[band] + 1))
    visible = begin < end
    steps = np.zeros((q_len, kv_len + 1), np.int32)
    np.add.at(steps, (row[visible], begin[visible]), 1)
    np.add.at(steps, (row[visible], end[visible]), -1)
    return np.cumsum(steps, axis=1, out=steps)[:, :-1]


def _pack(*fields: np.ndarray, keep: np.ndarray | None = None) -> np.ndarray:
    shape = np.broadcast_shapes(*(field.shape for field in fields))
    bands = np.empty((*shape, 6), np.int32)
    for i, field in enumerate(fields):
        bands[..., i] = field
    if keep is not None:
        bands[~keep] = 0
    return bands


def _shift_limit(limit: np.ndarray, distance: _Index) -> np.ndarray:
    moved = np.clip(limit + distance, -UNBOUNDED, UNBOUNDED)
    return np.where(np.abs(limit) >= UNBOUNDED, limit, moved)


def _cells_up_to(
    limit: np.ndarray, rows: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Counts the cells of the rectangle ``rows x keys`` with ``k - q <= limit``.

    Row ``q`` has ``q + limit + 1 - k0`` of them, clamped to ``[0, k1 - k0]``: a difference of two ramps.
    """
    (q0, q1), (k0, k1) = rows, keys
    first, last = q0 + limit - k0, q1 + limit - k0
    width = k1 - k0
    return _triangle(last) - _triangle(first) - _triangle(last - width) + _triangle(first - width)


def _triangle(n: np.ndarray) -> np.ndarray:
    n = np.maximum(n, 0)
    return n * (n + 1) // 2
