"""Ways to make a transfer in JAX: ours, and the collectives that `jax.lax` has.

Our kernels take keys and values as two arrays, as attention does. The peers get them in one array, so that
they make one collective of it.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks._transfers import ALL_GATHER, ALL_TO_ALL, DIM, KV_HEADS, LATENCY, Transfer
from jaxmagi import CollectiveOptions, GroupCastSpec, group_cast, group_reduce
from jaxmagi.calibration._chain import AXIS, draw_normal

SMS = (4, 8, 12, 16, 24, 32)
PADDED = "padded all_to_all + take"

type Direction = Literal["cast", "reduce bf16", "reduce f32"]
"""Names reductions by the dtype in which rows travel."""

DTYPES: dict[Direction, Any] = {"cast": jnp.bfloat16, "reduce bf16": jnp.bfloat16, "reduce f32": jnp.float32}
type Arrays = tuple[jax.Array, ...]


def native(num_sms: int) -> str:
    return f"native, {num_sms} SMs"


class Implementation(NamedTuple):
    """A way to make a transfer.

    Attributes:
        run: makes the transfer inside shard_map, from a rank's part of the operands and of the tables.
        rows: each operand has this many rows on a rank.
        arrays: keys and values are this many operands.
        tables: these arrays, which lead with the ranks, are the second operand of ``run``.
    """

    run: Callable[[Arrays, Any], Any]
    rows: int
    arrays: int
    tables: Any

    def operands(self, direction: Direction, mesh: Mesh) -> Arrays:
        """Draws unit-normal rows of keys and values, or of their gradients."""
        shape, dtype = (2 * KV_HEADS // self.arrays, DIM), DTYPES[direction]
        return tuple(draw_normal(seed, self.rows, shape, dtype, mesh) for seed in range(self.arrays))


def implementations(transfer: Transfer, direction: Direction) -> dict[str, Implementation]:
    """Returns the implementations that can express the transfer, by name."""
    found = {native(num): _ours(transfer, direction, "native", num_sms=num) for num in SMS}
    found["NCCL send and receive"] = _ours(transfer, direction, "nccl")
    found["ours in plain lax"] = _ours(transfer, direction, "xla")._replace(arrays=1)
    peers = _casts(transfer) if direction == "cast" else _reductions(transfer)
    return found | peers


def _ours(transfer: Transfer, direction: Direction, implementation: Any, **options: Any) -> Implementation:
    spec, cast = transfer.spec, direction == "cast"
    chosen = CollectiveOptions(implementation=implementation, **options)
    move = functools.partial(group_cast if cast else group_reduce, axis_name=AXIS, options=chosen)
    return Implementation(move, spec.input_rows if cast else spec.output_rows, 2, spec)


def _casts(transfer: Transfer) -> dict[str, Implementation]:
    spec = transfer.spec
    peers = {
        PADDED: _peer(_take_and_exchange, spec.input_rows, _padded_indices(spec)),
        "lax.ragged_all_to_all": _peer(_ragged_all_to_all(spec.output_rows), spec.input_rows, _slices(spec)),
    }
    if transfer.name == ALL_TO_ALL:
        peers["lax.all_to_all"] = _peer(_all_to_all, spec.input_rows)
        peers["ring of ppermutes"] = _peer(_permuted_parts, spec.input_rows)
    if transfer.name in (ALL_GATHER, LATENCY):
        peers["lax.all_gather"] = _peer(_all_gather, spec.input_rows)
        peers["ring of ppermutes"] = _peer(_permuted_whole, spec.input_rows)
    return peers


def _reductions(transfer: Transfer) -> dict[str, Implementation]:
    spec = transfer.spec
    if transfer.name == ALL_TO_ALL:
        return {"lax.all_to_all": _peer(_all_to_all, spec.input_rows)}
    if transfer.name in (ALL_GATHER, LATENCY):
        cp_size = len(spec.sends)
        return {
            "lax.psum_scatter": _peer(_psum_scatter, cp_size * spec.input_rows),
            "ring of ppermutes": _peer(_reduced_around, spec.output_rows),
        }
    return {}


def _peer(function: Callable[..., Any], rows: int, tables: Any = ()) -> Implementation:
    return Implementation(lambda xs, tables: function(*xs, *tables), rows, 1, tables)


_all_to_all = functools.partial(jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
_all_gather = functools.partial(jax.lax.all_gather, axis_name=AXIS, tiled=True)
_psum_scatter = functools.partial(jax.lax.psum_scatter, axis_name=AXIS, tiled=True)


def shift[Tree](tree: Tree, by: int) -> Tree:
    """Sends arrays to the rank whose number is larger by ``by``."""
    size = jax.lax.axis_size(AXIS)
    pairs = [(rank, (rank + by) % size) for rank in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _permuted_parts(x: jax.Array) -> list[jax.Array]:
    """Returns the parts that come from the rank before, from the one before it, and so on."""
    size, rank = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    part = x.shape[0] // size

    def part_for(peer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, peer % size * part, part)

    return [shift(part_for(rank + by), by) for by in range(1, size)]


def _permuted_whole(x: jax.Array) -> list[jax.Array]:
    """Returns the rows of the rank before, of the one before it, and so on."""
    received = [shift(x, 1)]
    for _ in range(jax.lax.axis_size(AXIS) - 2):
        received.append(shift(received[-1], 1))
    return received


def _reduced_around(x: jax.Array) -> jax.Array:
    """Returns the sum of a block of each rank; partial sums pass by all of them."""
    blocks = jnp.split(x, jax.lax.axis_size(AXIS) - 1)
    total = blocks[0]
    for block in blocks[1:]:
        total = shift(total, 1) + block
    return shift(total, 1)


def _padded_indices(spec: GroupCastSpec) -> Arrays:
    """Returns the indices that `_take_and_exchange` takes rows by, 0 where there is nothing to take.

    The first are the input row of each slot of the buffers for all peers, int32 [cp, cp * n], the second the
    slot of each output row in the buffers of all peers, int32 [cp, output_rows].
    """
    cp_size, pair_rows = len(spec.sends), spec.used.pair_rows
    row_of_slot = np.zeros((cp_size, cp_size * pair_rows), np.int32)
    slot_of_row = np.zeros((cp_size, spec.output_rows), np.int32)
    for rank in range(cp_size):
        for peer, slot, row, length in np.asarray(spec.sends)[rank, :, :4]:
            begin = peer * pair_rows + slot
            row_of_slot[rank, begin : begin + length] = np.arange(row, row + length)
        for peer, slot, row, length in np.asarray(spec.receives)[rank]:
            begin = peer * pair_rows + slot
            slot_of_row[rank, row : row + length] = np.arange(begin, begin + length)
    return jnp.asarray(row_of_slot), jnp.asarray(slot_of_row)


def _take_and_exchange(x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    """Exchanges buffers as large as the largest, in one all-to-all."""
    sent = x.at[row_of_slot[0]].get(mode="promise_in_bounds")
    return _all_to_all(sent).at[slot_of_row[0]].get(mode="promise_in_bounds")


def _slices(spec: GroupCastSpec) -> Arrays:
    """Returns the slices that ranks send and receive, int32 [cp, cp, n] each, for rank and peer.

    They are first row, length and first row at the receiver of what is sent, then the length of what is
    received.
    """
    sends = np.asarray(spec.sends)
    cp_size = len(sends)
    used = [[table[(table[:, 0] == peer) & (table[:, 3] > 0)] for peer in range(cp_size)] for table in sends]
    row, length, dst_row = np.zeros(
        (3, cp_size, cp_size, max(len(part) for parts in used for part in parts)), np.int32
    )
    for rank, parts in enumerate(used):
        for peer, part in enumerate(parts):
            for column, to in ((2, row), (3, length), (4, dst_row)):
                to[rank, peer, : len(part)] = part[:, column]
    return tuple(jnp.asarray(x) for x in (row, length, dst_row, np.swapaxes(length, 0, 1)))


def _ragged_all_to_all(output_rows: int) -> Callable[..., jax.Array]:
    """Returns a cast by `jax.lax.ragged_all_to_all`, which writes into an array that it is given.

    These are zeros, as rows that nobody sends are in ours, and made for each call: an array that calls share
    would be copied, also one of `jax.lax.empty`.
    """

    def run(x: jax.Array, *slices: jax.Array) -> jax.Array:
        x, zero = jax.lax.optimization_barrier((x, jnp.zeros((), x.dtype)))
        output = jnp.broadcast_to(zero, (output_rows, *x.shape[1:]))
        return jax.lax.ragged_all_to_all(x, output, *(s.reshape(-1) for s in slices), axis_name=AXIS)

    return run
