"""The two primitives: their types, batching and lowerings.

Operands always have a batch axis: q [B, T, N, D], k [B, S, K, D], v [B, S, K, Dv], bands int32 [1, C, 6] or
[B, C, 6], sinks [N]. "Accumulator dtype" is float64 for float64 operands and float32 for all others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _native
from . import _xla
from ._partial import Partial, add_sinks
from ._sharding import bind_over_shards
from ._xla import accumulator_dtype as accumulator_dtype

DTYPES = ("float64", "float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("ffi", "xla", None)


def _expect(name: str, x: Any, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> None:
    if x.shape != tuple(shape) or x.dtype != jnp.dtype(dtype):
        wanted = f"{jnp.dtype(dtype).name}{list(shape)}"
        raise ValueError(f"{name} must be {wanted}, but is {x.dtype.name}{list(x.shape)}.")


def is_soft_cap(value: float) -> bool:
    """Whether float32 has it as a positive normal number: the kernels divide by it there."""
    limits = jnp.finfo(jnp.float32)
    return float(limits.tiny) <= value <= float(limits.max)


def _check_common(q: Any, k: Any, v: Any, bands: Any, *, soft_cap: float, implementation: str | None) -> None:
    if q.dtype.name not in DTYPES:
        raise ValueError(f"The dtype of query must be one of {', '.join(DTYPES)}, but is {q.dtype.name}.")
    batch, _, heads, dim = q.shape
    _, length, kv_heads, v_dim = v.shape
    _expect("key", k, (batch, length, kv_heads, dim), q.dtype)
    _expect("value", v, (batch, length, kv_heads, v_dim), q.dtype)
    if 0 in (heads, kv_heads):
        raise ValueError(f"There must be heads, but query has {heads} and key has {kv_heads}.")
    if heads % kv_heads:
        raise ValueError(f"The number of query heads {heads} is no multiple of that of key heads {kv_heads}.")
    if bands.ndim != 3 or bands.shape[0] not in (1, batch) or bands.shape[2] != 6 or bands.dtype != jnp.int32:
        wanted = f"int32[1, C, 6] or int32[{batch}, C, 6]"
        raise ValueError(f"bands must be {wanted}, but is {bands.dtype.name}{list(bands.shape)}.")
    if soft_cap != 0 and not is_soft_cap(soft_cap):
        raise ValueError(f"soft_cap must be a positive normal float32, or 0 for none, but is {soft_cap}.")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, but is {implementation!r}.")


def _check_result_dtype(name: str, dtype: jnp.dtype, operand: jnp.dtype) -> None:
    allowed = (operand, accumulator_dtype(operand))
    if dtype not in allowed:
        wanted = " or ".join(sorted({x.name for x in allowed}))
        raise ValueError(f"{name} must be {wanted} for operands in {operand.name}, but is {dtype.name}.")


def _forward_types(
    q: Any,
    k: Any,
    v: Any,
    bands: Any,
    sinks: Any,
    *,
    out_dtype: jnp.dtype,
    soft_cap: float,
    implementation: str | None,
    **_: float,
) -> tuple[Any, Any]:
    _check_common(q, k, v, bands, soft_cap=soft_cap, implementation=implementation)
    accumulate = accumulator_dtype(q.dtype)
    _expect("sinks", sinks, q.shape[2:3], accumulate)
    _check_result_dtype("out_dtype", out_dtype, q.dtype)
    # update() keeps the sharding and the varying mesh axes of the operand.
    out = q.update(shape=(*q.shape[:3], v.shape[3]), dtype=out_dtype)
    return out, _row_type(q, accumulate)


def _row_type(q: Any, dtype: jnp.dtype) -> Any:
    """The type of a number per row and head: [B, T, N]."""
    sharding = q.sharding.update(spec=q.sharding.spec[:3])
    return q.update(shape=q.shape[:3], dtype=dtype, sharding=sharding)


def _backward_types(
    q: Any,
    k: Any,
    v: Any,
    bands: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    *,
    grad_dtype: jnp.dtype,
    soft_cap: float,
    implementation: str | None,
    **_: float,
) -> tuple[Any, Any, Any]:
    _check_common(q, k, v, bands, soft_cap=soft_cap, implementation=implementation)
    accumulate = accumulator_dtype(q.dtype)
    _expect("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype)
    _expect("lse", lse, q.shape[:3], accumulate)
    _expect("delta", delta, q.shape[:3], accumulate)
    _check_result_dtype("grad_dtype", grad_dtype, q.dtype)
    return q.update(dtype=grad_dtype), k.update(dtype=grad_dtype), v.update(dtype=grad_dtype)


def _no_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "Attention can be differentiated once and in reverse mode (jax.grad, jax.vjp): there are no second "
        "derivatives, nor derivatives of attention_forward and attention_backward."
    )


def _primitive(name: str, types: Callable[..., tuple[Any, ...]], static: Sequence[str]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=static))
    ad.primitive_jvps[primitive] = _no_derivative
    return primitive


attention_forward_p = _primitive(
    "jaxmagi_attention_forward", _forward_types, ("scale", "soft_cap", "out_dtype", "implementation")
)
attention_backward_p = _primitive(
    "jaxmagi_attention_backward",
    _backward_types,
    ("scale", "soft_cap", "deterministic", "grad_dtype", "implementation"),
)


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    out_dtype: jax.typing.DTypeLike,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention under bands, without derivatives.

    Args:
        q: [B, T, N, D].
        k: [B, S, K, D], in the dtype of q; N is a multiple of K.
        v: [B, S, K, Dv], in the dtype of q.
        bands: int32 [1, C, 6] or [B, C, 6].
        sinks: [N] in accumulator dtype, -inf for no sink.
        scale: factor of q·k.
        soft_cap: c of c · tanh(logits / c), a normal number of float32; 0 for none.
        out_dtype: dtype of the output, that of q or the accumulator dtype.
        implementation: "ffi", "xla", or None for the best that the platform has.

    Returns:
        The output [B, T, N, Dv] and the log-sum-exp [B, T, N] in accumulator dtype. A row that sees nothing,
        or nothing but logits of -inf, has output 0 and log-sum-exp -inf, also where it has a sink.

    Raises:
        ValueError: for shapes or dtypes other than these.
        NotImplementedError: when lowered for a platform that lacks the implementation asked for.
    """
    out, lse = bind_over_shards(
        attention_forward_p,
        q,
        k,
        v,
        bands,
        sinks,
        scale=float(scale),
        soft_cap=float(soft_cap),
        out_dtype=jnp.dtype(out_dtype),
        implementation=implementation,
    )
    return out, lse


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    deterministic: bool,
    grad_dtype: jax.typing.DTypeLike,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v.

    Probabilities come from ``lse``, so it may span more keys than these (one stage of several) and a sink.

    Args:
        q: as in `attention_forward`, likewise k, v, bands, scale, soft_cap and implementation.
        k: see there.
        v: see there.
        bands: see there.
        dout: cotangent of the output [B, T, N, Dv], in the dtype of q.
        lse: [B, T, N] in accumulator dtype; rows with -inf get and give no gradient.
        delta: [B, T, N] in accumulator dtype, rowsum(dout · out) minus the cotangent of lse.
        scale: see there.
        soft_cap: see there.
        deterministic: ask for bitwise reproducible gradients.
        grad_dtype: dtype of the gradients, that of q or the accumulator dtype.
        implementation: see there.

    Returns:
        The gradients of q, k and v.

    Raises:
        ValueError: for shapes or dtypes other than these.
        NotImplementedError: when lowered for a platform that lacks the implementation asked for.
    """
    dq, dk, dv = bind_over_shards(
        attention_backward_p,
        q,
        k,
        v,
        bands,
        dout,
        lse,
        delta,
        scale=float(scale),
        soft_cap=float(soft_cap),
        deterministic=bool(deterministic),
        grad_dtype=jnp.dtype(grad_dtype),
        implementation=implementation,
    )
    return dq, dk, dv


# --- batching: the new axis is folded into B ---


def _fold(x: Any, axis: int | None, size: int) -> Any:
    """[..., A, ...] with A at ``axis`` (or without it) → [A · B, ...]."""
    x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_bands(bands: Any, axis: int | None, size: int, batch: int) -> Any:
    """Bands [1 or B, C, 6] with or without the new axis → [1 or A · B, C, 6]."""
    shared = bands.shape[0 if axis != 0 else 1] == 1
    if not shared:
        return _fold(bands, axis, size)
    if axis is None:
        return bands
    bands = jnp.moveaxis(bands, axis, 0)
    return _fold(jnp.broadcast_to(bands, (size, batch, *bands.shape[2:])), 0, size)


def _unfold(x: Any, size: int) -> Any:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _fold_operands(args: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], int]:
    """All operands but the sinks with the new axis folded in, and the size of that axis."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    batch = args[0].shape[1 if axes[0] == 0 else 0]
    folded = [
        _fold_bands(x, axis, size, batch) if i == 3 else _fold(x, axis, size)
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]
    return folded, size


