"""Defines the primitives of a rank's part in the distributed op, one for each pass.

Operands lead with G sequences: query [G, T, N, D], key [G, T, K, D], value [G, T, K, Dv], bands int32
[M, C, 6] with M = 1 or G, and for each step of the transfer, one or two, a rank's tables sends int32
[G, E, 5] and receives int32 [G, E, 4]. Bands see the rank's keys, and behind them those that it receives.
With ``keeps_received`` these are the last two results of the forward pass, [G, R, K, D] and [G, R, K, Dv],
and the last two operands of the backward pass. All operands vary over the mesh axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _lowering
from .._dtypes import accumulator_dtype
from .._folding import fold, unfold
from .._lowering import Compiled, Function, run_compiled
from .._partitioning import is_partitioned
from .._softmax import Partial, add_sinks
from ..attention import _cuda as attention_cuda, attention_backward, attention_forward
from ..attention._sharding import result_sharding
from ..collectives._batching import Axes
from ..collectives._lowering import groups_of
from ..collectives._primitives import group_cast_p, group_reduce_p, sum_dtype
from ..collectives._process import set_memory_limits
from ..collectives._route import Route
from ..collectives._support import unsupported_reason as collectives_unsupported_reason
from . import _custom_call
from ._custom_call import split_received

context_forward_p = Primitive("jaxmagi_context_forward")
context_backward_p = Primitive("jaxmagi_context_backward")

_BANDS, _SINKS = 3, 4  # among the operands

STATIC = ("scale", "soft_cap", "implementation", "routes", "keeps_received")


def _forward_types(
    q: Any,
    k: Any,
    v: Any,
    *_: Any,
    out_dtype: jnp.dtype,
    routes: Sequence[Route],
    keeps_received: bool,
    **__: Any,
) -> list[Any]:
    sharding = result_sharding(q, k, v)
    by_row = sharding.update(spec=sharding.spec[:-1])
    # update() keeps the varying mesh axes of the operand.
    out = q.update(shape=(*q.shape[:3], v.shape[3]), dtype=out_dtype, sharding=sharding)
    lse = q.update(shape=q.shape[:3], dtype=accumulator_dtype(q.dtype), sharding=by_row)
    rows = routes[-1].output_rows
    kept = (k, v) if keeps_received else ()
    return [out, lse, *(x.update(shape=(x.shape[0], rows, *x.shape[2:])) for x in kept)]


def _backward_types(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> list[Any]:
    return [q, k, v]


# --- composed: any platform ---


def _steps(tables: Sequence[jax.Array], routes: Sequence[Route]) -> list[tuple[Route, jax.Array, jax.Array]]:
    """Returns the route and the tables of each step of a transfer."""
    return list(zip(routes, tables[::2], tables[1::2], strict=True))


def _receive(
    xs: Sequence[jax.Array], tables: Sequence[jax.Array], routes: Sequence[Route]
) -> Sequence[jax.Array]:
    """Returns the rows that the rank receives."""
    for route, sends, receives in _steps(tables, routes):
        xs = group_cast_p.bind(*xs, sends, receives, route=route._replace(wire_dtype=None))
    return xs


def _behind(own: Sequence[jax.Array], received: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the rank's rows, and behind them those that it receives."""
    return [jnp.concatenate(both, axis=1) for both in zip(own, received, strict=True)]


def _give_back(
    xs: Sequence[jax.Array], tables: Sequence[jax.Array], routes: Sequence[Route]
) -> list[jax.Array]:
    """Returns the sums of rows that others have for the rank's rows, in the dtype of these rows."""
    wide = xs[0].dtype
    for route, sends, receives in reversed(_steps(tables, routes)):
        sent = [route.round(x) for x in xs]
        dtypes = tuple(sum_dtype(x, wide) for x in sent)
        sums = group_reduce_p.bind(*sent, sends, receives, route=route, out_dtypes=dtypes)
        xs = [x.astype(wide) for x in sums]
    return [*xs]


def _composed_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *tables: jax.Array,
    routes: Sequence[Route],
    keeps_received: bool,
    **options: Any,
) -> Sequence[jax.Array]:
    received = _receive((k, v), tables, routes)
    keys, values = _behind((k, v), received)
    found = attention_forward(q, keys, values, bands, sinks, **options)
    return [*found, *received] if keeps_received else found


def _composed_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *others: jax.Array,
    routes: Sequence[Route],
    keeps_received: bool,
    **options: Any,
) -> Sequence[jax.Array]:
    wide, tokens = accumulator_dtype(q.dtype), k.shape[1]
    tables, received = split_received(others, keeps_received)
    keys, values = _behind((k, v), received or _receive((k, v), tables, routes))
    gradients = attention_backward(q, keys, values, bands, dout, lse, delta, grad_dtype=wide, **options)
    dq, *grads = gradients
    returned = _give_back([x[:, tokens:] for x in grads], tables, routes)
    sums = (x[:, :tokens] + y for x, y in zip(grads, returned, strict=True))
    return [x.astype(like.dtype) for x, like in zip((dq, *sums), (q, k, v), strict=True)]


