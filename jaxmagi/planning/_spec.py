"""Specs of group casts, in one step or in two: tables of row ranges, as arrays in pytrees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from .._checks import integer, is_traced
from ._capacity import PlanCapacity, bucket, resize_axis, used_length
from ._compiled import planner
from ._relay import Copies, copies_of, relay
from ._splits import read_splits
from ._tables import largest_pair, longest, pack_table


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
        splits = read_splits(input_split_sizes, dst_ranks, output_split_sizes, src_ranks)
        return _spec_of(splits.copies, splits.cp_size, splits.input_rows, splits.output_rows)

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
        steps = relay(copies_of(sends), cp_size, ranks_per_host, self.input_rows)
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
            across=_spec_of(across.table(), cp_size, input_rows, rows),
            inside=_spec_of(inside.table(), cp_size, rows, output_rows),
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


def pack_spec(
    sends: Int32[np.ndarray, "n 6"],
    receives: Int32[np.ndarray, "m 5"],
    *,
    cp_size: int,
    copies: int,
    input_rows: int,
    output_rows: int,
    pair_rows: int,
) -> GroupCastSpec:
    """Returns the spec of two tables, padded to ``copies`` entries per rank.

    Rows of the tables are the rank and a row of `GroupCastSpec.sends` or `GroupCastSpec.receives`.
    """
    return GroupCastSpec(
        sends=pack_table(sends, cp_size, copies),
        receives=pack_table(receives, cp_size, copies),
        input_rows=input_rows,
        output_rows=output_rows,
        pair_rows=pair_rows,
    )


def _spec_of(
    copies: Int32[np.ndarray, "n 5"], cp_size: int, input_rows: int, output_rows: int
) -> GroupCastSpec:
    """Returns the spec of copies, rows ``(src_rank, dst_rank, row, dst_row, length)``."""
    sends, receives = planner().place_copies(copies)
    return spec_of_tables(sends, receives, cp_size, input_rows, output_rows)


def spec_of_tables(
    sends: Int32[np.ndarray, "n 6"],
    receives: Int32[np.ndarray, "m 5"],
    cp_size: int,
    input_rows: int,
    output_rows: int,
) -> GroupCastSpec:
    """Returns the spec of two tables as `pack_spec` takes them, with other static sizes rounded up."""
    return pack_spec(
        sends,
        receives,
        cp_size=cp_size,
        copies=bucket(max(longest(sends, cp_size), longest(receives, cp_size))),
        input_rows=input_rows,
        output_rows=output_rows,
        pair_rows=bucket(largest_pair(sends)),
    )


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