def _batch_forward(
    args: Sequence[Any], axes: Sequence[int | None], *, out_dtype: jnp.dtype, **params: Any
) -> tuple[list[Any], list[int]]:
    *operands, sinks = args
    *operand_axes, sink_axis = axes
    bind = functools.partial(bind_over_shards, attention_forward_p, **params)
    if sink_axis is None:
        folded, size = _fold_operands(operands, operand_axes)
        out, lse = bind(*folded, sinks, out_dtype=out_dtype)
        return [_unfold(out, size), _unfold(lse, size)], [0, 0]
    # The kernels take one row of sinks, so batched sinks are put in afterwards.
    sinks = jnp.moveaxis(sinks, sink_axis, 0)
    if all(axis is None for axis in operand_axes):
        out, lse = bind(*operands, jnp.full_like(sinks[0], -jnp.inf), out_dtype=sinks.dtype)
        out, lse = out[None], lse[None]
    else:
        folded, size = _fold_operands(operands, operand_axes)
        results = bind(*folded, jnp.full_like(sinks[0], -jnp.inf), out_dtype=sinks.dtype)
        out, lse = (_unfold(x, size) for x in results)
    out, lse = add_sinks(Partial(out, lse), sinks[:, None, None])
    return [out.astype(out_dtype), lse], [0, 0]


