"""Reads the splits of `GroupCastSpec.from_splits`: lists per rank, in MagiAttention's form."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._checks import as_list, integer
from ..masks.geometry import UNBOUNDED
from ._ranges import meet


class SplitCopies(NamedTuple):
    """The rows that splits transfer.

    Attributes:
        copies: int32 ``[n, 5]``, rows ``(src_rank, dst_rank, row, dst_row, length)``.
        cp_size: number of ranks.
        input_rows: the most rows of a rank's input.
        output_rows: the most rows of a rank's output.
    """

    copies: np.ndarray
    cp_size: int
    input_rows: int
    output_rows: int


def read_splits(
    input_split_sizes: Any, dst_ranks: Any, output_split_sizes: Any, src_ranks: Any
) -> SplitCopies:
    """Returns the copies of the splits; raises ValueError where `GroupCastSpec.from_splits` does."""
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
    return SplitCopies(_link(sent, received), cp_size, max(map(sum, inputs)), max(map(sum, outputs)))


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


def _split_copies(
    sizes_name: str,
    sizes: Sequence[Sequence[int]],
    peers_name: str,
    peers: Sequence[Sequence[Sequence[int]]],
) -> np.ndarray:
    """Returns the copies of all ranks' splits that are not empty, in order: int64 ``[n, 4]``.

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
    """Raises ValueError unless every pair of ranks sends as many rows as it receives."""
    out, arriving = np.zeros((2, cp_size, cp_size), np.int64)
    np.add.at(out, (sent[:, 0], sent[:, 1]), sent[:, 3])
    np.add.at(arriving, (received[:, 1], received[:, 0]), received[:, 3])
    for src, dst in np.argwhere(out != arriving)[:1]:
        raise ValueError(
            f"rank {src} sends {out[src, dst]} rows to rank {dst}, "
            f"which expects {arriving[src, dst]} rows from it."
        )


def _link(sent: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Returns the copies int32 ``[n, 5]``, rows ``(src_rank, dst_rank, row, dst_row, length)``.

    The copies of both sides, as `_split_copies` returns them, fill the buffers of all pairs one after the
    other. Every pair has as many rows on either side.
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
