"""Plans compute every visible cell once and receive every needed row once."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi.planning import ContextPlan, CostModel, PlanCapacity, plan_context
from jaxmagi.planning._compiled import planner
from jaxmagi.planning._plan_context import Layout

from ..cases import MaskCase, document_lengths, mask_cases
from .lpt import chunk_areas, largest_first_owners
from .oracle import (
    NAMED_LAYOUTS,
    assert_same,
    builder_masks,
    check_plan,
    check_rows,
)

BUILDERS = builder_masks()
SQUARE_CASES = [case for case in mask_cases() if case.q_len == case.kv_len]
HOSTS = CostModel(ranks_per_host=2)
DENSE_LENGTH = 2100


def case_mask(case: MaskCase) -> AttnMask:
    return AttnMask.from_slices(
        case.q_ranges,
        case.k_ranges,
        case.mask_types,
        q_len=case.q_len,
        kv_len=case.kv_len,
        check=not case.overlaps,
    )


@pytest.mark.parametrize("two_levels", [False, True])
@pytest.mark.parametrize("case", SQUARE_CASES, ids=lambda case: case.name)
def test_public_masks(case: MaskCase, two_levels: bool) -> None:
    mask = case_mask(case)
    plan = plan_context(mask, 4, two_levels=two_levels, cost=HOSTS)
    check_rows(mask, plan)
    if case.q_len <= DENSE_LENGTH:
        check_plan(mask, plan)


@pytest.mark.parametrize("layout", NAMED_LAYOUTS)
@pytest.mark.parametrize("name", BUILDERS)
def test_builder_masks(name: str, layout: Layout) -> None:
    mask = BUILDERS[name]
    check_plan(mask, plan_context(mask, 2, layout=layout))
    for cp_size, two_levels in ((1, False), (3, False), (4, True), (8, False), (8, True)):
        check_plan(mask, plan_context(mask, cp_size, layout=layout, two_levels=two_levels, cost=HOSTS))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 33])
@pytest.mark.parametrize("name", ["causal", "two_sided_window", "causal_documents", "shared_prefix"])
def test_chunk_sizes(name: str, chunk_size: int) -> None:
    mask = BUILDERS[name]
    plan = plan_context(mask, 4, chunk_size=chunk_size)
    check_plan(mask, plan)
    chunks = -(-mask.q_len // chunk_size)
    assert plan.shard_length == -(-chunks // 4) * chunk_size


@pytest.mark.parametrize("length", [0, 1, 2, 7])
@pytest.mark.parametrize("layout", NAMED_LAYOUTS)
def test_short_sequences(length: int, layout: Layout) -> None:
    mask = masks.causal(length)
    for two_levels in (False, True, "auto"):
        check_plan(mask, plan_context(mask, 4, layout=layout, two_levels=two_levels, cost=HOSTS))


@pytest.mark.parametrize("layout", NAMED_LAYOUTS)
def test_empty_masks(layout: Layout) -> None:
    mask = AttnMask.from_bands(np.zeros((0, 6), np.int32), q_len=100, kv_len=100)
    plan = plan_context(mask, 4, layout=layout)
    check_plan(mask, plan)
    report = plan.report()
    assert (report.imbalance, report.predicted_seconds, report.predicted_backward_seconds) == (1.0, 0.0, 0.0)


def test_overlapping_bands_keep_their_counts() -> None:
    bands = [[0, 60, 0, 60, -(2**30), 0], [10, 50, 0, 60, -9, 3], [10, 50, 0, 60, -9, 3]]
    mask = AttnMask.from_bands(bands, q_len=60, kv_len=60, check=False)
    for two_levels in (False, True):
        check_plan(mask, plan_context(mask, 4, chunk_size=7, two_levels=two_levels, cost=HOSTS))


@pytest.mark.parametrize("name", ["causal", "causal_documents", "shared_prefix"])
def test_token_order_is_a_layout(name: str) -> None:
    mask = BUILDERS[name]
    plan = plan_context(mask, 4)
    assert_same(plan_context(mask, 4, layout=plan.token_order), plan)


NETWORK = CostModel(ranks_per_host=4)
COMPARED = {
    "documents": masks.documents(document_lengths(1 << 17)),
    "full documents": masks.documents(document_lengths(1 << 17), inner="full"),
    "causal": masks.causal(1 << 17),
    "window": masks.sliding_window(1 << 17, 4095),
    "video": masks.video(32, 4096, 4),
    "shared prefix": masks.shared_prefix(1 << 13, [1 << 12] * 30),
}


@pytest.mark.parametrize("cp_size", [8, 16])
@pytest.mark.parametrize("name", COMPARED)
def test_no_slower_than_chunks_assigned_largest_first(name: str, cp_size: int) -> None:
    """Both passes together, with a network between hosts of four ranks; by area alone takes up to 9 times."""
    mask, chunk = COMPARED[name], 512
    areas = chunk_areas(np.asarray(mask.bands), chunk, mask.q_len // chunk)
    owners = largest_first_owners(areas, cp_size).astype(np.int32)
    order = planner().token_order(owners, mask.q_len, cp_size, chunk)

    def seconds(**options: Any) -> float:
        report = plan_context(mask, cp_size, cost=NETWORK, **options).report(NETWORK)
        return report.predicted_seconds + report.predicted_backward_seconds

    assert seconds(chunk_size=chunk) <= 1.01 * seconds(layout=order)


def test_senders_of_a_long_document_are_spread() -> None:
    """Its first keys go to all who compute it: whoever owned them alone would send for everybody."""
    mask = masks.documents(document_lengths(1 << 20))
    plan = plan_context(mask, 64, chunk_size=512)
    report = plan.report()
    assert report.rows_sent.max() <= 2 * report.rows_sent.mean()
    fast = plan_context(mask, 64, chunk_size=512, cost=CostModel(network_gb_per_second=1e6))
    assert fast.report().rows_sent.max() > 2.5 * fast.report().rows_sent.mean()
    assert fast.report().rows_received.mean() < report.rows_received.mean()


def test_receivers_of_a_long_document_are_spread() -> None:
    """With many ranks it takes a price: few rows in all say nothing about who receives them."""
    mask = masks.documents(document_lengths(1 << 23, seed=0))
    report = plan_context(mask, 512, chunk_size=512).report()
    assert report.rows_received.max() < 2.1 * report.rows_received.mean()


def test_senders_within_a_host_are_spread_where_nothing_hides_a_transfer() -> None:
    """With one key head there is one part, and attention waits for all keys."""
    cost = CostModel(num_heads=8, num_kv_heads=1)
    mask = masks.documents(document_lengths(1 << 16))
    spread, fewest = (
        plan_context(mask, 4, cost=planned).report(cost)
        for planned in (cost, replace(cost, link_gb_per_second=1e6))
    )
    assert spread.rows_sent.max() < 0.7 * fewest.rows_sent.max()
    assert spread.predicted_seconds < 0.98 * fewest.predicted_seconds


def test_equal_masks_in_other_pieces_give_equal_plans() -> None:
    pieces = [[0, 40, 0, 30, -(2**30), 2**30], [0, 40, 30, 80, -(2**30), 2**30], [40, 80, 0, 80, -80, 80]]
    mask = AttnMask.from_bands(pieces, q_len=80, kv_len=80)
    assert_same(plan_context(mask, 4), plan_context(masks.full(80), 4))


def test_chunks_of_a_rank_ascend() -> None:
    plan = plan_context(masks.causal(1024), 4, chunk_size=32)
    assert (np.diff(plan.token_order.reshape(4, -1), axis=1) > 0).all()


def test_small_chunks_are_assigned_in_groups() -> None:
    mask = masks.documents(document_lengths(131072))
    coarse, fine = (plan_context(mask, 8, chunk_size=chunk) for chunk in (1024, 64))
    np.testing.assert_array_equal(fine.token_order, coarse.token_order)


def test_small_chunks_are_assigned_singly_where_groups_differ() -> None:
    mask = masks.documents([100] + [1] * 412, inner="full")
    plan = plan_context(mask, 4, chunk_size=1)
    assert plan.report().imbalance < 1.02  # groups of 8: 1.23


@pytest.mark.parametrize("chunk_size", [None, 13, 16])
def test_windows_exchange_halos_only(chunk_size: int | None) -> None:
    plan = plan_context(masks.sliding_window(1 << 16, 511), 8, chunk_size=chunk_size)
    report = plan.report()
    assert report.rows_received.max() == 511
    assert report.imbalance < 1.01


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


def bad_layout(*tokens: int) -> dict:
    return {"layout": np.array(tokens, np.int32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 0}, "cp_size must be between 1 and 4096, but it is 0"),
        ({"cp_size": 2**30}, "cp_size must be between 1 and 4096, but it is 1073741824"),
        ({"cp_size": 2.0}, "cp_size .* 2.0"),
        ({"chunk_size": 0}, "chunk_size .* 0"),
        ({"chunk_size": True}, "chunk_size must be an integer, but it is True"),
        ({"chunk_size": 3}, r"at most .* ceil\(4 / 2\) = 2, but it is 3"),
        ({"capacity": (8, 8, 8, 8)}, r"capacity must be a PlanCapacity, but it is \(8, 8"),
        ({"cost": 600.0}, "cost must be a CostModel, but it is 600.0"),
        ({"chunk_size": 4, "layout": "zigzag"}, "chunk_size is for"),
        ({"layout": "ring"}, "'ring'"),
        (bad_layout(0, 1, 2), "3 positions"),
        (bad_layout(), "0 positions"),
        (bad_layout(0, 1, 2, 9), "layout has 9"),
        (bad_layout(0, 1, 2, -2), "layout has -2"),
        (bad_layout(0, 1, 2, 2), "token 2 2 times"),
        (bad_layout(0, 1, 2, -1), "token 3 0 times"),
        ({"layout": np.zeros(4)}, "float64"),
        ({"layout": np.zeros((2, 2), int)}, r"\[2, 2\]"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_context(masks.causal(4), **{"cp_size": 2, **arguments})


def test_padded_length_beyond_the_indices() -> None:
    with pytest.raises(ValueError, match=r"at most 1073741824 positions, .* but has 1073741826"):
        plan_context(masks.full(2**30), 3, layout="contiguous")


def test_too_many_pieces() -> None:
    order = np.random.default_rng(0).permutation(8192).astype(np.int32)
    with pytest.raises(NotImplementedError, match=r"into \d+, more than 4194304: .* longer runs"):
        plan_context(masks.full(8192), 2, layout=order)


def test_bad_masks() -> None:
    with pytest.raises(ValueError, match="q_len=4 and kv_len=8"):
        plan_context(masks.causal(4, 8), 2)
    with pytest.raises(ValueError, match=r"AttnMask\.concatenate"):
        plan_context(AttnMask.stack([masks.causal(4), masks.full(4)]), 2)
    with pytest.raises(ValueError, match="ndarray"):
        plan_context(np.zeros((4, 4)), 2)  # pyright: ignore[reportArgumentType]


def test_traced_mask() -> None:
    def plan_inside_jit(mask: AttnMask) -> ContextPlan:
        return plan_context(mask, 2)

    with pytest.raises(ValueError, match=r"mask is traced"):
        jax.jit(plan_inside_jit)(masks.causal(8))
