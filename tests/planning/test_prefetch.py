"""Prefetched plans: order, look-ahead, errors, and a thread that always ends."""

import contextlib
import doctest
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxmagi
from jaxmagi import masks
from jaxmagi.planning import ContextPlan, PlanPrefetcher, _prefetch, plan_context, prefetch_plans

from .oracle import assert_same

PATIENCE = 60.0  # seconds after which a test that would hang fails


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == _prefetch.THREAD_NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert not threads()
    yield
    assert not threads()


class Progress:
    """Counts, on which other threads can wait."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def advance(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, PATIENCE), f"{self.count} < {count}"


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def wait_until_ending(pairs: PlanPrefetcher) -> None:
    while not pairs._worker.ending:
        time.sleep(0.001)


def square(number: int) -> int:
    return number * number


def numbers_until(progress: Progress, end: int | None = None) -> Iterator[int]:
    """0, 1, 2, ...; counts what is taken."""
    for i in itertools.count() if end is None else range(end):
        progress.advance()
        yield i


@pytest.mark.parametrize("depth", [1, 2, 7, 1000])
def test_pairs_in_order(depth: int) -> None:
    pairs = prefetch_plans(range(300), square, depth=depth)
    assert list(pairs) == [(i, i * i) for i in range(300)]
    assert list(pairs) == []


def test_no_batches() -> None:
    assert list(prefetch_plans([], square)) == []


def test_batches_may_be_none_or_errors() -> None:
    batches = [None, StopIteration(), ValueError("data"), ()]
    assert list(prefetch_plans(batches, type)) == [(batch, type(batch)) for batch in batches]


@pytest.mark.parametrize("depth", [1, 3])
def test_look_ahead_is_bounded(depth: int) -> None:
    taken, asked, ahead = Progress(), 0, []

    def batches() -> Iterator[int]:
        for i in numbers_until(taken):
            ahead.append(taken.count - asked)
            yield i

    with prefetch_plans(batches(), square, depth=depth) as pairs:
        taken.wait_for(depth)
        for _ in range(200):
            asked += 1
            next(pairs)
            taken.wait_for(asked + depth)  # it goes so far while the consumer is busy
    assert max(ahead) == depth


@pytest.mark.parametrize("depth", [0, -3, 1.5, True, "2"])
def test_bad_depth(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"depth .*{depth}"):
        prefetch_plans([], square, depth=depth)


def test_batches_that_are_no_iterable() -> None:
    with pytest.raises(TypeError, match="int"):
        prefetch_plans(3, square)  # pyright: ignore[reportArgumentType]


def failing_batches(end: int, error: BaseException) -> Iterator[int]:
    yield from range(end)
    raise error


def failing_plan(end: int, error: BaseException) -> Any:
    def plan_that_fails(batch: int) -> int:
        if batch == end:
            raise error
        return square(batch)

    return plan_that_fails


@pytest.mark.parametrize("depth", [1, 4, 50])
@pytest.mark.parametrize("where", ["failing_batches", "plan_that_fails"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_errors_come_at_their_batch(error: BaseException, where: str, depth: int) -> None:
    if where == "failing_batches":
        pairs = prefetch_plans(failing_batches(5, error), square, depth=depth)
    else:
        pairs = prefetch_plans(range(99), failing_plan(5, error), depth=depth)
    delivered = []
    with pytest.raises(type(error)) as raised:
        for pair in pairs:
            delivered.append(pair)
    assert raised.value is error
    assert where in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert delivered == [(i, i * i) for i in range(5)]
    assert not threads()
    assert list(pairs) == []


def test_source_is_left_alone_after_an_error() -> None:
    taken = Progress()
    pairs = prefetch_plans(numbers_until(taken), failing_plan(3, OSError()), depth=20)
    with pytest.raises(OSError):
        list(pairs)
    assert taken.count == 4


def test_stop_iteration_of_a_plan_is_an_error() -> None:
    pairs = prefetch_plans(range(9), failing_plan(2, StopIteration()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(pairs)


def documents_plan(lengths: Iterable[int]) -> ContextPlan:
    return plan_context(masks.documents(list(lengths)), 2)


def is_for(lengths: Iterable[int], plan: ContextPlan) -> bool:
    return plan.length == sum(lengths)


def test_plan_of_another_batch_is_stale() -> None:
    ahead = iter([[3, 5], [8], [9, 1]])  # as a planner would read a loader's state, which runs ahead
    pairs = prefetch_plans([[3, 5], [8], [4]], lambda _: documents_plan(next(ahead)), fits=is_for)
    assert [sum(lengths) for lengths, _ in itertools.islice(pairs, 2)] == [8, 8]
    with pytest.raises(ValueError, match=r"batch 2 .* for \[10\] tokens, is stale"):
        next(pairs)
    assert list(pairs) == []


def test_batch_that_changes_after_planning_is_stale() -> None:
    taken = Progress()

    def refill_one_buffer() -> Iterator[np.ndarray]:
        buffer = np.zeros(2, int)
        for i in numbers_until(taken, end=4):
            buffer[:] = i, 6
            yield buffer

    pairs = prefetch_plans(refill_one_buffer(), documents_plan, depth=3, fits=is_for)
    taken.wait_for(3)
    with pytest.raises(ValueError, match=r"batch 0 .* for \[6\] tokens, is stale"):
        next(pairs)


def test_errors_of_fits() -> None:
    def refuse(batch: int, plan: int) -> bool:
        raise OSError("disk")

    pairs = prefetch_plans(range(9), square, fits=refuse)
    with pytest.raises(OSError, match="disk"):
        next(pairs)
    assert list(pairs) == []


def test_fits_is_asked_once_for_every_pair() -> None:
    asked = []

    def fits(batch: int, plan: int) -> bool:
        asked.append((batch, plan, threading.current_thread()))
        return True

    pairs = list(prefetch_plans(range(9), square, fits=fits))
    assert asked == [(*pair, threading.current_thread()) for pair in pairs]


def test_plans_are_those_made_without_prefetching(rng: np.random.Generator) -> None:
    batches = [rng.integers(1, 300, int(rng.integers(1, 30))) for _ in range(12)]
    prefetched = list(prefetch_plans(batches, documents_plan, fits=is_for))
    assert [lengths is batch for batch, (lengths, _) in zip(batches, prefetched, strict=True)] == [True] * 12
    for lengths, plan in prefetched:
        assert_same(plan, documents_plan(lengths))


def test_public_name() -> None:
    assert jaxmagi.prefetch_plans is prefetch_plans


def test_plans_while_the_consumer_is_busy() -> None:
    """Neither side goes on without the other: each plan needs the step before it to run, not to end."""
    steps, plans = [threading.Event() for _ in range(21)], [threading.Event() for _ in range(21)]

    def make_plan(batch: int) -> int:
        if batch > 0:
            wait(steps[batch - 1])
        plans[batch].set()
        return batch

    with prefetch_plans(range(21), make_plan, depth=1) as pairs:
        for batch, _ in itertools.islice(pairs, 20):
            steps[batch].set()
            wait(plans[batch + 1])


def test_break_ends_the_thread_at_once() -> None:
    for batch, _ in prefetch_plans(itertools.count(), square):
        if batch == 3:
            break
    assert not threads()


def test_garbage_ends_the_thread() -> None:
    pairs = prefetch_plans(itertools.count(), square)
    assert len(threads()) == 1
    del pairs
    assert not threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_error_in_the_step_ends_the_thread(error: type[BaseException]) -> None:
    with pytest.raises(error), prefetch_plans(itertools.count(), square) as pairs:
        for batch, _ in pairs:
            if batch == 3:
                raise error
    assert not threads()
    assert list(pairs) == []


@contextlib.contextmanager
def interrupt_once() -> Iterator[None]:
    """What SIGINT does for as long as it lasts: raises KeyboardInterrupt the first time, then nothing."""
    interrupts = itertools.count()

    def interrupt(*_: object) -> None:
        if next(interrupts) == 0:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def test_interrupt_while_waiting_ends_the_thread() -> None:
    waiting = threading.Event()

    def batches() -> Iterator[int]:
        wait(waiting)
        while not pairs._worker.ending:  # again, for Python sees no signal that comes just before it waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.01)
        yield 0

    with interrupt_once():
        with pytest.raises(KeyboardInterrupt), prefetch_plans(batches(), square) as pairs:
            waiting.set()
            next(pairs)
        assert list(pairs) == []


def test_closing_twice() -> None:
    pairs = prefetch_plans(range(9), square)
    pairs.close()
    pairs.close()
    assert list(pairs) == []


@pytest.mark.parametrize("where", ["source", "make_plan"])
def test_close_waits_for_a_blocked_call(where: str) -> None:
    blocked, release, taken = threading.Event(), threading.Event(), Progress()

    def block_at(place: str, batch: int) -> int:
        if (place, batch) == (where, 2):
            blocked.set()
            wait(release)
        return batch

    batches = (block_at("source", i) for i in numbers_until(taken))
    pairs = prefetch_plans(batches, lambda batch: block_at("make_plan", batch), depth=5)
    wait(blocked)
    closer = threading.Thread(target=pairs.close)
    closer.start()
    wait_until_ending(pairs)
    assert closer.is_alive()
    release.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert taken.count == 3
    assert list(pairs) == []


def test_close_frees_a_consumer_in_another_thread() -> None:
    blocked, release, delivered = threading.Event(), threading.Event(), []

    def batches() -> Iterator[int]:
        yield 0
        blocked.set()
        wait(release)

    pairs = prefetch_plans(batches(), square)
    consumer = threading.Thread(target=lambda: delivered.extend(pairs))
    consumer.start()
    wait(blocked)
    release.set()
    pairs.close()
    consumer.join(PATIENCE)
    assert not consumer.is_alive()
    assert delivered in ([], [(0, 0)])


def test_garbage_found_by_its_own_thread() -> None:
    """In a cycle, so that a collection finds it; the thread that collects cannot wait for itself."""
    dropped = threading.Event()

    def make_plan(batch: int) -> None:
        wait(dropped)
        gc.collect()

    gc.disable()
    try:
        pairs = prefetch_plans(itertools.count(), make_plan)
        cycle: list[Any] = [pairs]
        cycle.append(cycle)
        (thread,) = threads()
        del pairs, cycle
        dropped.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_close_lets_the_source_go() -> None:
    ended = threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.set()

    with prefetch_plans(batches(), square) as pairs:
        next(pairs)
    assert ended.is_set()


def test_prefetcher_of_a_prefetcher() -> None:
    def add(pair: tuple[int, int]) -> int:
        return sum(pair)

    for pair, total in prefetch_plans(prefetch_plans(itertools.count(), square), add):
        assert total == sum(pair)
        if pair[0] == 5:
            break
    assert not threads()


def test_two_loops_over_one_prefetcher() -> None:
    with prefetch_plans(range(9), square) as pairs:
        first = [batch for batch, _ in itertools.islice(pairs, 4)]
        rest = [batch for batch, _ in pairs]
    assert (first, rest) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])


def test_two_prefetchers_one_after_the_other() -> None:
    batches = list(range(9))
    for _ in range(2):
        assert [batch for batch, _ in prefetch_plans(batches, square)] == batches


def run_program(code: str, **environment: str) -> None:
    program = f"import itertools, jaxmagi\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_planning_needs_no_device() -> None:
    """JAX is told to use a platform that does not exist, so that the first use of a device fails."""
    run_program(
        """
import jax
make_mask = lambda lengths: jaxmagi.masks.documents(lengths)
make_plan = lambda lengths: jaxmagi.plan_context(make_mask(lengths), 4)
assert [plan.length for _, plan in jaxmagi.prefetch_plans([[700, 300], [24]], make_plan)] == [1000, 24]
try:
    jax.devices()
except RuntimeError:
    pass
else:
    raise SystemExit("there are devices, so this shows nothing")
""",
        JAX_PLATFORMS="nowhere",
    )


def test_exit_with_an_open_prefetcher() -> None:
    run_program(
        """
make_plan = lambda length: jaxmagi.plan_context(jaxmagi.masks.causal(length), 64, chunk_size=16)
pairs = jaxmagi.prefetch_plans(itertools.count(1 << 15), make_plan, depth=1000)
next(pairs)
""",
        JAX_PLATFORMS="cpu",
    )


def test_docstrings() -> None:
    names = {"plan_context": plan_context, "masks": masks}
    result = doctest.testmod(_prefetch, extraglobs=names)
    assert result.attempted > 0 and result.failed == 0
