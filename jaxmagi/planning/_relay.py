"""Which rank of a host receives a row first, for all that need it there."""

from typing import NamedTuple

import numpy as np

from ._ranges import meet, union


class Copies(NamedTuple):
    """Rows ``[row, row + length)`` of ranks that become ``[dst_row, dst_row + length)`` of others: int64."""

    src: np.ndarray
    dst: np.ndarray
    row: np.ndarray
    dst_row: np.ndarray
    length: np.ndarray

    def where(self, chosen: np.ndarray) -> "Copies":
        return Copies(*(column[chosen] for column in self))

    def table(self) -> np.ndarray:
        """int32 ``[n, 5]``, by what receives them: so ranges that go on there follow each other."""
        order = np.lexsort((self.dst_row, self.dst))
        return np.ascontiguousarray(np.stack(self, axis=1)[order], np.int32)


def copies_of(sends: np.ndarray) -> Copies:
    """What a table `GroupCastSpec.sends` moves."""
    src, entry = np.nonzero(sends[..., 3])
    dst, _, row, length, dst_row = sends[src, entry].astype(np.int64).T
    return Copies(src, dst, row, dst_row, length)


def relay(copies: Copies, cp_size: int, ranks_per_host: int, input_rows: int) -> tuple[Copies, Copies]:
    """The same transfer by way of relays, in two steps.

    The first brings each row once to every other host that needs it, to one of the ranks that do. What a rank
    gets so are its relay rows. The second brings the rank's own rows and, behind them, its relay rows to the
    ranks of its host, itself among them.

    Args:
        copies: of the transfer.
        cp_size: ranks.
        ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host.
        input_rows: rows of each rank's input.
    """
    num_hosts = cp_size // ranks_per_host
    is_far = copies.src // ranks_per_host != copies.dst // ranks_per_host
    near, far = copies.where(~is_far), copies.where(is_far)
    # Rows that go to a host as positions: source after source, host after host.
    begin = (far.src * num_hosts + far.dst // ranks_per_host) * input_rows + far.row
    run_begin, run_end = _cut(begin, begin + far.length, input_rows, ranks_per_host)
    copy, run, first, _ = meet(begin, begin + far.length, run_begin, run_end)  # whole runs
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
    """Runs of positions that the same ranks need, each no more than a relay's share of what its source sends.

    Longer runs would leave a source's other relays with less, and where ranks exchange buffers of one size
    for all pairs the largest pair counts.
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
    """A relay for each run: of those that need it, the one with the fewest rows of the group so far.

    Runs that few ranks need come first, then long ones. Of equals it is the first from the one at the
    source's own place in its host on, so that sources prefer different ones.

    Args:
        needs: bool ``[n, ranks_per_host]``, which ranks of its host need a run.
        group: int ``[n]``, ascending: a number for the source and the host.
        length: int ``[n]``, rows.
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
    for runs in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):  # one of each group at a time
        so_far = np.where(excluded[runs], np.iinfo(np.int64).max, rows[group[runs]])
        chosen[runs] = so_far.argmin(axis=1)
        rows[group[runs], chosen[runs]] += length[runs]
    return (chosen + preferred) % num_places


def _rows_in_turn(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The first row of each run, if those of a rank follow each other from row 0 on in the given order."""
    order = np.argsort(rank, kind="stable")
    begin = np.cumsum(length[order]) - length[order]
    rows = np.zeros_like(length)
    rows[order] = begin - begin[np.searchsorted(rank[order], rank[order])]
    return rows
