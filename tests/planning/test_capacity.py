"""Static sizes: how they are rounded, what is large enough, and what is too large."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import ContextPlan, CostModel, PlanCapacity, RelayedSpec, plan_context
from jaxmagi.planning._capacity import bucket

from .oracle import check_plan


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 8, 9, 16, 17, 33, 1000)] == [8, 8, 9, 16, 18, 36, 1024]
    sizes = np.arange(1, 5000)
    rounded = np.array([bucket(int(n)) for n in sizes])
    assert (rounded >= sizes).all()
    assert (rounded[sizes > 8] <= 1.125 * sizes[sizes > 8]).all()
    assert len(set(rounded[sizes >= 2048])) <= 12


def test_capacity_is_used_exactly() -> None:
    mask = masks.documents([300, 200, 12])
    needed = plan_context(mask, 4).capacity
    larger = PlanCapacity(needed.bands + 5, needed.copies + 5, needed.pair_rows + 5, 700)
    plan = plan_context(mask, 4, capacity=larger)
    assert plan.capacity == larger
    check_plan(mask, plan)


@pytest.mark.parametrize("name", ["bands", "copies", "pair_rows", "output_rows"])
def test_capacity_too_small(name: str) -> None:
    capacity = replace(PlanCapacity(99, 99, 999, 999), **{name: 1})
    with pytest.raises(ValueError, match=rf"{name}=1 \(needs \d+\)"):
        plan_context(masks.causal(500), 4, chunk_size=16, capacity=capacity)


HUGE = PlanCapacity(2**30, 8, 8, 8)


@pytest.mark.parametrize(
    ("capacity", "taken"),
    [
        (HUGE, 2 * 4 * (2**30 * 6 + 8 * 9)),
        (PlanCapacity(8, 2**30, 8, 8), 2 * 4 * (8 * 6 + 2**30 * 9)),
        (replace(HUGE, bands=8, across=replace(HUGE, bands=0, copies=2**30)), 8 * (48 + 9 * (8 + 2**30))),
    ],
)
def test_capacity_too_large(capacity: PlanCapacity, taken: int) -> None:
    """The last is that of plans with two levels."""
    message = f"capacity is too large: .* the tables of 2 ranks take {taken} bytes, more than 4294967296"
    cost = CostModel(ranks_per_host=1)
    with pytest.raises(ValueError, match=message):
        plan_context(masks.causal(4), 2, capacity=capacity, cost=cost)
    plan = plan_context(masks.causal(4), 2, two_levels=capacity.across is not None, cost=cost)
    with pytest.raises(ValueError, match=message):
        plan.pad_to(capacity)


def test_stacked_plans_count_together() -> None:
    plan = plan_context(masks.causal(4), 2)
    capacity = PlanCapacity(2**24, 8, 8, 8)
    capacity.check_tables(2)
    with pytest.raises(ValueError, match="capacity is too large"):
        ContextPlan.stack([plan] * 6).pad_to(capacity)


@pytest.mark.parametrize("value", [-1, 2.0, True, 2**30 + 1])
def test_capacity_refuses_nonsense(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"PlanCapacity.copies must be .* but it is {value}"):
        PlanCapacity(8, value, 8, 8)


def test_capacities_of_the_other_kind() -> None:
    plan = plan_context(masks.causal(512), 8)
    relayed = plan.by_host(4)
    for call in (
        lambda: plan.pad_to(relayed.capacity),
        lambda: relayed.pad_to(plan.capacity),
        lambda: plan_context(masks.causal(512), 8, capacity=relayed.capacity),
        lambda: ContextPlan.stack([plan.pad_to(plan.capacity), relayed]),
    ):
        with pytest.raises(ValueError, match=r"by_host|ranks_per_host"):
            call()
    with pytest.raises(ValueError, match=r"differ in ranks_per_host: \[4, 2\]"):
        ContextPlan.stack([relayed, plan.by_host(2)])
    small = relayed.capacity.across
    assert small is not None
    with pytest.raises(ValueError, match=r"too small: across.pair_rows=1 \(needs \d+\)"):
        spec = relayed.transfer
        assert isinstance(spec, RelayedSpec)
        spec.padded(
            copies=64,
            output_rows=512,
            pair_rows=512,
            across=PlanCapacity(0, small.copies, 1, small.output_rows),
        )
    with pytest.raises(
        ValueError, match=r"PlanCapacity.across must be None or a PlanCapacity without across"
    ):
        PlanCapacity(8, 8, 8, 8, across=relayed.capacity)
