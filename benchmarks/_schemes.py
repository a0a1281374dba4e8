"""Predicts times of other ways to spread attention over ranks, under the model that plans are made with.

All are taken to be as good as they can be: perfect overlap where they overlap at all, collectives that use
every network card of a host and carry each byte into a host once, and no latencies beyond the model's.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxmagi import AttnMask, CostModel
from jaxmagi.masks import geometry
from jaxmagi.planning._cost import Pass
from jaxmagi.planning._tiles import count_tiles


class Prediction(NamedTuple):
    """Holds the prediction for both passes together.

    Attributes:
        seconds: the time of the slowest rank.
        received_bytes: bytes that a rank receives (mean).
        network_bytes: those that cross between hosts (mean), for plans.
        busiest_network_bytes: the most of them that a rank sends or receives, for plans.
    """

    seconds: float
    received_bytes: float
    network_bytes: float | None = None
    busiest_network_bytes: float | None = None


def ring(mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction:
    """Predicts a ring of keys and values, in the zigzag layout; every step waits for its slowest rank.

    The ring enters and leaves each host by one link of the network. In the backward pass the gradients go
    round with the keys.
    """
    seconds = received = 0.0
    rows = mask.q_len // cp_size
    for direction in (cost.forward, cost.backward):
        steps = _ring_steps(_zigzag_seconds(mask, cp_size, cost, direction))
        row_bytes = cost.row_bytes + direction.returns_gradients * cost.gradient_row_bytes
        far = cp_size > cost.ranks_per_host
        transfer = cost.transfer_seconds(np.array([0, rows] if far else [rows, 0]), row_bytes)
        merges = (cp_size - 1) * _merge_seconds(rows, cost)
        seconds += float(np.maximum(steps[:-1], transfer).sum() + steps[-1]) + merges
        received += (cp_size - 1) * rows * row_bytes
    return Prediction(seconds, received)


def all_gather(mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction:
    """Predicts that all keys and values are gathered first, and gradients scattered last; zigzag layout."""
    seconds = received = 0.0
    rows = (cp_size - 1) * mask.q_len // cp_size
    for direction in (cost.forward, cost.backward):
        compute = _zigzag_seconds(mask, cp_size, cost, direction).sum(axis=1).max()
        row_bytes = cost.row_bytes + direction.returns_gradients * cost.gradient_row_bytes
        hosts_share = max(0, cp_size - cost.ranks_per_host) / max(cp_size - 1, 1) / cost.ranks_per_host
        seconds += float(compute) + _collective_seconds(rows * row_bytes, hosts_share, cost)
        received += rows * row_bytes
    return Prediction(seconds, received)


def ulysses(mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction | None:
    """Predicts all-to-alls from tokens to heads and back; None where ranks are more than heads."""
    if cp_size > cost.num_heads:
        return None
    part = _with_heads_over(cp_size, cost)
    seconds = received = 0.0
    for direction in (part.forward, part.backward):
        compute = _seconds_of(np.asarray(mask.bands), part, direction)
        transfer, moved = _head_exchange(mask.q_len // cp_size, cp_size, cost, part, direction)
        seconds, received = seconds + compute + transfer, received + moved
    return Prediction(seconds, received)


def two_dimensional(mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction:
    """Predicts heads over the ranks of a host, and a ring over hosts (USP, LoongTrain)."""
    per_host = min(cost.ranks_per_host, cp_size)
    hosts = cp_size // per_host
    return with_heads_in_hosts(ring(mask, hosts, part_of_host(per_host, cost)), mask, cp_size, cost)


def part_of_host(per_host: int, cost: CostModel) -> CostModel:
    """Returns the model of hosts as ranks, in which each GPU has its part of the heads and a network card."""
    return replace(_with_heads_over(per_host, cost), ranks_per_host=1)


def with_heads_in_hosts(outer: Prediction, mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction:
    """Returns a prediction over hosts with the exchange of tokens and heads inside them."""
    per_host = min(cost.ranks_per_host, cp_size)
    part = _with_heads_over(per_host, cost)
    exchanges = [
        _head_exchange(mask.q_len // cp_size, per_host, cost, part, direction)
        for direction in (cost.forward, cost.backward)
    ]
    seconds, received = np.sum(exchanges, axis=0)
    return outer._replace(
        seconds=outer.seconds + float(seconds), received_bytes=outer.received_bytes + float(received)
    )


def _with_heads_over(ranks: int, cost: CostModel) -> CostModel:
    return replace(cost, num_heads=cost.num_heads // ranks, num_kv_heads=max(1, cost.num_kv_heads // ranks))


def _head_exchange(
    rows: int, ranks: int, cost: CostModel, part: CostModel, direction: Pass
) -> tuple[float, float]:
    """Returns seconds and bytes of the all-to-alls of a pass.

    Queries (or gradients) move there and back, keys and values there. Where there are fewer key heads than
    ranks, several ranks get the same one.
    """
    wide = 2 * cost.num_heads * cost.head_dim * cost.bytes_per_element
    keys = part.row_bytes * ranks * (2 if direction.returns_gradients else 1)
    moved = rows * (wide * (2 if direction.returns_gradients else 1) + keys) * (ranks - 1) / ranks
    between = max(0, ranks - cost.ranks_per_host) / max(ranks - 1, 1)
    return _collective_seconds(moved, between, cost), moved


def _collective_seconds(received: float, network_share: float, cost: CostModel) -> float:
    """Returns the time of a collective by which every rank receives so many bytes, a share by its network."""
    return float(cost.transfer_seconds(received * np.array([1, network_share]), row_bytes=1))


def _ring_steps(seconds: np.ndarray) -> np.ndarray:
    """Returns the slowest rank's compute in each step, float64 ``[cp]``, from seconds ``[rank, owner]``."""
    ranks = np.arange(len(seconds))
    return np.array([seconds[ranks, (ranks - step) % len(seconds)].max() for step in ranks])


def _merge_seconds(rows: int, cost: CostModel) -> float:
    """Returns the time to merge a partial result into another: two are read, one is written, in float32."""
    return cost.memory_seconds(3.0 * rows * cost.num_heads * cost.head_dim * 4)


def _seconds_of(bands: np.ndarray, cost: CostModel, direction: Pass) -> float:
    return float(cost.compute_seconds(count_tiles(bands, np.array(len(bands)), direction), direction))


def _zigzag_seconds(mask: AttnMask, cp_size: int, cost: CostModel, direction: Pass) -> np.ndarray:
    """Returns the compute seconds of each rank with the keys of each, float64 ``[cp, cp]``."""
    chunk = -(-mask.q_len // (2 * cp_size))
    owner = np.concatenate([np.arange(cp_size), np.arange(cp_size)[::-1]])
    tiles = np.zeros((cp_size, cp_size, 2), np.int64)
    tight = geometry.tighten(np.asarray(mask.bands))
    for band in tight[tight.any(axis=1)]:
        columns = np.arange(band[2] // chunk, -(-band[3] // chunk))
        for row in range(band[0] // chunk, -(-band[1] // chunk)):
            begin = columns * chunk
            pieces = geometry.crop(band, row * chunk, (row + 1) * chunk, begin, begin + chunk)
            counted = count_tiles(pieces, np.ones(len(pieces), int), direction)
            np.add.at(tiles[owner[row]], owner[columns], counted)
    return cost.compute_seconds(tiles, direction)
