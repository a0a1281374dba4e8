"""Transfers run beside attention: read from the profile of a program on GPUs, kernel by kernel."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks._profile import last_part, profile
from jaxmagi import CollectiveOptions, masks, plan_context

from .passes import Passes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_process")]

TOKENS, HEADS, KV_HEADS, DIM = 32768, 64, 8, 128
CALLS = 3
LAUNCHES = 3  # the second one on the multiprocessors that the cast gives back, the third one for what is left
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
    """Returns the kernels of the last of some calls, by device."""
    kernels = {}
    for device, events in profile(function, operands, folder, CALLS).items():
        named = {name: [event for event in events if event.is_of(name)] for name in NAMES}
        if any(named.values()):
            kernels[device] = {
                name: [Interval(x.begin, x.end) for x in last_part(found, CALLS)]
                for name, found in named.items()
            }
    return kernels


def share_beside(transfers: list[Interval], kernels: list[Interval]) -> float:
    """Returns which share of the transfers begins while one of the kernels runs.

    How long a transfer takes depends on the other rank too, for which it may wait.
    """
    return sum(any(kernel.has(x.begin) for kernel in kernels) for x in transfers) / len(transfers)


def profile_passes(cp_size: int, collectives: CollectiveOptions, folder: Path) -> list[Kernels]:
    """Returns the kernels of both passes of each device, in which every key matters to all queries."""
    plan = plan_context(masks.full(TOKENS), cp_size)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM}
    kernels = profiled_kernels(Passes(plan, TOKENS, **sizes, collectives=collectives).both, (), folder)
    assert len(kernels) == cp_size, f"there are profiles of {sorted(kernels)}"
    return list(kernels.values())


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_within_a_host(cp_size: int, tmp_path: Path) -> None:
    """The backward pass casts beside tiles of own keys, and returns gradients while it converts dQ."""
    for found in profile_passes(cp_size, CollectiveOptions(implementation="native"), tmp_path):
        *forward, cast = found[CAST]
        (gradients,) = found[RETURN]
        assert len(forward) == KV_HEADS and len(found[BACKWARD]) == LAUNCHES
        assert share_beside(forward[1:], found[FORWARD]) > 0.5
        assert cast.meets(found[BACKWARD][0]) and gradients.meets(found[CONVERT][-1])


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_between_hosts(cp_size: int, tmp_path: Path) -> None:
    """Both passes have parts. Transfers run beside attention, but for the first cast of the backward pass."""
    for found in profile_passes(cp_size, CollectiveOptions(implementation="nccl"), tmp_path):
        exchanges, each = found[EXCHANGE], 1 + KV_HEADS  # tables are compared before the first part
        assert len(exchanges) == 3 * each
        forward, casts, returns = (exchanges[i * each + 1 : (i + 1) * each] for i in range(3))
        assert share_beside(forward, found[FORWARD]) > 0.5
        assert share_beside(casts[1:], found[BACKWARD]) > 0.5
        assert share_beside(returns, found[BACKWARD]) == 1