def _batch_backward(
    args: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    folded, size = _fold_operands(args, axes)
    return [_unfold(x, size) for x in bind_over_shards(attention_backward_p, *folded, **params)], [0, 0, 0]


batching.primitive_batchers[attention_forward_p] = _batch_forward
batching.primitive_batchers[attention_backward_p] = _batch_backward


# --- lowering ---


def _missing_handler(target: str, platforms: Sequence[str]) -> NotImplementedError:
    lacks = "the compiled extension jaxmagi._cpu" if tuple(platforms) == ("cpu",) else "a handler"
    return NotImplementedError(
        f'implementation="ffi": {target} cannot run on platform {", ".join(platforms)}, which lacks {lacks}. '
        'Use implementation="xla", or None to choose by platform.'
    )


def _platforms(ctx: mlir.LoweringRuleContext) -> Sequence[str]:
    return ctx.platforms or ctx.module_context.platforms


def _register_lowerings(primitive: Primitive, portable: Callable[..., Any]) -> None:
    """The portable lowering everywhere; the custom call on CPU where its handler is there."""
    lower_portable = mlir.lower_fun(portable, multiple_results=True)
    lower_call = jax.ffi.ffi_lowering(primitive.name)

    def by_xla(
        ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
    ) -> Any:
        if implementation == "ffi":
            raise _missing_handler(primitive.name, _platforms(ctx))
        return lower_portable(ctx, *operands, **params)

    def by_handler(
        ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
    ) -> Any:
        if implementation == "xla" or not _native.has_handler(primitive.name, "cpu"):
            return by_xla(ctx, *operands, implementation=implementation, **params)
        numbers = {name: np.float64(params[name]) for name in ("scale", "soft_cap")}
        return lower_call(ctx, *operands, **numbers)

    mlir.register_lowering(primitive, by_xla)
    mlir.register_lowering(primitive, by_handler, platform="cpu")


def _portable_backward(*operands: jax.Array, deterministic: bool, **params: Any) -> tuple[jax.Array, ...]:
    del deterministic  # the portable backward always is
    return _xla.backward(*operands, **params)


_register_lowerings(attention_forward_p, _xla.forward)
_register_lowerings(attention_backward_p, _portable_backward)
