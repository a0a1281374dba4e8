"""Both passes on Hopper GPUs: a custom call that plans the mask, then one that attends, or differentiates.

The plans, by query rows for the forward pass and by keys for the backward pass, depend on the mask and the
lengths, not on the layer, and XLA merges equal calls: all layers under one mask share them, save across the
borders of loops and of ``jax.checkpoint``.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _hopper, _native
from ._dtypes import is_positive_normal

PLAN = "jaxmagi_attention_tile_schedule"
FORWARD = "jaxmagi_attention_forward"
BACKWARD = "jaxmagi_attention_backward"

_LOG2E = math.log2(math.e)
_DTYPES = ("bfloat16", "float16")
_OUT, _LSE = 0, 1  # among the results
_PREVIOUS_OUT, _PREVIOUS_LSE = 6, 7  # among the operands


def misfit(operands: Sequence[Any], *, scale: float, soft_cap: float, **_: Any) -> str | None:
    """Why the kernels, of either pass, cannot run these operands here; None if they can."""
    return _hopper.platform_misfit() or _operand_misfit(operands, scale, soft_cap)


def _operand_misfit(operands: Sequence[Any], scale: float, soft_cap: float) -> str | None:
    q, _, v, *_ = operands
    if q.dtype.name not in _DTYPES:
        return f"the operands are {q.dtype.name}, and the kernels are for {' and '.join(_DTYPES)}"
    if _compiled().forward_tile(*_padded_dims(q, v)) is None:
        dims = f"{q.shape[3]} (query, key) and {v.shape[3]} (value)"
        return f"no kernel has room for the head dimensions {dims}: the largest is for 256 and 256"
    if not _is_within_range(abs(scale) or 1.0, soft_cap):
        return (
            f"scale {scale} and soft cap {soft_cap} leave the normal numbers of float32, alone, in units of "
            "log 2, or divided by each other"
        )
    return None


def _is_within_range(scale: float, soft_cap: float) -> bool:
    """Whether the kernels, which work in units of log 2 and of the cap, can represent these numbers."""
    numbers = (scale, scale * _LOG2E)
    if soft_cap > 0:
        numbers = (scale, scale / soft_cap, soft_cap * _LOG2E)
    return all(map(is_positive_normal, numbers))


def warn_of_plain_xla() -> None:
    """Says, once per process, that attention on a GPU runs on plain XLA, because of the GPU or the build."""
    misfit = _hopper.device_misfit() or _hopper.module_misfit()
    if misfit is not None and _hopper.local_gpus():
        _warn_once(f'jaxmagi.attention runs on plain XLA (implementation="xla"): {misfit}.')


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=1)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *previous: jax.Array,
    scale: float,
    soft_cap: float,
    out_dtype: jnp.dtype,
    sm_margin: int,
) -> tuple[jax.Array, jax.Array]:
    """The two custom calls, to be lowered; operands as in `attention_forward`."""
    v_dim = v.shape[3]
    dims = _padded_dims(q, v)
    q, k = _pad_dim(_flip(q, scale), dims[0]), _pad_dim(k, dims[0])
    v = _pad_dim(v, dims[1])
    if previous:
        previous = (_pad_dim(previous[0], dims[1]), previous[1])
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], dims[1]), out_dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    aliases = {_PREVIOUS_OUT: _OUT, _PREVIOUS_LSE: _LSE} if previous else None
    call = jax.ffi.ffi_call(FORWARD, results, input_output_aliases=aliases)
    planned = plan(bands, q.shape[1], k.shape[1], dims)
    out, lse, _ = call(
        q,
        k,
        v,
        *planned,
        sinks,
        *previous,
        scale=np.float64(abs(scale) or 1),
        soft_cap=np.float64(soft_cap),
        sm_margin=np.int64(sm_margin),
    )
    return out[..., :v_dim], lse


def backward(
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
    grad_dtype: jnp.dtype,
    sm_margin: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two custom calls, to be lowered; operands as in `attention_backward`."""
    dim, v_dim = q.shape[3], v.shape[3]
    dims = _padded_dims(q, v)
    q, k = _pad_dim(_flip(q, scale), dims[0]), _pad_dim(k, dims[0])
    v, dout = _pad_dim(v, dims[1]), _pad_dim(dout, dims[1])
    batch, q_len, heads, _ = q.shape
    kv_len, plans = k.shape[1], bands.shape[0]
    size = _compiled().backward_workspace_bytes(batch, q_len, kv_len, heads, *dims, plans, deterministic)
    results = (
        *(jax.ShapeDtypeStruct(x.shape, grad_dtype) for x in (q, k, v)),
        jax.ShapeDtypeStruct((size // 16, 4), jnp.int32),
    )
    planned = plan(bands, q_len, kv_len, dims, by_keys=True)
    dq, dk, dv, _ = jax.ffi.ffi_call(BACKWARD, results)(
        q,
        k,
        v,
        *planned,
        dout,
        lse,
        delta,
        scale=np.float64(abs(scale) or 1),
        soft_cap=np.float64(soft_cap),
        deterministic=np.bool_(deterministic),
        sm_margin=np.int64(sm_margin),
    )
    return _flip(dq, scale)[..., :dim], dk[..., :dim], dv[..., :v_dim]


def plan(
    bands: jax.Array, q_len: int, kv_len: int, dims: tuple[int, int], by_keys: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The bands sorted [P, C, 8], and the tiles [P, tiles, 4], those with most to do first.

    By keys it is the plan of the transposed mask, for the tiles of the backward kernel.
    """
    plans, capacity, _ = bands.shape
    rows, keys = (_compiled().backward_tile if by_keys else _compiled().forward_tile)(*dims)
    length, tile = (kv_len, keys) if by_keys else (q_len, rows)
    words = _compiled().plan_workspace_words(plans, capacity, length, tile)
    results = (
        jax.ShapeDtypeStruct((plans, capacity, 8), jnp.int32),
        jax.ShapeDtypeStruct((plans, -(-length // tile), 4), jnp.int32),
        jax.ShapeDtypeStruct((words, 2), jnp.int32),
    )
    numbers = {"q_len": q_len, "kv_len": kv_len, "dim": dims[0], "v_dim": dims[1]}
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    call = jax.ffi.ffi_call(PLAN, results)
    sorted_bands, tiles, _ = call(bands, by_keys=np.bool_(by_keys), **attributes)
    return sorted_bands, tiles


def _compiled() -> ModuleType:
    extension = _native.extension("cuda")
    assert extension is not None
    return extension


def _padded_dims(q: Any, v: Any) -> tuple[int, int]:
    """The head dimensions as the kernels take them: whole units of 16 bytes, which TMA needs."""
    dim, v_dim = (-(-x.shape[3] // 8) * 8 for x in (q, v))
    return dim, v_dim


def _pad_dim(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * 3 + [(0, dim - x.shape[3])])


def _flip(q: jax.Array, scale: float) -> jax.Array:
    """The query, or its gradient, for |scale|, or 1 for a scale of 0: the kernels take positive ones."""
    return q if scale > 0 else q * q.dtype.type(np.sign(scale))
