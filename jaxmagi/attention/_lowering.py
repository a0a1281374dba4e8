"""How the primitives are lowered: to custom calls where they fit, else to plain JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _hopper, _native
from .._refusal import refusal
from . import _cuda, _xla
from ._dtypes import accumulator_dtype
from ._partial import Partial, accumulate
from ._partitioning import lowering

type _Function = Callable[..., Sequence[jax.Array]]
type _Misfit = Callable[..., str | None]  # of operand types and params: why compiled code cannot run them
type _Rule = Callable[..., Any]


def register_forward(primitive: Primitive) -> None:
    """Registers the lowerings of the forward primitive."""
    function = _accumulating(_xla.forward)
    on_cpu, cpu_misfit = _accumulating(_cpu_forward), functools.partial(_cpu_misfit, primitive.name)
    for_cpu = _compiled_rule(primitive, on_cpu, cpu_misfit, _portable_rule(primitive, function, cpu_misfit))
    on_hopper = functools.partial(_hopper_forward, function)
    for_cuda = _compiled_rule(
        primitive, on_hopper, _cuda.misfit, _portable_rule(primitive, function, _cuda.misfit)
    )
    mlir.register_lowering(primitive, _portable_rule(primitive, function, _no_kernel))
    mlir.register_lowering(primitive, for_cpu, platform="cpu")
    mlir.register_lowering(primitive, _warn_of_plain_xla(for_cuda), platform="cuda")


def register_backward(primitive: Primitive) -> None:
    """Registers the lowerings of the backward primitive."""
    cpu_misfit = functools.partial(_cpu_misfit, primitive.name)
    function = _portable_backward
    for_cpu = _compiled_rule(
        primitive, _cpu_backward, cpu_misfit, _portable_rule(primitive, function, cpu_misfit)
    )
    for_cuda = _compiled_rule(
        primitive, _hopper_backward, _cuda.misfit, _portable_rule(primitive, function, _cuda.misfit)
    )
    mlir.register_lowering(primitive, _portable_rule(primitive, function, _no_kernel))
    mlir.register_lowering(primitive, for_cpu, platform="cpu")
    mlir.register_lowering(primitive, for_cuda, platform="cuda")


def compiled_misfit(platform: str) -> str | None:
    """Why ``implementation="ffi"`` cannot run on a platform, whatever the operands; None if it can."""
    if platform == "cuda":
        return _hopper.platform_misfit()
    return _cpu_misfit("jaxmagi_attention_forward", ()) if platform == "cpu" else _no_kernel(())


def _portable_rule(primitive: Primitive, function: _Function, misfit: _Misfit) -> _Rule:
    """Lowers the function, unless compiled code was asked for."""
    lower = lowering(primitive, function, "xla")

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any) -> Any:
        if implementation != "ffi":
            return lower(ctx, *operands, **params)
        raise refusal(ctx, primitive, implementation, misfit(ctx.avals_in, **params))

    return rule


def _compiled_rule(primitive: Primitive, function: _Function, misfit: _Misfit, otherwise: _Rule) -> _Rule:
    """Lowers the function, which makes custom calls, where they fit and are not declined."""
    lower = lowering(primitive, function, "ffi")

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any) -> Any:
        if implementation == "xla" or misfit(ctx.avals_in, **params) is not None:
            return otherwise(ctx, *operands, implementation=implementation, **params)
        return lower(ctx, *operands, **params)

    return rule


def _warn_of_plain_xla(rule: _Rule) -> _Rule:
    def warning_rule(
        ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
    ) -> Any:
        if implementation is None:
            _cuda.warn_of_plain_xla()
        return rule(ctx, *operands, implementation=implementation, **params)

    return warning_rule


def _no_kernel(operands: Sequence[Any], **_: Any) -> str:
    del operands
    return "there is no compiled code for it"


def _cpu_misfit(target: str, operands: Sequence[Any], **_: Any) -> str | None:
    del operands
    if _native.has_handler(target, "cpu"):
        return None
    return "the compiled extension jaxmagi._cpu is missing"


def _accumulating(forward: _Function) -> _Function:
    """Lets a forward function merge its result into a previous one."""

    def function(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        bands: jax.Array,
        sinks: jax.Array,
        *previous: jax.Array,
        out_dtype: jax.typing.DTypeLike,
        sm_margin: int,
        **params: float,
    ) -> Sequence[jax.Array]:
        del sm_margin  # of GPUs
        run = functools.partial(forward, q, k, v, bands, sinks, **params)
        if not previous:
            return run(out_dtype=out_dtype)
        return accumulate(Partial(*previous), Partial(*run(out_dtype=accumulator_dtype(q.dtype))))

    return function


def _hopper_forward(portable: _Function, *operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
    """The kernel, save for empty operands: there is nothing to launch, and TMA cannot describe them."""
    q, k, *_ = operands
    forward = portable if 0 in (q.size, k.size) else _cuda.forward
    return forward(*operands, **params)


def _hopper_backward(*operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
    """The kernel, save for empty operands."""
    q, k, *_ = operands
    backward = _portable_backward if 0 in (q.size, k.size) else _cuda.backward
    return backward(*operands, **params)


def _cpu_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    out_dtype: jax.typing.DTypeLike,
) -> Sequence[jax.Array]:
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), out_dtype),
        jax.ShapeDtypeStruct(q.shape[:3], accumulator_dtype(q.dtype)),
    )
    call = jax.ffi.ffi_call("jaxmagi_attention_forward", results)
    return call(q, k, v, bands, sinks, scale=np.float64(scale), soft_cap=np.float64(soft_cap))


def _cpu_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
    scale: float,
    soft_cap: float,
    grad_dtype: jax.typing.DTypeLike,
    deterministic: bool,
    sm_margin: int,
) -> Sequence[jax.Array]:
    del deterministic, sm_margin  # the handler always is; of GPUs
    results = tuple(jax.ShapeDtypeStruct(x.shape, grad_dtype) for x in (q, k, v))
    call = jax.ffi.ffi_call("jaxmagi_attention_backward", results)
    return call(q, k, v, *rest, scale=np.float64(scale), soft_cap=np.float64(soft_cap))


def _portable_backward(
    *operands: jax.Array, deterministic: bool, sm_margin: int, **params: Any
) -> Sequence[jax.Array]:
    del deterministic, sm_margin  # the portable backward always is; of GPUs
    return _xla.backward(*operands, **params)
