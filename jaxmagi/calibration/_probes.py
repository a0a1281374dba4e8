"""The programs that `jaxmagi.calibrate` times."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import masks
from ..attention import attention
from ..collectives import CollectiveOptions, group_cast
from ..masks import AttnMask
from ..planning import CostModel, GroupCastSpec
from . import _processes
from ._chain import chain, chain_backward, draw_normal
from ._timing import DeviceWork, time_on_device

_REPEATS = 5
_BATCH_SECONDS = 0.03
_MOST_PROGRAMS = 64  # largest number of programs in a batch
_TURNS = 4  # turns of the loop of a program
_MANY_TURNS = 64  # turns where one takes no longer than its launch

_SHORT = 16  # number of tokens that fit into one tile

type Direction = Literal["forward", "backward"]
type Probe = Callable[[], DeviceWork]
"""Compiles and returns the work to be timed."""


class Sizes(NamedTuple):
    """Holds the sizes of the probes."""

    tokens: int  # length of the longer masks
    window: int  # keys that a query sees in the sliding window, which has many partial tiles
    floats: int  # float32 elements of each array that is added
    few_bytes: int  # bytes that a rank receives in a short transfer
    many_bytes: int  # bytes that a rank receives in a long transfer

    def masks(self) -> dict[str, AttnMask]:
        """Returns masks with almost no partial tiles, with many of them, and with a single tile."""
        return {
            "full": masks.full(self.tokens),
            "window": masks.sliding_window(self.tokens, self.window - 1),
            "tile": masks.full(_SHORT),
        }


ON_GPUS = Sizes(tokens=8192, window=384, floats=2**26, few_bytes=2**16, many_bytes=2**27)
# A long transfer takes longer than the latency of a short one on busy cores, which is some milliseconds.
ELSEWHERE = Sizes(tokens=256, window=64, floats=2**20, few_bytes=2**13, many_bytes=2**22)


def attention_probe(
    direction: Direction, mask: AttnMask, cost: CostModel, dtype: jnp.dtype, mesh: Mesh
) -> DeviceWork:
    """Runs one pass of attention on each device, with the heads of a cost model."""
    length, turns = mask.q_len, _MANY_TURNS if mask.q_len == _SHORT else _TURNS
    heads = (cost.num_heads, cost.num_kv_heads, cost.num_kv_heads, cost.num_heads)
    *rows, cotangent = (
        draw_normal(seed, length, (number, cost.head_dim), dtype, mesh) for seed, number in enumerate(heads)
    )

    def attend(rows: Sequence[jax.Array], _: Any) -> jax.Array:
        query, key, value = rows
        return attention(query, key, value, mask)

    if direction == "forward":
        return chain(attend, rows, (), mesh, turns)
    return chain_backward(attend, rows, cotangent, (), mesh, turns)


def addition_probe(floats: int, mesh: Mesh) -> DeviceWork:
    """Adds two float32 arrays of ``floats`` elements on each device."""
    operands = [draw_normal(seed, floats, (), jnp.float32, mesh) for seed in range(2)]
    return chain(lambda operands, _: operands[0] + operands[1], operands, (), mesh, _TURNS)


def exchange(peers: Sequence[Sequence[int]], rows: int) -> GroupCastSpec:
    """Returns the spec by which each rank sends ``rows`` different rows to each of its peers."""
    sizes = [[rows] * len(others) for others in peers]
    return GroupCastSpec.from_splits(
        input_split_sizes=sizes,
        dst_ranks=[[[peer] for peer in others] for others in peers],
        output_split_sizes=sizes,
        src_ranks=peers,
    )


def transfer_probe(
    spec: GroupCastSpec,
    cost: CostModel,
    dtype: jnp.dtype,
    mesh: Mesh,
    axis_name: str,
    ranks_per_host: int | None,
    is_short: bool,
) -> DeviceWork:
    """Runs a group cast of rows of keys and values; ``ranks_per_host`` is as in `CollectiveOptions`."""
    shape = (cost.num_kv_heads, cost.head_dim)
    operands = [draw_normal(seed, spec.input_rows, shape, dtype, mesh) for seed in range(2)]

    def cast(rows: list[jax.Array], _: Any) -> list[jax.Array]:
        options = CollectiveOptions(ranks_per_host=ranks_per_host)
        return group_cast(rows, spec, axis_name=axis_name, options=options)

    return chain(cast, operands, (), mesh, _MANY_TURNS if is_short else _TURNS)


def take_times(probes: Mapping[str, Probe]) -> dict[str, float]:
    """Times a pass of each probe on the slowest device. All processes must call this."""
    works = {name: probe() for name, probe in probes.items()}
    for work in works.values():
        work.seconds(1)
    estimates = _agree(work.seconds(1) for work in works.values())
    batches = {
        name: _repeat(work, math.ceil(_BATCH_SECONDS / estimate))
        for (name, work), estimate in zip(works.items(), estimates, strict=True)
    }
    timings = time_on_device(batches, _REPEATS, batches=1)
    return dict(zip(timings, _agree(timing.median for timing in timings.values()), strict=True))


def _repeat(work: DeviceWork, times: int) -> DeviceWork:
    """Makes batches of ``times`` batches of the work, at most `_MOST_PROGRAMS`."""
    times = min(times, _MOST_PROGRAMS)

    def enqueue() -> Any:
        for _ in range(times - 1):
            work.enqueue()
        return work.enqueue()

    return DeviceWork(enqueue, work.wait, times * work.passes)


def _agree(seconds: Iterable[float]) -> list[float]:
    """Returns the largest seconds of all processes, so that all enqueue the same programs."""
    return _processes.largest(np.array(list(seconds))).tolist()
