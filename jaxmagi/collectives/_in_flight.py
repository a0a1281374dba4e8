"""Transfers in two halves: on GPUs, what is computed between start and landing runs beside the transfer.

XLA does not know that the two belong together, and puts nothing between them by itself. `in_order` forces it
to: it ties other computations to the transfer by data. In plain JAX the start is all of the transfer, tied to
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .._folding import fold, unfold
from . import _cuda
from ._batching import Axes, batch_shape, carried_axes, carry, share_tables
from ._cuda import Kind
from ._lowering import register
from ._misfit import cast_misfit, reduce_misfit
from ._portable import cast, reduce_sum
from ._route import Route


@dataclass(frozen=True)
class Flight:
    """A transfer that may be under way.

    Attributes:
        arrays: what the landing takes, the workspace first. Empty if there was nothing to start.
        finish: the landing.
    """

    arrays: tuple[jax.Array, ...]
    finish: Callable[[tuple[jax.Array, ...]], list[jax.Array]]

    def land(self) -> list[jax.Array]:
        """The results. To be called once, and something that the program returns has to be made of them."""
        return self.finish(self.arrays)

    def then(self, function: Callable[[list[jax.Array]], list[jax.Array]]) -> "Flight":
        """The same, with something done to the results when it has landed."""
        return replace(self, finish=lambda arrays: function(self.finish(arrays)))


def in_order[Tree](tree: Tree, flights: Sequence[Flight]) -> tuple[Tree, list[Flight]]:
    """The same: uses of ``tree`` come after the flights' starts, landings after what has made ``tree``."""
    workspaces = [flight.arrays[:1] for flight in flights]
    if not any(workspaces):
        return tree, [*flights]
    tree, workspaces = jax.lax.optimization_barrier((tree, workspaces))
    return tree, [
        replace(flight, arrays=(*workspace, *flight.arrays[1:]))
        for flight, workspace in zip(flights, workspaces, strict=True)
    ]


def start(
    kind: Kind,
    operands: Sequence[jax.Array],
    dtypes: Sequence[jnp.dtype],
    route: Route,
    *,
    number: int,
    goes_first: bool,
) -> Flight:
    """Starts a cast or a reduction, which is not differentiable.

    Args:
        kind: which of the two it is.
        operands: as of `group_cast_p` and `group_reduce_p`, with eight arrays at most and nothing empty.
        dtypes: of the results.
        route: where rows go.
        number: tells the transfer from others of the group that are under way.
        goes_first: on GPUs, what is computed next waits until the transfer has its multiprocessors. For the
            first of several transfers that are started together, since the others wait for that one.
    """
    *xs, sends, receives = operands
    likes = _cuda.result_types(kind, route, xs, dtypes)
    params = {"kind": kind, "route": route, "dtypes": tuple(dtypes), "number": number}
    ranks = route.group_size or jax.lax.axis_size(route.axis_name)
    flat = (_cuda.flatten(x) for x in xs)
    started = start_p.bind(*flat, sends, receives, ranks=ranks, goes_first=goes_first, **params)

    def finish(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [
            _cuda.unflatten(x, like) for x, like in zip(done_p.bind(*arrays, **params), likes, strict=True)
        ]

    return Flight(tuple(started), finish)


# --- the primitives: of arrays [G, rows, ...] whose rows are whole units ---
#
# start_p: arrays, sends and receives → a workspace, the results, and the operands again
# done_p: all of that → the results

start_p = Primitive("jaxmagi_group_start")
done_p = Primitive("jaxmagi_group_done")


def _start_types(
    *operands: Any, kind: Kind, route: Route, dtypes: Sequence[jnp.dtype], ranks: int, **_: Any
) -> list[Any]:
    *xs, sends, receives = operands
    rows = _cuda.result_rows(kind, route)
    # update() keeps the sharding and the varying mesh axes of the operand.
    results = [
        x.update(shape=(x.shape[0], rows, *x.shape[2:]), dtype=dtype)
        for x, dtype in zip(xs, dtypes, strict=True)
    ]
    size = _cuda.workspace_bytes(xs, route, ranks)
    whole = sends.sharding.update(spec=jax.P(None))
    workspace = sends.update(shape=(size,), dtype=jnp.dtype(jnp.uint8), sharding=whole)
    return [workspace, *results, *xs, sends, receives]


def _done_types(workspace: Any, *started: Any, dtypes: Sequence[jnp.dtype], **_: Any) -> list[Any]:
    del workspace
    return [*started[: len(dtypes)]]


# --- batching: as that of `group_cast_p`, with one workspace for the whole batch ---


def _batch_start(operands: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int | None]]:
    if share_tables(axes):
        dims = carried_axes(axes[:-2])
        return start_p.bind(*carry(operands, axes), **params), [None, *dims, *dims, None, None]
    lead = batch_shape(operands, axes)
    folded = [fold(x, axis, lead[0]) for x, axis in zip(operands, axes, strict=True)]
    workspace, *started = start_p.bind(*folded, **params)
    return [workspace, *(unfold(x, lead) for x in started)], [None, *[0] * len(started)]


def _batch_done(operands: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int | None]]:
    workspace, *started = operands
    axes = axes[1:]
    if share_tables(axes):
        out = done_p.bind(workspace, *carry(started, axes), **params)
        return out, carried_axes(axes[: len(out)])
    lead = batch_shape(started, axes)
    folded = [fold(x, axis, lead[0]) for x, axis in zip(started, axes, strict=True)]
    out = [unfold(x, lead) for x in done_p.bind(workspace, *folded, **params)]
    return out, [0] * len(out)


# --- lowering ---


def _portable_start(
    *operands: jax.Array, kind: Kind, route: Route, dtypes: Sequence[jnp.dtype], ranks: int, **_: Any
) -> list[jax.Array]:
    *xs, sends, receives = operands
    tables = sends, receives, route
    results = cast(xs, *tables) if kind == "cast" else reduce_sum(xs, *tables, dtypes)
    return [_cuda.no_workspace(xs, route, ranks), *results, *operands]


def _portable_done(
    workspace: jax.Array, *started: jax.Array, dtypes: Sequence[jnp.dtype], **_: Any
) -> list[jax.Array]:
    del workspace
    return [*started[: len(dtypes)]]


def _start_misfit(operands: Sequence[Any], *, kind: Kind, dtypes: Any, cp_size: int, **_: Any) -> str | None:
    if kind == "cast":
        return cast_misfit(operands, cp_size=cp_size)
    return reduce_misfit(operands, cp_size=cp_size, out_dtypes=dtypes)


def _done_misfit(started: Sequence[Any], *, dtypes: Any, **params: Any) -> str | None:
    # By what the start had, so that both are custom calls or neither is.
    return _start_misfit(started[len(dtypes) + 1 :], dtypes=dtypes, **params)


def _define(primitive: Primitive, types: Callable[..., list[Any]], batch: Callable[..., Any]) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = batch


_define(start_p, _start_types, _batch_start)
_define(done_p, _done_types, _batch_done)
register(start_p, _portable_start, _cuda.start, _start_misfit)
register(done_p, _portable_done, _cuda.done, _done_misfit)
