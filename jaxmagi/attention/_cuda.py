"""The forward pass on Hopper GPUs: a custom call that plans the mask, then one that attends.

The plan depends on the mask and the lengths, not on the layer, and XLA merges equal calls: all layers under
one mask share one plan, save across the borders of loops and of ``jax.checkpoint``.
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

from .. import _native
from ._dtypes import is_positive_normal

PLAN = "jaxmagi_attention_plan"
FORWARD = "jaxmagi_attention_forward"

_CAPABILITY = "9.0"
_LOG2E = math.log2(math.e)
_DTYPES = ("bfloat16", "float16")
_OUT, _LSE = 0, 1  # among the results
_PREVIOUS_OUT, _PREVIOUS_LSE = 6, 7  # among the operands


def forward_misfit(operands: Sequence[Any], *, scale: float, soft_cap: float, **_: Any) -> str | None:
    """Why the forward kernel cannot run these operands here; None if it can."""
    return _module_misfit() or _device_misfit() or _operand_misfit(operands, scale, soft_cap)


def backward_misfit(operands: Sequence[Any], **_: Any) -> str | None:
    """Why there is no backward kernel for these operands here."""
    del operands
    return 'the backward kernel is not there yet: gradients on GPUs need implementation=None or "xla"'


def _module_misfit() -> str | None:
    if _native.extension("cuda") is not None:
        return None
    return (
        "jaxmagi was built without CUDA (the compiled extension jaxmagi._cuda is missing): install it where "
        "there is nvcc >= 12.8, with JAXMAGI_CUDA=ON in the environment to learn what the build lacks"
    )


def _device_misfit() -> str | None:
    """None also when lowering for CUDA where no GPU is: the handlers check the device that they run on."""
    for gpu in _local_gpus():
        if gpu.compute_capability != _CAPABILITY:
            return (
                f"{gpu.device_kind} has compute capability {gpu.compute_capability}, and the kernels are for "
                f"{_CAPABILITY} (H100, H200)"
            )
    return None


def _local_gpus() -> Sequence[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()


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
    misfit = _device_misfit() or _module_misfit()
    if misfit is not None and _local_gpus():
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


def plan(bands: jax.Array, q_len: int, kv_len: int, dims: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The bands sorted [P, C, 8], and the row tiles [P, tiles, 4], those with most to do first."""
    plans, capacity, _ = bands.shape
    rows, _ = _compiled().forward_tile(*dims)
    words = _compiled().plan_workspace_words(plans, capacity, q_len, rows)
    results = (
        jax.ShapeDtypeStruct((plans, capacity, 8), jnp.int32),
        jax.ShapeDtypeStruct((plans, -(-q_len // rows), 4), jnp.int32),
        jax.ShapeDtypeStruct((words, 2), jnp.int32),
    )
    numbers = {"q_len": q_len, "kv_len": kv_len, "dim": dims[0], "v_dim": dims[1]}
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    sorted_bands, tiles, _ = jax.ffi.ffi_call(PLAN, results)(bands, **attributes)
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
    """The query to be multiplied by |scale|, or by 1 for a scale of 0: the kernels take positive ones."""
    return q if scale > 0 else q * q.dtype.type(np.sign(scale))
