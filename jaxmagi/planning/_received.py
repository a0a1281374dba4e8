"""The tokens that transfers bring to ranks, as runs: dense masks bring nearly all tokens to each rank."""

from typing import NamedTuple

import jax
import numpy as np

from ._ranges import meet
from ._relay import copies_of
from ._spec import GroupCastSpec, RelayedSpec


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
        """Returns the same runs ``rows`` rows further down."""
        return self._replace(row=self.row + rows)


def joined(first: TokenRuns, second: TokenRuns) -> TokenRuns:
    """Returns the runs of both, which are in different rows."""
    return _sorted(TokenRuns(*(np.concatenate(columns) for columns in zip(first, second, strict=True))))


def _sorted(runs: TokenRuns) -> TokenRuns:
    order = np.lexsort((runs.row, runs.rank))
    return TokenRuns(*(column[order] for column in runs))


def own_runs(token_order: jax.Array | np.ndarray, cp_size: int) -> TokenRuns:
    """Returns the runs of the ranks' shards."""
    shards = np.asarray(token_order, np.int64).reshape(cp_size, -1)
    joins = np.zeros(shards.shape, bool)
    joins[:, 1:] = (shards[:, 1:] == shards[:, :-1] + 1) & (shards[:, :-1] >= 0)
    starts = np.flatnonzero(~joins)
    lengths = np.diff(starts, append=shards.size)
    kept = shards.reshape(-1)[starts] >= 0
    starts, lengths = starts[kept], lengths[kept]
    rank, row = np.divmod(starts, shards.shape[1])
    return TokenRuns(rank, row, shards.reshape(-1)[starts], lengths)


def key_runs(spec: GroupCastSpec | RelayedSpec, own: TokenRuns) -> TokenRuns:
    """Returns the runs in the keys of ranks: their shards, and the rows of a transfer behind them."""
    return joined(own, received_runs(spec, own).shifted(spec.input_rows))


def received_runs(spec: GroupCastSpec | RelayedSpec, own: TokenRuns) -> TokenRuns:
    """Returns the runs in the output rows of a transfer of the ranks' shards."""
    if isinstance(spec, RelayedSpec):
        return received_runs(spec.inside, received_runs(spec.across, own))
    copies = copies_of(np.asarray(spec.sends))
    # Rows as positions in the shards of all ranks, one after the other.
    begin, own_begin = copies.src * spec.input_rows + copies.row, own.rank * spec.input_rows + own.row
    send, run, first, last = meet(begin, begin + copies.length, own_begin, own_begin + own.length)
    row = copies.dst_row[send] + first - begin[send]
    token = own.token[run] + first - own_begin[run]
    return _sorted(TokenRuns(copies.dst[send], row, token, last - first))
