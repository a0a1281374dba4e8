"""Makes the custom calls of the distributed op: one for each pass, which holds transfers and attention.

Heads are cut into parts, whose keys travel one after the other while attention to others computes, and so
do their gradients. A part has the keys and values of its key heads in arrays of its own,
[parts, G, rows, K / parts, D]. The call puts received rows there, and in front of them those of the rank's
own rows that it reads there or, between hosts, sends from there; the others it reads and sends where they
are. The backward pass has one part within a host, unless so much is received that parts take turns with two
workspaces.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attention import _cuda as attention_cuda
from ..collectives._cuda import IMPLEMENTATIONS
from ..collectives._process import timeout_ms
from ..collectives._route import Route
from ..planning import num_parts

FORWARD = "jaxmagi_context_forward"
BACKWARD = "jaxmagi_context_backward"

type Steps = Sequence[tuple[Route, np.ndarray]]
"""The steps of a transfer, one or two: routes, and the groups of devices that exchange rows."""

_BACKWARD_FLAGS = 4  # of a part
_MOST_TRANSFER_SMS = 32  # multiprocessors that attention may leave free while rows travel
# Where so many keys are received that the workspaces of all parts take more memory than so many times the
# sums of dQ, parts take turns with two. Attention to so many keys takes long: ends of parts hardly count.
_MOST_SUMS, _SHARED_WORKSPACES = 2.5, 2


def split_received(
    others: Sequence[jax.Array], keeps_received: bool
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Returns the tables of the backward pass, and the keys and values behind them that have been kept."""
    count = len(others) - 2 * keeps_received
    return others[:count], others[count:]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *tables: jax.Array,
    scale: float,
    soft_cap: float,
    out_dtype: jnp.dtype,
    steps: Steps,
    keeps_received: bool,
) -> list[jax.Array]:
    """Returns the output [G, T, N, Dv] and the log-sum-exp [G, T, N], and received rows if they are kept."""
    dim, v_dim = key.shape[3], value.shape[3]
    query, key, value = _padded(query, key, value, scale)
    sizes = _Sizes.of(key, value, steps)
    num_kept = (sizes.rows - query.shape[1]) * keeps_received
    results = (
        jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), out_dtype),
        jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        *sizes.arrays(key, value, sizes.rows),
        *sizes.arrays(key, value, sizes.middle_rows),
        *(jax.ShapeDtypeStruct((x.shape[0], num_kept, *x.shape[2:]), x.dtype) for x in (key, value)),
        jax.ShapeDtypeStruct((2 * (sizes.parts + 2),), jnp.int32),
    )
    dims, tokens = (key.shape[3], value.shape[3]), query.shape[1]
    # With one mask, tiles that need no transfer are computed first.
    own_len = tokens if bands.shape[0] == 1 else sizes.rows
    schedule = attention_cuda.tile_schedule(bands, tokens, sizes.rows, dims, own_len=own_len)
    parts_within_host = num_parts(key.shape[2], sizes.received_bytes, within_host=True)
    attributes = _attributes(steps, sizes, parts_within_host, scale, soft_cap)
    call = jax.ffi.ffi_call(FORWARD, results)
    both = jnp.stack([sinks, jnp.full_like(sinks, -jnp.inf)])  # with sinks, and without
    out, lse, *_, kept_key, kept_value, _ = call(
        query, key, value, *schedule, both, *_moved(tables, steps), **attributes
    )
    kept = [kept_key[..., :dim], kept_value[..., :v_dim]] if keeps_received else []
    return [out[..., :v_dim], lse, *kept]


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bands: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *others: jax.Array,
    scale: float,
    soft_cap: float,
    deterministic: bool,
    steps: Steps,
    keeps_received: bool,
) -> list[jax.Array]:
    """Returns the gradients of queries, and of the rank's keys and values, in their dtypes."""
    tables, received = split_received(others, keeps_received)
    dim, v_dim = query.shape[3], value.shape[3]
    query, key, value = _padded(query, key, value, scale)
    dout = attention_cuda._pad_dim(dout, value.shape[3])
    sizes = _Sizes.of(key, value, steps)
    batch, tokens, heads, _ = query.shape
    dims = key.shape[3], value.shape[3]
    schedule = attention_cuda.tile_schedule(bands, tokens, sizes.rows, dims, by_keys=True)

    def workspace_bytes(parts: int) -> int:
        heads_of_part = heads // parts, key.shape[2] // parts
        shape = batch, tokens, sizes.rows, *heads_of_part, *dims, schedule[1].shape[1]
        return attention_cuda._compiled().backward_workspace_bytes(*shape, bands.shape[0], deterministic)

    bytes_of_part = {count: workspace_bytes(count) for count in sorted({1, sizes.parts})}
    sums_bytes = query.size * jnp.dtype(jnp.float32).itemsize
    num_workspaces, all_bytes = _workspaces(sizes.parts, bytes_of_part, sums_bytes)
    # Within a host rows move so fast that parts cost more than they hide, unless they take turns.
    take_turns = num_workspaces < sizes.parts
    parts_within_host = sizes.parts if take_turns else 1
    wire = steps[0][0].wire_dtype
    is_rounded = wire is not None and jnp.dtype(wire) != jnp.float32
    wire, single = (jnp.dtype(wire) if is_rounded else key.dtype), jnp.dtype(jnp.float32)
    results = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
        *sizes.arrays(key, value, sizes.rows, single),
        *sizes.arrays(key, value, sizes.middle_rows, single),
        *sizes.arrays(key, value, tokens, single),
        *sizes.arrays(key, value, sizes.rows * is_rounded, wire),
        *sizes.arrays(key, value, sizes.middle_rows * is_rounded, wire),
        *sizes.arrays(key, value, sizes.rows),
        *sizes.arrays(key, value, sizes.middle_rows),
        jax.ShapeDtypeStruct((all_bytes // 16, 4), jnp.int32),
        jax.ShapeDtypeStruct((_BACKWARD_FLAGS * sizes.parts,), jnp.int32),
    )
    attributes = _attributes(steps, sizes, parts_within_host, scale, soft_cap, deterministic, num_workspaces)
    call = jax.ffi.ffi_call(BACKWARD, results)
    kept = received or (key[:, :0], value[:, :0])
    kept = (attention_cuda._pad_dim(x, d) for x, d in zip(kept, dims, strict=True))
    operands = query, key, value, *schedule, dout, lse, delta, *kept, *_moved(tables, steps)
    dq, dk, dv, *_ = call(*operands, **attributes)
    return [attention_cuda._flip(dq, scale)[..., :dim], dk[..., :dim], dv[..., :v_dim]]


def _workspaces(parts: int, bytes_of_part: dict[int, int], sums_bytes: int) -> tuple[int, int]:
    """Returns how many workspaces a backward pass has, and the bytes that it may need for them.

    Args:
        bytes_of_part: of the workspace of one of so many parts, for 1 and for ``parts``.
        sums_bytes: of the sums of dQ of all heads.
    """
    bytes_of_all = parts * bytes_of_part[parts]
    if parts > _SHARED_WORKSPACES and bytes_of_all > _MOST_SUMS * sums_bytes:
        return _SHARED_WORKSPACES, _SHARED_WORKSPACES * bytes_of_part[parts]
    # Which host a rank is on is known when the program runs: within one host the pass has one part.
    return parts, max(bytes_of_all, bytes_of_part[1])


class _Sizes(NamedTuple):
    """The sizes of a call that its operands do not show."""

    parts: int  # of arrays, and of calls between hosts
    rows: int  # of keys: those of the rank, and those that it receives
    middle_rows: int  # that the first of two steps brings
    received_bytes: int  # of keys and values

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, steps: Steps) -> "_Sizes":
        first, last = steps[0][0], steps[-1][0]
        row_bytes = key.shape[2] * (key.shape[3] + value.shape[3]) * key.dtype.itemsize
        received_bytes = key.shape[0] * last.output_rows * row_bytes
        parts = num_parts(key.shape[2], received_bytes)
        rows, middle_rows = first.input_rows + last.output_rows, first.output_rows * (len(steps) == 2)
        return cls(parts, rows, middle_rows, received_bytes)

    def arrays(
        self, key: jax.Array, value: jax.Array, rows: int, dtype: jnp.dtype | None = None
    ) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of so many rows of keys and of values, or of their gradients, of all parts."""
        shapes = [(self.parts, x.shape[0], rows, x.shape[2] // self.parts, x.shape[3]) for x in (key, value)]
        return [jax.ShapeDtypeStruct(shape, dtype or key.dtype) for shape in shapes]


def _padded(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> list[jax.Array]:
    """Returns the operands with head dimensions that kernels take, for a positive scale."""
    dim, v_dim = attention_cuda._padded_dims(query, value)
    flipped = attention_cuda._flip(query, scale)
    return [attention_cuda._pad_dim(x, d) for x, d in ((flipped, dim), (key, dim), (value, v_dim))]


def _moved(tables: Sequence[jax.Array], steps: Steps) -> list[jax.Array]:
    """Returns the tables of two steps, in the last of which rows come behind the rank's own ones."""
    *before, sends, receives = tables
    sends, receives = (_add_rows(x, i, steps[0][0].input_rows) for x, i in ((sends, 4), (receives, 2)))
    none = [] if before else [jnp.zeros((*x.shape[:1], 0, x.shape[2]), jnp.int32) for x in (sends, receives)]
    return [*before, sends, receives, *none]


