"""The time that devices take for their work, without what launching and waiting cost."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, fastest and slowest of the repeats."""

    median: float
    fastest: float
    slowest: float


def _in_turns(names: Iterable[str], repeats: int) -> Iterator[str]:
    """All names in each repeat, and another one first: who follows an idle device finds it cooler."""
    order = list(names)
    for i in range(repeats if order else 0):
        first = i % len(order)
        yield from order[first:] + order[:first]


def time_in_turns(names: Iterable[str], repeats: int, seconds: Callable[[str], float]) -> dict[str, Timing]:
    """Of what ``seconds`` measures for each name, as often as ``repeats`` says."""
    measured: dict[str, list[float]] = {name: [] for name in names}
    for name in _in_turns(measured, repeats):
        measured[name].append(seconds(name))
    return {
        name: Timing(statistics.median(times), min(times), max(times)) for name, times in measured.items()
    }


@dataclass(frozen=True)
class DeviceWork:
    """Work that is put into a queue of a device: ``enqueue`` returns at once, ``wait`` when all is done.

    What `enqueue` returns is what `wait` takes; each enqueued batch makes ``passes`` of what is measured.
    """

    enqueue: Callable[[], Any]
    wait: Callable[[Any], None]
    passes: int

    def seconds(self, batches: int) -> float:
        """Wall-clock time of so many batches."""
        start = time.perf_counter()
        for _ in range(batches - 1):
            self.enqueue()
        self.wait(self.enqueue())
        return time.perf_counter() - start


def time_on_device(works: dict[str, DeviceWork], repeats: int, batches: int) -> dict[str, Timing]:
    """Seconds a pass that the device takes, measured in turns, so that throttling hits all of them alike.

    The difference between twice as many batches and so many: what launching and waiting cost drops out. Each
    runs once before, untimed.
    """
    for work in works.values():
        work.seconds(2 * batches)  # the most at once: the first time so many are under way takes longer

    def seconds(name: str) -> float:
        work = works[name]
        first = work.seconds(batches)
        return (work.seconds(2 * batches) - first) / (batches * work.passes)

    return time_in_turns(works, repeats, seconds)
