"""Which rows go where in a group cast: tables of row ranges, as arrays in a pytree."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from .._checks import integer, is_traced
from ..masks.geometry import UNBOUNDED
from ._capacity import PlanCapacity, bucket, resize_axis, used_length
from ._compiled import planner
from ._ranges import meet
from ._relay import copies_of, relay
from ._relayed_spec import RelayedSpec
from ._tables import largest_pair, longest, pack_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GroupCastSpec:
    """The row ranges that every rank sends to and receives from every other, for one group cast.

    Rows travel through one buffer per pair of ranks, whose slots ``0 .. n - 1`` are filled without gaps. A
    row may go to several ranks and to several places. Entries of length 0 are unused and come last. Output
    rows that no entry names are zero. Both tables may have more leading axes (see
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

    sends: jax.Array | np.ndarray
    receives: jax.Array | np.ndarray
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
        """A spec from each rank's splits, with MagiAttention's meaning.

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
        inputs = _sizes(input_split_sizes, "input_split_sizes")
        outputs = _sizes(output_split_sizes, "output_split_sizes")
        cp_size = integer(len(inputs), "the number of ranks in input_split_sizes", minimum=1)
        targets = _nested(dst_ranks, "dst_ranks", depth=3, maximum=cp_size - 1)
        sources = _nested(src_ranks, "src_ranks", depth=2, maximum=cp_size - 1)
        for name, value in (("dst_ranks", targets), ("output_split_sizes", outputs), ("src_ranks", sources)):
            if len(value) != cp_size:
                raise ValueError(f"{name} is for {len(value)} ranks, input_split_sizes is for {cp_size}.")
        sent = _split_copies("input_split_sizes", inputs, "dst_ranks", targets)
        sources = [[[src] for src in ranks] for ranks in sources]
        received = _split_copies("output_split_sizes", outputs, "src_ranks", sources)
        _check_totals(sent, received, cp_size)
        copies = _link(sent, received)
        return _spec_of(copies, cp_size, max(map(sum, inputs)), max(map(sum, outputs)))

    def by_host(self, ranks_per_host: int) -> RelayedSpec:
        """The same transfer in two steps, so that a row crosses to another host once, whoever needs it there.

        Made on the host, from what this spec sends; static sizes are rounded up as in plans.

        Args:
            ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host.

        Raises:
            ValueError: the number of ranks is no multiple of ``ranks_per_host``, or the spec is traced,
                stacked or a part.
        """
        cp_size, sends = _check_hosts(self, ranks_per_host)
        between, within = relay(copies_of(sends), cp_size, ranks_per_host, self.input_rows)
        relay_rows = bucket(int((between.dst_row + between.length).max(initial=0)))
        return RelayedSpec(
            between=_spec_of(between.table(), cp_size, self.input_rows, relay_rows),
            within=_spec_of(within.table(), cp_size, self.input_rows + relay_rows, self.output_rows),
            ranks_per_host=int(ranks_per_host),
        )

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
        """The same transfer with other static sizes.

        Raises:
            ValueError: a size is smaller than what the transfer uses.
        """
        PlanCapacity(0, copies, pair_rows, output_rows).require(self.used)
        return replace(
            self,
            sends=resize_axis(np.asarray(self.sends), copies, -2),
            receives=resize_axis(np.asarray(self.receives), copies, -2),
            output_rows=output_rows,
            pair_rows=pair_rows,
        )


def pack_spec(
    sends: np.ndarray,
    receives: np.ndarray,
    *,
    cp_size: int,
    copies: int,
    input_rows: int,
    output_rows: int,
    pair_rows: int,
) -> GroupCastSpec:
    """The spec of two tables, padded to ``copies`` entries per rank.

    Args:
        sends: int32 ``[n, 6]``, the ranks and what `GroupCastSpec.sends` has.
        receives: int32 ``[m, 5]``, the ranks and what `GroupCastSpec.receives` has.
        cp_size: ranks.
        copies: entries of a rank in each table.
        input_rows: as in `GroupCastSpec`.
        output_rows: as in `GroupCastSpec`.
        pair_rows: as in `GroupCastSpec`.
    """
    return GroupCastSpec(
        sends=pack_table(sends, cp_size, copies),
        receives=pack_table(receives, cp_size, copies),
        input_rows=input_rows,
        output_rows=output_rows,
        pair_rows=pair_rows,
    )


def _spec_of(copies: np.ndarray, cp_size: int, input_rows: int, output_rows: int) -> GroupCastSpec:
    """The spec of copies int32 ``[n, 5]``, rows ``(src_rank, dst_rank, row, dst_row, length)``."""
    sends, receives = planner().place_copies(copies)
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
    """The number of ranks and the sends of a spec that can be cut into hosts."""
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


def _sizes(value: Any, name: str) -> list[list[int]]:
    """The lengths of each rank's splits."""
    sizes = _nested(value, name, depth=2, maximum=UNBOUNDED)
    for rank, own in enumerate(sizes):
        integer(sum(own), f"the sum of {name}[{rank}]")
    return sizes


def _nested(value: Any, name: str, *, depth: int, maximum: int) -> Any:
    """Lists in lists, ``depth`` deep, of integers from 0 to ``maximum``."""
    if depth == 0:
        return integer(value, name, maximum=maximum)
    try:
        items = list(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a list, but it is {value!r}.") from error
    return [_nested(item, f"{name}[{i}]", depth=depth - 1, maximum=maximum) for i, item in enumerate(items)]


def _split_copies(
    sizes_name: str,
    sizes: Sequence[Sequence[int]],
    peers_name: str,
    peers: Sequence[Sequence[Sequence[int]]],
) -> np.ndarray:
    """The copies of all ranks' splits that are not empty, in order: int64 ``[n, 4]``.

    Rows are ``(rank, peer, row, length)``.
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
    """ValueError unless every pair of ranks sends as many rows as it receives."""
    out, arriving = np.zeros((2, cp_size, cp_size), np.int64)
    np.add.at(out, (sent[:, 0], sent[:, 1]), sent[:, 3])
    np.add.at(arriving, (received[:, 1], received[:, 0]), received[:, 3])
    for src, dst in np.argwhere(out != arriving)[:1]:
        raise ValueError(
            f"rank {src} sends {out[src, dst]} rows to rank {dst}, "
            f"which expects {arriving[src, dst]} rows from it."
        )


def _link(sent: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Which rows become which: int32 ``[n, 5]``, rows ``(src_rank, dst_rank, row, dst_row, length)``.

    Both sides' copies, int64 ``[_, 4]`` as `_split_copies` has them, fill the buffers of all pairs one after
    the other. Every pair has as many rows on either side.
    """
    sent = sent[np.lexsort((sent[:, 1], sent[:, 0]))]
    received = received[np.lexsort((received[:, 0], received[:, 1]))]
    sent_end, received_end = sent[:, 3].cumsum(), received[:, 3].cumsum()
    sent_begin, received_begin = sent_end - sent[:, 3], received_end - received[:, 3]
    send, receive, begin, end = meet(sent_begin, sent_end, received_begin, received_end)
    row = sent[send, 2] + begin - sent_begin[send]
    dst_row = received[receive, 2] + begin - received_begin[receive]
    columns = (sent[send, 0], sent[send, 1], row, dst_row, end - begin)
    return np.stack(columns, axis=1).astype(np.int32)
