"""Specs of group casts, in one step or in two: tables of row ranges, from copies or from lists of splits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from .._checks import as_list, integer, is_traced
from .._native import planner
from ..masks.geometry import UNBOUNDED
from ._capacity import PlanCapacity, bucket, frozen, resize_axis, used_length
from ._ranges import Copies, meet
from ._relay import relay


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GroupCastSpec:
    """The row ranges that every rank sends to and receives from every other, for one group cast.

    The rows of a pair of ranks are numbered by slots ``0 .. n - 1`` without gaps, and both tables have them
    in the same ranges. A row may go to several ranks and to several places. Entries of length 0 are unused
    and come last. Output rows that no entry names are zero. Both tables may have more leading axes (see
    `jaxmagi.ContextPlan.stack`).

    Attributes:
        sends: int32 ``[cp, M, 5]``, rows ``(dst_rank, slot, row, length, dst_row)`` sorted by ``(dst_rank,
            slot)``: the input rows ``[row, row + length)`` of this rank go to the slots ``[slot, slot +
            length)`` for ``dst_rank``, which has them as its output rows ``[dst_row, dst_row + length)``.
        receives: int32 ``[cp, M, 4]``, rows ``(src_rank, slot, row, length)`` sorted by ``row``: the output
            rows ``[row, row + length)`` of this rank come from the slots ``[slot, slot + length)`` of
            ``src_rank``.
        input_rows: rows of each rank's input. Static.
        output_rows: rows of each rank's output. Static.
        pair_rows: the slots of a pair of ranks. Static.
    """

    sends: Int32[jax.Array | np.ndarray, "*stack cp M 5"]
    receives: Int32[jax.Array | np.ndarray, "*stack cp M 4"]
    input_rows: int = field(metadata={"static": True})
    output_rows: int = field(metadata={"static": True})
    pair_rows: int = field(metadata={"static": True})

    @staticmethod
    def from_splits(
        input_split_sizes: Sequence[Sequence[int]],
        dst_ranks: Sequence[Sequence[Sequence[int]]],
        output_split_sizes: Sequence[Sequence[int]],
        src_ranks: Sequence[Sequence[int]],
    ) -> "GroupCastSpec":
        """Returns the spec of each rank's splits, with MagiAttention's meaning.

        Splits that travel between the same two ranks keep their order; only their total length has to agree.
        Ranks may have different numbers of rows: the spec's are the largest.

        Args:
            input_split_sizes: for each rank, the lengths of the consecutive splits of its input.
            dst_ranks: for each rank and input split, the ranks that get it.
            output_split_sizes: for each rank, the lengths of the consecutive splits of its output.
            src_ranks: for each rank and output split, the rank that it comes from.

        Raises:
            ValueError: there is no rank, the lists disagree or are not nested as above, a length or the sum
                of a rank's is not an integer from 0 to 2**30, or a rank is out of range.
        """
        copies, input_rows, output_rows = _copies_of_splits(
            input_split_sizes, dst_ranks, output_split_sizes, src_ranks
        )
        return _spec_of(copies, len(input_rows), max(input_rows), max(output_rows))

    def by_host(self, ranks_per_host: int) -> "RelayedSpec":
        """Returns the same transfer in two steps, in which a row crosses to each other host once.

        It is made on the host, from what this spec sends; static sizes are rounded up as in plans.

        Args:
            ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host.

        Raises:
            ValueError: the number of ranks is no multiple of ``ranks_per_host``, or the spec is traced,
                stacked or a part.
        """
        cp_size, sends = _check_hosts(self, ranks_per_host)
        steps = relay(_copies_of(sends), cp_size, ranks_per_host, self.input_rows)
        return RelayedSpec.of(*steps, cp_size, int(ranks_per_host), self.input_rows, self.output_rows)

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes (``bands`` is 0)."""
        return PlanCapacity(0, self.sends.shape[-2], self.pair_rows, self.output_rows)

    @property
    def used(self) -> PlanCapacity:
        """The smallest static sizes that hold what the host arrays transfer (``bands`` is 0)."""
        sends, receives = np.asarray(self.sends), np.asarray(self.receives)
        return PlanCapacity(
            bands=0,
            copies=max(used_length(table[..., 3] > 0) for table in (sends, receives)),
            pair_rows=int((sends[..., 1] + sends[..., 3]).max(initial=0)),
            output_rows=int((receives[..., 2] + receives[..., 3]).max(initial=0)),
        )

    def padded(self, *, copies: int, output_rows: int, pair_rows: int) -> "GroupCastSpec":
        """Returns the same transfer with other static sizes.

        Raises:
            ValueError: a size is smaller than what the transfer uses, or the tables would take more than
                2**32 bytes.
        """
        sizes = PlanCapacity(0, copies, pair_rows, output_rows)
        sizes.require(self.used)
        *stack, ranks = self.sends.shape[:-2]
        sizes.check_tables(ranks, plans=math.prod(stack))
        return replace(
            self,
            sends=resize_axis(np.asarray(self.sends), copies, -2),
            receives=resize_axis(np.asarray(self.receives), copies, -2),
            output_rows=output_rows,
            pair_rows=pair_rows,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RelayedSpec:
    """A group cast in which a row crosses to another host once, and is sent on to all that need it there.

    `GroupCastSpec.by_host` makes it. `jaxmagi.group_cast` and `jaxmagi.group_reduce` take it like the spec
    that it is made from: the same rows go to the same places. The rank of another host that receives a row
    first, its relay, is one of those that need it, unless these would receive more than any rank sends.

    Attributes:
        across: the step across all ranks. It brings rows to the ranks of their own host that need them, and
            to one relay in each other host that needs them.
        inside: the step inside each host, from what the step across all ranks has brought to what the whole
            transfer brings. Relays send what has come over the network to the ranks of their host. All else
            is a copy of each rank for itself.
        ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host. Static.
    """

    across: GroupCastSpec
    inside: GroupCastSpec
    ranks_per_host: int = field(metadata={"static": True})

    @staticmethod
    def of(
        across: Copies, inside: Copies, cp_size: int, ranks_per_host: int, input_rows: int, output_rows: int
    ) -> "RelayedSpec":
        """Returns the spec of the copies of both steps, with static sizes rounded up as in plans."""
        rows = bucket(int((across.dst_row + across.length).max(initial=0)))
        return RelayedSpec(
            across=_spec_of(across.by_destination(), cp_size, input_rows, rows),
            inside=_spec_of(inside.by_destination(), cp_size, rows, output_rows),
            ranks_per_host=ranks_per_host,
        )

    @property
    def input_rows(self) -> int:
        """Rows of each rank's input."""
        return self.across.input_rows

    @property
    def output_rows(self) -> int:
        """Rows of each rank's output."""
        return self.inside.output_rows

    @property
    def rows_between_hosts(self) -> int:
        """Rows that cross between hosts: one for each row and other host that needs it."""
        peer, rows = (np.asarray(self.across.sends)[..., column] for column in (0, 3))
        rank = np.arange(peer.shape[-2])[:, None]
        is_far = peer // self.ranks_per_host != rank // self.ranks_per_host
        return int(rows.sum(where=is_far, dtype=np.int64))

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes (``bands`` is 0)."""
        across, hosts = self.across.capacity, self.ranks_per_host
        return replace(self.inside.capacity, across=across, ranks_per_host=hosts)

    @property
    def used(self) -> PlanCapacity:
        """The smallest static sizes that hold what the host arrays transfer (``bands`` is 0)."""
        across, hosts = self.across.used, self.ranks_per_host
        return replace(self.inside.used, across=across, ranks_per_host=hosts)

    def padded(self, *, copies: int, output_rows: int, pair_rows: int, across: PlanCapacity) -> "RelayedSpec":
        """Returns the same transfer with other static sizes; ``across`` sizes the step across all ranks.

        Raises:
            ValueError: a size is smaller than what the transfer uses, or the tables of a step would take more
                than 2**32 bytes.
        """
        sizes = PlanCapacity(0, copies, pair_rows, output_rows, across=across)
        sizes.require(self.used)
        inside = self.inside.padded(copies=copies, output_rows=output_rows, pair_rows=pair_rows)
        return RelayedSpec(
            across=self.across.padded(
                copies=across.copies, output_rows=across.output_rows, pair_rows=across.pair_rows
            ),
            inside=replace(inside, input_rows=across.output_rows),
            ranks_per_host=self.ranks_per_host,
        )


def steps_of(transfer: GroupCastSpec | RelayedSpec) -> tuple[Copies, ...]:
    """Returns the copies of the steps of a transfer, which follow each other."""
    steps = (transfer.across, transfer.inside) if isinstance(transfer, RelayedSpec) else (transfer,)
    return tuple(_copies_of(np.asarray(step.sends)) for step in steps)


def spec_of_tables(
    sends: Int32[np.ndarray, "n 6"],
    receives: Int32[np.ndarray, "m 5"],
    cp_size: int,
    input_rows: int,
    output_rows: int,
) -> GroupCastSpec:
    """Returns the spec of two tables, with other static sizes rounded up.

    Rows of the tables are the rank and a row of `GroupCastSpec.sends` or `GroupCastSpec.receives`, by rank.
    """
    longest = max(int(np.bincount(table[:, 0]).max(initial=0)) for table in (sends, receives))
    return GroupCastSpec(
        sends=_pack(sends, cp_size, bucket(longest)),
        receives=_pack(receives, cp_size, bucket(longest)),
        input_rows=input_rows,
        output_rows=output_rows,
        pair_rows=bucket(int((sends[:, 2] + sends[:, 4]).max(initial=0))),
    )


def _pack(table: np.ndarray, cp_size: int, copies: int) -> np.ndarray:
    """Returns int32 ``[cp, copies, k]`` of entries ``[n, 1 + k]``, which lead with their rank, sorted."""
    packed = np.zeros((cp_size, copies, table.shape[1] - 1), np.int32)
    rank = table[:, 0]
    packed[rank, np.arange(len(rank)) - np.searchsorted(rank, rank)] = table[:, 1:]
    return frozen(packed)


def _spec_of(copies: Copies, cp_size: int, input_rows: int, output_rows: int) -> GroupCastSpec:
    """Returns the spec of copies, whose order is that of the slots of each pair of ranks."""
    sends, receives = planner().place_copies(np.stack(copies, axis=1).astype(np.int32))
    return spec_of_tables(sends, receives, cp_size, input_rows, output_rows)


def _copies_of(sends: np.ndarray) -> Copies:
    """Returns the copies in a table `GroupCastSpec.sends`."""
    src, entry = np.nonzero(sends[..., 3])
    return Copies.of_entries(src, sends[src, entry])


def _check_hosts(spec: GroupCastSpec, ranks_per_host: Any) -> tuple[int, np.ndarray]:
    """Returns the number of ranks and the sends of a spec; ValueError if it cannot be cut into hosts."""
    if is_traced(spec):
        raise ValueError("by_host needs the spec's host data, but the spec is traced: call it outside jit.")
    sends = np.asarray(spec.sends)
    if sends.ndim != 3:
        raise ValueError(
            f"by_host takes one spec with sends [cp, M, 5], but they are {sends.shape}: call it on each spec "
            "before they are stacked."
        )
    cp_size = len(sends)
    if cp_size % integer(ranks_per_host, "ranks_per_host", minimum=1):
        raise ValueError(
            f"the spec is for {cp_size} ranks, which is no multiple of ranks_per_host={ranks_per_host}."
        )
    if sends[..., 0].max(initial=0) >= cp_size:
        raise ValueError(
            f"by_host needs a whole spec, but this one is a part: it leads with {cp_size} ranks and sends to "
            f"rank {sends[..., 0].max()}."
        )
    return cp_size, sends


def _copies_of_splits(
    input_split_sizes: Any, dst_ranks: Any, output_split_sizes: Any, src_ranks: Any
) -> tuple[Copies, list[int], list[int]]:
    """Returns the copies of splits, and how many rows each rank's input and output have.

    Raises:
        ValueError: where `GroupCastSpec.from_splits` does.
    """
    inputs = _sizes(input_split_sizes, "input_split_sizes")
    outputs = _sizes(output_split_sizes, "output_split_sizes")
    cp_size = integer(len(inputs), "the number of ranks in input_split_sizes", minimum=1)
    targets = _nested(dst_ranks, "dst_ranks", depth=3, maximum=cp_size - 1)
    sources = _nested(src_ranks, "src_ranks", depth=2, maximum=cp_size - 1)
    for name, value in (("dst_ranks", targets), ("output_split_sizes", outputs), ("src_ranks", sources)):
        if len(value) != cp_size:
            raise ValueError(f"{name} is for {len(value)} ranks, input_split_sizes is for {cp_size}.")
    sent = _split_rows("input_split_sizes", inputs, "dst_ranks", targets)
    sources = [[[src] for src in ranks] for ranks in sources]
    received = _split_rows("output_split_sizes", outputs, "src_ranks", sources)
    _check_totals(sent, received, cp_size)
    return _link(sent, received), [*map(sum, inputs)], [*map(sum, outputs)]


def _sizes(value: Any, name: str) -> list[list[int]]:
    """Returns the lengths of each rank's splits."""
    sizes = _nested(value, name, depth=2, maximum=UNBOUNDED)
    for rank, own in enumerate(sizes):
        integer(sum(own), f"the sum of {name}[{rank}]")
    return sizes


def _nested(value: Any, name: str, *, depth: int, maximum: int) -> Any:
    """Returns lists in lists, ``depth`` deep, of integers from 0 to ``maximum``."""
    if depth == 0:
        return integer(value, name, maximum=maximum)
    return [
        _nested(item, f"{name}[{i}]", depth=depth - 1, maximum=maximum)
        for i, item in enumerate(as_list(value, name))
    ]


def _split_rows(
    sizes_name: str,
    sizes: Sequence[Sequence[int]],
    peers_name: str,
    peers: Sequence[Sequence[Sequence[int]]],
) -> np.ndarray:
    """Returns the rows of all ranks' splits that are not empty, in order, for each peer: int64 ``[n, 4]``.

    Entries are ``(rank, peer, row, length)``.
    """
    entries = []
    for rank, (rank_sizes, rank_peers) in enumerate(zip(sizes, peers, strict=True)):
        if len(rank_sizes) != len(rank_peers):
            raise ValueError(
                f"rank {rank} has {len(rank_sizes)} {sizes_name} but {len(rank_peers)} {peers_name}."
            )
        row = 0
        for size, split_peers in zip(rank_sizes, rank_peers, strict=True):
            entries += [(rank, peer, row, size) for peer in split_peers if size]
            row += size
    return np.array(entries, np.int64).reshape(-1, 4)


def _check_totals(sent: np.ndarray, received: np.ndarray, cp_size: int) -> None:
    """Raises ValueError unless every pair of ranks sends as many rows as it receives."""
    out, arriving = np.zeros((2, cp_size, cp_size), np.int64)
    np.add.at(out, (sent[:, 0], sent[:, 1]), sent[:, 3])
    np.add.at(arriving, (received[:, 1], received[:, 0]), received[:, 3])
    for src, dst in np.argwhere(out != arriving)[:1]:
        raise ValueError(
            f"rank {src} sends {out[src, dst]} rows to rank {dst}, "
            f"which expects {arriving[src, dst]} rows from it."
        )


def _link(sent: np.ndarray, received: np.ndarray) -> Copies:
    """Returns the copies from the rows of both sides, as `_split_rows` returns them.

    They fill the buffers of all pairs one after the other. Every pair has as many rows on either side.
    """
    sent = sent[np.lexsort((sent[:, 1], sent[:, 0]))]
    received = received[np.lexsort((received[:, 0], received[:, 1]))]
    sent_end, received_end = sent[:, 3].cumsum(), received[:, 3].cumsum()
    sent_begin, received_begin = sent_end - sent[:, 3], received_end - received[:, 3]
    send, receive, begin, end = meet(sent_begin, sent_end, received_begin, received_end)
    row = sent[send, 2] + begin - sent_begin[send]
    dst_row = received[receive, 2] + begin - received_begin[receive]
    return Copies(sent[send, 0], sent[send, 1], row, dst_row, end - begin)
