"""Prefetched plans: order, look-ahead, errors, and a thread that always ends."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import ContextPlan, _prefetch, plan_context, prefetch_plans

PATIENCE = 60.0  # seconds after which a test that would hang fails


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(_prefetch.THREAD_NAME)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not threads())


def square(number: int) -> int:
    return number * number


def documents_plan(lengths: Iterable[int]) -> ContextPlan:
    return plan_context(masks.documents(list(lengths)), 2)


def is_for(lengths: Iterable[int], plan: ContextPlan) -> bool:
    return plan.length == sum(lengths)


@pytest.mark.parametrize("depth", [1, 2, 1000])
def test_pairs_in_order(depth: int) -> None:
    pairs = prefetch_plans(range(300), square, depth=depth)
    assert list(pairs) == [(i, i * i) for i in range(300)]
    assert list(pairs) == list(prefetch_plans([], square)) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_look_ahead_is_bounded_and_used(depth: int) -> None:
    taken: list[int] = []
    with prefetch_plans((taken.append(i) or i for i in itertools.count()), square, depth=depth) as pairs:
        for asked in range(50):
            wait_until(lambda asked=asked: len(taken) == asked + depth)  # while the consumer is busy
            time.sleep(0.001)
            assert len(taken) == asked + depth
            next(pairs)


@pytest.mark.parametrize("depth", [0, 1.5, True])
def test_bad_arguments(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"depth .*{depth}"):
        prefetch_plans([], square, depth=depth)
    with pytest.raises(TypeError, match="int"):
        prefetch_plans(3, square)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="make_plan must be a function, but it is None"):
        prefetch_plans([3], None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="fits must be a function or None, but it is True"):
        prefetch_plans([3], square, fits=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("depth", [1, 50])
@pytest.mark.parametrize("where", ["failing_batches", "failing_plan"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_errors_come_at_their_batch(error: BaseException, where: str, depth: int) -> None:
    taken, delivered = [], []

    def failing_batches() -> Iterator[int]:
        for i in range(99):
            if (where, i) == ("failing_batches", 5):
                raise error
            taken.append(i)
            yield i

    def failing_plan(batch: int) -> int:
        if (where, batch) == ("failing_plan", 5):
            raise error
        return square(batch)

    pairs = prefetch_plans(failing_batches(), failing_plan, depth=depth)
    with pytest.raises(type(error)) as raised:
        for pair in pairs:
            delivered.append(pair)
    assert raised.value is error
    assert where in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert delivered == [(i, i * i) for i in range(5)]
    assert len(taken) <= 6  # the source is left alone
    assert not threads() and list(pairs) == []


def test_stale_plans() -> None:
    ahead = iter([[3, 5], [8], [9, 1]])  # as a planner would read a loader's state, which runs ahead
    pairs = prefetch_plans([[3, 5], [8], [4]], lambda _: documents_plan(next(ahead)), fits=is_for)
    assert [sum(lengths) for lengths, _ in itertools.islice(pairs, 2)] == [8, 8]
    with pytest.raises(ValueError, match=r"batch 2 .* for \[10\] tokens, is stale"):
        next(pairs)
    assert list(pairs) == []


def test_batch_that_changes_after_planning_is_stale() -> None:
    def refill_one_buffer() -> Iterator[np.ndarray]:
        buffer = np.zeros(2, int)
        for i in range(4):
            buffer[:] = i, 6
            yield buffer
            planned.append(i)

    planned: list[int] = []
    pairs = prefetch_plans(refill_one_buffer(), documents_plan, depth=3, fits=is_for)
    wait_until(lambda: len(planned) >= 2)
    with pytest.raises(ValueError, match=r"batch 0 .* for \[6\] tokens, is stale"):
        next(pairs)


def test_errors_of_fits() -> None:
    def refuse(batch: int, plan: int) -> bool:
        raise OSError("disk")

    pairs = prefetch_plans(range(9), square, fits=refuse)
    with pytest.raises(OSError, match="disk"):
        next(pairs)
    assert not threads() and list(pairs) == []


def test_fits_may_close() -> None:
    def close(batch: int, plan: int) -> bool:
        pairs.close()
        return True

    pairs = prefetch_plans(range(9), square, fits=close)
    assert list(pairs) == [(0, 0)]


def test_leaving_a_loop_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt), prefetch_plans(itertools.count(), square) as pairs:
        next(pairs)
        raise KeyboardInterrupt
    assert not threads() and list(pairs) == []
    for batch, _ in prefetch_plans(itertools.count(), square):
        if batch == 3:
            break
    wait_until(lambda: not threads())


def test_garbage_found_by_its_own_thread() -> None:
    """In a cycle, so that a collection finds it; the thread that collects cannot wait for itself."""
    dropped = threading.Event()

    def make_plan(batch: int) -> None:
        assert dropped.wait(PATIENCE)
        gc.collect()

    gc.disable()
    try:
        cycle: list[Any] = [prefetch_plans(itertools.count(), make_plan)]
        cycle.append(cycle)
        del cycle
        dropped.set()
        wait_until(lambda: not threads())
    finally:
        gc.enable()


def test_close_waits_for_a_blocked_call_and_drops_the_source() -> None:
    blocked, release, ended = threading.Event(), threading.Event(), threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.set()

    def make_plan(batch: int) -> bool:
        blocked.set()
        return release.wait(PATIENCE)

    pairs = prefetch_plans(batches(), make_plan, depth=5)
    assert blocked.wait(PATIENCE)
    threading.Timer(0.05, release.set).start()
    pairs.close()
    assert release.is_set() and ended.is_set() and not threads()
    pairs.close()
    assert list(pairs) == []


@pytest.mark.parametrize("depth", [1, 5])
def test_close_frees_a_consumer_in_another_thread(depth: int) -> None:
    """The consumer gets the pair that is in the making, or the end."""
    for delay in np.linspace(0, 2e-3, 50):
        delivered: list[Any] = []

        def batches(delay: float = delay) -> Iterator[int]:
            for i in itertools.count():
                time.sleep(delay / 5)
                yield i

        def consume(pairs: Iterable[Any], delivered: list[Any] = delivered) -> None:
            try:
                delivered.extend(pairs)
            except BaseException as error:
                delivered.append(error)

        pairs = prefetch_plans(batches(), square, depth=depth)
        consumer = threading.Thread(target=consume, args=(pairs,))
        consumer.start()
        time.sleep(delay)
        pairs.close()
        consumer.join(PATIENCE)
        assert not consumer.is_alive()
        assert delivered == [(i, i * i) for i in range(len(delivered))]


def test_exit_does_not_wait_for_all_queued_batches() -> None:
    run_program("""
