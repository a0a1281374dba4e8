"""A model of the machine, to compare plans with."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_ACCUMULATOR_BYTES = 4


@dataclass(frozen=True)
class CostModel:
    """Speeds of a GPU and shapes of the attention, to predict the time of a plan's forward pass.

    The defaults are those of an H200 with NVLink and of a layer with 64 query heads, 8 key heads and head
    dimension 128 in bfloat16. Only ratios matter to the planner.

    Attributes:
        tflops: attention forward speed of one rank, in 1e12 FLOP/s.
        link_gb_per_second: what a rank can receive (and at the same time send), in 1e9 bytes/s.
        memory_gb_per_second: what a rank can read and write in its memory, in 1e9 bytes/s.
        latency_us: fixed time of one transfer and of one attention call, in microseconds.
        num_heads: query heads of a rank.
        num_kv_heads: key heads of a rank.
        head_dim: dimension of a query, key and value head.
        bytes_per_element: of keys and values.

    Raises:
        ValueError: one of them is not a positive number (``latency_us`` may be 0).
    """

    tflops: float = 600.0
    link_gb_per_second: float = 350.0
    memory_gb_per_second: float = 4000.0
    latency_us: float = 15.0
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not (value > 0 or (value == 0 and name == "latency_us")):
                raise ValueError(f"CostModel.{name} must be a positive number, but it is {value!r}.")

    @property
    def row_bytes(self) -> int:
        """A row of keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element

    def compute_seconds(self, area: np.ndarray) -> np.ndarray:
        """Attention calls over ``area`` cells."""
        flops = 4.0 * area * self.num_heads * self.head_dim
        return flops / (self.tflops * 1e12) + (area > 0) * self.latency_us * 1e-6

    def transfer_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Transfers of ``rows`` rows of keys and values."""
        return (
            rows * float(self.row_bytes) / (self.link_gb_per_second * 1e9)
            + (rows > 0) * self.latency_us * 1e-6
        )

    def merge_seconds(self, rows: int) -> float:
        """Merging a partial output into another: two are read and one is written, in fp32."""
        row_bytes = 3.0 * self.num_heads * self.head_dim * _ACCUMULATOR_BYTES
        return rows * row_bytes / (self.memory_gb_per_second * 1e9)


class Schedule(NamedTuple):
    """When a plan's forward pass does what, in seconds from its start.

    Attributes:
        transfers: float64 ``[num_transfers, 2]``, beginning and end of each transfer.
        stages: float64 ``[cp, num_stages, 2]``, beginning and end of each rank's attention calls, the merges
            of their outputs included.
    """

    transfers: np.ndarray
    stages: np.ndarray

    @property
    def seconds(self) -> float:
        """When the slowest rank is done."""
        return float(self.stages[..., 1].max())


def schedule(
    area: np.ndarray, sent: np.ndarray, received: np.ndarray, shard_length: int, cost: CostModel
) -> Schedule:
    """The predicted forward pass, with transfers that run one after the other, behind the compute.

    A transfer takes as long as its busiest rank. Each stage starts when its keys are there and the stage
    before it is done; stage 0 of several needs no transfer. Every stage after the first merges its output.

    Args:
        area: cells ``[cp, num_stages]``.
        sent: rows ``[cp, num_transfers]``.
        received: rows ``[cp, num_transfers]``.
        shard_length: rows of each rank's partial outputs.
        cost: the machine.
    """
    ends = np.cumsum(cost.transfer_seconds(np.maximum(sent, received).max(axis=0)))
    transfers = np.stack([np.concatenate([[0.0], ends[:-1]]), ends], axis=-1)
    num_stages = area.shape[1]
    arrival = np.concatenate([[0.0], ends]) if num_stages > 1 else ends
    compute = cost.compute_seconds(area)
    compute[:, 1:] += cost.merge_seconds(shard_length)
    stages = np.empty((*area.shape, 2))
    done = np.zeros(len(area))
    for stage in range(num_stages):
        stages[:, stage, 0] = np.maximum(done, arrival[stage])
        stages[:, stage, 1] = done = stages[:, stage, 0] + compute[:, stage]
    return Schedule(transfers, stages)
