"""Predicts when the ranks of a plan compute and transfer, under a model of the machine.

A pass is a row of launches of attention. Some need a rank's own keys alone and begin at once, the others wait
for received keys. It is cut into parts of the heads, whose keys travel from the beginning on, part by part:

    forward     own tiles of all parts; if rows cross the network, the other tiles of the first part over own
                keys; what is left of part after part
    backward    own tiles of the first part; the other tiles of part after part; own tiles of the other parts

Within a host the backward pass has one part:

    backward    own tiles of a quarter of the key heads, while keys come; all that is left

Gradients of a part return when all ranks have computed its tiles of received keys: within a host those of all
heads, behind all attention. Parts that take turns with two workspaces (`jaxmagi/context/_custom_call.py`),
whose own tiles come right before the others, are not modelled: their ranks receive so many keys that
attention takes much longer than transfers.
"""

from typing import NamedTuple

import numpy as np

from ._cost import CostModel, Pass, num_parts
from ._tiles import Tiles

OWN_KEYS = -1  # instead of the number of a part, for launches that need no received keys
_FIRST_KEY_HEADS = 4  # within a host, own tiles of one in so many key heads come first in a backward pass


class Launch(NamedTuple):
    """Attention of all ranks.

    Attributes:
        part: the part whose received keys it needs and computes, or `OWN_KEYS`.
        seconds: float64 ``[cp]``.
    """

    part: int
    seconds: np.ndarray


class Work(NamedTuple):
    """The times of what ranks compute and transfer in a pass, in seconds.

    Attributes:
        parts: the number of parts.
        launches: the launches of attention in their order, of which each part has one.
        fetch: of the transfer of keys and values of a part.
        give_back: of the transfer of their gradients; None in a forward pass.
    """

    parts: int
    launches: list[Launch]
    fetch: float
    give_back: float | None


class Schedule(NamedTuple):
    """The predicted course of a pass, in seconds from its start.

    Attributes:
        fetches: float64 ``[parts, 2]``, beginning and end of each transfer of keys and values.
        launched: int64 ``[launches]``, the part whose received keys a launch needs, or `OWN_KEYS`.
        attention: float64 ``[cp, launches, 2]``, beginning and end of each rank's attention.
        returns: float64 ``[parts, 2]``, beginning and end of each transfer of gradients; empty in a forward
            pass.
    """

    fetches: np.ndarray
    launched: np.ndarray
    attention: np.ndarray
    returns: np.ndarray

    @property
    def seconds(self) -> float:
        """The time when the slowest rank is done."""
        return float(max(self.attention[..., 1].max(), self.returns.max(initial=0)))


def busiest_links(traffic: np.ndarray) -> np.ndarray:
    """Returns the rows ``[2]`` on the busiest links within a host and between hosts.

    Args:
        traffic: rows ``[cp, 2, 2]``: sent and received, within a host and between hosts.
    """
    return traffic.max(axis=(0, 1))


def work_of(tiles: Tiles, rows: np.ndarray, cost: CostModel, direction: Pass) -> Work:
    """Returns the times of a pass.

    Args:
        tiles: the tiles of all heads.
        rows: rows on the busiest links, ``[steps, 2]``, as from `busiest_links`.
        cost: the machine.
        direction: the pass.
    """
    within_host = len(rows) == 1 and len(tiles.own) <= cost.ranks_per_host
    has_one_part = direction.by_keys and within_host
    received_bytes = float(rows[-1].sum()) * cost.row_bytes
    parts = 1 if has_one_part else num_parts(cost.num_kv_heads, received_bytes, within_host=within_host)
    fetch = float(cost.transfer_seconds(rows, cost.row_bytes / parts).sum())
    # Gradients take the same links in the other direction, which is as fast.
    give_back = float(cost.reduction_seconds(rows, cost.gradient_row_bytes / parts).sum())
    if len(rows) > 1:  # ranks copy nearly all that the step across all ranks brings
        copied = 2 * rows[0].sum() / parts  # rows that are read and written
        fetch += cost.memory_seconds(copied * cost.row_bytes)
        give_back += cost.memory_seconds(copied * cost.gradient_row_bytes)
    if has_one_part:
        launches = _backward_within_host(tiles, cost, direction)
    elif direction.by_keys:
        launches = _backward_between_hosts(tiles, parts, cost, direction)
    else:
        launches = _forward(tiles, parts, bool(rows[:, 1].any()), cost, direction)
    return Work(parts, launches, fetch, give_back if direction.returns_gradients else None)


def _forward(tiles: Tiles, parts: int, crosses_hosts: bool, cost: CostModel, direction: Pass) -> list[Launch]:
    own, *all_parts = cost.compute_seconds(np.stack([tiles.own, tiles.others, *tiles.halves]), direction)
    others, before, behind = (seconds / parts for seconds in all_parts)
    first = [Launch(OWN_KEYS, before), Launch(0, behind)] if crosses_hosts else [Launch(0, others)]
    return [Launch(OWN_KEYS, own), *first, *(Launch(part, others) for part in range(1, parts))]


def _backward_within_host(tiles: Tiles, cost: CostModel, direction: Pass) -> list[Launch]:
    own, others = cost.compute_seconds(np.stack([tiles.own, tiles.others]), direction)
    heads = cost.num_kv_heads
    first = own * (-(-heads // _FIRST_KEY_HEADS) / heads)
    return [Launch(OWN_KEYS, first), Launch(0, own - first + others)]


def _backward_between_hosts(tiles: Tiles, parts: int, cost: CostModel, direction: Pass) -> list[Launch]:
    own, others = cost.compute_seconds(np.stack([tiles.own, tiles.others]), direction) / parts
    received = [Launch(part, others) for part in range(parts)]
    return [Launch(OWN_KEYS, own), *received, Launch(OWN_KEYS, own * (parts - 1))]


def schedule(work: Work) -> Schedule:
    """Returns the predicted pass, in which transfers run one after the other, beside attention."""
    arrivals = work.fetch * np.arange(work.parts + 1)
    launched = np.array([launch.part for launch in work.launches])
    done = np.zeros(len(work.launches[0].seconds))
    attention = np.empty((len(done), len(launched), 2))
    for i, (part, seconds) in enumerate(work.launches):
        attention[:, i, 0] = np.maximum(done, arrivals[part + 1])  # at the beginning for own keys
        attention[:, i, 1] = done = attention[:, i, 0] + seconds
    computed = attention[:, launched != OWN_KEYS, 1].max(axis=0)
    fetches = np.stack([arrivals[:-1], arrivals[1:]], axis=-1)
    return Schedule(fetches, launched, attention, _returns(work, computed, arrivals[-1]))


def _returns(work: Work, computed: np.ndarray, fetched: float) -> np.ndarray:
    """Returns the transfers of gradients of parts, from the times when all ranks have computed them."""
    if work.give_back is None:
        return np.zeros((0, 2))
    returns, free = np.empty((work.parts, 2)), fetched
    for part, ready in enumerate(computed):
        returns[part, 0] = max(free, ready)
        returns[part, 1] = free = returns[part, 0] + work.give_back
    return returns
