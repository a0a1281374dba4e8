"""Decides which products with a collective are custom calls.

Users ask for plain JAX or for custom calls by name, or leave the choice: then a product is a custom call
where it was measured to be faster than XLA's sequence, also on GPUs at their power limit, on which the
kernels need more time for a large product than cuBLAS does (docs/log/overlap.md). A custom call hides the
transfer, which takes a part of the product's time that depends on one size alone: the inner numbers of a
reduce-scatter, and the columns of an all-gather. Sizes between those that were measured count too.
"""

import itertools
import math
import os
from typing import Any

import jax

from .. import _hopper, _native
from ._exchange import Exchange, Weights

_UNIT = 8  # of the inner dimension and of columns: rows are multiples of 16 bytes
_DTYPES = ("bfloat16", "float16")
_MOST_RANKS = 64

_MEASURED_RANKS = 2  # all devices of the mesh: other groups beside them have not run
_FEWEST_INNER, _FEWEST_COLUMNS = 1024, 2048
_MOST_HIDING = 5120  # inner numbers or columns: the transfer takes at least 0.19 of the product's time
_TILE = 256  # rows of one rank and one example, and columns
_FEWEST_TILES = 128
_LEAST_FILLED = 0.95  # of the tiles, whose rest is computed for nothing

_ALLOCATORS = ("", "default", "bfc")  # whose memory other GPUs reach


def is_kernel(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights, *, scatters: bool) -> bool:
    """Returns whether a product is a custom call where the devices allow it.

    Args:
        x: the left operand, all rows of a reduce-scatter and those of the rank of an all-gather.
        w: the weights.
        exchange: what the user asks for.
        weights: how the weights lie.
        scatters: whether sums are scattered; else rows are gathered.
    """
    if exchange.implementation is not None:
        return exchange.implementation == "native"
    mesh, is_known = jax.sharding.get_abstract_mesh(), all(isinstance(size, int) for size in x.shape)
    if mesh.explicit_axes or mesh.size != _MEASURED_RANKS or not is_known:
        return False
    fits = operands_reason(x, w, exchange, weights.transposed) is None
    return fits and _pays(scatters, x, w, exchange, weights.transposed)


def operands_reason(x: Any, w: Any, exchange: Exchange, transposed: bool) -> str | None:
    """Returns why kernels do not multiply operands of these types; None if they do."""
    ranks, sizes = jax.lax.axis_size(exchange.axis_name), (x.shape[-1], columns_of(w, transposed))
    if 0 in x.shape:
        return f"x is empty: {x.shape}"
    if x.dtype.name not in _DTYPES:
        return f"the operands are {x.dtype.name}, and the kernel multiplies {' and '.join(_DTYPES)}"
    if exchange.wire_dtype != x.dtype:
        return f"wire_dtype={exchange.wire_dtype.name}, but tiles travel as {x.dtype.name}"
    if any(size % _UNIT for size in sizes):
        return f"the inner dimension and the columns must be multiples of {_UNIT}, but they are {sizes}"
    if not 2 <= ranks <= _MOST_RANKS:
        return f"mesh axis {exchange.axis_name!r} has size {ranks}, and the kernel is for 2 to {_MOST_RANKS}"
    return None


def ranks_reach_each_other() -> bool:
    """Returns whether the ranks of a program are known to reach each other's memory over NVLink.

    They are all in this process then, and their memory is of the allocator that JAX has by default.
    """
    gpus = _hopper.local_gpus()
    have_nvlink = getattr(_native.extension("cuda"), "have_nvlink", None)
    is_reachable = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() in _ALLOCATORS
    if jax.process_count() > 1 or len(gpus) < _MEASURED_RANKS or have_nvlink is None or not is_reachable:
        return False
    pairs = itertools.permutations((gpu.local_hardware_id for gpu in gpus), 2)
    return all(itertools.starmap(have_nvlink, pairs))


def columns_of(w: Any, transposed: bool) -> int:
    """Returns N of weights ``[K, N]`` or, transposed, ``[N, K]``."""
    return w.shape[0 if transposed else 1]


def _pays(scatters: bool, x: Any, w: Any, exchange: Exchange, transposed: bool) -> bool:
    *lead, rows, inner = x.shape
    ranks, columns = jax.lax.axis_size(exchange.axis_name), columns_of(w, transposed)
    if scatters:
        rows //= ranks
    parts = math.prod(lead) * ranks  # of the rows: those of a rank and an example
    tiles = parts * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    filled = parts * rows * columns / (tiles * _TILE**2)
    return (
        inner >= _FEWEST_INNER
        and columns >= _FEWEST_COLUMNS
        and (inner if scatters else columns) <= _MOST_HIDING
        and tiles >= _FEWEST_TILES
        and filled >= _LEAST_FILLED
    )
