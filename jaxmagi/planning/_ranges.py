"""Ranges: unions and common parts, copies of row ranges between ranks, and runs of tokens in rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def union(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the union of any ranges ``[begin, end)`` as the fewest sorted, disjoint ones."""
    kept = np.flatnonzero(begin < end)
    order = kept[np.argsort(begin[kept], kind="stable")]
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    is_new = np.ones(len(order), bool)
    is_new[1:] = begin[1:] > reach[:-1]
    starts = np.flatnonzero(is_new)
    return begin[starts], reach[np.append(starts[1:], len(order)) - 1] if starts.size else begin


def meet(
    begin: np.ndarray, end: np.ndarray, other_begin: np.ndarray, other_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the parts that any ranges ``[begin, end)`` share with others, which are sorted and disjoint.

    Returns:
        The index of the range, the index of the other range, begin and end of each part, in the order of the
        ranges.
    """
    first = np.searchsorted(other_end, begin, side="right")
    last = np.searchsorted(other_begin, end, side="left")
    count = np.where(begin < end, np.maximum(last - first, 0), 0)
    index = np.repeat(np.arange(len(begin)), count)
    within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    other = first[index] + within
    begin, end = np.maximum(begin[index], other_begin[other]), np.minimum(end[index], other_end[other])
    return index, other, begin, end


class Copies(NamedTuple):
    """Rows ``[row, row + length)`` of ``src``: the rows ``[dst_row, dst_row + length)`` of ``dst``; int64."""

    src: np.ndarray
    dst: np.ndarray
    row: np.ndarray
    dst_row: np.ndarray
    length: np.ndarray

    @staticmethod
    def of_entries(src: np.ndarray, sends: np.ndarray) -> "Copies":
        """Returns the copies of entries of `GroupCastSpec.sends`, int32 ``[n, 5]``, of ranks ``[n]``."""
        dst, _, row, length, dst_row = sends.astype(np.int64).T
        return Copies(src.astype(np.int64), dst, row, dst_row, length)

    def where(self, chosen: np.ndarray) -> "Copies":
        """Returns the copies that a mask or an order chooses."""
        return Copies(*(column[chosen] for column in self))

    def by_destination(self) -> "Copies":
        """Returns the copies sorted by receiving rows, so that adjacent ones can be joined."""
        return self.where(np.lexsort((self.dst_row, self.dst)))

    def traffic(self, cp_size: int, ranks_per_host: int) -> np.ndarray:
        """Returns rows sent and received, within a host and between hosts: int64 ``[cp, 2, 2]``.

        Rows that a rank sends to itself do not count.
        """
        is_far = self.src // ranks_per_host != self.dst // ranks_per_host
        traffic = np.zeros((cp_size, 2, 2), np.int64)
        for level, crosses in enumerate(((self.src != self.dst) & ~is_far, is_far)):
            for side, rank in enumerate((self.src, self.dst)):
                np.add.at(traffic[:, side, level], rank[crosses], self.length[crosses])
        return traffic


class TokenRuns(NamedTuple):
    """Runs of consecutive tokens in consecutive rows of ranks, sorted by rank and row: each int64 ``[n]``.

    Dense masks bring nearly all tokens to each rank, in few runs.
    """

    rank: np.ndarray
    row: np.ndarray
    token: np.ndarray
    length: np.ndarray

    def of_rank(self, rank: int) -> "TokenRuns":
        begin, end = np.searchsorted(self.rank, [rank, rank + 1])
        return TokenRuns(*(column[begin:end] for column in self))


def own_runs(token_order: np.ndarray, cp_size: int) -> TokenRuns:
    """Returns the runs of the ranks' shards."""
    shards = token_order.astype(np.int64).reshape(cp_size, -1)
    joins = np.zeros(shards.shape, bool)
    joins[:, 1:] = (shards[:, 1:] == shards[:, :-1] + 1) & (shards[:, :-1] >= 0)
    starts = np.flatnonzero(~joins)
    lengths = np.diff(starts, append=shards.size)
    kept = shards.reshape(-1)[starts] >= 0
    starts, lengths = starts[kept], lengths[kept]
    rank, row = np.divmod(starts, shards.shape[1])
    return TokenRuns(rank, row, shards.reshape(-1)[starts], lengths)


def received_runs(steps: Sequence[Copies], own: TokenRuns) -> TokenRuns:
    """Returns the runs in the output rows of a transfer of the ranks' shards, from its steps in turn."""
    runs = own
    for copies in steps:
        runs = _copied(copies, runs)
    return runs


def key_runs(steps: Sequence[Copies], own: TokenRuns, shard_length: int) -> TokenRuns:
    """Returns the runs in the keys of ranks: their shards, and the rows of a transfer behind them."""
    received = received_runs(steps, own)
    received = received._replace(row=received.row + shard_length)
    return _sorted(TokenRuns(*(np.concatenate(columns) for columns in zip(own, received, strict=True))))


def _copied(copies: Copies, runs: TokenRuns) -> TokenRuns:
    """Returns the runs that copies of runs make."""
    # Rows as positions in the rows of all ranks, one rank after the other.
    height = int(np.concatenate([copies.row + copies.length, runs.row + runs.length]).max(initial=0))
    begin, runs_begin = copies.src * height + copies.row, runs.rank * height + runs.row
    copy, run, first, last = meet(begin, begin + copies.length, runs_begin, runs_begin + runs.length)
    row = copies.dst_row[copy] + first - begin[copy]
    token = runs.token[run] + first - runs_begin[run]
    return _sorted(TokenRuns(copies.dst[copy], row, token, last - first))


def _sorted(runs: TokenRuns) -> TokenRuns:
    order = np.lexsort((runs.row, runs.rank))
    return TokenRuns(*(column[order] for column in runs))