def _add_rows(table: jax.Array, column: int, rows: int) -> jax.Array:
    """Returns a table with a number added to a column of the entries in use."""
    shift = np.zeros((1, 1, table.shape[-1]), np.int32)
    shift[..., column] = rows
    return jnp.where(table[..., 3:4] > 0, table + shift, table)


def _attributes(
    steps: Steps,
    sizes: _Sizes,
    parts_within_host: int,
    scale: float,
    soft_cap: float,
    deterministic: bool = False,
    num_workspaces: int | None = None,
) -> dict[str, Any]:
    (route, groups), *inside = steps
    inside_route, inside_groups = inside[0] if inside else (None, groups)
    num_sms = min(route.num_sms, _MOST_TRANSFER_SMS)
    numbers = {
        "group_size": groups.shape[1],
        "inside_group_size": inside_groups.shape[1] if inside else 0,
        "input_rows": route.input_rows,
        "middle_rows": sizes.middle_rows,
        "output_rows": sizes.rows,
        "pair_rows": route.pair_rows,
        "inside_pair_rows": 0 if inside_route is None else inside_route.pair_rows,
        "num_sms": num_sms,
        "implementation": IMPLEMENTATIONS[route.implementation],
        "ranks_per_host": route.ranks_per_host or 0,
        "timeout_ms": timeout_ms(route.timeout),
        "num_parts": sizes.parts,
        "num_parts_within_host": parts_within_host,
        "num_workspaces": num_workspaces or sizes.parts,
    }
    return {name: np.int64(number) for name, number in numbers.items()} | {
        "groups": groups.reshape(-1),
        "inside_groups": inside_groups.reshape(-1),
        "scale": np.float64(abs(scale) or 1),
        "soft_cap": np.float64(soft_cap),
        "deterministic": np.bool_(deterministic),
    }
