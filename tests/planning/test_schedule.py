"""When ranks compute and transfer the parts of a pass, with times that follow by hand."""

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import CostModel, plan_context
from jaxmagi.planning._report import schedule_pass
from jaxmagi.planning._schedule import Work, schedule, work_of

# Links move 1 MB/s within a host and 0.1 MB/s between hosts, after 1 s and 3 s. A row has 1024 bytes of keys
# and values and 2048 bytes of their gradients, of which each of four parts has a quarter.
COST = CostModel(
    tflops=1e-3, backward_tflops=2e-3, partial_tile_cost=2.0, link_gb_per_second=1e-3,
    network_gb_per_second=1e-4, ranks_per_host=2, memory_gb_per_second=1e-3, latency_us=1e6,
    network_latency_us=3e6, num_heads=4, num_kv_heads=4, head_dim=64,
)  # fmt: skip


def test_fast_transfers_cost_the_keys_of_the_first_part() -> None:
    """Keys of the others come while the first rank computes; the second one waits for them."""
    made = schedule(Work(4, np.array([2.0, 0.25]), 0.5, None))
    np.testing.assert_array_equal(made.fetches, [[0, 0.5], [0.5, 1], [1, 1.5], [1.5, 2]])
    np.testing.assert_array_equal(made.attention[0], [[0.5, 2.5], [2.5, 4.5], [4.5, 6.5], [6.5, 8.5]])
    np.testing.assert_array_equal(made.attention[1], [[0.5, 0.75], [1, 1.25], [1.5, 1.75], [2, 2.25]])
    assert made.seconds == 0.5 + 4 * 2


def test_slow_transfers_bound_the_time() -> None:
    """All keys come one after the other, and the last part computes behind them."""
    made = schedule(Work(3, np.array([1.0, 2.0]), 3.0, None))
    np.testing.assert_array_equal(made.fetches, [[0, 3], [3, 6], [6, 9]])
    np.testing.assert_array_equal(made.attention, [[[3, 4], [6, 7], [9, 10]], [[3, 5], [6, 8], [9, 11]]])
    assert made.seconds == 3 * 3 + 2


def test_gradients_return_when_all_ranks_have_them() -> None:
    work = Work(2, np.array([4.0, 1.0]), 1.0, 3.0)
    made = schedule(work)
    np.testing.assert_array_equal(made.attention[..., 1], [[5, 9], [2, 3]])
    np.testing.assert_array_equal(made.returns, [[5, 8], [9, 12]])
    assert made.seconds == 12
    forward = schedule(work._replace(give_back=None))
    assert (forward.returns.shape, forward.seconds) == ((0, 2), 9)


def test_gradients_return_behind_all_casts_and_earlier_returns() -> None:
    """Parts have computed after 3, 5 and 7 s, but the last keys come after 6 s."""
    made = schedule(Work(3, np.array([1.0]), 2.0, 1.5))
    np.testing.assert_array_equal(made.attention[0, :, 1], [3, 5, 7])
    np.testing.assert_array_equal(made.returns, [[6, 7.5], [7.5, 9], [9, 10.5]])
    assert made.seconds == 10.5


def test_one_part_hides_nothing() -> None:
    made = schedule(Work(1, np.array([2.0, 5.0]), 3.0, 4.0))
    np.testing.assert_array_equal(made.attention, [[[3, 5]], [[3, 8]]])
    np.testing.assert_array_equal(made.returns, [[8, 12]])
    assert made.seconds == 3 + 5 + 4


def test_no_rows_take_no_time() -> None:
    """Ranks compute from the beginning on, one of them nothing."""
    made = schedule(Work(3, np.array([2.0, 0.0]), 0.0, 0.0))
    np.testing.assert_array_equal(made.fetches, 0)
    np.testing.assert_array_equal(made.attention, [[[0, 2], [2, 4], [4, 6]], [[0, 0]] * 3])
    np.testing.assert_array_equal(made.returns, [[2, 2], [4, 4], [6, 6]])
    assert made.seconds == 6


