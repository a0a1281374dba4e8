"""What a plan costs, computed from its arrays alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..masks.geometry import area, tighten
from ._cost import CostModel, Schedule, schedule
from ._ranges import expand, union

if TYPE_CHECKING:
    from ._plan import ContextPlan


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What each rank of a plan computes and communicates.

    Attributes:
        area: int64 ``[cp]``, visible cells of each rank's queries.
        imbalance: largest over mean area; 1.0 for a mask without visible cells.
        rows_sent: int64 ``[cp]``, rows of keys (and of values) that leave each rank; one that goes to several
            ranks counts for each.
        rows_received: int64 ``[cp]``, rows of keys (and of values) that arrive at each rank.
        redundant_rows: received rows that no query of the rank sees, and rows received again; 0 in every
            plan.
        num_stages: attention calls of a rank.
        predicted_seconds: forward time under the `CostModel` given to `jaxmagi.ContextPlan.report`, which
            need not be the one that the plan was made with.
    """

    area: np.ndarray
    imbalance: float
    rows_sent: np.ndarray
    rows_received: np.ndarray
    redundant_rows: int
    num_stages: int
    predicted_seconds: float


def report_plan(plan: "ContextPlan", cost: CostModel) -> PlanReport:
    """The report of a plan with host arrays."""
    cells, sent, received = _work(plan)
    per_rank = cells.sum(axis=1)
    mean = per_rank.mean()
    return PlanReport(
        area=per_rank,
        imbalance=float(per_rank.max() / mean) if mean else 1.0,
        rows_sent=sent.sum(axis=1),
        rows_received=received.sum(axis=1),
        redundant_rows=_redundant_rows(plan),
        num_stages=plan.num_stages,
        predicted_seconds=schedule(cells, sent, received, plan.shard_length, cost).seconds,
    )


def schedule_plan(plan: "ContextPlan", cost: CostModel) -> Schedule:
    """When each rank of a plan with host arrays does what, under a model of the machine."""
    return schedule(*_work(plan), plan.shard_length, cost)


def _work(plan: "ContextPlan") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells ``[cp, num_stages]``, and rows sent and received ``[cp, num_transfers]``."""
    cells = area(np.asarray(plan.bands)).sum(axis=-1)
    sent, received = (
        np.stack([table[..., 3].sum(axis=1, dtype=np.int64) for table in tables], axis=1)
        for tables in zip(*((spec.sends, spec.receives) for spec in plan.transfers), strict=True)
    )
    return cells, sent, received


def received_tokens(plan: "ContextPlan", transfer: int) -> np.ndarray:
    """The token (global index) in each output row of a transfer, -1 for none: int64 ``[cp, R]``."""
    spec, cp_size = plan.transfers[transfer], plan.cp_size
    rank = np.repeat(np.arange(cp_size), spec.sends.shape[1])
    # The buffers of all pairs one after the other, in the order of the sends.
    dst, _, row, length = np.asarray(spec.sends, np.int64).reshape(-1, 4).T
    entry, sent_row = expand(row, length)
    buffers = plan.token_order.reshape(cp_size, -1)[rank[entry], sent_row]
    sizes = np.zeros(cp_size * cp_size, np.int64)
    np.add.at(sizes, rank * cp_size + dst, length)
    starts = np.cumsum(sizes) - sizes
    src, slot, row, length = np.asarray(spec.receives, np.int64).reshape(-1, 4).T
    entry, position = expand(starts[src * cp_size + rank] + slot, length)
    tokens = np.full((cp_size, spec.output_rows), -1, np.int64)
    tokens[rank[entry], expand(row, length)[1]] = buffers[position]
    return tokens


def seen_keys(bands: np.ndarray, keys: int) -> np.ndarray:
    """Whether some row sees a key, for bands ``[C, 6]``: bool ``[keys]``."""
    tight = tighten(bands).astype(np.int64)
    begin, end = union(tight[:, 2], tight[:, 3])
    steps = np.zeros(keys + 1, np.int64)
    steps[begin], steps[end] = 1, -1
    return np.cumsum(steps)[:-1] > 0


def _redundant_rows(plan: "ContextPlan") -> int:
    """Rows received in vain: unseen in their stage, the rank's own, or received before."""
    shards = plan.token_order.reshape(plan.cp_size, -1)
    received = np.concatenate([received_tokens(plan, i) for i in range(len(plan.transfers))], axis=1)
    useful = 0
    for rank in range(plan.cp_size):
        seen = _seen_rows(plan, rank)
        wanted = np.zeros(plan.length + 1, bool)
        wanted[received[rank, seen]] = True
        wanted[shards[rank]] = False
        useful += int(wanted[:-1].sum())
    return sum(int(spec.receives[..., 3].sum(dtype=np.int64)) for spec in plan.transfers) - useful


def _seen_rows(plan: "ContextPlan", rank: int) -> np.ndarray:
    """Whether the rank sees each output row of its transfers, one transfer after the other."""
    rows = plan.transfers[0].output_rows
    if plan.num_stages == 1:
        return seen_keys(np.asarray(plan.bands)[rank, 0], plan.shard_length + rows)[plan.shard_length :]
    return np.concatenate([seen_keys(bands, rows) for bands in np.asarray(plan.bands)[rank, 1:]])
