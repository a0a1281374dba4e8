"""The collectives on GPUs: custom calls, one for a transfer, or two where it is apart.

The first starts it, and the program's stream waits for it at once. Or the second waits, and the first puts
it on a stream of the group's own: all buffers of the first are operands of the second, so that XLA does not
reuse them before, and the second gives back the results of the first in place.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from ._misfit import CAST, DONE, REDUCE, platform_misfit
from ._process import timeout_ms
from ._route import Route

MOST_ARRAYS = 8  # of a call
_UNIT = 16  # bytes: rows are whole ones
_IMPLEMENTATIONS = {None: 0, "native": 1, "nccl": 2}

type Kind = Literal["cast", "reduce"]


def cast(*operands: jax.Array, route: Route, groups: np.ndarray) -> list[jax.Array]:
    """The custom calls of a cast, to be lowered; ``groups`` as `replica_groups` has them."""
    return _move("cast", operands, [x.dtype for x in operands[:-2]], route, groups)


def reduce(
    *operands: jax.Array, route: Route, out_dtypes: Sequence[jnp.dtype], groups: np.ndarray
) -> list[jax.Array]:
    """The custom calls of a reduction, to be lowered; ``groups`` as `replica_groups` has them."""
    return _move("reduce", operands, out_dtypes, route, groups)


def _move(
    kind: Kind,
    operands: Sequence[jax.Array],
    dtypes: Sequence[jnp.dtype],
    route: Route,
    groups: np.ndarray,
) -> list[jax.Array]:
    """Arrays [G, ..., ...] to such of these dtypes, several in a call."""
    *xs, sends, receives = operands
    results = result_types(kind, route, xs, dtypes)
    anything = 0 not in (sends.size, receives.size, route.pair_rows)
    moving = [i for i, x in enumerate(xs) if anything and x.size and results[i].size]
    moved: dict[int, jax.Array] = {}
    for part in itertools.batched(moving, MOST_ARRAYS):
        calls = Calls(kind, route, [dtypes[i] for i in part], groups)
        started = calls.start(*(flatten(xs[i]) for i in part), sends, receives)
        moved.update(zip(part, started[: len(part)], strict=True))
    return [
        unflatten(moved[i], like) if i in moved else jnp.zeros(like.shape, like.dtype)
        for i, like in enumerate(results)
    ]


class Calls(NamedTuple):
    """The calls of a transfer of up to eight arrays [G, rows, width] of whole units.

    Attributes:
        kind: which of the collectives it is.
        route: where rows go.
        dtypes: of the results.
        groups: as `replica_groups` has them.
        number: tells it from other transfers that are under way.
        is_apart: there are two calls, and other things may be computed between them. XLA must then neither
            merge two starts, nor drop or move one of the calls alone.
        goes_first: what is computed next waits until the transfer has its multiprocessors, and where ranks
            of a group use NCCL until its native part is over.
    """

    kind: Kind
    route: Route
    dtypes: Sequence[jnp.dtype]
    groups: np.ndarray
    number: int = 0
    is_apart: bool = False
    goes_first: bool = False

    def start(self, *operands: jax.Array) -> list[jax.Array]:
        """From arrays, sends and receives to what `done` takes: results, a workspace, and the operands."""
        if self.is_apart:
            # Else XLA, when short of memory, could make the operands again for the second call.
            operands = jax.lax.optimization_barrier(operands)
        *xs, sends, receives = operands
        call = jax.ffi.ffi_call(
            CAST if self.kind == "cast" else REDUCE, self._results(xs), has_side_effect=self.is_apart
        )
        return [*call(sends, receives, *xs, **self._attributes()), *xs, sends, receives]

    def done(self, started: Sequence[jax.Array]) -> list[jax.Array]:
        """The results, from what `start` has returned."""
        count = len(self.dtypes)
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in started[:count]]
        aliases = {i: i for i in range(count)}
        call = jax.ffi.ffi_call(DONE, results, has_side_effect=True, input_output_aliases=aliases)
        # Else XLA, where a loop stacks the results, makes a second call of it, which writes there by itself.
        # The barrier has an operand beside the results, or XLA would warn of it.
        landed, _ = jax.lax.optimization_barrier((call(*started, **self._place()), started[-1]))
        return list(landed)

    def _results(self, xs: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
        results = result_types(self.kind, self.route, xs, self.dtypes)
        size = workspace_bytes(xs, self.route, self.groups.shape[1])
        return [*results, jax.ShapeDtypeStruct((size,), jnp.uint8)]

    def _place(self) -> dict[str, Any]:
        """The attributes that both calls have."""
        return {
            "groups": self.groups.reshape(-1),
            "group_size": np.int64(self.groups.shape[1]),
            "transfer_id": np.int64(self.number),
        }

    def _attributes(self) -> dict[str, Any]:
        numbers = {
            "input_rows": self.route.input_rows,
            "output_rows": self.route.output_rows,
            "pair_rows": self.route.pair_rows,
            "num_sms": self.route.num_sms,
            "implementation": _IMPLEMENTATIONS[self.route.implementation],
            "ranks_per_host": self.route.ranks_per_host or 0,
            "timeout_ms": timeout_ms(),
        }
        numbers = {name: np.int64(number) for name, number in numbers.items()}
        flags = {"is_async": np.bool_(self.is_apart), "goes_first": np.bool_(self.goes_first)}
        return self._place() | numbers | flags


def start(
    *operands: jax.Array,
    kind: Kind,
    route: Route,
    dtypes: Sequence[jnp.dtype],
    groups: np.ndarray,
    ranks: int,
    **options: Any,
) -> list[jax.Array]:
    """The first half of a transfer, to be lowered: see `start_p`."""
    *xs, sends, receives = operands
    if _is_one_call(xs, sends):
        return [no_workspace(xs, route, ranks), *_move(kind, operands, dtypes, route, groups), *operands]
    calls = Calls(kind, route, dtypes, groups, is_apart=True, **options)
    started = calls.start(*(x.reshape(*x.shape[:2], -1) for x in xs), sends, receives)
    count = len(xs)
    results, workspace, held = started[:count], started[count], started[count + 1 : -2]
    return [
        workspace,
        *(x.reshape(*x.shape[:2], *like.shape[2:]) for x, like in zip(results, xs, strict=True)),
        *(x.reshape(like.shape) for x, like in zip(held, xs, strict=True)),
        *started[-2:],
    ]


def done(
    workspace: jax.Array,
    *started: jax.Array,
    kind: Kind,
    route: Route,
    dtypes: Sequence[jnp.dtype],
    number: int,
    groups: np.ndarray,
) -> list[jax.Array]:
    """The second half, to be lowered: see `done_p`."""
    *arrays, sends, receives = started
    count = len(dtypes)
    results, held = arrays[:count], arrays[count:]
    if _is_one_call(held, sends):
        return results
    flat_results, flat_held = ([x.reshape(*x.shape[:2], -1) for x in part] for part in (results, held))
    calls = Calls(kind, route, dtypes, groups, number, is_apart=True)
    landed = calls.done([*flat_results, workspace, *flat_held, sends, receives])
    return [x.reshape(like.shape) for x, like in zip(landed, results, strict=True)]


def _is_one_call(xs: Sequence[jax.Array], sends: jax.Array) -> bool:
    """Returns whether the start is all of the transfer, as it is where vmap has made an array empty."""
    return any(x.size == 0 for x in (*xs, sends))


def result_rows(kind: Kind, route: Route) -> int:
    """Of each result of a transfer."""
    return route.output_rows if kind == "cast" else route.input_rows


def result_types(
    kind: Kind, route: Route, xs: Sequence[Any], dtypes: Sequence[jnp.dtype]
) -> list[jax.ShapeDtypeStruct]:
    """Of a transfer of arrays [G, rows, ...] to results of these dtypes."""
    rows = result_rows(kind, route)
    return [
        jax.ShapeDtypeStruct((x.shape[0], rows, *x.shape[2:]), dtype)
        for x, dtype in zip(xs, dtypes, strict=True)
    ]


def workspace_bytes(xs: Sequence[Any], route: Route, cp_size: int) -> int:
    """What a transfer of arrays [G, rows, ...] in groups of ``cp_size`` ranks needs beside its results."""
    compiled = _native.extension("cuda")
    if compiled is None or not _may_use_nccl(route) or platform_misfit():
        return _UNIT  # anything but nothing
    row_bytes = [math.prod(x.shape[2:]) * x.dtype.itemsize for x in xs]
    return compiled.pair_buffer_bytes(xs[0].shape[0], cp_size, route.pair_rows, row_bytes)


def no_workspace(xs: Sequence[Any], route: Route, cp_size: int) -> jax.Array:
    """Something in place of a workspace, where a transfer has none."""
    return jnp.zeros(workspace_bytes(xs, route, cp_size), jnp.uint8)


def _may_use_nccl(route: Route) -> bool:
    """Whether pairs of ranks may need buffers: in one process GPUs reach each other's memory."""
    several_hosts = jax.process_count() > 1 or route.ranks_per_host is not None
    return route.implementation == "nccl" or (route.implementation is None and several_hosts)


def flatten(x: jax.Array) -> jax.Array:
    """[G, rows, ...] → [G, rows, width], with zeros behind each row to whole units of bytes."""
    width, unit = math.prod(x.shape[2:]), max(1, _UNIT // x.dtype.itemsize)
    x, padding = x.reshape(*x.shape[:2], width), -width % unit
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def unflatten(x: jax.Array, like: Any) -> jax.Array:
    """[G, rows, width], perhaps with zeros behind each row, to the shape of ``like``."""
    return x[..., : math.prod(like.shape[2:])].reshape(like.shape)
