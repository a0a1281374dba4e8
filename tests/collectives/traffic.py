"""Reads the counters of this process's collectives, and counts the rows that a transfer needs."""

from dataclasses import asdict, dataclass
from typing import Literal

import jax
import numpy as np

from jaxmagi import collectives

from .. import hosts
from .groups import Group
from .routes import Transfer

type Kind = Literal["cast", "reduce"]


def counters() -> dict[str, int]:
    """The counters of this process, which only grow."""
    return asdict(collectives.statistics())


@dataclass(frozen=True)
class Needed:
    """Holds the rows and messages that ranks of this process have to send over NCCL.

    Attributes:
        rows: that go to others.
        pairs: of a rank of this process with another one.
        pairs_in_use: those of them between which rows go.
        ranges: of rows that go together, by the tables of the spec.
    """

    rows: int
    pairs: int
    pairs_in_use: int
    ranges: int


def local_ranks(group: Group) -> list[int]:
    """The ranks of a group that this process has."""
    devices = group.mesh.devices.flat
    return [rank for rank, device in enumerate(devices) if device.process_index == jax.process_index()]


def is_remote(group: Group, rank: int, peer: int) -> bool:
    """Returns whether rows go from one rank to another by NCCL."""
    per_host = group.ranks_per_host or group.size // hosts.count()
    return rank != peer and (group.implementation == "nccl" or rank // per_host != peer // per_host)


def rows_sent(transfer: Transfer, kind: Kind) -> np.ndarray:
    """The rows that each rank (first axis) sends to each rank (second axis): int64 [cp, cp]."""
    counts = np.zeros((transfer.cp_size, transfer.cp_size), np.int64)
    for rank, rows in enumerate(transfer.sources):
        for source, _ in rows:
            counts[source, rank] += 1
    return counts if kind == "cast" else counts.T


def needed(group: Group, transfer: Transfer, kind: Kind) -> Needed:
    """Counts for one array of a transfer; in a reduction rows go the other way."""
    rows = rows_sent(transfer, kind)
    tables = np.asarray(transfer.spec.sends if kind == "cast" else transfer.spec.receives)
    pairs = [
        (rank, peer)
        for rank in local_ranks(group)
        for peer in range(group.size)
        if is_remote(group, rank, peer)
    ]
    ranges = [
        np.count_nonzero((tables[rank, :, 0] == peer) & (tables[rank, :, 3] > 0)) for rank, peer in pairs
    ]
    return Needed(
        rows=int(sum(rows[pair] for pair in pairs)),
        pairs=len(pairs),
        pairs_in_use=sum(rows[pair] > 0 for pair in pairs),
        ranges=int(sum(ranges)),
    )
