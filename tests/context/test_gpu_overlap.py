"""Transfers run beside attention: read from the profile of a program on GPUs, kernel by kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from benchmarks._profile import divide, profile
from jaxmagi import AttnMask, CollectiveOptions, masks, plan_context

from ..parts import let_parts_receive
from .passes import Passes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_process")]

TOKENS, HEADS, KV_HEADS, DIM = 32768, 64, 8, 128
WINDOW = 4095  # most tiles of queries see keys of their rank alone
PART_BYTES = 2**22  # so that what a rank receives for the window is cut in parts within a host too
CALLS = 3
# There is one for own tiles, one on the multiprocessors that casts give back, and one for what is left. In
# the forward pass there is one more where there are several casts, behind the first.
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 4, 3
FORWARD, PREPARE, BACKWARD, CONVERT = "forward_kernel", "prepare", "backward_kernel", "convert_all"
CAST, RETURN, EXCHANGE = "push", "pull", "ncclDevKernel_SendRecv"
NAMES = (FORWARD, PREPARE, BACKWARD, CONVERT, CAST, RETURN, EXCHANGE)


class Interval(NamedTuple):
    begin: float
    end: float

    def has(self, time: float) -> bool:
        return self.begin <= time < self.end

    def meets(self, other: "Interval") -> bool:
        return self.begin < other.end and other.begin < self.end

    @property
    def length(self) -> float:
        return self.end - self.begin


type Kernels = dict[str, list[Interval]]
"""When the kernels of a device ran, in nanoseconds: by name, in order."""


def profiled_kernels(function: Any, operands: Any, folder: Path) -> list[dict[str, Kernels]]:
    """Returns the kernels of some calls, call by call, by device."""
    calls: list[dict[str, Kernels]] = [{} for _ in range(CALLS)]
    for device, events in profile(function, operands, folder, CALLS).items():
        named = {name: divide([event for event in events if event.is_of(name)], CALLS) for name in NAMES}
        for i, kernels in enumerate(calls):
            found = {name: [Interval(x.begin, x.end) for x in parts[i]] for name, parts in named.items()}
            if any(found.values()):
                kernels[device] = found
    return calls


def share_beside(transfers: list[Interval], kernels: list[Interval]) -> float:
    """Returns which share of the transfers begins while one of the kernels runs.

    How long a transfer takes depends on the other rank too, for which it may wait.
    """
    return sum(any(kernel.has(x.begin) for kernel in kernels) for x in transfers) / len(transfers)


def profile_passes(
    cp_size: int,
    implementation: Literal["native", "nccl"],
    folder: Path,
    mask: AttnMask,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> list[list[Kernels]]:
    """Returns the kernels of both passes of each device, call by call."""
    plan = plan_context(mask, cp_size)
    collectives = CollectiveOptions(implementation=implementation)
    passes = Passes(plan, mask.q_len, heads=heads, kv_heads=kv_heads, dim=DIM, collectives=collectives)
    calls = profiled_kernels(passes.both, (), folder)
    assert all(len(kernels) == cp_size for kernels in calls), f"there are profiles of {sorted(calls[0])}"
    return [list(kernels.values()) for kernels in calls]


def assert_in_some_call(check: Callable[[Kernels], None], calls: list[list[Kernels]]) -> None:
    """Checks each device, and raises AssertionError if no call passes.

    Nothing overlaps on a rank whose peers begin late, for instance since the host was busy.
    """
    failures = []
    for devices in calls[1:]:
        try:
            for kernels in devices:
                check(kernels)
        except AssertionError as failure:
            failures.append(failure)
        else:
            return
    raise ExceptionGroup(f"none of {len(failures)} calls passes", failures)


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_within_a_host(cp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come beside attention to own ones, or while the backward pass prepares.

    CTAs go on with tiles that need received keys, so that launches for what is left have next to nothing to
    do. Gradients return while those of queries are converted.
    """

    def check(found: Kernels) -> None:
        (*forward_casts, backward_cast), (gradients,) = found[CAST], found[RETURN]
        assert len(forward_casts) > 1 and all(cast.meets(found[FORWARD][0]) for cast in forward_casts)
        assert backward_cast.meets(found[PREPARE][-1])
        for name, count in ((FORWARD, FORWARD_LAUNCHES), (BACKWARD, BACKWARD_LAUNCHES)):
            first, _, *others = found[name]  # the second one may be that of the helpers
            assert len(found[name]) == count and all(x.length < 0.2 * first.length for x in others)
        assert gradients.meets(found[CONVERT][-1])

    let_parts_receive(monkeypatch, PART_BYTES)
    mask = masks.sliding_window(TOKENS, WINDOW)
    assert_in_some_call(check, profile_passes(cp_size, "native", tmp_path, mask))


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_fewer_own_tiles_than_multiprocessors(cp_size: int, tmp_path: Path) -> None:
    """Multiprocessors that find no tile of own keys do those of received ones before own ones are done."""

    def check(found: Kernels) -> None:
        own, *_, rest = found[BACKWARD]
        assert rest.begin < own.begin + 0.5 * own.length

    mask = masks.full(TOKENS // 2)
    assert_in_some_call(check, profile_passes(cp_size, "native", tmp_path, mask, heads=2, kv_heads=1))


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_between_hosts(cp_size: int, tmp_path: Path) -> None:
    """Passes have parts. Transfers run beside attention, but for the first cast of the backward pass."""

    def check(found: Kernels) -> None:
        exchanges, each = found[EXCHANGE], 1 + KV_HEADS  # tables are compared before the first part
        assert len(exchanges) == 3 * each
        forward, casts, returns = (exchanges[i * each + 1 : (i + 1) * each] for i in range(3))
        assert share_beside(forward, found[FORWARD]) > 0.5
        # Own tiles and the own half need no cast, and a part begins before the last cast.
        assert sum(x.begin < forward[-1].begin for x in found[FORWARD]) > 2
        assert share_beside(casts[1:], found[BACKWARD]) > 0.5
        assert share_beside(returns, found[BACKWARD]) == 1

    assert_in_some_call(check, profile_passes(cp_size, "nccl", tmp_path, masks.full(TOKENS)))
