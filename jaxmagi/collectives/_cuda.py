"""Makes the custom calls of collectives on GPUs, each of which is a whole transfer of up to eight arrays."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ._process import timeout_ms
from ._route import Route
from ._support import CAST, REDUCE

MAX_ARRAYS = 8  # of a call
_UNIT = 16  # bytes, of which rows are multiples
IMPLEMENTATIONS = {None: 0, "native": 1, "nccl": 2}
"""The numbers of implementations in attributes of custom calls."""

type Kind = Literal["cast", "reduce"]


def cast(*operands: jax.Array, route: Route, groups: np.ndarray) -> list[jax.Array]:
    """Casts by custom calls; ``groups`` are those of `replica_groups`."""
    return _move("cast", operands, [x.dtype for x in operands[:-2]], route, groups)


def reduce(
    *operands: jax.Array, route: Route, out_dtypes: Sequence[jnp.dtype], groups: np.ndarray
) -> list[jax.Array]:
    """Reduces by custom calls; ``groups`` are those of `replica_groups`."""
    return _move("reduce", operands, out_dtypes, route, groups)


def _move(
    kind: Kind,
    operands: Sequence[jax.Array],
    dtypes: Sequence[jnp.dtype],
    route: Route,
    groups: np.ndarray,
) -> list[jax.Array]:
    """Transfers arrays [G, rows, ...], several in a call, to results of these dtypes."""
    *xs, sends, receives = operands
    results = result_types(kind, route, xs, dtypes)
    anything = 0 not in (sends.size, receives.size, route.pair_rows)
    moving = [i for i, x in enumerate(xs) if anything and x.size and results[i].size]
    moved: dict[int, jax.Array] = {}
    for part in itertools.batched(moving, MAX_ARRAYS):
        flat = [flatten(xs[i]) for i in part]
        types = result_types(kind, route, flat, [dtypes[i] for i in part])
        call = jax.ffi.ffi_call(CAST if kind == "cast" else REDUCE, types)
        moved.update(zip(part, call(sends, receives, *flat, **_attributes(route, groups)), strict=True))
    return [
        unflatten(moved[i], like) if i in moved else jnp.zeros(like.shape, like.dtype)
        for i, like in enumerate(results)
    ]


def _attributes(route: Route, groups: np.ndarray) -> dict[str, Any]:
    numbers = {
        "group_size": groups.shape[1],
        "input_rows": route.input_rows,
        "output_rows": route.output_rows,
        "pair_rows": route.pair_rows,
        "num_sms": route.num_sms,
        "implementation": IMPLEMENTATIONS[route.implementation],
        "ranks_per_host": route.ranks_per_host or 0,
        "timeout_ms": timeout_ms(route.timeout),
    }
    return {name: np.int64(number) for name, number in numbers.items()} | {"groups": groups.reshape(-1)}


def result_rows(kind: Kind, route: Route) -> int:
    """Returns the number of rows of each result of a transfer."""
    return route.output_rows if kind == "cast" else route.input_rows


def result_types(
    kind: Kind, route: Route, xs: Sequence[Any], dtypes: Sequence[jnp.dtype]
) -> list[jax.ShapeDtypeStruct]:
    """Returns the results' types of a transfer of arrays [G, rows, ...] to these dtypes."""
    rows = result_rows(kind, route)
    return [
        jax.ShapeDtypeStruct((x.shape[0], rows, *x.shape[2:]), dtype)
        for x, dtype in zip(xs, dtypes, strict=True)
    ]


def flatten(x: jax.Array) -> jax.Array:
    """Reshapes [G, rows, ...] → [G, rows, width], and pads rows with zeros to whole units of bytes."""
    width, unit = math.prod(x.shape[2:]), max(1, _UNIT // x.dtype.itemsize)
    x, padding = x.reshape(*x.shape[:2], width), -width % unit
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def unflatten(x: jax.Array, like: Any) -> jax.Array:
    """Inverts `flatten` for an array of the shape of ``like``."""
    return x[..., : math.prod(like.shape[2:])].reshape(like.shape)
