"""Transfer tables: which rank sends which of its rows to whom, from intersections of ranges."""

import numpy as np

from ._runs import Runs, meetings
from ._spec import Copies, CopyTable, copy_table


def transfer_tables(owned: list[Runs], received: list[Runs]) -> tuple[CopyTable, CopyTable]:
    """The tables ``(sends, receives)`` of one transfer.

    Args:
        owned: for each rank, its own tokens; together they hold every token once.
        received: for each rank, the tokens that it receives; ``place`` is the output row.
    """
    owner, src = _all_ranks(owned)
    order = np.argsort(owner.begin)
    owner, src = Runs(*(column[order] for column in owner)), src[order]
    wanted, dst = _all_ranks(received)
    item, run = meetings(wanted.begin, wanted.end, owner.begin, owner.end)
    begin = np.maximum(wanted.begin[item], owner.begin[run])
    length = np.minimum(wanted.end[item], owner.end[run]) - begin
    src_row = owner.place[run] + begin - owner.begin[run]
    dst_row = wanted.place[item] + begin - wanted.begin[item]
    sends = copy_table(Copies(src[run], dst[item], src_row, length))
    return sends, copy_table(Copies(dst[item], src[run], dst_row, length), by_row=True)


def _all_ranks(runs: list[Runs]) -> tuple[Runs, np.ndarray]:
    """The runs of all ranks in one list, with the rank of each."""
    rank = np.repeat(np.arange(len(runs)), [len(one.begin) for one in runs])
    return Runs(*(np.concatenate(columns) for columns in zip(*runs, strict=True))), rank
