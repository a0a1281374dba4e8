"""Plans the next batches in a background thread while the step of the last one runs."""

import atexit
import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Self

import jax

from .._checks import integer
from ._plan import ContextPlan

THREAD_NAME = "jaxmagi.prefetch_plans"

_PATIENCE = 5.0  # seconds for a current call of the source, after an error and at the exit of the program


def prefetch_plans[Batch, Plan](
    batches: Iterable[Batch],
    make_plan: Callable[[Batch], Plan],
    *,
    depth: int = 2,
    fits: Callable[[Batch, Plan], bool] | None = None,
) -> "PlanPrefetcher[Batch, Plan]":
    """Iterates over ``(batch, make_plan(batch))``, made ahead of time in a background thread.

    It is for the end of a data loader: ``jaxmagi.plan_context`` needs no device and lets other threads run
    while it searches, so that planning costs no time during a longer step. The thread starts at once.

    Args:
        batches: the source, iterated in the thread: a list, a generator, an iterator of Grain, ``tf.data`` or
            PyTorch. It must not change a batch that it has given out, as loaders do that refill one buffer.
        make_plan: called in the thread with each batch, in their order. Returns what the step needs: a
            `ContextPlan`, or several of them (of two masks, of the sequences of a batch) in a pytree. It
            should depend on its batch only, for it runs ahead of the consumer by a varying distance. For
            plans that share a compilation it fixes ``two_levels`` (see `jaxmagi.plan_context`).
        depth: how many batches the thread may take from the source beyond those that the consumer has taken.
            They are lost to the source's other users when the prefetcher is closed.
        fits: called in the consumer, just before a pair is returned, to check that the plan is still that of
            the batch: ``lambda batch, plan: plan.length == batch.shape[0]``. By default there is no check.

    Returns:
        An iterator that is also a context manager, for one consumer. As with a generator there is nothing
        after an error or a `close`. An error of ``batches`` or of ``make_plan`` is raised for the batch where
        it happened, with its traceback, after all earlier pairs.

    Raises:
        ValueError: ``depth`` is no integer above zero; while iterating: ``fits`` is false, the plan is stale.
        TypeError: ``batches`` is not iterable, or ``make_plan`` or ``fits`` is no function.

    Examples:
        >>> batches = [[3, 5], [8]]
        >>> def make_plan(lengths):
        ...     return plan_context(masks.documents(lengths), cp_size=2)
        >>> with prefetch_plans(batches, make_plan) as pairs:
        ...     [(batch, plan.length) for batch, plan in pairs]
        [([3, 5], 8), ([8], 8)]
    """
    depth = integer(depth, "depth", minimum=1)
    if not callable(make_plan):
        raise TypeError(f"make_plan must be a function, but it is {make_plan!r}.")
    if not (fits is None or callable(fits)):
        raise TypeError(f"fits must be a function or None, but it is {fits!r}.")
    source = _Source(batches)
    pairs = ((batch, make_plan(batch)) for batch in source)
    return PlanPrefetcher(_PlanThread(source, pairs), depth, fits)