# --- batching: a new axis is folded into G ---


def _fold_all(args: Sequence[Any], axes: Axes) -> tuple[list[Any], tuple[int, int]]:
    """Folds a mapped axis A into G. Returns the operands without sinks, and the sizes of A and G."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    lead = size, args[0].shape[1 if axes[0] == 0 else 0]
    folded = [fold(x, axis, size) for x, axis in zip(args, axes, strict=True)]
    folded[_BANDS] = _fold_bands(args[_BANDS], axes[_BANDS], lead)
    return folded, lead


def _fold_bands(bands: Any, axis: int | None, lead: tuple[int, int]) -> Any:
    """Folds the mapped axis of bands. Those that all sequences share stay shared."""
    if axis is None and bands.shape[0] == 1:
        return bands
    bands = jnp.broadcast_to(bands, (lead[0], *bands.shape)) if axis is None else jnp.moveaxis(bands, axis, 0)
    return jnp.broadcast_to(bands, (*lead, *bands.shape[2:])).reshape(-1, *bands.shape[2:])


def _batch_forward(args: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
    others = [i for i in range(len(args)) if i != _SINKS]
    if axes[_SINKS] is not None:
        return _batch_over_sinks(args, axes, **params)
    folded, lead = _fold_all([args[i] for i in others], [axes[i] for i in others])
    folded.insert(_SINKS, args[_SINKS])
    found = [unfold(x, lead) for x in context_forward_p.bind(*folded, **params)]
    return found, [0] * len(found)


def _batch_over_sinks(
    args: Sequence[Any], axes: Axes, *, out_dtype: jnp.dtype, **params: Any
) -> tuple[list[Any], list[int | None]]:
    """Adds sinks afterwards, since the kernels take only one row of them."""
    sinks = jnp.moveaxis(args[_SINKS], axes[_SINKS] or 0, 0)
    no_sinks = jnp.full_like(sinks, -jnp.inf).max(0, initial=-jnp.inf)  # there may be no example
    operands, given = ([*xs[:_SINKS], x, *xs[_SINKS + 1 :]] for xs, x in ((args, no_sinks), (axes, None)))
    params["out_dtype"] = sinks.dtype
    is_mapped = any(axis is not None for axis in given)
    if is_mapped:
        found, _ = _batch_forward(operands, given, **params)
    else:
        found = context_forward_p.bind(*operands, **params)
    part, received = found[:2], found[2:]
    out, lse = add_sinks(Partial(*(x if is_mapped else x[None] for x in part)), sinks[:, None, None])
    axis = 0 if is_mapped else None
    return [out.astype(out_dtype), lse, *received], [0, 0, *[axis] * len(received)]


def _batch_backward(args: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int]]:
    folded, lead = _fold_all(args, axes)
    return [unfold(x, lead) for x in context_backward_p.bind(*folded, **params)], [0, 0, 0]


# --- lowering ---


def _register(primitive: Primitive, composed: Function, custom_call: Function) -> None:
    portable = mlir.lower_fun(composed, multiple_results=True)

    def lower(
        ctx: mlir.LoweringRuleContext,
        *operands: Any,
        routes: Sequence[Route],
        implementation: Any,
        **params: Any,
    ) -> Any:
        del implementation
        set_memory_limits()
        steps = [(route, groups_of(ctx, route)) for route in routes]
        call = functools.partial(custom_call, steps=steps, **params)
        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    compiled = {"cuda": Compiled(lower, _unsupported_reason)}
    # Where attention or transfers are to be custom calls and cannot, their own primitives say so.
    _lowering.register(primitive, portable, compiled, lambda params: None)


def _unsupported_reason(
    ctx: mlir.LoweringRuleContext,
    *,
    scale: float,
    soft_cap: float,
    implementation: str | None,
    routes: Sequence[Route],
    **_: Any,
) -> str | None:
    if "xla" in (implementation, routes[0].implementation):
        return "plain JAX is asked for"
    if is_partitioned(ctx):
        return "XLA's partitioner splits the program"
    operands: Sequence[Any] = ctx.avals_in
    sizes = [size for x in operands for size in x.shape]
    if 0 in (*sizes, *(size for x in routes for size in (x.input_rows, x.output_rows, x.pair_rows))):
        return "an array is empty"
    reason = attention_cuda.unsupported_reason(operands, scale=scale, soft_cap=soft_cap)
    return reason or collectives_unsupported_reason()


def _define(
    primitive: Primitive,
    types: Callable[..., list[Any]],
    batch: Callable[..., Any],
    static: Sequence[str],
) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    run_compiled(primitive, static)
    batching.primitive_batchers[primitive] = batch


_define(context_forward_p, _forward_types, _batch_forward, (*STATIC, "out_dtype"))
_define(context_backward_p, _backward_types, _batch_backward, (*STATIC, "deterministic"))
_register(context_forward_p, _composed_forward, _custom_call.forward)
_register(context_backward_p, _composed_backward, _custom_call.backward)
