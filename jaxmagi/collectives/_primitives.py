"""Defines the two linear primitives, each the transpose of the other.

Operands are any number of arrays x [G, rows, ...] and a rank's tables, sends int32 [G, M, 5] and receives
int32 [G, M, 4]: G independent transfers, which travel together. All operands vary over the mesh axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._dtypes import accumulator_dtype
from .._lowering import run_compiled
from . import _cuda
from ._batching import Axes, batch
from ._lowering import register
from ._portable import cast, reduce_sum
from ._route import Route
from ._support import cast_unsupported_reason, reduce_unsupported_reason

group_cast_p = Primitive("jaxmagi_group_cast")
group_reduce_p = Primitive("jaxmagi_group_reduce")


def _cast_types(*operands: Any, route: Route) -> list[Any]:
    # update() keeps the sharding and the varying mesh axes of the operand.
    return [x.update(shape=(x.shape[0], route.output_rows, *x.shape[2:])) for x in operands[:-2]]


def _reduce_types(*operands: Any, route: Route, out_dtypes: tuple[jnp.dtype, ...]) -> list[Any]:
    return [
        x.update(shape=(x.shape[0], route.input_rows, *x.shape[2:]), dtype=dtype)
        for x, dtype in zip(operands[:-2], out_dtypes, strict=True)
    ]


def sum_dtype(x: jax.Array, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of sums of x for a result of this dtype: that of x, or that of accumulators."""
    return dtype if dtype == x.dtype else accumulator_dtype(x.dtype)


# --- derivatives: linear in all operands but the tables ---


def _bind_some(
    primitive: Primitive, xs: Sequence[Any], tables: Sequence[Any], chosen: Sequence[int], **params: Any
) -> dict[int, Any]:
    """Binds the primitive to the chosen operands. Returns the results by index."""
    if not chosen:
        return {}
    if "out_dtypes" in params:
        params["out_dtypes"] = tuple(params["out_dtypes"][i] for i in chosen)
    return dict(zip(chosen, primitive.bind(*(xs[i] for i in chosen), *tables, **params), strict=True))


def _jvp(primitive: Primitive) -> Callable[..., tuple[list[Any], list[Any]]]:
    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        out = primitive.bind(*primals, **params)
        moving = [i for i, tangent in enumerate(tangents[:-2]) if not isinstance(tangent, ad.Zero)]
        results = _bind_some(primitive, tangents, primals[-2:], moving, **params)
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
        return out, [results.get(i, zero) for i, zero in enumerate(zeros)]

    return rule


def _wanted(cotangents: Sequence[Any], operands: Sequence[Any]) -> list[int]:
    """Returns the indices of operands that get a cotangent."""
    return [
        i
        for i, (cotangent, x) in enumerate(zip(cotangents, operands[:-2], strict=True))
        if ad.is_undefined_primal(x) and not isinstance(cotangent, ad.Zero)
    ]


def _transpose_cast(cotangents: Sequence[Any], *operands: Any, route: Route) -> list[Any]:
    wanted = _wanted(cotangents, operands)
    rounded = {i: route.round(cotangents[i]) for i in wanted}
    values = [rounded.get(i) for i in range(len(cotangents))]
    dtypes = [None if x is None else sum_dtype(x, ct.dtype) for x, ct in zip(values, cotangents, strict=True)]
    sums = _bind_some(group_reduce_p, values, operands[-2:], wanted, route=route, out_dtypes=dtypes)
    results = {i: total.astype(cotangents[i].dtype) for i, total in sums.items()}
    return [results.get(i) for i in range(len(operands))]


def _transpose_reduce(cotangents: Sequence[Any], *operands: Any, route: Route, out_dtypes: Any) -> list[Any]:
    del out_dtypes
    wanted = _wanted(cotangents, operands)
    # They are cast before they are sent, since the dtype of the operands is the narrower one.
    narrow = {i: cotangents[i].astype(operands[i].aval.dtype) for i in wanted}
    values = [narrow.get(i) for i in range(len(cotangents))]
    results = _bind_some(group_cast_p, values, operands[-2:], wanted, route=route)
    return [results.get(i) for i in range(len(operands))]


# --- batching ---


def _batch(primitive: Primitive) -> Callable[..., tuple[list[Any], list[int | None]]]:
    def rule(operands: Sequence[Any], axes: Axes, **params: Any) -> tuple[list[Any], list[int | None]]:
        out, dims = batch(functools.partial(primitive.bind, **params), operands, axes)
        return out, dims[:-2]

    return rule


# --- lowering ---


def _portable_cast(*operands: jax.Array, route: Route) -> list[jax.Array]:
    *xs, sends, receives = operands
    return cast(xs, sends, receives, route)


def _portable_reduce(*operands: jax.Array, route: Route, out_dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
    *xs, sends, receives = operands
    return reduce_sum(xs, sends, receives, route, out_dtypes)


def _define(
    primitive: Primitive,
    types: Callable[..., list[Any]],
    transpose: Callable[..., list[Any]],
    static: Sequence[str],
) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    run_compiled(primitive, static)
    ad.primitive_jvps[primitive] = _jvp(primitive)
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = _batch(primitive)


_define(group_cast_p, _cast_types, _transpose_cast, ("route",))
_define(group_reduce_p, _reduce_types, _transpose_reduce, ("route", "out_dtypes"))
register(group_cast_p, _portable_cast, _cuda.cast, cast_unsupported_reason)
register(group_reduce_p, _portable_reduce, _cuda.reduce, reduce_unsupported_reason)
