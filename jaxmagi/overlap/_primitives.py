"""Defines the primitives of products that are custom calls, which overlap with their collective.

They are bound where a user asks for custom calls by name or they pay (`is_kernel`), inside the functions with
the gradient rules:

    matmul_reduce_scatter_p  x [..., sM, K] · w → [..., M, N]    this rank's rows of the sum over s ranks
    all_gather_matmul_p      x [..., M, K] · w → [..., sM, N]    of the rows of all ranks

Weights w are ``[K, N]`` or, transposed, ``[N, K]``. Both operands vary over the mesh axis.
"""

import functools
import math
from collections.abc import Mapping, Sequence
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
from . import _plain
from ._choice import columns_of, operands_reason, ranks_reach_each_other
from ._exchange import Exchange, Weights

matmul_reduce_scatter_p = Primitive("jaxmagi_matmul_reduce_scatter")
all_gather_matmul_p = Primitive("jaxmagi_all_gather_matmul")


def _result_rows(primitive: Primitive, rows: int, ranks: int) -> int:
    return rows // ranks if primitive is matmul_reduce_scatter_p else rows * ranks


def _type(primitive: Primitive, x: Any, w: Any, *, exchange: Exchange, transposed: bool) -> Any:
    rows = _result_rows(primitive, x.shape[-2], jax.lax.axis_size(exchange.axis_name))
    return x.update(shape=(*x.shape[:-2], rows, columns_of(w, transposed)))


def _batch(
    primitive: Primitive, args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
    """Takes a mapped axis of x as one more of its leading axes.

    With a mapped axis of w there is a call an example, or plain JAX if the user has left the choice.
    """
    (x, w), (x_axis, w_axis) = args, axes
    if w_axis is None:
        return primitive.bind(jnp.moveaxis(x, x_axis or 0, 0), w, **params), 0
    if params["exchange"].implementation is None:
        return jax.vmap(functools.partial(_compute_plainly, primitive, **params), axes)(x, w), 0
    xs = [x] * w.shape[w_axis] if x_axis is None else jnp.moveaxis(x, x_axis, 0)
    ws = jnp.moveaxis(w, w_axis, 0)
    return jnp.stack([primitive.bind(*both, **params) for both in zip(xs, ws, strict=True)]), 0


def _compute_plainly(
    primitive: Primitive, x: jax.Array, w: jax.Array, *, exchange: Exchange, transposed: bool
) -> jax.Array:
    plain = _plain.reduce_scattered if primitive is matmul_reduce_scatter_p else _plain.all_gathered
    return plain(x, w, exchange, Weights(transposed))


def _call(
    primitive: Primitive,
    x: jax.Array,
    w: jax.Array,
    *,
    exchange: Exchange,
    transposed: bool,
    groups: np.ndarray,
) -> list[jax.Array]:
    """Multiplies by a custom call; ``groups`` are those of `replica_groups`."""
    *lead, rows, inner = x.shape
    examples, ranks, columns = math.prod(lead), groups.shape[1], columns_of(w, transposed)
    scatters = primitive is matmul_reduce_scatter_p
    parts, result_parts = (ranks, 1) if scatters else (1, ranks)
    bytes_of = getattr(_native.extension("cuda"), f"{primitive.name.removeprefix('jaxmagi_')}_bytes")
    types = [
        jax.ShapeDtypeStruct((examples, result_parts, rows // parts, columns), x.dtype),
        jax.ShapeDtypeStruct((bytes_of(examples, ranks, rows // parts, columns, inner),), jnp.uint8),
    ]
    y, _ = jax.ffi.ffi_call(primitive.name, types)(
        x.reshape(examples, parts, rows // parts, inner),
        w,
        groups=groups.reshape(-1),
        group_size=np.int64(ranks),
        timeout_ms=np.int64(timeout_ms(exchange.timeout)),
        transposed_w=np.bool_(transposed),
    )
    return [y.reshape(*lead, _result_rows(primitive, rows, ranks), columns)]


def _lower(
    primitive: Primitive, ctx: mlir.LoweringRuleContext, *operands: Any, exchange: Exchange, **params: Any
) -> Any:
    set_memory_limits()
    groups = replica_groups(ctx, exchange.axis_name)
    call = functools.partial(_call, primitive, exchange=exchange, groups=groups, **params)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _unsupported_reason(
    primitive: Primitive, ctx: mlir.LoweringRuleContext, *, exchange: Exchange, transposed: bool
) -> str | None:
    """Returns why the custom call does not fit here; None if it does."""
    x, w = ctx.avals_in
    if reason := operands_reason(x, w, exchange, transposed):
        return reason
    if is_partitioned(ctx):
        return "XLA's partitioner splits the program"
    if reason := _hopper.unsupported_reason():
        return reason
    if _native.has_handler(primitive.name, "cuda"):
        return None
    return "the compiled extension jaxmagi._cuda is older than these sources: build jaxmagi again"


def _implementation(params: Mapping[str, Any]) -> str | None:
    """Returns what the user asks for, and plain JAX where kernels would not do by default."""
    asked = params["exchange"].implementation
    return "xla" if asked is None and not ranks_reach_each_other() else asked


def _define(primitive: Primitive) -> None:
    primitive.def_abstract_eval(functools.partial(_type, primitive))
    run_compiled(primitive, ("exchange", "transposed"))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    kernel = Compiled(functools.partial(_lower, primitive), functools.partial(_unsupported_reason, primitive))
    portable = mlir.lower_fun(functools.partial(_compute_plainly, primitive), multiple_results=False)
    _lowering.register(primitive, portable, {"cuda": kernel}, _implementation)


_define(matmul_reduce_scatter_p)
_define(all_gather_matmul_p)