@pytest.mark.parametrize("seed", range(50))
def test_random_parts_against_closed_forms(seed: int) -> None:
    """A part is ready when either all parts up to it have computed, or all keys up to its own have come.

    Then its gradients, and those of all later parts, still have to return.
    """
    rng = np.random.default_rng(seed)
    parts, compute = int(rng.integers(1, 9)), rng.uniform(0, 3, rng.integers(1, 5))
    fetch, give_back = rng.uniform(0, 3, 2).tolist()
    made = schedule(Work(parts, compute, fetch, give_back))
    part = np.arange(1, parts + 1)
    ready = np.maximum(fetch + part * compute[:, None], part * fetch + compute[:, None])
    np.testing.assert_allclose(made.attention[..., 1], ready)
    np.testing.assert_allclose(
        made.attention[..., 1] - made.attention[..., 0], np.tile(compute[:, None], parts)
    )
    first = np.maximum(ready.max(axis=0), parts * fetch)
    assert made.seconds == pytest.approx((first + (parts + 1 - part) * give_back).max())
    links = np.concatenate([made.fetches, made.returns])
    assert (links[1:, 0] >= links[:-1, 1]).all()


def test_times_of_a_part(small_parts: None) -> None:
    """A part has a quarter of the bytes, but whole latencies of links, because its rows travel alone."""
    tiles, rows = np.array([[3, 1], [0, 0]]), np.array([[1000, 100]])
    forward, backward = (work_of(tiles, rows, COST, each) for each in (COST.forward, COST.backward))
    assert forward.parts == backward.parts == 4
    # Links of both kinds work at once for keys, in 1 + 0.256 s and 3 + 0.256 s, and in turn for gradients.
    assert forward.fetch == backward.fetch == pytest.approx(3.256)
    assert forward.give_back is None
    assert backward.give_back == pytest.approx(1.512 + 3.512)
    # A full tile counts for one and a partial one for two. Each cell takes 256 operations of 1e9 a second for
    # the head of a part, in the backward pass 640 of 2e9. A part has a quarter of the latency of a call.
    np.testing.assert_allclose(forward.compute, [(3 + 2) * 192 * 128 * 256e-9 + 0.25, 0])
    np.testing.assert_allclose(backward.compute, [(3 + 2) * 128 * 128 * 320e-9 + 0.25, 0])


def test_times_of_a_part_in_two_steps(small_parts: None) -> None:
    """Steps follow each other, and ranks copy what the first one brings: they read and write 1100 rows."""
    rows = np.array([[1000, 100], [500, 0]])
    work = work_of(np.array([[1, 0]]), rows, COST, COST.backward)
    assert work.fetch == pytest.approx(3.256 + 1.128 + 2 * 1100 * 256 / 1e6)
    assert work.give_back == pytest.approx(1.512 + 3.512 + 1.256 + 2 * 1100 * 512 / 1e6)


@pytest.mark.parametrize("steps", [1, 2])
def test_transfers_without_rows_take_no_time(steps: int) -> None:
    work = work_of(np.array([[1, 0]]), np.zeros((steps, 2), int), COST, COST.backward)
    assert (work.fetch, work.give_back) == (0, 0)


def test_pass_of_a_plan(small_parts: None) -> None:
    """Rank 1 receives the 192 rows of rank 0, whose part of the heads takes 1 + 192 * 256 / 1e6 s.

    Ranks begin a part together. Each has 2 partial tiles of 192 x 128 of its own keys, which count as 4, and
    rank 1 has a full and a partial tile of received keys, which count as 3 more.
    """
    plan = plan_context(masks.causal(384), 2, layout="contiguous")
    made = schedule_pass(np.asarray(plan.bands), plan.transfer, COST, COST.forward)
    fetch, tile = 1.049152, 192 * 128 * 256e-9
    np.testing.assert_allclose(made.fetches[:, 1], fetch * np.arange(1, 5))
    np.testing.assert_allclose(made.attention[..., 0], [fetch * np.arange(1, 5)] * 2)
    lasts = made.attention[..., 1] - made.attention[..., 0]
    np.testing.assert_allclose(lasts, np.tile([[4 * tile + 0.25], [7 * tile + 0.25]], 4))
    assert made.seconds == plan.report(COST).predicted_seconds
