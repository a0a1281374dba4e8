"""Predicts when the ranks of a plan compute and transfer, under a model of the machine."""

from typing import NamedTuple

import numpy as np

from ._compiled import planner
from ._cost import CostModel, Pass


class Work(NamedTuple):
    """The times of what ranks compute and transfer in one direction.

    Attributes:
        compute: float64 ``[..., cp, num_stages]``, seconds of the attention calls.
        fetches: float64 ``[..., num_transfers]``, seconds of the transfers of keys and values.
        returns: float64 ``[..., num_transfers]``, seconds of the transfers of their gradients; None in a
            forward pass.
    """

    compute: np.ndarray
    fetches: np.ndarray
    returns: np.ndarray | None


class Schedule(NamedTuple):
    """The predicted course of a pass, in seconds from its start.

    Attributes:
        transfers: float64 ``[..., num_transfers, 2]``, beginning and end of each transfer of keys and values.
        stages: float64 ``[..., cp, num_stages, 2]``, beginning and end of each rank's attention calls, the
            merges of their results included.
        returns: float64 ``[..., num_transfers, 2]``, beginning and end of each transfer of gradients; empty
            in a forward pass.
    """

    transfers: np.ndarray
    stages: np.ndarray
    returns: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """The time when the slowest rank is done: ``[...]``."""
        returned = self.returns[..., 1].max(axis=-1, initial=0)
        return np.maximum(self.stages[..., 1].max(axis=(-2, -1)), returned)


def count_tiles(bands: np.ndarray, counts: np.ndarray, direction: Pass) -> np.ndarray:
    """Returns the numbers of full and partial tiles of groups of bands.

    Args:
        bands: int32 ``[n, 6]``, the bands of all groups, one group after the other.
        counts: integers of any shape, the number of bands of each group.
        direction: the pass.

    Returns:
        int64 ``[*counts.shape, 2]``.
    """
    groups = np.ascontiguousarray(counts, np.int32).reshape(-1)
    tiles = planner().tile_counts(np.ascontiguousarray(bands), groups, *direction.tile, direction.by_keys)
    return tiles.reshape(*counts.shape, 2)


def work_of(tiles: np.ndarray, rows: np.ndarray, shard_length: int, cost: CostModel, direction: Pass) -> Work:
    """Returns the times of a staging.

    With two steps, only the one across all ranks runs beside attention. The one inside hosts comes right
    before the attention call that uses the rows, and that of their gradients right after it.

    Args:
        tiles: full and partial tiles, ``[cp, num_stages, 2]``.
        rows: rows on the busiest links, ``[num_transfers, steps, 2]``, as from `busiest_links`.
        shard_length: rows of each rank's partial results.
        cost: the machine.
        direction: the pass.
    """
    compute = cost.compute_seconds(tiles, direction)
    compute[..., 1:] += cost.merge_seconds(shard_length)
    if rows.shape[1] > 1:
        compute[..., -len(rows) :] += _steps_inside(rows, cost, direction)
    return Work(compute, *transfer_times(rows[:, 0], cost, direction))


def _steps_inside(rows: np.ndarray, cost: CostModel, direction: Pass) -> np.ndarray:
    """Returns the seconds of the step inside hosts of each transfer and its gradients, ``[num_transfers]``.

    Beside what links move, ranks copy what the step across all ranks has brought, or is to return: nearly
    every row of it is for the rank itself, too.
    """
    copied = 2 * rows[:, 0].sum(axis=-1)  # read and written
    fetches, returns = transfer_times(rows[:, 1], cost, direction)
    seconds = fetches + cost.memory_seconds(copied * cost.row_bytes)
    if returns is None:
        return seconds
    return seconds + returns + cost.memory_seconds(copied * cost.gradient_row_bytes)


def busiest_links(traffic: np.ndarray) -> np.ndarray:
    """Returns the rows ``[..., 2]`` of each step on the busiest links within a host and between hosts.

    Args:
        traffic: rows ``[cp, ..., 2, 2]``: sent and received, within a host and between hosts.
    """
    return traffic.max(axis=(0, -2))


def transfer_times(
    rows: np.ndarray, cost: CostModel, direction: Pass
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the seconds of transfers with rows ``[..., 2]`` on the busiest links, and of gradients."""
    fetches = cost.transfer_seconds(rows, cost.row_bytes)
    # Gradients take the same links in the other direction, which is as fast.
    returns = cost.reduction_seconds(rows, cost.gradient_row_bytes) if direction.returns_gradients else None
    return fetches, returns


def schedule(work: Work) -> Schedule:
    """Returns the predicted pass, with transfers that run one after the other, overlapped with the compute.

    Each stage starts when its keys have arrived and the previous stage is done; stage 0 of several needs no
    transfer. The gradients of a transfer return when all ranks have computed them and the previous transfers
    are done.
    """
    num_stages = work.compute.shape[-1]
    ends = np.cumsum(work.fetches, axis=-1)
    edges = np.concatenate([np.zeros_like(ends[..., :1]), ends], axis=-1)
    transfers = np.stack([edges[..., :-1], ends], axis=-1)
    arrival = edges if num_stages > 1 else ends
    stages = np.empty((*work.compute.shape, 2))
    done = np.zeros(work.compute.shape[:-1])
    for stage in range(num_stages):
        stages[..., stage, 0] = np.maximum(done, arrival[..., stage, None])
        stages[..., stage, 1] = done = stages[..., stage, 0] + work.compute[..., stage]
    return Schedule(transfers, stages, _schedule_returns(work, stages, ends[..., -1]))


def _schedule_returns(work: Work, stages: np.ndarray, fetched: np.ndarray) -> np.ndarray:
    if work.returns is None:
        return np.zeros((*fetched.shape, 0, 2))
    returns = np.empty((*work.returns.shape, 2))
    computed = stages[..., -work.returns.shape[-1] :, 1].max(axis=-2)
    free = fetched
    for transfer in range(work.returns.shape[-1]):
        returns[..., transfer, 0] = np.maximum(free, computed[..., transfer])
        returns[..., transfer, 1] = free = returns[..., transfer, 0] + work.returns[..., transfer]
    return returns
