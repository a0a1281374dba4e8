"""Computes the report of a plan, its costs, from its arrays alone."""

from dataclasses import dataclass

import numpy as np

from ..masks.geometry import area, tighten
from ._cost import CostModel, Pass
from ._ranges import TokenRuns, key_runs, meet, own_runs, received_runs, union
from ._schedule import Schedule, busiest_links, schedule, work_of
from ._spec import GroupCastSpec, RelayedSpec, steps_of
from ._tiles import Tiles, tiles_of


@dataclass(frozen=True)
class LinkTraffic:
    """Counts the rows and bytes that cross links of one kind: those within hosts, or those between hosts.

    Attributes:
        rows: rows of keys (and of values) that cross in the forward pass, of all ranks together.
        bytes_moved: bytes that cross in both passes: keys and values in each, and gradients back, of
            which an element takes ``CostModel.bytes_per_gradient``.
        busiest_bytes: the most of them that one rank sends, or receives.
    """

    rows: int
    bytes_moved: int
    busiest_bytes: int


@dataclass(frozen=True, eq=False)
class PlanReport:
    """The work and the traffic of each rank of a plan.

    Rows count as transfers move them, each time that they cross a link: a row that a relay sends on inside
    its host (`jaxmagi.ContextPlan.by_host`) has crossed two. Which links are those between hosts follows from
    the `CostModel`.

    Attributes:
        area: int64 ``[cp]``, visible cells of each rank's queries.
        imbalance: largest over mean area; 1.0 for a mask without visible cells.
        work_imbalance: the same of the forward attention that the `CostModel` predicts, whose kernel computes
            whole tiles.
        backward_work_imbalance: the same of the backward pass.
        rows_sent: int64 ``[cp]``, rows of keys (and of values) that leave each rank in the forward pass; one
            that goes to several ranks counts for each.
        rows_received: int64 ``[cp]``, rows of keys (and of values) that arrive at each rank.
        network_rows_sent: int64 ``[cp]``, those of ``rows_sent`` that go to another host.
        network_rows_received: int64 ``[cp]``, those of ``rows_received`` that come from another host.
        within_hosts: what crosses links within hosts (NVLink).
        between_hosts: what crosses the network.
        redundant_rows: rows that the transfer brings to ranks that do not need them or have them, to hosts
            once more, or over a link without use. It is 0 in every plan of `jaxmagi.plan_context`.
        predicted_seconds: forward time under the `CostModel` given to `jaxmagi.ContextPlan.report`, which
            need not be the one that the plan was made with.
        predicted_backward_seconds: the same of the backward pass.
    """

    area: np.ndarray
    imbalance: float
    work_imbalance: float
    backward_work_imbalance: float
    rows_sent: np.ndarray
    rows_received: np.ndarray
    network_rows_sent: np.ndarray
    network_rows_received: np.ndarray
    within_hosts: LinkTraffic
    between_hosts: LinkTraffic
    redundant_rows: int
    predicted_seconds: float
    predicted_backward_seconds: float

    @property
    def rows_moved(self) -> int:
        """Rows of keys (and of values) that cross links in the forward pass, of all ranks together."""
        return self.within_hosts.rows + self.between_hosts.rows


def report_plan(
    token_order: np.ndarray, bands: np.ndarray, transfer: GroupCastSpec | RelayedSpec, cost: CostModel
) -> PlanReport:
    """Returns the report of a plan with host arrays."""
    per_rank = area(bands).sum(axis=1)
    traffic = _traffic(transfer, len(bands), cost)
    within_hosts, between_hosts = _links(traffic.sum(axis=0), cost)
    sent, received = np.moveaxis(traffic.sum(axis=0), 1, 0)
    own_keys = transfer.input_rows
    forward, backward = ((_tiles(bands, own_keys, each), each) for each in (cost.forward, cost.backward))
    return PlanReport(
        area=per_rank,
        imbalance=_largest_over_mean(per_rank),
        work_imbalance=_largest_over_mean(cost.compute_seconds(forward[0].all, forward[1])),
        backward_work_imbalance=_largest_over_mean(cost.compute_seconds(backward[0].all, backward[1])),
        rows_sent=sent.sum(axis=-1),
        rows_received=received.sum(axis=-1),
        network_rows_sent=sent[:, 1],
        network_rows_received=received[:, 1],
        within_hosts=within_hosts,
        between_hosts=between_hosts,
        redundant_rows=_redundant_rows(bands, transfer, own_runs(token_order, len(bands))),
        predicted_seconds=_schedule(*forward, traffic, cost).seconds,
        predicted_backward_seconds=_schedule(*backward, traffic, cost).seconds,
    )


def schedule_pass(
    bands: np.ndarray, transfer: GroupCastSpec | RelayedSpec, cost: CostModel, direction: Pass
) -> Schedule:
    """Returns when each rank does what in a pass with host arrays, under a model of the machine."""
    tiles = _tiles(bands, transfer.input_rows, direction)
    return _schedule(tiles, direction, _traffic(transfer, len(bands), cost), cost)


