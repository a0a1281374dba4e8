"""Plans the next batches in a background thread while the step of the last one runs."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import jax

from .._checks import integer
from ._plan import ContextPlan

THREAD_NAME = "jaxmagi.prefetch_plans"


def prefetch_plans[Batch, Plan](
    batches: Iterable[Batch],
    make_plan: Callable[[Batch], Plan],
    *,
    depth: int = 2,
    fits: Callable[[Batch, Plan], bool] | None = None,
) -> "PlanPrefetcher[Batch, Plan]":
    """Iterates over ``(batch, make_plan(batch))``, made ahead of time in a background thread.

    For the end of a data loader: ``jaxmagi.plan_context`` needs no device and lets other threads run while
    it searches, so that planning costs no time beside a longer step. The thread starts at once.

    Args:
        batches: the source, iterated in the thread: a list, a generator, an iterator of Grain, ``tf.data`` or
            PyTorch. It must not change a batch that it has given out, as loaders do that refill one buffer.
        make_plan: called in the thread with each batch, in their order. Returns what the step needs: a
            `ContextPlan`, or several of them (of two masks, of the sequences of a batch) in a pytree. It
            should depend on its batch only, for it runs ahead of the consumer by a varying distance. For
            plans that share a compilation it fixes ``num_stages`` (see `jaxmagi.plan_context`).
        depth: how many batches the thread may take from the source beyond those that the consumer has taken.
            They are lost to the source's other users when the prefetcher is closed.
        fits: asked in the consumer, just before a pair is handed out, whether the plan is still that of the
            batch: ``lambda batch, plan: plan.length == batch.shape[0]``. By default nobody asks.

    Returns:
        An iterator that is also a context manager, for one consumer. As with a generator there is nothing
        after an error or a `close`. An error of ``batches`` or of ``make_plan`` is raised for the batch where
        it happened, with its traceback, after all earlier pairs.

    Raises:
        ValueError: ``depth`` is no integer above zero; while iterating: ``fits`` says no, the plan is stale.
        TypeError: ``batches`` is not iterable.

    >>> batches = [[3, 5], [8]]
    >>> def make_plan(lengths):
    ...     return plan_context(masks.documents(lengths), cp_size=2, num_stages=1)
    >>> with prefetch_plans(batches, make_plan) as pairs:
    ...     [(batch, plan.length) for batch, plan in pairs]
    [([3, 5], 8), ([8], 8)]
    """
    depth = integer(depth, "depth", minimum=1)
    pairs = ((batch, make_plan(batch)) for batch in batches)
    return PlanPrefetcher(pairs, depth, fits)


class PlanPrefetcher[Batch, Plan]:
    """What `jaxmagi.prefetch_plans` returns: an iterator of ``(batch, plan)`` that owns a thread.

    The thread ends with the source, at an error (``KeyboardInterrupt`` in ``next`` included), at `close`, at
    the end of a ``with`` block, when the prefetcher is garbage, and when the program exits. It is garbage as
    soon as a loop over it is left, unless something else refers to it. ``batches`` and ``make_plan`` should
    not refer to it, for the thread keeps them alive.
    """

    def __init__(
        self,
        pairs: Iterator[tuple[Batch, Plan]],
        depth: int,
        fits: Callable[[Batch, Plan], bool] | None,
    ):
        self._fits = fits
        self._taken = 0
        self._worker: _Worker[Batch, Plan] = _Worker(pairs, depth)
        weakref.finalize(self, self._worker.end)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, Plan]:
        try:
            pair = self._worker.take()
            self._check(*pair)
        except BaseException:  # KeyboardInterrupt too: a pair may be lost, so none may follow
            self.close()
            raise
        self._taken += 1
        self._worker.turns.put(None)
        return pair

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for it: for the call of the source or of ``make_plan`` that it is in.

        What was planned ahead is dropped. Closing again does nothing.
        """
        self._worker.end()

    def _check(self, batch: Batch, plan: Plan) -> None:
        if self._fits is not None and not self._fits(batch, plan):
            raise ValueError(
                f"the plan of batch {self._taken} (the first is 0), for {_lengths(plan)} tokens, is stale: "
                "fits(batch, plan) is false."
            )


class _Worker[Batch, Plan]:
    """The thread and what it shares with the consumer; without the prefetcher, which can so become garbage.

    The prefetcher's finalizer may run in the middle of any line of any thread. Hence simple queues, whose
    methods never wait for a lock that the interrupted line holds.

    Attributes:
        turns: one for each pair that the thread may make.
        outcomes: pairs, and last of all an exception: ``StopIteration`` if nothing failed.
    """

    def __init__(self, pairs: Iterator[tuple[Batch, Plan]], depth: int):
        self.turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[Batch, Plan] | BaseException] = queue.SimpleQueue()
        self.ending = False
        for _ in range(depth):
            self.turns.put(None)
        # A daemon, because at the exit the program would wait for any other before it calls the finalizer.
        self.thread = threading.Thread(target=self.run, args=(pairs,), name=THREAD_NAME, daemon=True)
        self.thread.start()

    def run(self, pairs: Iterator[tuple[Batch, Plan]]) -> None:
        """What the thread does: a pair for each turn."""
        try:
            while True:
                self.turns.get()
                if self.ending:
                    return
                self.outcomes.put(next(pairs))
        except BaseException as error:
            self.outcomes.put(error)

    def take(self) -> tuple[Batch, Plan]:
        """The next pair; raises the error, or StopIteration, where there is none."""
        outcome = self.outcomes.get()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # an error and a frame that refer to each other would keep batches alive

    def end(self) -> None:
        """Stops the thread, waits for it, and leaves nothing but a StopIteration to take."""
        self.ending = True
        self.turns.put(None)
        if self.thread is threading.current_thread():  # it collects garbage: nobody is left to take anything
            return
        self.thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self.outcomes.get_nowait()
        self.outcomes.put(StopIteration())


def _lengths(plans: Any) -> list[int]:
    """The lengths of all plans in a pytree."""
    leaves = jax.tree.leaves(plans, is_leaf=lambda leaf: isinstance(leaf, ContextPlan))
    return [leaf.length for leaf in leaves if isinstance(leaf, ContextPlan)]
