"""Several masks on one layout, for models whose layers differ."""

import doctest
import sys
from typing import Any

import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi.planning import ContextPlan, CostModel, plan_context, plan_contexts, prefetch_plans
from jaxmagi.planning._cost import Pass
from jaxmagi.planning._schedule import count_tiles

from ..cases import document_lengths, random_bands
from .oracle import assert_same, check_plan

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
def test_every_plan_is_right(seed: int) -> None:
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


@pytest.mark.parametrize("function", [plan_context, plan_contexts, prefetch_plans])
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
def test_bad_arguments(several: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_contexts(several, 2, **options)


def test_too_many_ranks() -> None:
    with pytest.raises(ValueError, match="cp_size must be between 1 and 4096, but it is 4097"):
        plan_contexts([masks.causal(8)], 4097)
