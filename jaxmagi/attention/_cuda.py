"""Makes the custom calls of both passes on Hopper GPUs: one for the tile schedule, and one for the kernel.

The tile schedules, of query rows for the forward pass and of keys for the backward pass, depend on the mask
and the lengths and not on the layer, and XLA merges equal calls: all layers under one mask share them, but
not across the borders of loops and of ``jax.checkpoint``.
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
from .._dtypes import is_positive_normal

TILE_SCHEDULE = "jaxmagi_attention_tile_schedule"
FORWARD = "jaxmagi_attention_forward"
BACKWARD = "jaxmagi_attention_backward"

_LOG2E = math.log2(math.e)
_DTYPES = ("bfloat16", "float16")
_OUT, _LSE = 0, 1  # among the results
_PREVIOUS_OUT, _PREVIOUS_LSE = 6, 7  # among the operands
_LONG_BAND_ROWS = 1024  # kLongBandRows of csrc/attention/sm90/tile_schedule.h
_ALIGNED_LENGTH = 8192  # tiles begin with documents in sequences of at least this length


def unsupported_reason(operands: Sequence[Any], *, scale: float, soft_cap: float) -> str | None:
    """Returns why the kernels of either pass cannot run these operands here; None if they can."""
    if reason := _hopper.unsupported_reason():
        return reason
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
    """Returns whether scale and cap stay normal float32 numbers in the kernels' units."""
    numbers = (scale, scale * _LOG2E)
    if soft_cap > 0:
        numbers = (scale, scale / soft_cap, soft_cap * _LOG2E)
    return all(map(is_positive_normal, numbers))


def warn_of_plain_xla() -> None:
    """Warns once per process where attention runs on plain XLA because of the GPU or the build."""
    reason = _hopper.device_unsupported_reason() or _hopper.build_unsupported_reason()
    if reason is not None and _hopper.local_gpus():
        _warn_once(f'jaxmagi.attention runs on plain XLA (implementation="xla"): {reason}.')


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
    """Computes `attention_forward`, for one batch dimension, by two custom calls."""
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
    schedule = tile_schedule(bands, q.shape[1], k.shape[1], dims)
    out, lse, _ = call(
        q,
        k,
        v,
        *schedule,
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
    """Computes `attention_backward`, for one batch dimension, by two custom calls."""
    dim, v_dim = q.shape[3], v.shape[3]
    dims = _padded_dims(q, v)
    q, k = _pad_dim(_flip(q, scale), dims[0]), _pad_dim(k, dims[0])
    v, dout = _pad_dim(v, dims[1]), _pad_dim(dout, dims[1])
    batch, q_len, heads, _ = q.shape
    kv_len, num_masks = k.shape[1], bands.shape[0]
    # A fixed order of sums counts additions by tiles that begin at multiples of their length.
    aligns = not deterministic
    schedule = tile_schedule(bands, q_len, kv_len, dims, by_keys=True, aligns_to_documents=aligns)
    shape = batch, q_len, kv_len, heads, k.shape[2], *dims, schedule[1].shape[1]
    size = _compiled().backward_workspace_bytes(*shape, num_masks, deterministic)
    results = (
        *(jax.ShapeDtypeStruct(x.shape, grad_dtype) for x in (q, k, v)),
        jax.ShapeDtypeStruct((size // 16, 4), jnp.int32),
    )
    dq, dk, dv, _ = jax.ffi.ffi_call(BACKWARD, results)(
        q,
        k,
        v,
        *schedule,
        dout,
        lse,
        delta,
        scale=np.float64(abs(scale) or 1),
        soft_cap=np.float64(soft_cap),
        deterministic=np.bool_(deterministic),
        sm_margin=np.int64(sm_margin),
    )
    return _flip(dq, scale)[..., :dim], dk[..., :dim], dv[..., :v_dim]


def tile_schedule(
    bands: jax.Array,
    q_len: int,
    kv_len: int,
    dims: tuple[int, int],
    by_keys: bool = False,
    own_len: int | None = None,
    aligns_to_documents: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sorted bands [M, C, 8] of M masks and their tiles [M, tiles, 8], by cost.

    With ``by_keys`` the schedule is that of the transposed masks, for the tiles of the backward kernel.
    The costliest tile comes first. Tiles whose rows see keys from ``own_len`` on come behind the others, as
    ~tile, and of these the costliest is the last. With ``aligns_to_documents``, tiles of sequences of 8192
    rows and more also begin where long documents do; then some tiles may have no rows.
    """
    num_masks, capacity, _ = bands.shape
    rows, keys = (_compiled().backward_tile if by_keys else _compiled().forward_tile)(*dims)
    length, tile = (kv_len, keys) if by_keys else (q_len, rows)
    num_tiles = -(-length // tile)
    if aligns_to_documents:
        num_tiles += _more_tiles(length, capacity)
    words = _compiled().tile_schedule_workspace_words(num_masks, capacity, num_tiles)
    results = (
        jax.ShapeDtypeStruct((num_masks, capacity, 8), jnp.int32),
        jax.ShapeDtypeStruct((num_masks, num_tiles, 8), jnp.int32),
        jax.ShapeDtypeStruct((words, 2), jnp.int32),
    )
    own_len = kv_len if own_len is None else own_len
    numbers = {"q_len": q_len, "kv_len": kv_len, "own_len": own_len, "dim": dims[0], "v_dim": dims[1]}
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    call = jax.ffi.ffi_call(TILE_SCHEDULE, results)
    sorted_bands, tiles, _ = call(bands, by_keys=np.bool_(by_keys), **attributes)
    return sorted_bands, tiles


def _more_tiles(length: int, capacity: int) -> int:
    """Returns how many tiles may begin with long bands, beside those at multiples of their length.

    Short sequences have so few work items that some without work would unbalance the rest.
    """
    if length < _ALIGNED_LENGTH:
        return 0
    return min(max(capacity - 1, 0), length // _LONG_BAND_ROWS)


def _compiled() -> ModuleType:
    extension = _native.extension("cuda")
    assert extension is not None
    return extension


def _padded_dims(q: Any, v: Any) -> tuple[int, int]:
    """Returns the head dimensions, rounded up to multiples of 16 bytes, which TMA needs."""
    dim, v_dim = (-(-x.shape[3] // 8) * 8 for x in (q, v))
    return dim, v_dim


def _pad_dim(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * 3 + [(0, dim - x.shape[3])])


def _flip(q: jax.Array, scale: float) -> jax.Array:
    """Multiplies the query, or its gradient, by the sign of the scale: kernels take positive scales only."""
    return q if scale > 0 else q * q.dtype.type(np.sign(scale))
