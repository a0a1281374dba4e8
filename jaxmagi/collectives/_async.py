"""Starts collectives and waits for them: on GPUs, what is computed in between overlaps with the transfer.

XLA does not know that start and wait belong together, and puts nothing between them by itself. `in_order`
makes it do so by data dependencies. In plain JAX the start is the whole transfer.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from . import _cuda
from ._batching import Axes, batch
from ._cuda import Kind
from ._lowering import register
from ._portable import cast, reduce_sum
from ._route import Route
from ._support import cast_unsupported_reason, reduce_unsupported_reason


@dataclass(frozen=True)
class AsyncTransfer:
    """A transfer that has been started.

    Attributes:
        arrays: the operands of ``finish``, the token first. Empty if nothing was started.
        finish: waits for the transfer and returns its results.
    """

    arrays: tuple[jax.Array, ...]
    finish: Callable[[tuple[jax.Array, ...]], list[jax.Array]]

    def wait(self) -> list[jax.Array]:
        """Returns the results. Call it once; the program must return something that depends on them."""
        return self.finish(self.arrays)

    def then(self, function: Callable[[list[jax.Array]], list[jax.Array]]) -> "AsyncTransfer":
        """Returns the transfer with a function applied to its results."""
        return replace(self, finish=lambda arrays: function(self.finish(arrays)))


def in_order[Tree](tree: Tree, transfers: Sequence[AsyncTransfer]) -> tuple[Tree, list[AsyncTransfer]]:
    """Orders computations around transfers, and returns both with the same values.

    What uses the returned tree comes after the starts of the transfers, and waiting for the returned
    transfers comes after what computes ``tree``.
    """
    tokens = [transfer.arrays[:1] for transfer in transfers]
    if not any(tokens):
        return tree, [*transfers]
    tree, tokens = jax.lax.optimization_barrier((tree, tokens))
    return tree, [
        replace(transfer, arrays=(*token, *transfer.arrays[1:]))
        for transfer, token in zip(transfers, tokens, strict=True)
    ]


def start(
    kind: Kind,
    operands: Sequence[jax.Array],
    dtypes: Sequence[jnp.dtype],
    route: Route,
    *,
    transfer_id: int,
    goes_first: bool,
) -> AsyncTransfer:
    """Starts a cast or a reduction, which is not differentiable.

    Args:
        kind: which of the two it is.
        operands: those of `group_cast_p` and `group_reduce_p`, with at most eight arrays and none empty.
        dtypes: the dtypes of the results.
        route: where rows go.
        transfer_id: tells the transfer from other unfinished ones of the group.
        goes_first: whether, on GPUs, what is computed next waits until the transfer has its multiprocessors.
            Set it for the first of several transfers that start together, since the others wait for that one.
    """
    *xs, sends, receives = operands
    likes = _cuda.result_types(kind, route, xs, dtypes)
    params = {"kind": kind, "route": route, "dtypes": tuple(dtypes), "transfer_id": transfer_id}
    flat = (_cuda.flatten(x) for x in xs)
    started = start_p.bind(*flat, sends, receives, goes_first=goes_first, **params)

    def finish(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [
            _cuda.unflatten(x, like) for x, like in zip(done_p.bind(*arrays, **params), likes, strict=True)
        ]

    return AsyncTransfer(tuple(started), finish)


# --- the primitives, for arrays [G, rows, ...] whose rows are whole units of bytes ---
#
# start_p: arrays, sends and receives → a token, the results, and the operands again
# done_p: the results of start_p → the results of the transfer

start_p = Primitive("jaxmagi_group_start")
done_p = Primitive("jaxmagi_group_done")


def _start_types(
    *operands: Any, kind: Kind, route: Route, dtypes: Sequence[jnp.dtype], **_: Any
) -> list[Any]:
    *xs, sends, receives = operands
    rows = _cuda.result_rows(kind, route)
    # update() keeps the sharding and the varying mesh axes of the operand.
    results = [
        x.update(shape=(x.shape[0], rows, *x.shape[2:]), dtype=dtype)
        for x, dtype in zip(xs, dtypes, strict=True)
    ]
    whole = sends.sharding.update(spec=jax.P(None))
    token = sends.update(shape=_cuda.TOKEN, dtype=jnp.dtype(jnp.uint8), sharding=whole)
    return [token, *results, *xs, sends, receives]


def _done_types(token: Any, *started: Any, dtypes: Sequence[jnp.dtype], **_: Any) -> list[Any]:
    del token
    return [*started[: len(dtypes)]]


# --- batching: as in `group_cast_p`, with one token for the whole batch ---


def _batch_start(operands: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int | None]]:
    tokens = []

    def bind(*operands: Any) -> list[Any]:
        token, *started = start_p.bind(*operands, **params)
        tokens.append(token)
        return started

    started, dims = batch(bind, operands, axes)
    return [*tokens, *started], [None, *dims[:-2], *dims]


def _batch_done(operands: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int | None]]:
    token, *started = operands
    out, dims = batch(functools.partial(done_p.bind, token, **params), started, axes[1:])
    return out, dims[: len(out)]


# --- lowering ---


def _portable_start(
    *operands: jax.Array, kind: Kind, route: Route, dtypes: Sequence[jnp.dtype], **_: Any
) -> list[jax.Array]:
    *xs, sends, receives = operands
    tables = sends, receives, route
    results = cast(xs, *tables) if kind == "cast" else reduce_sum(xs, *tables, dtypes)
    return [_cuda.new_token(), *results, *operands]


def _portable_done(
    token: jax.Array, *started: jax.Array, dtypes: Sequence[jnp.dtype], **_: Any
) -> list[jax.Array]:
    del token
    return [*started[: len(dtypes)]]


def _start_unsupported_reason(operands: Sequence[Any], *, kind: Kind, dtypes: Any, **_: Any) -> str | None:
    if kind == "cast":
        return cast_unsupported_reason(operands)
    return reduce_unsupported_reason(operands, out_dtypes=dtypes)


def _done_unsupported_reason(started: Sequence[Any], *, dtypes: Any, **params: Any) -> str | None:
    # The operands of the start decide, so that both are custom calls or neither is.
    return _start_unsupported_reason(started[len(dtypes) + 1 :], dtypes=dtypes, **params)


def _define(primitive: Primitive, types: Callable[..., list[Any]], batch: Callable[..., Any]) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = batch


_define(start_p, _start_types, _batch_start)
_define(done_p, _done_types, _batch_done)
register(start_p, _portable_start, _cuda.start, _start_unsupported_reason)
register(done_p, _portable_done, _cuda.done, _done_unsupported_reason)