import itertools, jaxmagi, time
pairs = jaxmagi.prefetch_plans(itertools.count(), lambda _: time.sleep(0.5), depth=1000)
next(pairs)
""")


def test_a_program_without_devices_that_leaves_a_prefetcher_open() -> None:
    """JAX is told to use a platform that does not exist, so that the first use of a device fails."""
    run_program("""
import itertools, jaxmagi
make_plan = lambda length: jaxmagi.plan_context(jaxmagi.masks.causal(length), 4)
pairs = jaxmagi.prefetch_plans(itertools.count(1000), make_plan)
assert next(pairs)[1].length == 1000
""")


BLOCKED = """
import itertools, jaxmagi, threading, jaxmagi.planning._prefetch as prefetch
prefetch._PATIENCE = 1  # longer than the interrupts take
def batches():
    yield 0
    threading.Event().wait()
pairs = jaxmagi.prefetch_plans(batches(), lambda batch: batch)
"""

INTERRUPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a program in the background ignores
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("next(pairs)", ""),
        ("next(pairs)\nraise OSError('disk')", "OSError: disk"),
        ("with pairs:\n    next(pairs)\n    raise OSError('disk')", "OSError: disk"),
        (f"{INTERRUPT}list(pairs)", "KeyboardInterrupt"),
        (f"{INTERRUPT}next(pairs)\npairs.close()", "KeyboardInterrupt"),
    ],
    ids=["end", "error", "error in with", "interrupt", "interrupt of close"],
)
def test_a_source_that_never_returns_does_not_keep_the_program(end: str, shown: str) -> None:
    run = program(BLOCKED + end)
    assert (run.returncode == 0) == (shown == "")
    assert run.stderr.splitlines()[-1:] == ([shown] if shown else [])


def test_the_exit_waits_for_a_plan() -> None:
    """The thread would abort the program if it returned from native code behind the exit."""
    text = """
import threading, time, jaxmagi, jaxmagi.planning._prefetch as prefetch
prefetch._PATIENCE = 0.1
begun = threading.Event()
def make_plan(batch):
    begun.set()
    time.sleep(1)
    print("made", flush=True)
pairs = jaxmagi.prefetch_plans([0], make_plan)
begun.wait()
"""
    run = program(text)
    assert (run.returncode, run.stdout, run.stderr) == (0, "made\n", "")


def run_program(text: str) -> None:
    run = program(text)
    assert (run.returncode, run.stderr) == (0, "")


def program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
