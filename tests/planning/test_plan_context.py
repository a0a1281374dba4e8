"""Plans of one mask or of several compute every visible cell once and receive every needed row once."""

import doctest
import itertools
import sys
from typing import Any

import jax
import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi.masks import geometry
from jaxmagi.planning import ContextPlan, CostModel, plan_context, plan_contexts, prefetch_plans
from jaxmagi.planning._cost import Pass
from jaxmagi.planning._plan_context import Layout, merge
from jaxmagi.planning._tiles import count_tiles

from ..cases import MaskCase, document_lengths, mask_cases, random_bands
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


def test_equal_masks_in_other_pieces_give_equal_plans() -> None:
    pieces = [[0, 40, 0, 30, -(2**30), 2**30], [0, 40, 30, 80, -(2**30), 2**30], [40, 80, 0, 80, -80, 80]]
    mask = AttnMask.from_bands(pieces, q_len=80, kv_len=80)
    assert_same(plan_context(mask, 4), plan_context(masks.full(80), 4))


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


@pytest.mark.parametrize("seed", range(20))
def test_merge_keeps_the_cells(seed: int) -> None:
    bands = random_bands(np.random.default_rng(seed), 50, 60, 30)
    merged = merge(bands)
    np.testing.assert_array_equal(geometry.to_dense(merged, 50, 60), geometry.to_dense(bands, 50, 60))
    assert len(merged) <= len(bands)


@pytest.mark.parametrize(
    "mask",
    [masks.full(64), masks.causal(64), masks.sliding_window(64, 9, 3)],
    ids=["full", "causal", "window"],
)
def test_merge_restores_a_band_from_its_crops(mask: masks.AttnMask) -> None:
    edges = np.array([0, 5, 6, 20, 41, 64])
    bands = [geometry.crop(np.asarray(mask.bands), q0, q1, 0, 64) for q0, q1 in itertools.pairwise(edges)]
    assert len(merge(np.concatenate(bands))) == 1


def test_merge_keeps_cells_covered_twice() -> None:
    bands = np.array([[0, 4, 0, 4, -9, 9], [0, 4, 2, 6, -9, 9]])
    np.testing.assert_array_equal(geometry.to_dense(merge(bands), 4, 6), geometry.to_dense(bands, 4, 6))


LENGTHS = document_lengths(1 << 16)


FULL, WINDOW = masks.documents(LENGTHS), masks.documents(LENGTHS, inner=(1023, 0))


def weighted_imbalance(weights: tuple[int, int], plans: Any) -> float:
    """Returns the largest over the mean weighted area of the ranks."""
    areas = np.array(weights) @ np.stack([plan.report().area for plan in plans])
    return float(areas.max() / areas.mean())


def weighted_work_imbalance(weights: tuple[int, int], plans: Any, direction: Pass) -> float:
    """Returns the largest over the mean weighted work of the ranks, by the tiles of a pass."""
    tiles = np.stack([count_tiles(plan.bands.reshape(-1, 6), bands_of(plan), direction) for plan in plans])
    work = np.array(weights) @ (tiles @ [1, CostModel().partial_tile_cost])
    return float(work.max() / work.mean())


def bands_of(plan: ContextPlan) -> np.ndarray:
    """Returns the number of bands of each rank."""
    return np.full(plan.cp_size, plan.bands.shape[1])


@pytest.mark.parametrize("weights", [(1, 1), (1, 5), (1, 100), (7, 1)])
def test_the_weighted_sum_is_balanced(weights: tuple[int, int]) -> None:
    """By areas alone the largest work is up to 1.069 of the mean."""
    plans = plan_contexts([FULL, WINDOW], 8, weights=weights, chunk_size=256)
    np.testing.assert_array_equal(plans[0].token_order, plans[1].token_order)
    assert weighted_imbalance(weights, plans) <= 1.0231
    for direction in (CostModel().forward, CostModel().backward):
        assert weighted_work_imbalance(weights, plans, direction) <= 1.024


def test_layouts_for_one_of_the_masks_do_not_balance_the_sum() -> None:
    for first, second in ((FULL, WINDOW), (WINDOW, FULL)):
        layout = plan_context(first, 8, chunk_size=256).token_order
        plans = [plan_context(mask, 8, layout=layout) for mask in (first, second)]
        assert weighted_imbalance((1, 20), sorted(plans, key=lambda plan: -plan.report().area.sum())) > 1.03


