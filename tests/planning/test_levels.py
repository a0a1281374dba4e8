"""Plans that take two levels by themselves: when they do, what they predict, and how a stream keeps to it."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi._native import planner
from jaxmagi.planning import ContextPlan, CostModel, PlanCapacity, RelayedSpec, plan_context, plan_contexts
from jaxmagi.planning._levels import OneLevel, TwoLevels

from ..cases import document_lengths
from .oracle import assert_same, check_plan

CP, LENGTH = 8, 1 << 15
HOSTS = CostModel(ranks_per_host=4)
SLOW = CostModel(ranks_per_host=4, network_gb_per_second=3.0)
FREE = CostModel(ranks_per_host=4, network_gb_per_second=1e6, network_latency_us=0)
MASKS = {
    "documents": masks.documents(document_lengths(LENGTH)),
    "causal": masks.causal(LENGTH),
    "window": masks.sliding_window(LENGTH, 1023),
    "shared prefix": masks.shared_prefix(1 << 12, [1 << 12] * 7),
}


def seconds(plan: ContextPlan, cost: CostModel) -> float:
    report = plan.report(cost)
    return report.predicted_seconds + report.predicted_backward_seconds


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("cost", [HOSTS, SLOW, FREE], ids=["default", "slow", "free"])
@pytest.mark.parametrize("name", MASKS)
def test_auto_is_what_is_predicted_to_be_faster(name: str, cost: CostModel, num_kv_heads: int) -> None:
    """One key head makes one part, so that nothing hides a transfer."""
    cost = replace(cost, num_kv_heads=num_kv_heads, num_heads=8 * num_kv_heads)
    auto, one, two = (
        plan_context(MASKS[name], CP, cost=cost, two_levels=levels) for levels in ("auto", False, True)
    )
    assert (one.two_levels, two.two_levels) == (False, True)
    assert auto.two_levels == (seconds(two, cost) <= 0.99 * seconds(one, cost))
    assert_same(auto, two if auto.two_levels else one)


@pytest.mark.parametrize("cost", [HOSTS, SLOW, FREE], ids=["default", "slow", "free"])
@pytest.mark.parametrize("name", MASKS)
def test_the_planner_predicts_what_the_report_does(name: str, cost: CostModel) -> None:
    """It compares times before there are tables of either plan."""
    one, two = (plan_context(MASKS[name], CP, cost=cost, two_levels=levels) for levels in (False, True))
    routing = planner().Routing(np.asarray(MASKS[name].bands), one.token_order, CP)
    direct = OneLevel(routing, one.shard_length, cost)
    assert direct.seconds() == pytest.approx(seconds(one, cost), rel=1e-9)
    assert TwoLevels(direct).seconds() == pytest.approx(seconds(two, cost), rel=1e-9)


def test_both_choices_are_taken() -> None:
    assert plan_context(MASKS["shared prefix"], CP, cost=SLOW).two_levels
    assert not plan_context(MASKS["shared prefix"], CP, cost=FREE).two_levels


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5, 6, 7, 9])
def test_never_with_one_host_or_with_a_part_of_a_host(cp_size: int) -> None:
    plan = plan_context(MASKS["shared prefix"], cp_size, cost=SLOW, layout="contiguous")
    assert (plan.two_levels, plan.ranks_per_host) == (False, None)


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["documents", "window", "causal"])
def test_plans_are_right(name: str, ranks_per_host: int) -> None:
    mask = {
        "documents": masks.documents([300, 200, 12]),
        "window": masks.sliding_window(512, 90),
        "causal": masks.causal(512),
    }[name]
    cost = CostModel(ranks_per_host=ranks_per_host)
    plan = plan_context(mask, CP, cost=cost, two_levels=True, chunk_size=16)
    assert plan.ranks_per_host == ranks_per_host
    check_plan(mask, plan)


@pytest.mark.parametrize("name", MASKS)
def test_it_is_the_plan_by_host_of_the_one_with_one_level(name: str) -> None:
    one, two = (plan_context(MASKS[name], CP, cost=HOSTS, two_levels=levels) for levels in (False, True))
    assert_same(two, one.by_host(4))
    assert_same(two.by_host(4), two)


def test_both_steps_of_a_part_come_before_the_next_part(small_parts: None) -> None:
    """Two rows of rank 0 go to both ranks of the other host, and from its relay to the other one.

    There are two parts. Only latencies take time: 1 ms within hosts, 3 ms between them, and 0.5 ms for the
    attention of a part.
    """
    mask = AttnMask.from_bands([[4, 8, 0, 2, -8, 8], [0, 4, 0, 4, -8, 8]], q_len=8, kv_len=8)
    cost = CostModel(
        ranks_per_host=2, latency_us=1000, network_latency_us=3000, memory_gb_per_second=1e9, tflops=1e3,
        link_gb_per_second=1e9, network_gb_per_second=1e9, backward_tflops=1e3, num_heads=16, num_kv_heads=2,
    )  # fmt: skip
    one, two = (
        plan_context(mask, 4, layout="contiguous", cost=cost, two_levels=levels) for levels in (False, True)
    )
    # One level: keys of the own host come beside those that cross in 3 ms, so that the parts have theirs at
    # 3 and 6 ms, and the second one computes until 6.5 ms. Gradients wait until all keys are there, at 6 ms.
    # The gradients of a part take 3 ms across and then 1 ms to owners of the own host, who do not read them
    # beside what crosses: until 10 and 14 ms.
    # Two levels: 1 ms inside the host follows, so that parts have their keys at 4 and 8 ms. Gradients take
    # 1 ms inside the host before they cross: until 13 and 18 ms.
    times = [
        (p.predicted_seconds, p.predicted_backward_seconds) for p in (one.report(cost), two.report(cost))
    ]
    np.testing.assert_allclose(times, [[6.5e-3, 14e-3], [8.5e-3, 18e-3]], rtol=1e-3)


def test_copies_inside_hosts_take_time() -> None:
    """Rows of the step across all ranks are copied, and so are their gradients: in 1 GB/s of memory.

    Transfers follow each other without a break, because attention takes less time than they do.
    """
    mask = masks.causal(1 << 10)
    plan = plan_context(mask, 4, layout="contiguous", cost=CostModel(ranks_per_host=2), two_levels=True)
    slow, fast = (plan.report(CostModel(ranks_per_host=2, memory_gb_per_second=speed)) for speed in (1, 1e9))
    spec = plan.transfer
    assert isinstance(spec, RelayedSpec)
    sides = spec.across.sends, spec.across.receives
    peers, rows = (np.stack([table[..., column] for table in sides]) for column in (0, 3))
    is_near = peers // 2 == np.arange(4)[:, None] // 2
    busiest = sum(rows.sum(axis=-1, where=chosen).max() for chosen in (is_near, ~is_near))
    cost = CostModel()
    keys, gradients = (2 * busiest * size / 1e9 for size in (cost.row_bytes, cost.gradient_row_bytes))
    assert slow.predicted_seconds - fast.predicted_seconds == pytest.approx(keys, rel=1e-6)
    more = slow.predicted_backward_seconds - fast.predicted_backward_seconds
    assert more == pytest.approx(keys + gradients, rel=1e-6)


def test_a_stream_keeps_to_the_first_plan() -> None:
    """Masks that would choose otherwise share a compilation, by one argument or by a capacity."""
    stream = [MASKS["shared prefix"], MASKS["window"], MASKS["documents"]]
    alone = [plan_context(mask, CP, cost=SLOW) for mask in stream]
    assert {plan.two_levels for plan in alone} == {False, True}  # else the test is about nothing
    for first in (alone[0], next(plan for plan in alone if not plan.two_levels)):
        plans = [plan_context(mask, CP, two_levels=first.two_levels, cost=SLOW) for mask in stream]
        capacity = first.capacity
        for plan in plans:
            capacity = capacity.union(plan.capacity)
        padded = [plan.pad_to(capacity) for plan in plans]
        by_capacity = [plan_context(mask, CP, cost=SLOW, capacity=capacity) for mask in stream]
        assert len({(plan.capacity, jax.tree.structure(plan)) for plan in (*padded, *by_capacity)}) == 1
        for plan, other in zip(padded, by_capacity, strict=True):
            assert_same(plan, other)
        assert ContextPlan.stack(plans).two_levels == first.two_levels


def test_masks_of_layers() -> None:
    chosen = [MASKS["shared prefix"], masks.documents([8] * (LENGTH // 8))]
    auto = plan_contexts(chosen, CP, cost=SLOW)
    assert [plan.two_levels for plan in auto] == [True, False]
    again = plan_contexts(chosen, CP, two_levels=[plan.two_levels for plan in auto], cost=SLOW)
    for plan, other in zip(auto, again, strict=True):
        assert_same(plan, other)
    assert [plan.two_levels for plan in plan_contexts(chosen, CP, two_levels=False, cost=SLOW)] == [False] * 2
    with pytest.raises(ValueError, match=r"got two_levels=\[True\] for 2 masks"):
        plan_contexts(chosen, CP, two_levels=[True], cost=SLOW)


def test_mismatches() -> None:
    mask = masks.causal(512)
    one, two = (plan_context(mask, CP, cost=HOSTS, two_levels=levels) for levels in (False, True))
    pairs = plan_context(mask, CP, cost=CostModel(ranks_per_host=2), two_levels=True)
    room = PlanCapacity(99, 99, 999, 999)
    roomy = replace(room, across=replace(room, bands=0), ranks_per_host=4)
    for call, message in (
        (lambda: one.pad_to(two.capacity), "two levels do not go with others: .* two_levels=plan.two_levels"),
        (lambda: two.pad_to(one.capacity), "two levels do not go with others"),
        (lambda: pairs.pad_to(two.capacity), "ranks_per_host=4 and ranks_per_host=2 share no compilation"),
        (lambda: pairs.pad_to(roomy), "ranks_per_host=4 and ranks_per_host=2 share no compilation"),
        (lambda: ContextPlan.stack([one, two]), r"differ in ranks_per_host: \[None, 4\]: give .*two_levels"),
        (
            lambda: plan_context(mask, CP, cost=HOSTS, two_levels=True, capacity=one.capacity),
            "two_levels=True, but the capacity is for plans with two_levels=False",
        ),
        (
            lambda: plan_context(mask, CP, cost=HOSTS, two_levels=False, capacity=two.capacity),
            "two_levels=False, but the capacity is for plans with two_levels=True",
        ),
        (
            lambda: plan_context(mask, CP, cost=HOSTS, capacity=pairs.capacity),
            "for plans with ranks_per_host=2, but cost.ranks_per_host=4",
        ),
        (
            lambda: plan_context(mask, 6, cost=HOSTS, two_levels=True),
            "cp_size=6 is no multiple of cost.ranks_per_host=4",
        ),
        (
            lambda: plan_context(mask, 6, cost=HOSTS, capacity=two.capacity),
            "cp_size=6 is no multiple of cost.ranks_per_host=4",
        ),
        (lambda: PlanCapacity(8, 8, 8, 8, ranks_per_host=2), "ranks_per_host=2 needs across"),
        (
            lambda: PlanCapacity(8, 8, 8, 8, across=PlanCapacity(0, 8, 8, 8), ranks_per_host=0),
            "PlanCapacity.ranks_per_host must be between 1 and .* it is 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_capacity_of_two_levels_that_is_too_small() -> None:
    mask = masks.causal(512)
    small = plan_context(masks.sliding_window(512, 3), CP, cost=HOSTS, two_levels=True).capacity
    with pytest.raises(ValueError, match=r"too small: .*across.output_rows=\d+ \(needs \d+\)"):
        plan_context(mask, CP, cost=HOSTS, capacity=small)


@pytest.mark.parametrize("two_levels", ["yes", 1, None])
def test_two_levels_is_true_or_false_or_auto(two_levels: Any) -> None:
    with pytest.raises(
        ValueError, match=rf'two_levels must be True, False or "auto", but it is {two_levels!r}'
    ):
        plan_context(masks.causal(512), CP, two_levels=two_levels)
