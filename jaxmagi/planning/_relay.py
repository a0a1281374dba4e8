"""Chooses the rank of a host that receives a row first, for all ranks that need it there."""

from typing import NamedTuple

import numpy as np

from ._ranges import meet, union


class Copies(NamedTuple):
    """Rows ``[row, row + length)`` of ``src``: the rows ``[dst_row, dst_row + length)`` of ``dst``; int64."""

    src: np.ndarray
    dst: np.ndarray
    row: np.ndarray
    dst_row: np.ndarray
    length: np.ndarray

    def where(self, chosen: np.ndarray) -> "Copies":
        return Copies(*(column[chosen] for column in self))

    def table(self) -> np.ndarray:
        """Returns int32 ``[n, 5]``, sorted by receiving rows, so that adjacent copies can be joined."""
        order = np.lexsort((self.dst_row, self.dst))
        return np.ascontiguousarray(np.stack(self, axis=1)[order], np.int32)


def copies_of(sends: np.ndarray) -> Copies:
    """Returns the copies in a table `GroupCastSpec.sends`."""
    src, entry = np.nonzero(sends[..., 3])
    dst, _, row, length, dst_row = sends[src, entry].astype(np.int64).T
    return Copies(src, dst, row, dst_row, length)


def relay(copies: Copies, cp_size: int, ranks_per_host: int, input_rows: int) -> tuple[Copies, Copies]:
    """Returns the two steps of the same transfer through relays.

    The first step brings each row once to every other host that needs it, to one of the ranks that need it:
    the relay rows of that rank. The input of the second step is a rank's own rows followed by its relay rows,
    which it sends to the ranks of its host, itself included.

    A row that goes to a host is a position ``(src * num_hosts + host) * input_rows + row``, so that one
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
    run_begin, run_end = _cut(begin, begin + far.length, input_rows, ranks_per_host)
    copy, run, first, _ = meet(
        begin, begin + far.length, run_begin, run_end
    )  # each run is in a copy as a whole
    needs = np.zeros((len(run_begin), ranks_per_host), bool)
    needs[run, far.dst[copy] % ranks_per_host] = True

    group, row = np.divmod(run_begin, max(1, input_rows))
    src, host = np.divmod(group, num_hosts)
    length = run_end - run_begin
    relays = host * ranks_per_host + _choose(needs, group, length, src % ranks_per_host)
    relay_row = _rows_in_turn(relays, length)
    between = Copies(src, relays, row, relay_row, length)
    dst_row = far.dst_row[copy] + first - begin[copy]
    fanned = Copies(relays[run], far.dst[copy], input_rows + relay_row[run], dst_row, length[run])
    return between, Copies(*(np.concatenate(columns) for columns in zip(near, fanned, strict=True)))


def _cut(
    begin: np.ndarray, end: np.ndarray, input_rows: int, ranks_per_host: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns runs of positions that the same ranks need, each at most a relay's share of its group.

    The set of ranks that need a position changes only where a copy begins or ends, so runs lie between these
    edges. With R relays a run has at most 1 / R of the rows of its group, rounded up: otherwise one relay
    would get more than its share, and where ranks exchange buffers of one size the largest pair counts.
    """
    edges = np.unique(np.concatenate([begin, end]))
    *_, first, last = meet(*union(begin, end), edges[:-1], edges[1:])
    group = first // max(1, input_rows)
    totals = np.bincount(group, weights=last - first).astype(np.int64)
    share = -(-totals[group] // ranks_per_host)
    parts = -(-(last - first) // np.maximum(share, 1))
    run = np.repeat(np.arange(len(first)), parts)
    part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    length = last - first
    cuts = [first[run] + length[run] * index // parts[run] for index in (part, part + 1)]
    return cuts[0], cuts[1]


def _choose(needs: np.ndarray, group: np.ndarray, length: np.ndarray, preferred: np.ndarray) -> np.ndarray:
    """Returns the relay of each run, as its place in the host.

    It is the rank with the fewest rows of the group so far among those that need the run. Runs that few
    ranks need come first, because they have the least choice, then long ones, as in scheduling by longest
    processing time. Of equal ranks it is the first one from the source's own place on, in a ring, so that
    different sources prefer different relays.

    Args:
        needs: bool ``[n, ranks_per_host]``, which ranks of the host need a run.
        group: int ``[n]``, ascending, the number of the source and the host.
        length: int ``[n]``, rows of each run.
        preferred: int ``[n]``, the place of the source in its host.
    """
    num_places = needs.shape[1]
    places = (np.arange(num_places) + preferred[:, None]) % num_places
    excluded = ~np.take_along_axis(needs, places, axis=1)
    order = np.lexsort((-length, needs.sum(axis=1), group))
    turn = np.arange(len(group)) - np.searchsorted(group, group)
    rows = np.zeros((int(group.max(initial=-1)) + 1, num_places), np.int64)
    chosen = np.zeros(len(group), np.int64)
    by_turn = order[np.argsort(turn, kind="stable")]
    for runs in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):  # at most one run of each group
        so_far = np.where(excluded[runs], np.iinfo(np.int64).max, rows[group[runs]])
        chosen[runs] = so_far.argmin(axis=1)
        rows[group[runs], chosen[runs]] += length[runs]
    return (chosen + preferred) % num_places


def _rows_in_turn(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns the first row of each run, if runs of a rank follow each other from row 0 in their order."""
    order = np.argsort(rank, kind="stable")
    begin = np.cumsum(length[order]) - length[order]
    rows = np.zeros_like(length)
    rows[order] = begin - begin[np.searchsorted(rank[order], rank[order])]
    return rows
