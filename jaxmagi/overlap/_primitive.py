"""Defines the primitive of a product whose parts are summed over ranks by a custom call.

It is bound where a user asks for the custom call by name, inside the function with the gradient rule. Operands
are x ``[..., sM, K]`` and w ``[K, N]`` or, transposed, ``[N, K]``, which vary over the mesh axis, and the
result is ``[..., M, N]``.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _hopper, _lowering, _native
from .._lowering import Compiled, run_compiled
from .._partitioning import is_partitioned
from ..collectives._groups import replica_groups
from ..collectives._process import set_memory_limits, timeout_ms
from ._exchange import Exchange

TARGET = "jaxmagi_matmul_reduce_scatter"
_UNIT = 8  # of the inner dimension and of columns: rows are multiples of 16 bytes
_DTYPES = ("bfloat16", "float16")
_MOST_RANKS = 64

matmul_reduce_scatter_p = Primitive(TARGET)


@matmul_reduce_scatter_p.def_abstract_eval
def _type(x: Any, w: Any, *, exchange: Exchange, transposed: bool) -> Any:
    rows = x.shape[-2] // jax.lax.axis_size(exchange.axis_name)
    return x.update(shape=(*x.shape[:-2], rows, _columns(w, transposed)))


def _columns(w: Any, transposed: bool) -> int:
    return w.shape[0 if transposed else 1]


run_compiled(matmul_reduce_scatter_p, ("exchange", "transposed"))


def _batch(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """Takes a mapped axis of x as one more of its leading axes; with that of w, one call an example."""
    (x, w), (x_axis, w_axis) = args, axes
    if w_axis is None:
        return matmul_reduce_scatter_p.bind(jnp.moveaxis(x, x_axis or 0, 0), w, **params), 0
    xs = [x] * w.shape[w_axis] if x_axis is None else jnp.moveaxis(x, x_axis, 0)
    ws = jnp.moveaxis(w, w_axis, 0)
    return jnp.stack([matmul_reduce_scatter_p.bind(*both, **params) for both in zip(xs, ws, strict=True)]), 0


batching.primitive_batchers[matmul_reduce_scatter_p] = _batch


def _call(
    x: jax.Array, w: jax.Array, exchange: Exchange, transposed: bool, groups: np.ndarray
) -> list[jax.Array]:
    *lead, rows, inner = x.shape
    examples, ranks, columns = math.prod(lead), groups.shape[1], _columns(w, transposed)
    shape = examples, rows // ranks, columns
    compiled: Any = _native.extension("cuda")
    received = compiled.matmul_reduce_scatter_bytes(examples, ranks, shape[1], columns)
    types = [jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((received,), jnp.uint8)]
    y, _ = jax.ffi.ffi_call(TARGET, types)(
        x.reshape(examples, ranks, shape[1], inner),
        w,
        groups=groups.reshape(-1),
        group_size=np.int64(ranks),
        timeout_ms=np.int64(timeout_ms(exchange.timeout)),
        transposed_w=np.bool_(transposed),
    )
    return [y.reshape(*lead, *shape[1:])]


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, exchange: Exchange, transposed: bool) -> Any:
    set_memory_limits()
    groups = replica_groups(ctx, exchange.axis_name)

    def call(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return _call(x, w, exchange, transposed, groups)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _unsupported_reason(ctx: mlir.LoweringRuleContext, *, exchange: Exchange, transposed: bool) -> str | None:
    """Returns why the custom call does not fit here; None if it does."""
    x, w = ctx.avals_in
    ranks, sizes = jax.lax.axis_size(exchange.axis_name), (x.shape[-1], _columns(w, transposed))
    if x.dtype.name not in _DTYPES:
        return f"the operands are {x.dtype.name}, and the kernel multiplies {' and '.join(_DTYPES)}"
    if exchange.wire_dtype != x.dtype:
        return f"wire_dtype={exchange.wire_dtype.name}, but tiles travel as {x.dtype.name}"
    if any(size % _UNIT for size in sizes):
        return f"the inner dimension and the columns must be multiples of {_UNIT}, but they are {sizes}"
    if not 2 <= ranks <= _MOST_RANKS:
        return f"mesh axis {exchange.axis_name!r} has {ranks} ranks, and the kernel is for 2 to {_MOST_RANKS}"
    if is_partitioned(ctx):
        return "XLA's partitioner splits the program"
    if reason := _hopper.unsupported_reason():
        return reason
    if _native.has_handler(TARGET, "cuda"):
        return None
    return "the compiled extension jaxmagi._cuda is older than these sources: build jaxmagi again"


_lowering.register(
    matmul_reduce_scatter_p,
    _lowering.no_kernel,  # it is bound only where the custom call is asked for
    {"cuda": Compiled(_lower, _unsupported_reason)},
    lambda params: "native",
)
