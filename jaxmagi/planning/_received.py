"""Which tokens a plan's transfers bring where, in runs: dense masks bring each rank nearly all of them."""

from typing import NamedTuple

import jax
import numpy as np

from ._ranges import meet
from ._spec import GroupCastSpec


class TokenRuns(NamedTuple):
    """Runs of consecutive tokens in consecutive rows of ranks, sorted by rank and row: each int64 ``[n]``."""

    rank: np.ndarray
    row: np.ndarray
    token: np.ndarray
    length: np.ndarray

    def of_rank(self, rank: int) -> "TokenRuns":
        begin, end = np.searchsorted(self.rank, [rank, rank + 1])
        return TokenRuns(*(column[begin:end] for column in self))

    def shifted(self, rows: int) -> "TokenRuns":
        """The same runs so many rows further down."""
        return self._replace(row=self.row + rows)


def own_runs(token_order: jax.Array | np.ndarray, cp_size: int) -> TokenRuns:
    """The tokens of the ranks' shards."""
    shards = np.asarray(token_order, np.int64).reshape(cp_size, -1)
    joins = np.zeros(shards.shape, bool)
    joins[:, 1:] = (shards[:, 1:] == shards[:, :-1] + 1) & (shards[:, :-1] >= 0)
    starts = np.flatnonzero(~joins)
    lengths = np.diff(starts, append=shards.size)
    kept = shards.reshape(-1)[starts] >= 0
    starts, lengths = starts[kept], lengths[kept]
    rank, row = np.divmod(starts, shards.shape[1])
    return TokenRuns(rank, row, shards.reshape(-1)[starts], lengths)


def received_runs(spec: GroupCastSpec, own: TokenRuns) -> TokenRuns:
    """The tokens in the output rows of a transfer of the ranks' shards."""
    # Sent rows as positions in the shards of all ranks, one after the other; slots as positions in the
    # buffers of all pairs.
    rank, dst, slot, row, length = _entries(spec.sends)
    begin, own_begin = rank * spec.input_rows + row, own.rank * spec.input_rows + own.row
    send, run, first, last = meet(begin, begin + length, own_begin, own_begin + own.length)
    slots = _buffer(rank, dst, spec)[send] + slot[send] + first - begin[send]
    tokens = own.token[run] + first - own_begin[run]
    order = np.argsort(slots)
    slots, tokens, lengths = slots[order], tokens[order], (last - first)[order]
    rank, src, slot, row, length = _entries(spec.receives)
    begin = _buffer(src, rank, spec) + slot
    receive, piece, first, last = meet(begin, begin + length, slots, slots + lengths)
    return TokenRuns(
        rank[receive],
        row[receive] + first - begin[receive],
        tokens[piece] + first - slots[piece],
        last - first,
    )


def _entries(table: jax.Array | np.ndarray) -> tuple[np.ndarray, ...]:
    """The used entries of a table ``[cp, M, 4]`` as columns: the rank, then those of the table."""
    rank, index = np.nonzero(np.asarray(table)[..., 3])
    return rank, *np.asarray(table, np.int64)[rank, index].T


def _buffer(src: np.ndarray, dst: np.ndarray, spec: GroupCastSpec) -> np.ndarray:
    """Where the slots of a pair of ranks begin."""
    return (src * len(spec.sends) + dst) * max(spec.pair_rows, 1)