def test_weights_are_numbers_of_layers() -> None:
    """A mask with weight 3 is that mask three times."""
    once = plan_contexts([FULL, WINDOW], 4, weights=[1, 3])
    thrice = plan_contexts([FULL, WINDOW, WINDOW, WINDOW], 4)
    np.testing.assert_array_equal(once[0].token_order, thrice[0].token_order)


@pytest.mark.parametrize("weight", [1, 2**30])
def test_one_mask_is_planned_as_alone(weight: int) -> None:
    """Also where a row that travels takes 2**53 cells."""
    for cost in (CostModel(), CostModel(network_gb_per_second=0.01)):
        (plan,) = plan_contexts([FULL], 16, weights=[weight], cost=cost)
        assert_same(plan, plan_context(FULL, 16, cost=cost))


def test_each_mask_may_have_its_own_levels() -> None:
    levels = [True, False]
    plans = plan_contexts([FULL, WINDOW], 8, two_levels=levels, cost=CostModel(ranks_per_host=4))
    assert [plan.two_levels for plan in plans] == levels


@pytest.mark.parametrize("seed", range(30))
def test_plans_of_several_masks_are_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, cp_size, two_levels = int(rng.integers(1, 120)), int(rng.integers(1, 7)), seed % 2 == 1
    cp_size = 2 * cp_size if two_levels else cp_size
    several = [
        AttnMask.from_bands(random_bands(rng, length, length, 8), q_len=length, kv_len=length)
        for _ in range(int(rng.integers(1, 4)))
    ]
    weights = rng.integers(1, 9, len(several)).tolist()
    cost = CostModel(ranks_per_host=2)
    plans = plan_contexts(several, cp_size, weights=weights, two_levels=two_levels, cost=cost)
    for mask, plan in zip(several, plans, strict=True):
        check_plan(mask, plan)


@pytest.mark.parametrize("function", [plan_context, prefetch_plans])
def test_examples_of_docstrings(function: Any) -> None:
    names = {"plan_context": plan_context, "masks": masks}
    result = doctest.testmod(sys.modules[function.__module__], extraglobs=names)
    assert result.attempted > 1 and result.failed == 0


def test_iterators_of_masks_and_weights() -> None:
    several = [masks.causal(64), masks.sliding_window(64, 5)]
    plans = plan_contexts((mask for mask in several), 2, weights=(n for n in (1, 5)))  # pyright: ignore[reportArgumentType]
    for plan, expected in zip(plans, plan_contexts(several, 2, weights=[1, 5]), strict=True):
        assert_same(plan, expected)


@pytest.mark.parametrize(
    ("several", "options", "message"),
    [
        ([], {}, r"at least one, but their lengths are \[\]"),
        ([masks.causal(8), masks.causal(9)], {}, r"lengths are \[8, 9\]"),
        ([masks.causal(8)], {"weights": [1, 2]}, "2 weights for 1 masks"),
        ([masks.causal(8)], {"weights": [0]}, r"weights\[0\] .* 0"),
        ([masks.causal(8)], {"weights": [0.5]}, r"weights\[0\] .* 0.5"),
        ([masks.full(2**30)], {"weights": [9]}, r"weights=\[9\] .* 64 bits"),
        ([masks.causal(4, 8)], {}, "q_len=4 and kv_len=8"),
        ([masks.causal(8)], {"two_levels": [True, False]}, r"two_levels=\[True, False\] for 1 masks"),
        ([masks.causal(8)], {"two_levels": [2]}, 'two_levels must be True, False or "auto", but it is 2'),
        ([masks.causal(8)], {"two_levels": True}, "cp_size=2 is no multiple of cost.ranks_per_host=8"),
        ([masks.causal(8)], {"chunk_size": 9}, "chunk_size .* 9"),
        ([masks.causal(8), 1], {}, r"masks\[1\] must be an AttnMask, but it is 1"),
        (None, {}, "masks must be a list, but it is None"),
        ([masks.causal(8)], {"weights": 3}, "weights must be a list, but it is 3"),
        ([masks.causal(8)], {"cost": 3}, "cost must be a CostModel, but it is 3"),
    ],
)
def test_bad_arguments_for_several_masks(several: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_contexts(several, 2, **options)


def test_too_many_ranks_for_several_masks() -> None:
    with pytest.raises(ValueError, match="cp_size must be between 1 and 4096, but it is 4097"):
        plan_contexts([masks.causal(8)], 4097)
