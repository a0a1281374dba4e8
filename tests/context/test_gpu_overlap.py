"""Transfers run beside attention: read from the profile of a program on GPUs, kernel by kernel."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmagi import CollectiveOptions, context_attention, masks, plan_context

from .harness import AXIS, make_mesh

pytestmark = pytest.mark.gpu

TOKENS, HEADS, KV_HEADS, DIM = 16384, 64, 8, 128
CALLS = 3
FORWARD, BACKWARD, CONVERT = "forward_kernel", "backward_kernel", "convert_all"
CAST, RETURN, EXCHANGE = "push", "pull", "ncclDevKernel_SendRecv"
NAMES = (FORWARD, BACKWARD, CONVERT, CAST, RETURN, EXCHANGE)


class Interval(NamedTuple):
    begin: float
    end: float

    def has(self, time: float) -> bool:
        return self.begin <= time < self.end

    def meets(self, other: "Interval") -> bool:
        return self.begin < other.end and other.begin < self.end


type Kernels = dict[str, list[Interval]]
"""When the kernels of a device ran, in nanoseconds: by name, in order."""


def profiled_kernels(function: Any, operands: Any, folder: Path) -> dict[str, Kernels]:
    """Returns the kernels of the last of some calls, by device. The host is then ahead of the device."""
    jax.block_until_ready(function(*operands))
    with jax.profiler.trace(folder):
        jax.block_until_ready([function(*operands) for _ in range(CALLS)])
    (path,) = folder.rglob("*.xplane.pb")
    kernels: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for event in (event for line in plane.lines for event in line.events):
            for name in NAMES:
                if re.search(rf"(^|::){name}([<(]|$)", event.name):
                    interval = Interval(event.start_ns, event.start_ns + event.duration_ns)
                    kernels[plane.name][name].append(interval)
    return {x: {name: last_part(sorted(each[name])) for name in NAMES} for x, each in kernels.items()}


def last_part(intervals: list[Interval]) -> list[Interval]:
    assert len(intervals) % CALLS == 0
    return intervals[len(intervals) // CALLS * (CALLS - 1) :]


def share_beside(transfers: list[Interval], kernels: list[Interval]) -> float:
    """Returns which share of the transfers begins while one of the kernels runs.

    How long a transfer takes depends on the other rank too, for which it may wait.
    """
    return sum(any(kernel.has(x.begin) for kernel in kernels) for x in transfers) / len(transfers)


def profile_passes(cp_size: int, collectives: CollectiveOptions, folder: Path) -> list[Kernels]:
    """Returns the kernels of both passes of each device, in which every key matters to all queries."""
    mesh = make_mesh(cp_size)
    plan = plan_context(masks.full(TOKENS), cp_size)
    sharding = NamedSharding(mesh, P(AXIS))
    operands = [
        jax.device_put(jax.random.normal(jax.random.key(seed), (TOKENS, heads, DIM), jnp.bfloat16), sharding)
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))
    ]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context_attention(query, key, value, plan, axis_name=AXIS, collectives=collectives)

    @jax.jit
    def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, query, key, value)
        return out, vjp(dout)

    with jax.set_mesh(mesh):
        kernels = profiled_kernels(both, operands, folder)
    assert len(kernels) == cp_size, f"there are profiles of {sorted(kernels)}"
    return list(kernels.values())


@pytest.fixture(autouse=True)
def one_process() -> None:
    if jax.process_count() > 1:
        pytest.skip("a profile shows the devices of one process")


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_within_a_host(cp_size: int, tmp_path: Path) -> None:
    """The forward pass has parts. The backward pass has one, and returns gradients while it converts dQ."""
    for found in profile_passes(cp_size, CollectiveOptions(implementation="native"), tmp_path):
        assert len(found[CAST]) == KV_HEADS + 1 and len(found[RETURN]) == 1
        assert share_beside(found[CAST][1:-1], found[FORWARD]) > 0.5
        assert found[RETURN][0].meets(found[CONVERT][-1])


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_between_hosts(cp_size: int, tmp_path: Path) -> None:
    """Both passes have parts. Backward, the first cast and the last return have nothing beside them."""
    for found in profile_passes(cp_size, CollectiveOptions(implementation="nccl"), tmp_path):
        exchanges, each = found[EXCHANGE], 1 + KV_HEADS  # tables are compared before the first part
        assert len(exchanges) == 3 * each
        forward, casts, returns = (exchanges[i * each + 1 : (i + 1) * each] for i in range(3))
        assert share_beside(forward, found[FORWARD]) > 0.5
        assert share_beside(casts[1:], found[BACKWARD]) > 0.5
        assert share_beside(returns[:-1], found[BACKWARD]) > 0.5
