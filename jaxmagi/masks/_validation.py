"""Turns what users pass into int64 arrays and ints, or raises a ValueError with the offending values."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._checks import integer, is_traced, numpy_array
from ._overlap import find_overlap
from .geometry import UNBOUNDED

_LARGEST = np.iinfo(np.int64).max


def host_array(value: Any, name: str) -> np.ndarray:
    """Returns ``value`` as a numpy array; raises ValueError when it, or an item of a list, is traced."""
    if is_traced(value):
        raise ValueError(
            f"{name} is traced: masks are built and inspected on the host, outside jit, grad and vmap."
        )
    return numpy_array(value, name)


def integer_array(value: Any, name: str, *, columns: int | None = None) -> np.ndarray:
    """Returns ``value`` as int64 ``[n]``, or ``[n, columns]``."""
    array = host_array(value, name)
    row = () if columns is None else (columns,)
    if array.shape == (0,):  # an empty list has no dtype and no columns
        return np.zeros((0, *row), np.int64)
    _check_int64(value, array, name)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, but has dtype {array.dtype}.")
    if array.ndim != 1 + len(row) or array.shape[1:] != row:
        expected = "[n]" if columns is None else f"[n, {columns}]"
        raise ValueError(f"{name} must have shape {expected}, but has shape {array.shape}.")
    return array.astype(np.int64)


def _check_int64(value: Any, array: np.ndarray, name: str) -> None:
    """Raises ValueError for an integer beyond int64, of which numpy makes uint64, floats or objects."""
    if array.dtype.kind == "u":
        numbers = [int(array.max(initial=0))]
    else:
        numbers = [] if array.dtype.kind in "bi" or value is array else jax.tree.leaves(value)
    for number in numbers:
        if isinstance(number, int) and not -_LARGEST - 1 <= number <= _LARGEST:
            raise ValueError(f"{name} must fit into int64, but it holds {number}.")


def lengths(value: Any, name: str) -> np.ndarray:
    """Returns ``value`` as int64 ``[n]`` of lengths that are not negative and sum to at most `UNBOUNDED`."""
    array = integer_array(value, name)
    reject(array < 0, lambda i: f"{name}[{i}] = {array[i]} is negative.")
    reject(array > UNBOUNDED, lambda i: f"{name}[{i}] = {array[i]} is more than {UNBOUNDED}.")
    integer(array.sum(), f"the sum of {name}")
    return array


def check_ranges(ranges: np.ndarray, name: str, length: int) -> None:
    """Raises ValueError unless every range ``[begin, end)`` is ordered and inside ``[0, length)``."""
    begin, end = ranges.T
    reject(begin > end, lambda i: f"band {i}: {name} range {_pair(ranges[i])} ends before it begins.")
    reject(
        (begin < 0) | (end > length),
        lambda i: f"band {i}: {name} range {_pair(ranges[i])} is not inside the {length} {name} tokens.",
    )


def host_bands(bands: Any, q_len: Any, kv_len: Any) -> np.ndarray:
    """Returns the bands of a mask as a numpy array; ValueError unless a constructor could have made them.

    A mask is a pytree: its bands may have been cast, which rounds them, or made by hand.
    """
    array = host_array(bands, "the mask")
    check_bands_type(array)
    ranges = array.reshape(-1, 6)
    check_ranges(ranges[:, 0:2], "query", integer(q_len, "q_len"))
    check_ranges(ranges[:, 2:4], "key", integer(kv_len, "kv_len"))
    return array


def check_bands_type(bands: Any) -> None:
    """Raises ValueError unless the bands of a mask, which may be traced, are int32 ``[..., S, 6]``."""
    dtype, shape = getattr(bands, "dtype", type(bands).__name__), np.shape(bands)
    if dtype != np.int32 or len(shape) < 2 or shape[-1] != 6:
        raise ValueError(
            f"the bands of a mask must be int32[..., S, 6], but they are {dtype}{list(shape)}: leave them as "
            "the constructors made them, also where other arrays of a pytree are cast."
        )


def check_overlap(bands: np.ndarray) -> None:
    """Raises ValueError, with two bands and a cell, when two bands cover the same cell."""
    overlap = find_overlap(bands)
    if overlap is None:
        return
    a, b, q, k = overlap
    raise ValueError(
        f"bands {a} and {b} both cover query {q}, key {k}, {_counting_twice(bands, a, b)} "
        "Pass check=False if that is intended."
    )


def check_disjoint(first: np.ndarray, second: np.ndarray) -> None:
    """Raises ValueError, with a cell and two bands, when the bands of two masks cover a cell twice."""
    bands = np.concatenate([first, second])
    overlap = find_overlap(bands)
    if overlap is None:
        return
    a, b, q, k = overlap
    if a < len(first) <= b:
        owners = "both masks"
    else:
        owners = f"two bands of the {'first' if b < len(first) else 'second'} mask"
    raise ValueError(f"{owners} let query {q} see key {k}, {_counting_twice(bands, a, b)} Crop one first.")


def _counting_twice(bands: np.ndarray, a: int, b: int) -> str:
    first, second = (tuple(bands[i].tolist()) for i in (a, b))
    return f"which would count twice: (q0, q1, k0, k1, lo, hi) = {first} and {second}."


def token_range(value: Any, name: str, length: int) -> tuple[int, int]:
    """Returns the beginning and the end of a slice, of a pair, or of all when None.

    Raises:
        ValueError: the range is none of these, is reversed, or is not inside ``[0, length)``.
    """
    if value is None:
        return 0, length
    if isinstance(value, slice) and value.step in (None, 1):
        value = 0 if value.start is None else value.start, length if value.stop is None else value.stop
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a slice without a step or (begin, end), but it is {value!r}.")
    begin = integer(value[0], f"the beginning of {name}", maximum=length)
    end = integer(value[1], f"the end of {name}", maximum=length)
    if begin > end:
        raise ValueError(f"{name}: the range ({begin}, {end}) ends before it begins.")
    return begin, end


def reject(bad: np.ndarray, message: Callable[[int], str]) -> None:
    """Raises ValueError with the message of the first bad index, and the indices of a few more."""
    indices = np.flatnonzero(bad)
    if indices.size == 0:
        return
    more = f" The same holds for {indices.size - 1} more: {_few(indices[1:])}." if indices.size > 1 else ""
    raise ValueError(message(int(indices[0])) + more)


def _few(indices: np.ndarray) -> str:
    return ", ".join(str(i) for i in indices[:5].tolist()) + (", …" if indices.size > 5 else "")


def _pair(row: np.ndarray) -> tuple[int, ...]:
    return tuple(row.tolist())
