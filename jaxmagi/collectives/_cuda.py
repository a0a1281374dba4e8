"""Makes the custom calls of collectives on GPUs: one for a transfer, or two for an asynchronous one.

Of two, the first starts the transfer on a stream of the group, and the second makes the program's stream wait
for it. All buffers of the first are operands of the second, so that XLA does not reuse them before, and the
second returns the results of the first in place.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._process import timeout_ms
from ._route import Route
from ._support import CAST, DONE, REDUCE

MAX_ARRAYS = 8  # of a call
TOKEN = (16,)  # shape, of bytes: a result by which `in_order` orders calls
_UNIT = 16  # bytes, of which rows are multiples
_IMPLEMENTATIONS = {None: 0, "native": 1, "nccl": 2}

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
        calls = Calls(kind, route, [dtypes[i] for i in part], groups)
        started = calls.start(*(flatten(xs[i]) for i in part), sends, receives)
        moved.update(zip(part, started[: len(part)], strict=True))
    return [
        unflatten(moved[i], like) if i in moved else jnp.zeros(like.shape, like.dtype)
        for i, like in enumerate(results)
    ]


class Calls(NamedTuple):
    """Makes the calls of a transfer of up to eight arrays [G, rows, width] of whole units.

    Attributes:
        kind: which of the collectives it is.
        route: where rows go.
        dtypes: the dtypes of the results.
        groups: the devices that exchange rows, by `replica_groups`.
        transfer_id: tells the transfer from other unfinished ones.
        is_async: whether there are two calls, with computations between them. XLA must then neither merge two
            starts, nor drop or move one of the calls alone.
        goes_first: whether what is computed next waits until the transfer has its multiprocessors. For rows
            that go by NCCL it waits until all ranks of their pairs have come to the call.
    """

    kind: Kind
    route: Route
    dtypes: Sequence[jnp.dtype]
    groups: np.ndarray
    transfer_id: int = 0
    is_async: bool = False
    goes_first: bool = False

    def start(self, *operands: jax.Array) -> list[jax.Array]:
        """Starts a transfer of arrays, sends and receives. Returns results, a token and the operands."""
        if self.is_async:
            # Otherwise XLA, when short of memory, could compute the operands again for the second call.
            operands = jax.lax.optimization_barrier(operands)
        *xs, sends, receives = operands
        call = jax.ffi.ffi_call(
            CAST if self.kind == "cast" else REDUCE, self._results(xs), has_side_effect=self.is_async
        )
        return [*call(sends, receives, *xs, **self._attributes()), *xs, sends, receives]

    def done(self, started: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results, from what `start` has returned."""
        count = len(self.dtypes)
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in started[:count]]
        aliases = {i: i for i in range(count)}
        call = jax.ffi.ffi_call(DONE, results, has_side_effect=True, input_output_aliases=aliases)
        # Without the barrier XLA makes a second call where a loop stacks the results.
        # XLA would warn of a barrier that has no other operand than the results.
        done, _ = jax.lax.optimization_barrier((call(*started, **self._place()), started[-1]))
        return list(done)

    def _results(self, xs: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
        return [*result_types(self.kind, self.route, xs, self.dtypes), jax.ShapeDtypeStruct(TOKEN, jnp.uint8)]

    def _place(self) -> dict[str, Any]:
        """Returns the attributes that both calls have."""
        return {
            "groups": self.groups.reshape(-1),
            "group_size": np.int64(self.groups.shape[1]),
            "transfer_id": np.int64(self.transfer_id),
        }

    def _attributes(self) -> dict[str, Any]:
        numbers = {
            "input_rows": self.route.input_rows,
            "output_rows": self.route.output_rows,
            "pair_rows": self.route.pair_rows,
            "num_sms": self.route.num_sms,
            "implementation": _IMPLEMENTATIONS[self.route.implementation],
            "ranks_per_host": self.route.ranks_per_host or 0,
            "timeout_ms": timeout_ms(self.route.timeout),
        }
        numbers = {name: np.int64(number) for name, number in numbers.items()}
        flags = {"is_async": np.bool_(self.is_async), "goes_first": np.bool_(self.goes_first)}
        return self._place() | numbers | flags


def start(
    *operands: jax.Array,
    kind: Kind,
    route: Route,
    dtypes: Sequence[jnp.dtype],
    groups: np.ndarray,
    **options: Any,
) -> list[jax.Array]:
    """Computes `start_p` by a custom call."""
    *xs, sends, receives = operands
    if _is_one_call(xs, sends):
        return [new_token(), *_move(kind, operands, dtypes, route, groups), *operands]
    calls = Calls(kind, route, dtypes, groups, is_async=True, **options)
    started = calls.start(*(x.reshape(*x.shape[:2], -1) for x in xs), sends, receives)
    count = len(xs)
    results, token, held = started[:count], started[count], started[count + 1 : -2]
    return [
        token,
        *(x.reshape(*x.shape[:2], *like.shape[2:]) for x, like in zip(results, xs, strict=True)),
        *(x.reshape(like.shape) for x, like in zip(held, xs, strict=True)),
        *started[-2:],
    ]


def done(
    token: jax.Array,
    *started: jax.Array,
    kind: Kind,
    route: Route,
    dtypes: Sequence[jnp.dtype],
    transfer_id: int,
    groups: np.ndarray,
) -> list[jax.Array]:
    """Computes `done_p` by a custom call."""
    *arrays, sends, receives = started
    count = len(dtypes)
    results, held = arrays[:count], arrays[count:]
    if _is_one_call(held, sends):
        return results
    flat_results, flat_held = ([x.reshape(*x.shape[:2], -1) for x in part] for part in (results, held))
    calls = Calls(kind, route, dtypes, groups, transfer_id, is_async=True)
    done = calls.done([*flat_results, token, *flat_held, sends, receives])
    return [x.reshape(like.shape) for x, like in zip(done, results, strict=True)]


def _is_one_call(xs: Sequence[jax.Array], sends: jax.Array) -> bool:
    """Returns whether the start is the whole transfer, which it is where vmap has made an array empty."""
    return any(x.size == 0 for x in (*xs, sends))


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


def new_token() -> jax.Array:
    """Returns the token of a transfer that needs none."""
    return jnp.zeros(TOKEN, jnp.uint8)


def flatten(x: jax.Array) -> jax.Array:
    """Reshapes [G, rows, ...] → [G, rows, width], and pads rows with zeros to whole units of bytes."""
    width, unit = math.prod(x.shape[2:]), max(1, _UNIT // x.dtype.itemsize)
    x, padding = x.reshape(*x.shape[:2], width), -width % unit
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def unflatten(x: jax.Array, like: Any) -> jax.Array:
    """Inverts `flatten` for an array of the shape of ``like``."""
    return x[..., : math.prod(like.shape[2:])].reshape(like.shape)
