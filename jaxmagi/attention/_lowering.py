"""Lowers attention to custom calls for CPUs and Hopper GPUs where they fit, otherwise to plain JAX."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _hopper, _native
from .._dtypes import accumulator_dtype
from .._lowering import Compiled, Function, LoweringRule, no_kernel, register
from .._softmax import Partial, accumulate
from . import _cuda, _xla
from ._partitioning import lowering

FORWARD, BACKWARD = "jaxmagi_attention_forward", "jaxmagi_attention_backward"
"""Names of the primitives, and of their custom calls on CPUs."""


def register_forward(primitive: Primitive) -> None:
    """Registers the lowerings of the forward primitive."""
    _register(primitive, _accumulating(_xla.forward), _accumulating(_cpu_forward), _cuda.forward)


def register_backward(primitive: Primitive) -> None:
    """Registers the lowerings of the backward primitive."""
    _register(primitive, _portable_backward, _cpu_backward, _cuda.backward)


def unsupported_reason(platform: str) -> str | None:
    """Returns why "ffi" cannot run on a platform, whatever the operands; None if it can."""
    if platform == "cuda":
        return _hopper.unsupported_reason()
    return _cpu_unsupported_reason(FORWARD) if platform == "cpu" else no_kernel()


def _register(primitive: Primitive, portable: Function, on_cpu: Function, on_hopper: Function) -> None:
    cpu_reason = functools.partial(_cpu_unsupported_reason, primitive.name)
    compiled = {
        "cpu": Compiled(
            _without_margin(primitive, lowering(primitive, on_cpu, "ffi")), lambda *_, **__: cpu_reason()
        ),
        "cuda": Compiled(
            lowering(primitive, _unless_empty(on_hopper, portable), "ffi"),
            _hopper_unsupported_reason,
            on_fallback=_cuda.warn_of_plain_xla,
        ),
    }
    plain = _without_margin(primitive, lowering(primitive, portable, "xla"))
    register(primitive, plain, compiled, lambda params: params["implementation"])


def _without_margin(primitive: Primitive, rule: LoweringRule) -> LoweringRule:
    """Returns a lowering rule that refuses to leave multiprocessors free, which only kernels for GPUs can."""

    def checked(ctx: mlir.LoweringRuleContext, *operands: Any, sm_margin: int, **params: Any) -> Any:
        if sm_margin == 0:
            return rule(ctx, *operands, sm_margin=sm_margin, **params)
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise NotImplementedError(
            f"sm_margin={sm_margin}: only the kernels for GPUs leave multiprocessors free, and here, on "
            f"platform {platforms}, {primitive.name} runs without them. On a GPU "
            'implementation="ffi" says why.'
        )

    return checked


def _cpu_unsupported_reason(target: str) -> str | None:
    if _native.has_handler(target, "cpu"):
        return None
    return "the compiled extension jaxmagi._cpu is missing"


def _hopper_unsupported_reason(
    ctx: mlir.LoweringRuleContext, *, scale: float, soft_cap: float, **_: Any
) -> str | None:
    return _cuda.unsupported_reason(ctx.avals_in, scale=scale, soft_cap=soft_cap)


def _unless_empty(kernel: Function, portable: Function) -> Function:
    """Returns the kernel, but plain JAX for empty operands: TMA cannot describe them."""

    def function(q: jax.Array, k: jax.Array, *rest: jax.Array, **params: Any) -> Sequence[jax.Array]:
        return (portable if 0 in (q.size, k.size) else kernel)(q, k, *rest, **params)

    return function


def _accumulating(forward: Function) -> Function:
    """Returns a forward function that also merges its result into a previous one, if there is one."""

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
        del sm_margin  # is for GPUs
        run = functools.partial(forward, q, k, v, bands, sinks, **params)
        if not previous:
            return run(out_dtype=out_dtype)
        return accumulate(Partial(*previous), Partial(*run(out_dtype=accumulator_dtype(q.dtype))))

    return function


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
    call = jax.ffi.ffi_call(FORWARD, results)
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
    del deterministic, sm_margin  # on CPUs gradients are always deterministic
    results = tuple(jax.ShapeDtypeStruct(x.shape, grad_dtype) for x in (q, k, v))
    call = jax.ffi.ffi_call(BACKWARD, results)
    return call(q, k, v, *rest, scale=np.float64(scale), soft_cap=np.float64(soft_cap))


def _portable_backward(
    *operands: jax.Array, deterministic: bool, sm_margin: int, **params: Any
) -> Sequence[jax.Array]:
    del deterministic, sm_margin  # in plain JAX gradients are always deterministic
    return _xla.backward(*operands, **params)
