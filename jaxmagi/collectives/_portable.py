"""Computes group casts in plain JAX: tables of ranges become indices, buffers go through ``lax.all_to_all``.

Functions compute on one rank: sends are [M, 5], receives [M, 4], and the rows of an array are its first axis.
The slots of all pair buffers of a rank are numbered ``peer * pair_rows + slot``. `cast` and `reduce_sum` are
for several transfers, with an axis G in front of these.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._dtypes import accumulator_dtype
from ._route import Route

NONE = -1


def _expand(start: jax.Array, length: jax.Array, value: jax.Array, count: int) -> jax.Array:
    """Returns [count]: ``value + i - start`` where a range ``[start, start + length)`` has i, otherwise NONE.

    Ranges are sorted by ``start``, and those of length 0 come last.
    """
    if start.shape[0] == 0:  # nothing can be looked up in an empty table
        return jax.lax.full_like(start, NONE, shape=(count,))
    start = jnp.where(length > 0, start, count)
    place = jnp.arange(count, dtype=jnp.int32)
    entry = last_at_most(start, place)
    offset = place - start[entry]
    covered = (entry >= 0) & (offset < length[entry])
    return jnp.where(covered, value[entry] + offset, NONE)


def last_at_most(sorted_: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the last index with ``sorted_[i] <= value``, -1 where there is none.

    It bisects by itself because ``jnp.searchsorted`` fails in a shard_map that leaves some axes to the
    compiler (jax 0.11.2).
    """
    size = sorted_.shape[0]
    count = jax.lax.full_like(values, 0)
    for bit in reversed(range(size.bit_length())):
        more = count + (1 << bit)
        fits = (more <= size) & (sorted_[jnp.minimum(more, size) - 1] <= values)
        count = jnp.where(fits, more, count)
    return count - 1


def input_row_of_slot(sends: jax.Array, route: Route) -> jax.Array:
    """Returns int32 [slots]: the input row that is sent from each slot, NONE for unused slots."""
    dst, slot, row, length, _ = sends.T
    return _expand(dst * route.pair_rows + slot, length, row, route.slots)


def _slot_of_output_row(receives: jax.Array, route: Route) -> jax.Array:
    """Returns int32 [output_rows]: the slot that each output row comes from, NONE where nothing comes."""
    src, slot, row, length = receives.T
    return _expand(row, length, src * route.pair_rows + slot, route.output_rows)


def _output_row_of_slot(receives: jax.Array, route: Route) -> jax.Array:
    """Returns int32 [slots]: the output row that each slot goes to, NONE for unused slots."""
    src, slot, row, length = receives.T
    start = src * route.pair_rows + slot
    order = jnp.argsort(jnp.where(length > 0, start, route.slots))
    return _expand(start[order], length[order], row[order], route.slots)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns these rows of x; for NONE, any row."""
    if x.shape[0] == 0:
        return jax.lax.full_like(x, 0, shape=(*rows.shape, *x.shape[1:]))
    return x.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds")


def _take_or_zero(x: jax.Array, rows: jax.Array) -> jax.Array:
    found = (rows != NONE).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(found, _take(x, rows), jnp.zeros((), x.dtype))


def _exchange(buffers: Sequence[jax.Array], route: Route) -> list[jax.Array]:
    """Sends all pair buffers [G, slots, ...] to their peers.

    Arrays that differ in their last axis only (keys and values) share one collective.
    """
    groups: dict[object, list[int]] = {}
    for i, x in enumerate(buffers):
        groups.setdefault((x.dtype, x.shape[2:-1]) if x.ndim > 2 else i, []).append(i)
    received: list[jax.Array] = list(buffers)
    for members in groups.values():
        parts = [buffers[i] for i in members]
        together = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        # It is not under jax.vmap, which has no rule for groups of ranks (jax 0.11.2).
        together = jax.lax.all_to_all(
            together, route.axis_name, 1, 1, axis_index_groups=route.groups, tiled=True
        )
        begin = 0
        for i in members:
            width = buffers[i].shape[-1]
            whole = len(members) == 1
            received[i] = together if whole else together[..., begin : begin + width]
            begin += width
    return received


def cast(xs: Sequence[jax.Array], sends: jax.Array, receives: jax.Array, route: Route) -> list[jax.Array]:
    """Casts [G, input_rows, ...] → [G, output_rows, ...]; rows that nobody sends are zero."""
    rows = jax.vmap(functools.partial(input_row_of_slot, route=route))(sends)
    slots = jax.vmap(functools.partial(_slot_of_output_row, route=route))(receives)
    received = _exchange([jax.vmap(_take)(x, rows) for x in xs], route)
    return [jax.vmap(_take_or_zero)(x, slots) for x in received]


def add_in_order(x: jax.Array, rows: jax.Array, route: Route) -> jax.Array:
    """Adds slots [slots, ...] to their rows [input_rows, ...], peer after peer for reproducible sums."""

    def add_peer(total: jax.Array, peer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        peer_rows, part = peer
        place = total.at[peer_rows]
        sharding = jax.typeof(total).sharding
        part = part.astype(total.dtype)
        return place.add(part, mode="drop", wrap_negative_indices=False, out_sharding=sharding), None

    rows = rows.reshape(route.peers, route.pair_rows)
    by_peer = x.reshape(*rows.shape, *x.shape[1:])
    return jax.lax.scan(add_peer, _no_sum(x, route), (rows, by_peer))[0]


def _no_sum(x: jax.Array, route: Route) -> jax.Array:
    shape = (route.input_rows, *x.shape[1:])
    return jax.lax.full_like(x, 0, accumulator_dtype(x.dtype), shape, sharding=jax.typeof(x).sharding)


def reduce_sum(
    xs: Sequence[jax.Array],
    sends: jax.Array,
    receives: jax.Array,
    route: Route,
    out_dtypes: Sequence[jnp.dtype],
) -> list[jax.Array]:
    """Adds up [G, output_rows, ...] → [G, input_rows, ...] in accumulator dtype; it transposes `cast`."""
    if sends.shape[-2] == 0:  # no entries, and XLA fails at additions to rows that all are known to be none
        return [
            jax.vmap(functools.partial(_no_sum, route=route))(x).astype(dtype)
            for x, dtype in zip(xs, out_dtypes, strict=True)
        ]
    rows = jax.vmap(functools.partial(input_row_of_slot, route=route))(sends)
    places = jax.vmap(functools.partial(_output_row_of_slot, route=route))(receives)
    received = _exchange([jax.vmap(_take)(x, places) for x in xs], route)  # unused slots hold anything
    add = jax.vmap(functools.partial(add_in_order, route=route))
    return [add(x, rows).astype(dtype) for x, dtype in zip(received, out_dtypes, strict=True)]