def _schedule(tiles: Tiles, direction: Pass, traffic: np.ndarray, cost: CostModel) -> Schedule:
    rows = np.stack([busiest_links(step) for step in traffic])
    return schedule(work_of(tiles, rows, cost, direction))


def _tiles(bands: np.ndarray, own_keys: int, direction: Pass) -> Tiles:
    return tiles_of(bands.reshape(-1, 6), np.full(len(bands), bands.shape[1]), own_keys, direction)


def _largest_over_mean(of_ranks: np.ndarray) -> float:
    mean = of_ranks.mean()
    return float(of_ranks.max() / mean) if mean else 1.0


def _traffic(transfer: GroupCastSpec | RelayedSpec, cp_size: int, cost: CostModel) -> np.ndarray:
    """Returns the traffic of each step, as from `Copies.traffic`: int64 ``[steps, cp, 2, 2]``."""
    return np.stack([step.traffic(cp_size, cost.ranks_per_host) for step in steps_of(transfer)])


def _links(rows: np.ndarray, cost: CostModel) -> list[LinkTraffic]:
    """Returns what crosses links within hosts and between hosts, from the rows ``[cp, 2, 2]`` of a pass."""
    gradients = rows[:, ::-1] * cost.gradient_row_bytes  # they are sent where keys were received
    moved = 2 * rows * cost.row_bytes + gradients
    return [
        LinkTraffic(int(rows[:, 0, kind].sum()), int(moved[:, 0, kind].sum()), int(moved[..., kind].max()))
        for kind in range(2)
    ]


def _redundant_rows(bands: np.ndarray, transfer: GroupCastSpec | RelayedSpec, own: TokenRuns) -> int:
    """Returns the rows that the tables of all steps bring to ranks and hosts, beyond those that they need.

    A rank needs each row once that it sees and does not own, a host each one that a rank of it gets from
    other hosts.
    """
    width = int((own.token + own.length).max(initial=0)) + 1
    seen = _seen_tokens(bands, key_runs(steps_of(transfer), own, transfer.input_rows), width)
    return _arriving_rows(transfer, own, width) - _count_beyond(*seen, *_edges(own, own.rank, width))


def _arriving_rows(transfer: GroupCastSpec | RelayedSpec, own: TokenRuns, width: int) -> int:
    """Returns the rows that a transfer brings to ranks in the end, and those that cross links on the way.

    The step inside hosts uses each row that a rank has in the end from another one of its host, and one for
    each row that a host has in the end from other hosts. On the way are the others of the step across all
    ranks.
    """
    steps = steps_of(transfer)
    moved = int(steps[0].length[steps[0].src != steps[0].dst].sum())
    if not isinstance(transfer, RelayedSpec):
        return moved
    received = received_runs(steps, own)
    at_ranks, at_hosts = (
        [edges for runs in (received, own) for edges in _edges(runs, runs.rank // ranks, width)]
        for ranks in (1, transfer.ranks_per_host)
    )
    used = _count_within(*at_hosts) - _count_within(*at_ranks) + _count_beyond(*at_hosts)
    return int(steps[1].length.sum()) + moved - used


def _edges(runs: TokenRuns, place: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of runs as ranges of ``place * width + token``."""
    begin = place * width + runs.token
    return begin, begin + runs.length


def _count_within(begin: np.ndarray, end: np.ndarray, own_begin: np.ndarray, own_end: np.ndarray) -> int:
    """Returns how many integers ranges hold, each as often as it is held, that others, disjoint, hold too."""
    *_, first, last = meet(begin, end, np.sort(own_begin), np.sort(own_end))
    return int((last - first).sum())


def _count_beyond(begin: np.ndarray, end: np.ndarray, own_begin: np.ndarray, own_end: np.ndarray) -> int:
    """Returns how many integers any ranges hold that others, which are disjoint, do not."""
    begin, end = union(begin, end)
    return int((end - begin).sum()) - _count_within(begin, end, own_begin, own_end)


def _seen_tokens(bands: np.ndarray, keys: TokenRuns, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what ranks see by bands ``[cp, C, 6]``, as ranges of ``rank * width + token``."""
    tight = tighten(bands).astype(np.int64)
    height = int(max(tight[..., 3].max(initial=0), (keys.row + keys.length).max(initial=0))) + 1
    rank = np.arange(len(bands))[:, None] * height
    begin, end = union((rank + tight[..., 2]).ravel(), (rank + tight[..., 3]).ravel())
    row = keys.rank * height + keys.row
    run, _, first, last = meet(row, row + keys.length, begin, end)
    token = keys.rank[run] * width + keys.token[run] + first - row[run]
    return token, token + last - first
