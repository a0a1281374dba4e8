"""Chooses the rank of a host that receives a row first, for all ranks that need it there."""

from typing import NamedTuple

import numpy as np

from ._ranges import Copies, meet, union

# With 32 rounds the largest number of rows of a rank fell no further, for all masks that were tried.
_ROUNDS = 2
_FULL = 2**50  # above every number of rows, and so that sums of it fit into 64 bits


def relay(copies: Copies, cp_size: int, ranks_per_host: int, input_rows: int) -> tuple[Copies, Copies]:
    """Returns the two steps of the same transfer through relays: across all ranks, and inside hosts.

    The step across all ranks brings near rows, which stay in their host, to the ranks that need them, and
    each far row once to every other host that needs it: to its relay there, which is one of the ranks that
    need it. A rank lays down its near rows in their final order, and what it relays behind them. So nothing
    inside a host waits for the network but what has come over the network.

    In the step inside hosts ranks send what they relay to the ranks of their host. Each also copies its near
    rows, in its own memory, to where they belong in the result.

    A far row that goes to a host is a position ``(src * num_hosts + host) * input_rows + row``, so that one
    sequence of disjoint ranges holds the rows of all pairs of a source and a host (a group).

    Args:
        copies: the copies of the transfer.
        cp_size: number of ranks.
        ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host.
        input_rows: rows of each rank's input.
    """
    num_hosts = cp_size // ranks_per_host
    is_far = copies.src // ranks_per_host != copies.dst // ranks_per_host
    near, far = copies.where(~is_far), copies.where(is_far)
    begin = (far.src * num_hosts + far.dst // ranks_per_host) * input_rows + far.row
    runs = _runs(begin, begin + far.length, far.dst % ranks_per_host, ranks_per_host)
    source, _ = np.divmod(runs.begin, max(1, input_rows * num_hosts))
    most_sent = int(np.bincount(source, weights=runs.length).max(initial=0))
    runs = runs.where(np.lexsort((runs.begin, source % ranks_per_host)))
    host = runs.begin // max(1, input_rows) % num_hosts
    run_begin, length, place = _share_out(runs, host, most_sent)

    order = np.argsort(run_begin)
    run_begin, length, place = run_begin[order], length[order], place[order]
    group, row = np.divmod(run_begin, max(1, input_rows))
    src, host = np.divmod(group, num_hosts)
    relays = host * ranks_per_host + place
    near = near.by_destination()
    laid = _rows_in_turn(np.concatenate([near.dst, relays]), np.concatenate([near.length, length]))
    near_row, relay_row = np.split(laid, [len(near.dst)])
    across = _join(near._replace(dst_row=near_row), Copies(src, relays, row, relay_row, length))
    copy, run, first, last = meet(begin, begin + far.length, run_begin, run_begin + length)
    skipped = first - run_begin[run]
    dst_row = far.dst_row[copy] + first - begin[copy]
    relayed = Copies(relays[run], far.dst[copy], relay_row[run] + skipped, dst_row, last - first)
    return across, _join(near._replace(src=near.dst, row=near_row), relayed)


def _join(first: Copies, second: Copies) -> Copies:
    return Copies(*(np.concatenate(columns) for columns in zip(first, second, strict=True)))


class _Runs(NamedTuple):
    """Disjoint ranges of positions, each needed by the same ranks of a host.

    Attributes:
        begin: int64 ``[n]``, the first position.
        length: int64 ``[n]``.
        needs: bool ``[n, ranks_per_host]``, which ranks of the host need them.
    """

    begin: np.ndarray
    length: np.ndarray
    needs: np.ndarray

    def where(self, chosen: np.ndarray) -> "_Runs":
        return _Runs(*(column[chosen] for column in self))


def _runs(begin: np.ndarray, end: np.ndarray, place: np.ndarray, ranks_per_host: int) -> _Runs:
    """Returns the runs of ranges of positions, which the rank at ``place`` in its host needs.

    The set of ranks that need a position changes only where a range begins or ends.
    """
    edges = np.unique(np.concatenate([begin, end]))
    *_, first, last = meet(*union(begin, end), edges[:-1], edges[1:])
    needs = np.zeros((len(first), ranks_per_host), bool)
    copy, run, *_ = meet(begin, end, first, last)
    needs[run, place[copy]] = True
    return _Runs(first, last - first, needs)


def _share_out(runs: _Runs, host: np.ndarray, most_sent: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ``(begin, length, place)`` of parts of the runs, each with its relay's place in the host.

    Relays of a host receive as equal numbers of rows as those that need the rows allow. One that would still
    receive more than any rank sends (``most_sent``), so that the others wait for it, leaves the rest to ranks
    that do not need the rows: these cross one more link, but inside the host.

    Rows that the same ranks of a host need are alike, and are cut into one part for each relay. With runs
    sorted by the place of their source in its host, a relay gets rows mostly from sources of its own place.
    """
    kinds, kind = np.unique(np.c_[host, np.packbits(runs.needs, axis=1)], axis=0, return_inverse=True)
    example = np.zeros(len(kinds), np.int64)
    example[kind] = np.arange(len(kind))
    rows = np.zeros(len(kinds), np.int64)
    np.add.at(rows, kind, runs.length)
    shares = _spill(_fill(runs.needs[example], rows, kinds[:, 0]), kinds[:, 0], most_sent)
    # All rows, kind after kind, are cut into runs, and into the shares of relays.
    order = np.argsort(kind, kind="stable")
    end = np.cumsum(runs.length[order])
    begin = end - runs.length[order]
    relay, share = np.nonzero(shares)[1], shares[shares > 0]
    share_end = np.cumsum(share)
    run, index, first, last = meet(begin, end, share_end - share, share_end)
    return runs.begin[order][run] + first - begin[run], last - first, relay[index]


def _fill(needs: np.ndarray, rows: np.ndarray, host: np.ndarray) -> np.ndarray:
    """Returns how many rows of each kind each rank gets, int64 ``[n, ranks_per_host]``.

    Rows of a kind are poured over the ranks that need them, as water that fills the lowest first. Kinds that
    few ranks need come first, because they have the least choice. Each is then poured anew a few times, which
    only lowers the sum of squares of what ranks receive.

    Args:
        needs: bool ``[n, ranks_per_host]``, which ranks need a kind of rows.
        rows: int64 ``[n]``, how many there are.
        host: int64 ``[n]``, ascending, whose ranks need them.
    """
    order = np.lexsort((needs.sum(axis=1), host))
    turn = np.arange(len(host)) - np.searchsorted(host, host)
    turns = [order[turn == index] for index in range(turn.max(initial=-1) + 1)]  # one kind of each host
    loads = np.zeros((host.max(initial=-1) + 1, needs.shape[1]), np.int64)
    shares = np.zeros(needs.shape, np.int64)
    for kinds in turns * _ROUNDS:
        others = loads[host[kinds]] - shares[kinds]
        shares[kinds] = _pour(rows[kinds], np.where(needs[kinds], others, _FULL))
        loads[host[kinds]] = others + shares[kinds]
    return shares


def _pour(amount: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Returns how water ``[n]`` fills vessels of width 1 up to one level above what is in them, ``[n, k]``.

    All are whole numbers, so that each host computes the same: the last ones to be filled may stay lower.
    """
    width = np.arange(1, levels.shape[1] + 1)
    level = (-(-(amount[:, None] + np.cumsum(np.sort(levels, axis=1), axis=1)) // width)).min(axis=1)
    poured = np.cumsum(np.maximum(level[:, None] - levels, 0), axis=1)
    return np.diff(np.minimum(poured, amount[:, None]), axis=1, prepend=0)


def _spill(shares: np.ndarray, host: np.ndarray, most: int) -> np.ndarray:
    """Returns the shares with what ranks get beyond ``most`` handed to ranks of the same host with room.

    ``most`` is raised to the mean of the host that receives most, if that is more.
    """
    loads = np.zeros((host.max(initial=-1) + 1, shares.shape[1]), np.int64)
    np.add.at(loads, host, shares)
    most = max(most, int((-(-loads.sum(axis=1) // shares.shape[1])).max(initial=0)))
    excess = shares * (np.maximum(loads - most, 0))[host] // np.maximum(loads, 1)[host]
    room = np.cumsum(np.maximum(most - loads, 0), axis=1)[host]
    spilt = excess.sum(axis=1, keepdims=True) * room // np.maximum(room[:, -1:], 1)
    return shares - excess + np.diff(spilt, axis=1, prepend=0)


def _rows_in_turn(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns the first row of each run, if runs of a rank follow each other from row 0 in their order."""
    order = np.argsort(rank, kind="stable")
    begin = np.cumsum(length[order]) - length[order]
    rows = np.zeros_like(length)
    rows[order] = begin - begin[np.searchsorted(rank[order], rank[order])]
    return rows
