"""The plan as a pytree, its reports and pictures."""

import functools
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import ContextPlan, CostModel, GroupCastSpec, PlanCapacity, plan_context

from .oracle import check_plan


@pytest.mark.parametrize("two_levels", [False, True])
def test_plan_is_a_pytree_of_int32(two_levels: bool) -> None:
    """Each step of the transfer has two tables."""
    plan = plan_context(masks.causal(100), 4, cost=CostModel(ranks_per_host=2), two_levels=two_levels)
    leaves = jax.tree.leaves(plan)
    assert len(leaves) == 3 + 2 * (1 + two_levels)
    assert all(leaf.dtype == np.int32 for leaf in leaves)
    assert all(leaf.shape[0] in (4, plan.token_order.size) for leaf in leaves)
    assert not any(leaf.flags.writeable for leaf in leaves)


def test_plans_of_a_capacity_share_a_compilation() -> None:
    traces = []

    @jax.jit
    def count(plan: ContextPlan) -> jax.Array:
        traces.append(plan.shard_length)
        return plan.token_order.sum() + plan.bands.sum()

    first = plan_context(masks.documents([60, 40]), 4)
    second = plan_context(masks.documents([30, 70]), 4, capacity=first.capacity)
    count(first)
    count(second)
    assert traces == [first.shard_length]


def test_a_stream_of_masks_compiles_once() -> None:
    """They have one capacity from the beginning on, or capacities that only grow."""
    length = 1 << 11
    stream = [masks.causal(length), masks.sliding_window(length, 63), masks.documents([length // 2] * 2)]
    alone = [plan_context(mask, 8) for mask in stream]
    assert len({plan.capacity for plan in alone}) > 1  # else the test is about nothing
    roomy = alone[0].capacity.union(PlanCapacity(500, 500, 4000, 16000))
    capacity = functools.reduce(PlanCapacity.union, [plan.capacity for plan in alone])
    for plans in (
        [plan_context(mask, 8, capacity=roomy) for mask in stream],
        [plan.pad_to(capacity) for plan in alone],
    ):
        assert len({(plan.capacity, jax.tree.structure(plan)) for plan in plans}) == 1
        for mask, plan in zip(stream, plans, strict=True):
            check_plan(mask, plan)
        check_plan(stream[1], jax.tree.map(lambda leaf: leaf[1], ContextPlan.stack(plans)))


def test_stack_pads_to_the_largest_capacity() -> None:
    examples = [masks.causal(200), masks.documents([1] * 30 + [170]), masks.sliding_window(200, 9)]
    plans = [plan_context(mask, 4) for mask in examples]
    stacked = ContextPlan.stack(plans)
    assert stacked.token_order.shape == (3, plans[0].token_order.size)
    assert stacked.bands.shape == (3, 4, stacked.capacity.bands, 6)
    assert stacked.shard_length == plans[0].shard_length
    for i, mask in enumerate(examples):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        assert one.capacity == stacked.capacity
        check_plan(mask, one)


def test_pad_to_keeps_what_the_plan_does_and_refuses_less() -> None:
    plan = plan_context(masks.documents([50, 14]), 4, chunk_size=4)
    capacity = plan.capacity.union(PlanCapacity(40, 30, 20, 50))
    larger = plan.pad_to(capacity)
    assert larger.capacity == capacity
    for name in ("area", "rows_sent", "rows_received"):
        np.testing.assert_array_equal(getattr(larger.report(), name), getattr(plan.report(), name))
    with pytest.raises(ValueError, match=r"capacity is too small: bands=1 \(needs \d+\)"):
        plan.pad_to(PlanCapacity(1, 30, 20, 50))


def test_pad_to_cuts_off_what_is_unused() -> None:
    mask, cost = masks.documents([50, 14]), CostModel(ranks_per_host=2)
    roomy = PlanCapacity(40, 40, 80, 80)
    for two_levels, room in ((False, roomy), (True, replace(roomy, across=replace(roomy, bands=0)))):
        plan = plan_context(mask, 4, chunk_size=4, cost=cost, two_levels=two_levels)
        used = replace(plan.transfer.used, bands=8)
        large = plan.pad_to(plan.capacity.union(room))
        assert large.capacity == replace(room, ranks_per_host=plan.ranks_per_host)
        for each in (large, ContextPlan.stack([large, large])):
            tight = each.pad_to(used)
            assert tight.capacity == used
        check_plan(mask, large.pad_to(used))


def test_host_arrays_are_read_only() -> None:
    plan = plan_context(masks.causal(100), 4)
    spec = GroupCastSpec.from_splits([[2], [1]], [[[1]], [[]]], [[], [2]], [[], [0]])
    larger = plan.capacity.union(PlanCapacity(200, 200, 200, 200))
    made = (
        plan,
        plan.pad_to(larger),
        plan.pad_to(plan.capacity),
        ContextPlan.stack([plan, plan]),
        spec,
        spec.padded(copies=20, output_rows=30, pair_rows=40),
    )
    assert not any(leaf.flags.writeable for leaf in jax.tree.leaves(made))


def test_stack_errors() -> None:
    plan = plan_context(masks.causal(64), 4)
    with pytest.raises(ValueError, match="at least one"):
        ContextPlan.stack([])
    for other, name in (
        (plan_context(masks.causal(63), 4), "length"),
        (plan_context(masks.causal(64), 2), "cp_size"),
        (plan_context(masks.causal(64), 4, chunk_size=5), "shard_length"),
    ):
        with pytest.raises(ValueError, match=f"differ in {name}"):
            ContextPlan.stack([plan, other])
    with pytest.raises(ValueError, match="stacked or a part"):
        ContextPlan.stack([ContextPlan.stack([plan])])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda plan: ContextPlan.stack([plan, cast("Any", masks.full(4))]),
            r"plans\[1\] must be a ContextPlan, .* Attn",
        ),
        (lambda plan: ContextPlan.stack(plan), "plans must be a list, but it is ContextPlan"),
        (lambda plan: plan.pad_to(None), "capacity must be a PlanCapacity, but it is None"),
        (lambda plan: plan.capacity.union(None), "other must be a PlanCapacity, but it is None"),
        (lambda plan: plan.capacity.require(8), "other must be a PlanCapacity, but it is 8"),
        (lambda plan: plan.report({}), "cost must be a CostModel, but it is {}"),
        (
            lambda plan: plan_context(masks.full(2), 1, layout=cast("Any", [[1], [1, 2]])),
            "layout must be an array, but numpy",
        ),
    ],
)
def test_wrong_types_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(plan_context(masks.causal(64), 4))


@pytest.mark.parametrize("method", ["report", "draw"])
def test_host_methods_refuse_traced_and_stacked_plans(method: str) -> None:
    plan = plan_context(masks.causal(64), 4)

    def call(plan: ContextPlan) -> int:
        getattr(plan, method)()
        return 0

    with pytest.raises(ValueError, match=f"{method} needs .* traced"):
        jax.jit(call)(plan)
    with pytest.raises(ValueError, match="stacked or a part"):
        call(ContextPlan.stack([plan, plan]))
