"""The collectives on GPUs: custom calls."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from .. import _hopper, _native
from ._process import timeout_ms
from ._route import Route

CAST = "jaxmagi_group_cast"
REDUCE = "jaxmagi_group_reduce"

_MOST_ARRAYS = 8  # of a call
_MOST_RANKS = 64  # of a group
_UNIT = 16  # bytes: rows are whole ones
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
_SUMMABLE = ("bfloat16", "float16", "float32", "float64")
_IMPLEMENTATIONS = {None: 0, "native": 1, "nccl": 2}


def cast_misfit(operands: Sequence[Any], *, cp_size: int, **_: Any) -> str | None:
    """Why the custom calls cannot cast these operands here; None if they can."""
    *xs, _, _ = operands
    packed = [x.dtype.name for x in xs if x.dtype.name in _PACKED]
    reason = f"{packed[0]} takes less than a byte" if packed else None
    return platform_misfit() or _size_misfit(cp_size) or _sharded_misfit(operands) or reason


def reduce_misfit(
    operands: Sequence[Any], *, cp_size: int, out_dtypes: Sequence[jnp.dtype], **_: Any
) -> str | None:
    """Why the custom calls cannot reduce these operands here; None if they can."""
    *xs, _, _ = operands
    sum_misfit = _sum_misfit([x.dtype for x in xs], out_dtypes)
    return platform_misfit() or _size_misfit(cp_size) or _sharded_misfit(operands) or sum_misfit


def platform_misfit() -> str | None:
    """Why the custom calls cannot run here, whatever the operands; None if they can."""
    if misfit := _hopper.platform_misfit():
        return misfit
    if _native.has_handler(CAST, "cuda") and _native.has_handler(REDUCE, "cuda"):
        return None
    return "the compiled extension jaxmagi._cuda is older than these sources: build jaxmagi again"


def _size_misfit(cp_size: int) -> str | None:
    if cp_size > _MOST_RANKS:
        return f"the mesh axis has {cp_size} ranks, and the custom calls are for {_MOST_RANKS} at most"
    return None


def _sharded_misfit(operands: Sequence[Any]) -> str | None:
    for x in operands:
        if any(x.sharding.spec):
            return (
                f"an array {x.shape} is sharded over Explicit mesh axes, {x.sharding.spec}, which a custom "
                "call would gather: map over them too"
            )
    return None


def _sum_misfit(dtypes: Sequence[jnp.dtype], out_dtypes: Sequence[jnp.dtype]) -> str | None:
    for dtype, out_dtype in zip(dtypes, out_dtypes, strict=True):
        if dtype.name not in _SUMMABLE:
            return f"the array is {dtype.name}, and the kernels add up {', '.join(_SUMMABLE)}"
        if out_dtype != dtype and (dtype.itemsize > 2 or out_dtype != jnp.float32):
            return f"the kernels do not add up {dtype.name} to {out_dtype.name}"
    return None


def cast(*operands: jax.Array, route: Route, groups: np.ndarray) -> list[jax.Array]:
    """The custom calls of a cast, to be lowered; ``groups`` as `replica_groups` has them."""
    dtypes = [x.dtype for x in operands[:-2]]
    return _move("cast", operands, route.output_rows, dtypes, route, groups)


def reduce(
    *operands: jax.Array, route: Route, out_dtypes: Sequence[jnp.dtype], groups: np.ndarray
) -> list[jax.Array]:
    """The custom calls of a reduction, to be lowered; ``groups`` as `replica_groups` has them."""
    return _move("reduce", operands, route.input_rows, out_dtypes, route, groups)


def _move(
    kind: Literal["cast", "reduce"],
    operands: Sequence[jax.Array],
    rows: int,
    dtypes: Sequence[jnp.dtype],
    route: Route,
    groups: np.ndarray,
) -> list[jax.Array]:
    """Arrays [G, ..., ...] to such with so many rows and of these dtypes, several in a call."""
    *xs, sends, receives = (_gathered(x) for x in operands)
    results = [
        jax.ShapeDtypeStruct((x.shape[0], rows, *x.shape[2:]), dtype)
        for x, dtype in zip(xs, dtypes, strict=True)
    ]
    anything = 0 not in (sends.size, receives.size, route.pair_rows)
    moving = [i for i, x in enumerate(xs) if anything and x.size and results[i].size]
    moved: dict[int, jax.Array] = {}
    for part in itertools.batched(moving, _MOST_ARRAYS):
        arrays = [_flatten(xs[i]) for i in part]
        call = functools.partial(_call, kind, rows, [dtypes[i] for i in part], route, groups)
        moved.update(zip(part, _as_collective(call)(sends, receives, *arrays), strict=True))
    return [
        _unflatten(moved[i], like) if i in moved else jnp.zeros(like.shape, like.dtype)
        for i, like in enumerate(results)
    ]


def _gathered(x: jax.Array) -> jax.Array:
    """The same, whole on each device as far as the compiler decides that.

    A custom call takes whole arrays. Gathered inside of what runs as a collective, they would be a collective
    in a collective, which XLA's scheduler fails on.
    """
    mesh = jax.typeof(x).sharding.mesh
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P())) if mesh.auto_axes else x


def _as_collective(function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """The same as a collective, so that XLA does not put it between the start and the end of one of its own.

    XLA hides none of it behind other work: it ends where it starts. Behind a barrier, or XLA would take each
    of several results out of the call by one more collective.
    """
    wrapped: Any = compute_on(
        function, compute_type="gpu_stream:collective", out_memory_spaces=jax.memory.Space.Device
    )
    return lambda *operands: jax.lax.optimization_barrier(wrapped(*operands))


def _call(
    kind: Literal["cast", "reduce"],
    rows: int,
    dtypes: Sequence[jnp.dtype],
    route: Route,
    groups: np.ndarray,
    sends: jax.Array,
    receives: jax.Array,
    *xs: jax.Array,
) -> list[jax.Array]:
    """One custom call. Arrays are [G, rows, width] of whole units, eight at most."""
    transfers, cp_size = sends.shape[0], groups.shape[1]
    implementation = _IMPLEMENTATIONS[route.implementation]
    ranks_per_host = route.ranks_per_host or 0
    compiled = _native.extension("cuda")
    assert compiled is not None
    workspace = _UNIT  # anything but nothing
    if _may_use_nccl(route):
        row_bytes = [x.shape[2] * x.dtype.itemsize for x in xs]
        workspace = compiled.pair_buffer_bytes(transfers, cp_size, route.pair_rows, row_bytes)
    results = [
        *(
            jax.ShapeDtypeStruct((transfers, rows, x.shape[2]), dtype)
            for x, dtype in zip(xs, dtypes, strict=True)
        ),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    numbers = {
        "group_size": cp_size,
        "input_rows": route.input_rows,
        "output_rows": route.output_rows,
        "pair_rows": route.pair_rows,
        "num_sms": route.num_sms,
        "implementation": implementation,
        "ranks_per_host": ranks_per_host,
        "timeout_ms": timeout_ms(),
    }
    call = jax.ffi.ffi_call(CAST if kind == "cast" else REDUCE, results)
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    return list(call(sends, receives, *xs, groups=groups.reshape(-1), **attributes))[:-1]


def _may_use_nccl(route: Route) -> bool:
    """Whether pairs of ranks may need buffers: in one process GPUs reach each other's memory."""
    several_hosts = jax.process_count() > 1 or route.ranks_per_host is not None
    return route.implementation == "nccl" or (route.implementation is None and several_hosts)


def _flatten(x: jax.Array) -> jax.Array:
    """[G, rows, ...] → [G, rows, width], with zeros behind each row to whole units of bytes."""
    width, unit = math.prod(x.shape[2:]), max(1, _UNIT // x.dtype.itemsize)
    x, padding = x.reshape(*x.shape[:2], width), -width % unit
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding))) if padding else x


def _unflatten(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return x[..., : math.prod(like.shape[2:])].reshape(like.shape)
