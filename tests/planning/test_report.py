"""Reports of plans: work, traffic and rows that nobody needs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmagi import AttnMask, masks
from jaxmagi.masks.geometry import UNBOUNDED
from jaxmagi.planning import ContextPlan, CostModel, GroupCastSpec, RelayedSpec, plan_context


def test_plan_of_device_arrays_reports_the_same() -> None:
    plan = plan_context(masks.causal(100), 4)
    device = jax.tree.map(jax.numpy.asarray, plan)
    np.testing.assert_array_equal(device.report().area, plan.report().area)


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


def test_report_counts_each_row_once_between_hosts() -> None:
    mask, cost = masks.causal(4096), CostModel(ranks_per_host=4)
    plan = plan_context(mask, 8, cost=cost, two_levels=False)
    relayed = plan.by_host(4)
    before, after = plan.report(cost), relayed.report(cost)
    assert after.rows_moved == before.rows_moved
    assert isinstance(relayed.transfer, RelayedSpec)
    crossing = relayed.transfer.rows_between_hosts
    assert after.network_rows_sent.sum() == after.network_rows_received.sum() == crossing
    assert after.between_hosts.rows == crossing < before.between_hosts.rows / 3


def test_steps_are_predicted_one_after_the_other() -> None:
    """One row goes to two ranks of another host, which takes both latencies instead of the longer one.

    All heads are one part, whose attention takes a latency more.
    """
    mask = AttnMask.from_bands([[2, 4, 0, 1, -4, 4]], q_len=4, kv_len=4)
    cost = CostModel(ranks_per_host=2, latency_us=1000, network_latency_us=3000, num_heads=8, num_kv_heads=1)
    plan = plan_context(mask, 4, layout="contiguous")
    seconds = [p.report(cost).predicted_seconds for p in (plan, plan.by_host(2))]
    np.testing.assert_allclose(seconds, [4e-3, 5e-3], rtol=1e-2)


def test_traffic_between_hosts() -> None:
    """Four ranks on two hosts: of the keys before the own ones, those of the same host take NVLink."""
    plan = plan_context(masks.causal(400), 4, layout="contiguous")
    report = plan.report(CostModel(ranks_per_host=2))
    np.testing.assert_array_equal(report.rows_received, [0, 100, 200, 300])
    np.testing.assert_array_equal(report.network_rows_received, [0, 0, 200, 200])
    np.testing.assert_array_equal(report.network_rows_sent, [200, 200, 0, 0])
    np.testing.assert_array_equal(plan.report().network_rows_received, 0)
