"""Timing of devices by a clock that the tests set."""

import subprocess
import sys
from itertools import pairwise, permutations

import pytest

from jaxmagi.calibration import _timing
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device, time_sustained

LAUNCH, WAIT = 3.0, 50.0


class Clock:
    """Simulates a host and a device that works through its queue asynchronously."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        monkeypatch.setattr(_timing.time, "perf_counter", lambda: self.host)

    def work(self, seconds: float, passes: int = 1) -> DeviceWork:
        """Returns work that takes ``seconds`` of the device per pass, and time of the host to launch."""

        def enqueue() -> float:
            self.host += LAUNCH
            self.device = max(self.device, self.host) + passes * seconds
            return self.device

        def wait(end: float) -> None:
            self.host = max(self.host, end) + WAIT

        return DeviceWork(enqueue, wait, passes)


@pytest.mark.parametrize("batches", [1, 5])
def test_launching_and_waiting_drop_out(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    works = {"long": clock.work(70.0, passes=2), "short": clock.work(1.0, passes=4)}
    timings = time_on_device(works, repeats=3, batches=batches)
    assert timings == {"long": Timing(70.0, 70.0, 70.0), "short": Timing(1.0, 1.0, 1.0)}


def test_sustained_work_without_launching_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    works = {"long": clock.work(70.0, passes=2), "short": clock.work(25.0, passes=8)}
    timings = time_sustained(works, repeats=3, seconds=9000.0)
    assert {name: timing.median for name, timing in timings.items()} == {
        "long": pytest.approx(70.0, rel=0.02),
        "short": pytest.approx(25.0, rel=0.02),
    }


def test_work_for_which_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is nearly done when it has been enqueued, as with transfers between hosts."""
    clock = Clock(monkeypatch)
    work = clock.work(100.0, passes=5)

    def enqueue() -> float:
        end = work.enqueue()
        clock.host = end - 100.0
        return end

    timings = time_sustained({"some": DeviceWork(enqueue, work.wait, 5)}, repeats=1, seconds=1500.0)
    assert timings["some"].median == pytest.approx(100.0, rel=0.02)


def test_a_device_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has time to settle before anything is measured."""
    clock = Clock(monkeypatch)
    fast, slow = clock.work(100.0), clock.work(200.0)
    batches = 0

    def enqueue() -> float:
        nonlocal batches
        batches += 1
        return (fast if batches < 20 else slow).enqueue()

    timings = time_sustained({"some": DeviceWork(enqueue, slow.wait, 1)}, repeats=1, seconds=9000.0)
    assert timings["some"].median == pytest.approx(200.0, rel=0.02)


def test_a_batch_that_takes_longer_than_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = time_sustained({"some": clock.work(9000.0)}, repeats=1, seconds=4000.0)
    assert timings["some"].median == pytest.approx(9000.0, rel=0.02)


def test_the_slowest_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the slowest process counts, also for the number of batches."""
    clock, enqueued = Clock(monkeypatch), 0

    def enqueue() -> float:
        nonlocal enqueued
        enqueued += 1
        return work.enqueue()

    work = clock.work(100.0)
    counted = {"some": DeviceWork(enqueue, work.wait, 1)}
    timings = time_sustained(counted, 1, seconds=9000.0, slowest=lambda seconds: 4 * seconds)
    assert timings["some"].median == pytest.approx(400.0, rel=0.02)
    estimate = 4 * (100.0 + LAUNCH + WAIT / 2)  # of a batch, from two in the queue
    assert enqueued - 5 == pytest.approx(1.5 * 6000.0 / estimate, abs=1)  # and one behind them


def test_median_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [99.0, 1.0, 2.0, 10.0, 1.0, 5.0, 7.0]  # the first does not count
    clock, host = Clock(monkeypatch), iter(times)

    def wait(_: None) -> None:
        clock.host += next(host)

    works = {"some": DeviceWork(lambda: None, wait, 1)}
    assert time_on_device(works, repeats=3, batches=1) == {"some": Timing(1.0, -9.0, 2.0)}


def test_memory_for_all_batches_is_allocated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, batches, most = Clock(monkeypatch), 0, 0

    def enqueue() -> None:
        nonlocal batches, most
        batches += 1
        if batches > most:
            clock.host += 1000.0
        most = max(most, batches)

    def wait(_: None) -> None:
        nonlocal batches
        clock.host += 2.0 * batches
        batches = 0

    timings = time_on_device({"some": DeviceWork(enqueue, wait, 1)}, repeats=3, batches=2)
    assert timings == {"some": Timing(2.0, 2.0, 2.0)}


def test_each_name_comes_behind_each_other_one() -> None:
    order = list(_timing._in_turns("abcde", 12))
    turns = [order[i : i + 5] for i in range(0, len(order), 5)]
    assert all(sorted(turn) == list("abcde") for turn in turns)
    assert {pair for turn in turns for pair in pairwise(turn)} == set(permutations("abcde", 2))


def test_processes_agree_on_the_order() -> None:
    """Ranks that are timed together run the same work at the same time."""
    program = "from jaxmagi.calibration import _timing; print(*_timing._in_turns('abcde', 9), sep='')"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "".join(_timing._in_turns("abcde", 9))
