"""Predicts when the ranks of a plan compute and transfer, under a model of the machine.

A pass is cut into parts of the heads: the keys of all parts travel from the beginning on, part by part, and a
part computes when its keys are there. In the backward pass its gradients return when all ranks have computed
them.
"""

from typing import NamedTuple

import numpy as np

from .._native import planner
from ._cost import CostModel, Pass, num_parts


class Work(NamedTuple):
    """The times of what ranks compute and transfer for a part, in seconds.

    Attributes:
        parts: the number of parts.
        compute: float64 ``[cp]``, of attention.
        fetch: of the transfer of keys and values.
        give_back: of the transfer of their gradients; None in a forward pass.
    """

    parts: int
    compute: np.ndarray
    fetch: float
    give_back: float | None


class Schedule(NamedTuple):
    """The predicted course of a pass, in seconds from its start.

    Attributes:
        fetches: float64 ``[parts, 2]``, beginning and end of each transfer of keys and values.
        attention: float64 ``[cp, parts, 2]``, beginning and end of each rank's attention.
        returns: float64 ``[parts, 2]``, beginning and end of each transfer of gradients; empty in a forward
            pass.
    """

    fetches: np.ndarray
    attention: np.ndarray
    returns: np.ndarray

    @property
    def seconds(self) -> float:
        """The time when the slowest rank is done."""
        return float(max(self.attention[..., 1].max(), self.returns.max(initial=0)))


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


def busiest_links(traffic: np.ndarray) -> np.ndarray:
    """Returns the rows ``[2]`` on the busiest links within a host and between hosts.

    Args:
        traffic: rows ``[cp, 2, 2]``: sent and received, within a host and between hosts.
    """
    return traffic.max(axis=(0, 1))


def work_of(tiles: np.ndarray, rows: np.ndarray, cost: CostModel, direction: Pass) -> Work:
    """Returns the times of a part.

    Args:
        tiles: full and partial tiles of all heads, ``[cp, 2]``.
        rows: rows on the busiest links, ``[steps, 2]``, as from `busiest_links`.
        cost: the machine.
        direction: the pass.
    """
    parts = num_parts(cost.num_kv_heads, float(rows[-1].sum()) * cost.row_bytes)
    fetch = float(cost.transfer_seconds(rows, cost.row_bytes / parts).sum())
    # Gradients take the same links in the other direction, which is as fast.
    give_back = float(cost.reduction_seconds(rows, cost.gradient_row_bytes / parts).sum())
    if len(rows) > 1:  # ranks copy nearly all that the step across all ranks brings
        copied = 2 * rows[0].sum() / parts  # rows that are read and written
        fetch += cost.memory_seconds(copied * cost.row_bytes)
        give_back += cost.memory_seconds(copied * cost.gradient_row_bytes)
    compute = cost.compute_seconds(tiles, direction) / parts
    return Work(parts, compute, fetch, give_back if direction.returns_gradients else None)


def schedule(work: Work) -> Schedule:
    """Returns the predicted pass, in which transfers run one after the other, beside attention."""
    arrivals = work.fetch * np.arange(work.parts + 1)
    attention = np.empty((len(work.compute), work.parts, 2))
    done = np.zeros(len(work.compute))
    for part in range(work.parts):
        attention[:, part, 0] = np.maximum(done, arrivals[part + 1])
        attention[:, part, 1] = done = attention[:, part, 0] + work.compute
    return Schedule(
        np.stack([arrivals[:-1], arrivals[1:]], axis=-1), attention, _returns(work, attention, arrivals[-1])
    )


def _returns(work: Work, attention: np.ndarray, fetched: float) -> np.ndarray:
    if work.give_back is None:
        return np.zeros((0, 2))
    returns, free = np.empty((work.parts, 2)), fetched
    for part, computed in enumerate(attention[..., 1].max(axis=0)):
        returns[part, 0] = max(free, computed)
        returns[part, 1] = free = returns[part, 0] + work.give_back
    return returns
