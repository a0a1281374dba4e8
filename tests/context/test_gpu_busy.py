"""Both passes end, with the same results, where other kernels hold multiprocessors of GPUs for a while."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import CollectiveOptions, masks, plan_context

from ..busy_gpu import Holder, num_multiprocessors
from ..collectives.groups import assert_close, assert_same_bits
from .harness import whole
from .passes import Passes
from .test_gpu import BF16_TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_process")]

type Kind = Literal["forward", "backward", "deterministic backward"]
type Implementation = Literal["native", "nccl"]

LENGTH, HEADS, KV_HEADS, DIM = 8192, 16, 4, 128
TIMEOUT = 60.0
"""Seconds after which a pass that cannot end is an error."""
SECONDS = 0.3
"""How long multiprocessors are held: a pass takes a few milliseconds."""
CALLS, REPETITIONS, SHORT = 50, 12, 0.02
"""Calls that are under way while a kernel comes, how often, and for how many seconds."""
MEETING = 3.0
"""Seconds until kernels that wait for each other give up."""
THREAD = ThreadPoolExecutor(1)
"""Calls passes, for which the host may wait for GPUs."""
FREE = (0, 1, 8, 131)
"""Multiprocessors that are not held: none, one, fewer than a transfer has CTAs, and all of 132 but one."""

ON_TWO_RANKS = pytest.mark.parametrize("cp_size", [2], indirect=True)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", get_args(Implementation.__value__))
KINDS = pytest.mark.parametrize("kind", get_args(Kind.__value__))


@functools.cache
def make_passes(implementation: Implementation, deterministic: bool) -> Passes:
    plan = plan_context(masks.causal(LENGTH), 2)
    options = {
        "collectives": CollectiveOptions(implementation=implementation, timeout=TIMEOUT),
        "deterministic": deterministic,
    }
    return Passes(plan, LENGTH, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, **options)


class Call:
    """Calls of a pass, and what they return."""

    def __init__(self, implementation: Implementation, kind: Kind) -> None:
        passes = make_passes(implementation, kind == "deterministic backward")
        self._run: Callable[[], Any] = passes.forward if kind == "forward" else passes.backward
        self._is_exact = kind != "backward"
        self._expected = self._run()
        self._host_expected = jax.tree.map(whole, self._expected)

    def start(self, calls: int = 1) -> Future[list[Any]]:
        """Returns the results of so many calls, when they are ready."""
        return THREAD.submit(lambda: jax.block_until_ready([self._run() for _ in range(calls)]))

    def check(self, results: list[Any]) -> None:
        """Compares the first and the last with a call on idle GPUs: bit by bit, where sums have an order."""
        for result in (results[0], results[-1]):
            if self._is_exact:
                assert_same_bits(result, self._expected)
            else:
                assert_close(result, self._host_expected, BF16_TOLERANCE)


def hold(stack: ExitStack, free: int) -> list[Holder]:
    """Returns what holds all multiprocessors of each of two GPUs but some."""
    return [
        stack.enter_context(Holder(gpu, max(1, num_multiprocessors(gpu) - free)))
        for gpu in jax.local_devices()[:2]
    ]


@pytest.mark.parametrize("free", [0, 1])
def test_nothing_runs_on_a_multiprocessor_that_is_held(free: int) -> None:
    """A small kernel waits if no multiprocessor is free. Otherwise the other tests would show nothing."""
    gpu = jax.local_devices()[0]
    add, x = jax.jit(lambda x: x + 1), jax.device_put(jnp.zeros(8), gpu)
    jax.block_until_ready(add(x))
    with Holder(gpu, num_multiprocessors(gpu) - free) as holder:
        holder.launch(SECONDS)
        holder.wait_until_held()
        jax.block_until_ready(add(x))
        assert holder.holds_all() == (free > 0)
        holder.wait()
        assert all(slot.end - slot.begin >= SECONDS * 1e9 for slot in holder.slots)


@ON_TWO_RANKS
@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("free", FREE)
@pytest.mark.parametrize("delay", [None, 0.0, SECONDS / 2], ids=["one GPU", "both GPUs", "one GPU later"])
def test_held_before_the_pass(
    cp_size: int, implementation: Implementation, kind: Kind, free: int, delay: float | None
) -> None:
    """The first GPU is held when the pass is launched, the second one never, as well, or from a moment on."""
    call = Call(implementation, kind)
    with ExitStack() as stack:
        first, second = hold(stack, free)
        before = [first, second] if delay == 0 else [first]
        for holder in before:
            holder.launch(SECONDS)
        for holder in before:
            holder.wait_until_held()
        results = call.start()
        if delay:
            time.sleep(delay)
            second.launch(SECONDS)
        call.check(results.result())
        if free == 0:
            assert not first.holds_all(), "the pass ended while it had no multiprocessor of the first GPU"


@ON_TWO_RANKS
@IMPLEMENTATIONS
@KINDS
def test_held_in_the_middle(
    cp_size: int, implementation: Implementation, kind: Kind, rng: np.random.Generator
) -> None:
    """Both GPUs are held at random moments of several calls, mostly while these are under way."""
    call = Call(implementation, kind)
    call.start(CALLS).result()
    begin = time.monotonic()
    call.start(CALLS).result()
    duration = time.monotonic() - begin
    were_running = 0
    with ExitStack() as stack:
        holders = [hold(stack, free) for free in FREE]
        for _ in range(REPETITIONS):
            both = rng.permutation(np.array(holders[rng.integers(len(FREE))], object))
            results = call.start(CALLS)
            for holder, delay in zip(both, rng.uniform(0, duration / 4, 2), strict=True):
                time.sleep(delay)
                holder.launch(SHORT)
            were_running += not results.done()
            call.check(results.result())
            for holder in both:
                holder.wait()
    assert were_running >= REPETITIONS / 2


@ON_TWO_RANKS
@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("count", [32, None], ids=["32", "all"])
def test_kernels_that_wait_for_each_other(
    cp_size: int, implementation: Implementation, kind: Kind, count: int | None
) -> None:
    """Each GPU has a kernel that waits for the other's, as those of a collective beside the pass do.

    That of the first GPU comes before the pass, that of the second one when the pass is under way. If CTAs
    on the second GPU kept all multiprocessors until a transfer has come from the first one, where it finds
    none, nothing would go on.
    """
    call = Call(implementation, kind)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Holder(gpu, count or num_multiprocessors(gpu)))
            for gpu in jax.local_devices()[:2]
        )
        first.launch(MEETING, partner=second)
        first.wait_until_held()
        results = call.start()
        time.sleep(MEETING / 10)
        assert first.holds_all()
        second.launch(MEETING, partner=first)
        call.check(results.result())
        for holder in (first, second):
            holder.wait()
            assert all(slot.has_met for slot in holder.slots)
