"""Names the custom calls on GPUs, and tells what they do not support."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import _hopper, _native

CAST = "jaxmagi_group_cast"
REDUCE = "jaxmagi_group_reduce"

_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
_SUMMABLE = ("bfloat16", "float16", "float32", "float64")


def cast_unsupported_reason(operands: Sequence[Any], **_: Any) -> str | None:
    """Returns why the custom calls cannot cast these operands here; None if they can."""
    *xs, _, _ = operands
    packed = [x.dtype.name for x in xs if x.dtype.name in _PACKED]
    reason = f"{packed[0]} takes less than a byte" if packed else None
    return unsupported_reason() or reason


def reduce_unsupported_reason(
    operands: Sequence[Any], *, out_dtypes: Sequence[jnp.dtype], **_: Any
) -> str | None:
    """Returns why the custom calls cannot reduce these operands here; None if they can."""
    *xs, _, _ = operands
    reason = _sum_reason([x.dtype for x in xs], out_dtypes)
    return unsupported_reason() or reason


def unsupported_reason() -> str | None:
    """Returns why the custom calls cannot run here, whatever the operands; None if they can."""
    if reason := _hopper.unsupported_reason():
        return reason
    has_handlers = all(_native.has_handler(target, "cuda") for target in (CAST, REDUCE))
    if has_handlers and hasattr(_native.extension("cuda"), "collective_statistics"):
        return None
    return "the compiled extension jaxmagi._cuda is older than these sources: build jaxmagi again"


def _sum_reason(dtypes: Sequence[jnp.dtype], out_dtypes: Sequence[jnp.dtype]) -> str | None:
    for dtype, out_dtype in zip(dtypes, out_dtypes, strict=True):
        if dtype.name not in _SUMMABLE:
            return f"the array is {dtype.name}, and the kernels add up {', '.join(_SUMMABLE)}"
        if out_dtype != dtype and (dtype.itemsize > 2 or out_dtype != jnp.float32):
            return f"the kernels do not add up {dtype.name} to {out_dtype.name}"
    return None
