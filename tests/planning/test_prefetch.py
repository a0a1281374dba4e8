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


def test_a_program_without_devices_that_leaves_a_prefetcher_open() -> None:
    """JAX is told to use a platform that does not exist, so that the first use of a device fails."""
    program = """
import itertools, jaxmagi
make_plan = lambda length: jaxmagi.plan_context(jaxmagi.masks.causal(length), 4)
pairs = jaxmagi.prefetch_plans(itertools.count(1000), make_plan)
assert next(pairs)[1].length == 1000
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (run.returncode, run.stderr) == (0, "")
