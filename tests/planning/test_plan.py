"""The plan as a pytree, its reports and pictures."""

import builtins
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi.masks.geometry import UNBOUNDED
from jaxmagi.planning import ContextPlan, CostModel, GroupCastSpec, PlanCapacity, RelayedSpec, plan_context

from .oracle import builder_masks, check_plan


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    matplotlib.use("agg")
    yield
    plt.close("all")


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


def test_plan_of_device_arrays_reports_the_same() -> None:
    plan = plan_context(masks.causal(100), 4)
    device = jax.tree.map(jax.numpy.asarray, plan)
    np.testing.assert_array_equal(device.report().area, plan.report().area)


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


def test_report_of_a_known_plan() -> None:
    report = plan_context(masks.causal(8), 2, layout="contiguous").report()
    np.testing.assert_array_equal(report.area, [10, 26])
    assert report.imbalance == pytest.approx(26 / 18)
    np.testing.assert_array_equal(report.rows_sent, [4, 0])
    np.testing.assert_array_equal(report.rows_received, [0, 4])
    assert report.redundant_rows == 0


def test_report_of_modelled_work() -> None:
    """Tiles are 24 x 80 forward and 80 x 128 backward; 384 rows see 768 keys, as many others see 80."""
    bands = np.array([[0, 384, 0, 768], [384, 768, 384, 464]], np.int32)
    anywhere = np.array([[-UNBOUNDED, UNBOUNDED]] * 2, np.int32)
    mask = AttnMask.from_bands(np.concatenate([bands, anywhere], axis=1), q_len=768, kv_len=768)
    plan = plan_context(mask, 2, layout="contiguous")
    report = plan.report(CostModel(partial_tile_cost=1.5, latency_us=0))
    work, backward_work = [16 * (9 + 1.5), 16 * 1], [6 * (4 + 1.5), 5 * 1.5]
    assert report.imbalance == pytest.approx(768 / np.mean([768, 80]))
    assert report.work_imbalance == pytest.approx(work[0] / np.mean(work))
    assert report.backward_work_imbalance == pytest.approx(backward_work[0] / np.mean(backward_work))


@pytest.mark.parametrize(("keys", "redundant"), [(4, 4), (5, 3), (8, 0)])
def test_report_counts_rows_that_nobody_sees(keys: int, redundant: int) -> None:
    """The first four keys of rank 1 are its own, and four more come from rank 0."""
    plan = plan_context(masks.causal(8), 2, layout="contiguous")
    bands = np.array(plan.bands)
    bands[1] = masks.geometry.crop(bands[1], 0, 4, 0, keys)
    assert replace(plan, bands=bands).report().redundant_rows == redundant


@pytest.mark.parametrize("dst_row", [0, 4])
def test_report_counts_rows_that_one_transfer_sends_twice(dst_row: int) -> None:
    """Rank 0 sends its four rows to rank 1 in two ranges, to the same rows or to others."""
    plan = plan_context(masks.causal(8), 2, layout="contiguous")
    sends = np.zeros((2, 2, 5), np.int32)
    sends[0] = [[1, 0, 0, 4, 0], [1, 4, 0, 4, dst_row]]
    assert isinstance(plan.transfer, GroupCastSpec)
    twice = replace(plan, transfer=replace(plan.transfer, sends=sends))
    assert (plan.report().redundant_rows, twice.report().redundant_rows) == (0, 4)
    assert (plan.by_host(2).report().redundant_rows, twice.by_host(2).report().redundant_rows) == (0, 4)


def test_report_counts_rows_that_cross_to_a_host_twice() -> None:
    """Rank 0 sends a row to both ranks of the other host, of which one hands it to the other one, too."""
    plan = plan_context(masks.full(4), 4, layout="contiguous").by_host(2)
    (relay,) = _of_rank_0(plan)[_of_rank_0(plan)[:, 0] > 1, 0]
    assert _redundant_with_one_more(plan, [5 - relay, 0, 0, 1, _UNUSED_ROW]) == 1


def test_report_counts_rows_of_the_own_host_that_nobody_asked_for() -> None:
    """Rank 0 sends rank 1 a row more: one that rank 1 does not see, or one that it gets already."""
    sees = masks.AttnMask.from_bands([[2, 4, 0, 1, -4, 4]], q_len=4, kv_len=4)
    for mask in (sees, masks.full(4)):
        plan = plan_context(mask, 4, layout="contiguous").by_host(2)
        assert (_of_rank_0(plan)[:, 0] == 1).any() == (mask is not sees)
        assert _redundant_with_one_more(plan, [1, 0, 0, 1, _UNUSED_ROW]) == 1


_UNUSED_ROW = 7  # of those that the step across all ranks brings


def _of_rank_0(plan: ContextPlan) -> np.ndarray:
    """The sends of rank 0 in the step across all ranks."""
    assert isinstance(plan.transfer, RelayedSpec)
    sends = np.asarray(plan.transfer.across.sends[0])
    return sends[sends[:, 3] > 0]


def _redundant_with_one_more(plan: ContextPlan, send: list[int]) -> int:
    """The redundant rows of a plan that has none, with one more send of rank 0 across all ranks."""
    spec = plan.transfer
    assert isinstance(spec, RelayedSpec)
    sends = np.array(spec.across.sends)
    sends[0, len(_of_rank_0(plan))] = send
    more = replace(spec, across=replace(spec.across, sends=sends))
    assert plan.report().redundant_rows == 0
    return replace(plan, transfer=more).report().redundant_rows


@pytest.mark.parametrize("value", [-1, 2.0, True, 2**30 + 1])
def test_capacity_refuses_nonsense(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"PlanCapacity.copies must be .* but it is {value}"):
        PlanCapacity(8, value, 8, 8)


@pytest.mark.parametrize("name", builder_masks())
def test_draw_shows_the_mask(name: str) -> None:
    mask = builder_masks()[name]
    plan = plan_context(mask, 4, chunk_size=16)
    image = np.asarray(plan.draw().images[0].get_array())
    background = np.array([0xF3, 0xF4, 0xF6]) / 255
    np.testing.assert_array_equal(np.abs(image - background).max(axis=-1) > 1e-6, mask.to_dense())


def test_report_and_draw_of_dense_masks_on_many_ranks() -> None:
    """Rows by rows, what ranks receive here would take 4 GB."""
    plan = plan_context(masks.full(1 << 20), 1024)
    report = plan.report()
    assert (report.rows_received == (1 << 20) - (1 << 10)).all()
    assert report.redundant_rows == 0
    image = np.asarray(plan.draw().images[0].get_array())
    assert (np.abs(image - np.array([0xF3, 0xF4, 0xF6]) / 255).max(axis=-1) > 1e-6).all()


def test_draw_into_axes_and_long_or_empty_sequences() -> None:
    _, ax = plt.subplots()
    assert plan_context(masks.causal(1 << 14), 8).draw(ax) is ax
    plan_context(masks.full(0), 2).draw()


def test_draw_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"jaxmagi\[plot\]"):
        plan_context(masks.causal(8), 2).draw()