class PlanPrefetcher[Batch, Plan]:
    """The iterator of ``(batch, plan)`` that `jaxmagi.prefetch_plans` returns, which owns a thread.

    The thread ends when ``next`` raises (at the end of the source, at an error, at ``KeyboardInterrupt``), at
    `close`, and at the end of a ``with`` block. When the prefetcher is garbage, and at the exit of the
    program, it ends after its current call. ``batches`` and ``make_plan`` should not refer to the prefetcher,
    for the thread keeps them alive.

    A call of the source that never returns keeps neither an error from its reader nor the program from its
    exit: after an error, in a ``with`` block too, and at the exit such a call is waited for no longer than
    five seconds in all. A call of ``make_plan`` is always waited for.
    """

    def __init__(
        self,
        thread: "_PlanThread[tuple[Batch, Plan]]",
        depth: int,
        fits: Callable[[Batch, Plan], bool] | None,
    ):
        self._fits, self._taken = fits, 0
        self._thread = thread
        self._thread.start()
        self._lock = threading.Lock()
        self._ahead = collections.deque(self._thread.submit() for _ in range(depth))
        # Any line of any thread may collect the prefetcher, so this waits for nothing.
        weakref.finalize(self, self._thread.stop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, Plan]:
        try:
            batch, plan = self._take()
            if self._fits is not None and not self._fits(batch, plan):
                raise ValueError(
                    f"the plan of batch {self._taken} (the first is 0), for {_lengths(plan)} tokens, is "
                    "stale: fits(batch, plan) is false."
                )
            with self._lock:
                self._taken += 1
                if not self._thread.is_stopped():
                    self._ahead.append(self._thread.submit())
        except BaseException:  # KeyboardInterrupt too: a pair may be lost, so none may follow
            self._end(is_patient=False)
            raise
        return batch, plan

    def _take(self) -> tuple[Batch, Plan]:
        """Waits for the next pair. Raises StopIteration if it is dropped by `close`, or was before."""
        try:
            return self._next_future().result()
        except CancelledError:
            if self._thread.is_stopped():
                raise StopIteration from None
            raise

    def _next_future(self) -> Future[tuple[Batch, Plan]]:
        with self._lock:
            if self._thread.is_stopped():
                raise StopIteration
            return self._ahead.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._end(is_patient=error is None)

    def close(self) -> None:
        """Ends the thread and waits for its current call of the source or of ``make_plan``.

        Plans made ahead are dropped. A consumer that waits in another thread gets the pair of that call, or
        the end of the iteration. Closing again does nothing.
        """
        self._end(is_patient=True)

    def _end(self, *, is_patient: bool) -> None:
        with self._lock:
            self._thread.stop()
            self._ahead.clear()
        if is_patient:
            self._thread.join()
        else:
            self._thread.wait_for_source()


class _Source[Batch]:
    """An iterator that says whether a call of it is under way."""

    def __init__(self, batches: Iterable[Batch]):
        self._batches = iter(batches)
        self.is_busy = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        self.is_busy = True
        try:
            return next(self._batches)
        finally:
            self.is_busy = False


class _PlanThread[Pair](threading.Thread):
    """Takes pairs from an iterator, one for each future that is submitted.

    It is a daemon, as Python waits for other threads without a limit before it exits.
    """

    def __init__(self, source: _Source[Any], pairs: Iterator[Pair]):
        super().__init__(name=THREAD_NAME, daemon=True)
        self._source: _Source[Any] | None = source
        self._pairs = pairs
        self._patience_ends: float | None = None
        self._is_ending = False  # no event: its lock may be held where garbage is collected
        self._futures: queue.SimpleQueue[Future[Pair] | None] = queue.SimpleQueue()

    def submit(self) -> Future[Pair]:
        """Returns the future of the next pair, which is cancelled if the thread is stopped before."""
        future = Future[Pair]()
        self._futures.put(future)
        return future

    def stop(self) -> None:
        """Has the thread end after its current call. Safe in a collection of garbage."""
        self._is_ending = True
        self._futures.put(None)

    def is_stopped(self) -> bool:
        """Returns whether the thread ends after its current call, or has ended."""
        return self._is_ending

    def run(self) -> None:
        """Does the work of the thread."""
        while (future := self._futures.get()) is not None:
            if self.is_stopped():
                future.cancel()
                continue
            try:
                future.set_result(next(self._pairs))
            except BaseException as error:
                future.set_exception(error)
            del future  # its pair is the consumer's now
        self._source, self._pairs = None, iter(())  # drops the source

    def wait_for_source(self) -> None:
        """Waits for the current call: without a limit for a plan, and all in all five seconds for the source.

        A plan comes to its end, and a thread that returns from native code after the exit aborts the program.
        """
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + _PATIENCE
        while self.is_alive():
            self.join(0.02)
            source = self._source
            if source and source.is_busy and time.monotonic() > self._patience_ends:
                return


@atexit.register
def _end_threads() -> None:
    """Waits for current calls."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _PlanThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.wait_for_source()


def _lengths(plans: Any) -> list[int]:
    """Returns the lengths of all plans in a pytree."""
    leaves = jax.tree.leaves(plans, is_leaf=lambda leaf: isinstance(leaf, ContextPlan))
    return [leaf.length for leaf in leaves if isinstance(leaf, ContextPlan)]
