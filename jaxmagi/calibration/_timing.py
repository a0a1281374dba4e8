"""Times work on devices, without the cost of launching it and waiting for it."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Holds the seconds of a call: median, fastest and slowest of the repeats."""

    median: float
    fastest: float
    slowest: float


def _in_turns[N](names: Iterable[N], repeats: int) -> Iterator[N]:
    """Yields all names in each repeat, in another order that all processes agree on.

    What ran before heats the device: with a fixed order, even if it is rotated, each name would find it as
    its predecessor leaves it.
    """
    order = list(names)
    for repeat in range(repeats):
        random.Random(repeat).shuffle(order)
        yield from order


def time_in_turns[N](names: Iterable[N], repeats: int, seconds: Callable[[N], float]) -> dict[N, Timing]:
    """Calls ``seconds`` for each name ``repeats`` times, in turns."""
    measured: dict[N, list[float]] = {name: [] for name in names}
    for name in _in_turns(measured, repeats):
        measured[name].append(seconds(name))
    return {
        name: Timing(statistics.median(times), min(times), max(times)) for name, times in measured.items()
    }


@dataclass(frozen=True)
class DeviceWork:
    """Describes work for the queue of a device: ``enqueue`` returns at once, ``wait`` when all is done.

    `wait` takes the result of `enqueue`; each enqueued batch runs ``passes`` passes of the measured work.
    """

    enqueue: Callable[[], Any]
    wait: Callable[[Any], None]
    passes: int

    def seconds(self, batches: int) -> float:
        """Returns the wall-clock time of ``batches`` batches."""
        start = time.perf_counter()
        for _ in range(batches - 1):
            self.enqueue()
        self.wait(self.enqueue())
        return time.perf_counter() - start

    def sustained_seconds(self, batches: int) -> float:
        """Returns the time of a pass while so many batches run, behind half as many that are not measured.

        As the queue always holds another batch, neither launching nor waiting counts, unless they take
        longer than a batch. It holds one at the end too, which is not measured: `enqueue` may return when the
        batch is nearly done, as it does if the host waits for its transfers, and then both times are as late.
        """
        queued = self.enqueue()

        def advance(count: int) -> None:
            nonlocal queued
            for _ in range(count):
                following = self.enqueue()
                self.wait(queued)
                queued = following

        advance(math.ceil(batches / 2))
        start = time.perf_counter()
        advance(batches)
        seconds = time.perf_counter() - start
        self.wait(queued)
        return seconds / (batches * self.passes)


def time_sustained[N](
    works: dict[N, DeviceWork], repeats: int, seconds: float, slowest: Callable[[float], float] = float
) -> dict[N, Timing]:
    """Times a pass of each work while it runs without a pause, in turns of about so many seconds.

    A device at its power limit needs about a tenth of a second to find the clock at which it can run a work
    on and on, so the first third of a turn is not measured. ``slowest`` takes the seconds of this process and
    returns those of the slowest one; with it all processes begin a turn together and run the same batches.
    """

    def measured_batches(work: DeviceWork) -> int:
        work.seconds(2)  # enqueueing two batches for the first time takes longer
        return math.ceil(2 / 3 * seconds / slowest(work.seconds(2) / 2))

    batches = {name: measured_batches(work) for name, work in works.items()}
    return time_in_turns(works, repeats, lambda name: slowest(works[name].sustained_seconds(batches[name])))


def time_on_device(works: dict[str, DeviceWork], repeats: int, batches: int) -> dict[str, Timing]:
    """Times a pass of each work on the device, in turns, so that throttling affects all of them alike.

    The time is the difference between twice ``batches`` and ``batches`` batches, which cancels the cost of
    launching and waiting. Each work runs once before, untimed.
    """
    for work in works.values():
        work.seconds(2 * batches)  # enqueueing this many batches for the first time takes longer

    def seconds(name: str) -> float:
        work = works[name]
        first = work.seconds(batches)
        return (work.seconds(2 * batches) - first) / (batches * work.passes)

    return time_in_turns(works, repeats, seconds)
