"""Reads from JAX's profiler which kernels the GPUs of this process ran, and when."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """A kernel, or a copy, that a GPU ran.

    begin, end: nanoseconds.
    name: as the profile has it, with namespaces and arguments.
    line: of the profile, a stream for instance.
    """

    begin: float
    end: float
    name: str
    line: str

    def is_of(self, kernel: str) -> bool:
        """Returns whether the kernel is the one of this name in any namespace, with any arguments."""
        return re.search(rf"(^|::){kernel}([<(]|$)", self.name) is not None

    @property
    def short_name(self) -> str:
        """The name without namespaces and arguments."""
        found = re.search(r"(\w+)([<(]|$)", re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", self.name))
        return found[1] if found else self.name


def profile(
    function: Callable[..., Any], operands: Sequence[Any], folder: Path, calls: int
) -> dict[str, list[Event]]:
    """Returns what the devices ran for some calls, by device, in order of time.

    Behind the first call the host is ahead of the device.
    """
    jax.block_until_ready(function(*operands))
    with jax.profiler.trace(folder):
        jax.block_until_ready([function(*operands) for _ in range(calls)])
    (path,) = folder.rglob("*.xplane.pb")
    events: dict[str, list[Event]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                end = event.start_ns + event.duration_ns
                events[plane.name].append(Event(event.start_ns, end, event.name, line.name))
    return {device: sorted(found) for device, found in events.items()}


def divide(events: Sequence[Event], calls: int) -> list[Sequence[Event]]:
    """Returns the events of each call, if all are of one kernel.

    Raises:
        ValueError: the calls do not divide the events.
    """
    if len(events) % calls:
        raise ValueError(f"{events[0].short_name} ran {len(events)} times in {calls} calls of one program.")
    count = len(events) // calls
    return [events[i * count : (i + 1) * count] for i in range(calls)]
