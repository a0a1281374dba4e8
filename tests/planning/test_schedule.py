"""When ranks compute and transfer the parts of a pass, with times that follow by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import CostModel, plan_context
from jaxmagi.planning._report import schedule_pass
from jaxmagi.planning._schedule import OWN_KEYS, Launch, Work, schedule, work_of
from jaxmagi.planning._tiles import Tiles

# Links move 1 MB/s within a host and 0.1 MB/s between hosts, after 1 s and 3 s. A row has 1024 bytes of keys
# and values and 2048 bytes of their gradients, of which each of four parts has a quarter.
COST = CostModel(
    tflops=1e-3, backward_tflops=2e-3, partial_tile_cost=2.0, link_gb_per_second=1e-3,
    network_gb_per_second=1e-4, ranks_per_host=2, memory_gb_per_second=1e-3, latency_us=1e6,
    network_latency_us=3e6, num_heads=4, num_kv_heads=4, head_dim=64,
)  # fmt: skip

# A full tile of all heads takes 1 s and a partial one 2 s, a row of keys and values 1 s over each link, and a
# row of their gradients 2 s.
SECONDS = replace(
    COST, tflops=192 * 128 * 1024e-12, backward_tflops=128 * 128 * 2560e-12, link_gb_per_second=1024e-9,
    network_gb_per_second=1024e-9, memory_gb_per_second=1e9, latency_us=0, network_latency_us=0,
)  # fmt: skip

# Rank 0 has own tiles for 4 s and others for 3 s, rank 1 for 2 s and 3 s. The others take 3 s and 2 s over
# own keys alone, and 3 s and 5 s over received ones.
TILES = Tiles(
    own=np.array([[4, 0], [0, 1]]),
    others=np.array([[1, 1], [3, 0]]),
    halves=np.array([[[1, 1], [2, 0]], [[1, 1], [1, 2]]]),
)


def of_parts(parts: int, *seconds: float) -> list[Launch]:
    """The launches of parts that have no own tiles, each of which takes as long, on so many ranks."""
    return [Launch(part, np.array(seconds)) for part in range(parts)]


def seconds_of(work: Work) -> list[tuple[int, list[float]]]:
    return [(launch.part, launch.seconds.tolist()) for launch in work.launches]


def test_fast_transfers_cost_the_keys_of_the_first_part() -> None:
    """Keys of the others come while the first rank computes; the second one waits for them."""
    made = schedule(Work(4, of_parts(4, 2.0, 0.25), 0.5, None))
    np.testing.assert_array_equal(made.launched, range(4))
    np.testing.assert_array_equal(made.fetches, [[0, 0.5], [0.5, 1], [1, 1.5], [1.5, 2]])
    np.testing.assert_array_equal(made.attention[0], [[0.5, 2.5], [2.5, 4.5], [4.5, 6.5], [6.5, 8.5]])
    np.testing.assert_array_equal(made.attention[1], [[0.5, 0.75], [1, 1.25], [1.5, 1.75], [2, 2.25]])
    assert made.seconds == 0.5 + 4 * 2


def test_slow_transfers_bound_the_time() -> None:
    """All keys come one after the other, and the last part computes behind them."""
    made = schedule(Work(3, of_parts(3, 1.0, 2.0), 3.0, None))
    np.testing.assert_array_equal(made.fetches, [[0, 3], [3, 6], [6, 9]])
    np.testing.assert_array_equal(made.attention, [[[3, 4], [6, 7], [9, 10]], [[3, 5], [6, 8], [9, 11]]])
    assert made.seconds == 3 * 3 + 2


def test_gradients_return_when_all_ranks_have_them() -> None:
    work = Work(2, of_parts(2, 4.0, 1.0), 1.0, 3.0)
    made = schedule(work)
    np.testing.assert_array_equal(made.attention[..., 1], [[5, 9], [2, 3]])
    np.testing.assert_array_equal(made.returns, [[5, 8], [9, 12]])
    assert made.seconds == 12
    forward = schedule(work._replace(give_back=None))
    assert (forward.returns.shape, forward.seconds) == ((0, 2), 9)


def test_gradients_return_behind_all_casts_and_earlier_returns() -> None:
    """Parts have computed after 3, 5 and 7 s, but the last keys come after 6 s."""
    made = schedule(Work(3, of_parts(3, 1.0), 2.0, 1.5))
    np.testing.assert_array_equal(made.attention[0, :, 1], [3, 5, 7])
    np.testing.assert_array_equal(made.returns, [[6, 7.5], [7.5, 9], [9, 10.5]])
    assert made.seconds == 10.5


def test_one_part_without_own_tiles_hides_nothing() -> None:
    made = schedule(Work(1, of_parts(1, 2.0, 5.0), 3.0, 4.0))
    np.testing.assert_array_equal(made.attention, [[[3, 5]], [[3, 8]]])
    np.testing.assert_array_equal(made.returns, [[8, 12]])
    assert made.seconds == 3 + 5 + 4


def test_own_keys_need_no_transfer() -> None:
    """Rank 0 computes until its keys have come, rank 1 waits for them."""
    launches = [Launch(OWN_KEYS, np.array([4.0, 1.0])), Launch(0, np.array([2.0, 6.0]))]
    made = schedule(Work(1, launches, 3.0, 0.5))
    np.testing.assert_array_equal(made.launched, [OWN_KEYS, 0])
    np.testing.assert_array_equal(made.attention, [[[0, 4], [4, 6]], [[0, 1], [3, 9]]])
    np.testing.assert_array_equal(made.returns, [[9, 9.5]])


@pytest.mark.parametrize(("give_back", "seconds"), [(2.0, 12.0), (5.0, 13.0)])
def test_own_tiles_hide_gradients_that_return(give_back: float, seconds: float) -> None:
    """Parts have computed after 3 and 5 s, and attention to own keys ends 12 s after the beginning."""
    launches = [Launch(OWN_KEYS, np.array([1.0])), *of_parts(2, 2.0), Launch(OWN_KEYS, np.array([7.0]))]
    made = schedule(Work(2, launches, 0.5, give_back))
    np.testing.assert_array_equal(made.attention, [[[0, 1], [1, 3], [3, 5], [5, 12]]])
    np.testing.assert_array_equal(made.returns[:, 0], [3, max(5, 3 + give_back)])
    assert made.seconds == seconds


def test_no_rows_take_no_time() -> None:
    """Ranks compute from the beginning on, one of them nothing."""
    made = schedule(Work(3, of_parts(3, 2.0, 0.0), 0.0, 0.0))
    np.testing.assert_array_equal(made.fetches, 0)
    np.testing.assert_array_equal(made.attention, [[[0, 2], [2, 4], [4, 6]], [[0, 0]] * 3])
    np.testing.assert_array_equal(made.returns, [[2, 2], [4, 4], [6, 6]])
    assert made.seconds == 6


@pytest.mark.parametrize("seed", range(50))
def test_random_parts_against_closed_forms(seed: int) -> None:
    """A part is ready when all before it has been computed, or when its own keys or the first ones have come.

    Then its gradients, and those of all later parts, still have to return, and own tiles are left.
    """
    rng = np.random.default_rng(seed)
    parts, (compute, before, behind) = int(rng.integers(1, 9)), rng.uniform(0, 3, (3, rng.integers(1, 5)))
    fetch, give_back = rng.uniform(0, 3, 2).tolist()
    launches = [Launch(OWN_KEYS, before), *of_parts(parts, *compute), Launch(OWN_KEYS, behind)]
    made = schedule(Work(parts, launches, fetch, give_back))
    part = np.arange(1, parts + 1)
    ready = np.maximum(
        np.maximum(before, fetch)[:, None] + part * compute[:, None], part * fetch + compute[:, None]
    )
    np.testing.assert_allclose(made.attention[:, 1:-1, 1], ready)
    lasts = np.stack([launch.seconds for launch in launches], axis=1)
    np.testing.assert_allclose(made.attention[..., 1] - made.attention[..., 0], lasts)
    first = np.maximum(ready.max(axis=0), parts * fetch)
    returned = (first + (parts + 1 - part) * give_back).max()
    assert made.seconds == pytest.approx(max(returned, (ready[:, -1] + behind).max()))
    links = np.concatenate([made.fetches, made.returns])
    assert (links[1:, 0] >= links[:-1, 1]).all()


def test_forward_pass_within_a_host(small_parts: None) -> None:
    """Own tiles of all heads come first, beside the transfer of keys, then the others of part after part."""
    work = work_of(TILES, np.array([[8, 0]]), SECONDS, SECONDS.forward)
    others = [(part, [0.75, 0.75]) for part in range(4)]
    assert seconds_of(work) == [(OWN_KEYS, [4, 2]), *others]
    assert (work.parts, work.fetch, work.give_back) == (4, 2, None)
    ends = [[4, 4.75, 5.5, 6.75, 8.75], [2, 2.75, 4.75, 6.75, 8.75]]
    np.testing.assert_array_equal(schedule(work).attention[..., 1], ends)


def test_backward_pass_within_a_host() -> None:
    """Own tiles of one of four key heads come first. Gradients return behind all that is left."""
    work = work_of(TILES, np.array([[3, 0]]), SECONDS, SECONDS.backward)
    assert seconds_of(work) == [(OWN_KEYS, [1, 0.5]), (0, [3 + 3, 1.5 + 3])]
    assert (work.parts, work.fetch, work.give_back) == (1, 3, 6)
    made = schedule(work)
    np.testing.assert_array_equal(made.attention, [[[0, 1], [3, 9]], [[0, 0.5], [3, 7.5]]])
    np.testing.assert_array_equal(made.returns, [[9, 15]])


@pytest.mark.parametrize(("heads", "first"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_key_heads_that_come_first_in_a_backward_pass(heads: int, first: int) -> None:
    """A quarter of the heads, rounded up. Own tiles of rank 0 take a second for each head."""
    cost = replace(SECONDS, num_heads=heads, num_kv_heads=heads)
    work = work_of(TILES, np.array([[3, 0]]), cost, cost.backward)
    assert [launch.seconds[0] for launch in work.launches] == pytest.approx([first, heads * 7 / 4 - first])


def test_forward_pass_between_hosts(small_parts: None) -> None:
    """Own tiles come first, of all parts. The other tiles of the first part are computed in halves."""
    cost = replace(SECONDS, ranks_per_host=1)
    work = work_of(TILES, np.array([[0, 4]]), cost, cost.forward)
    others = [(part, [0.75, 0.75]) for part in (1, 2, 3)]
    assert seconds_of(work) == [(OWN_KEYS, [4, 2]), (OWN_KEYS, [0.75, 0.5]), (0, [0.75, 1.25]), *others]
    assert (work.parts, work.fetch, work.give_back) == (4, 1, None)
    ends = [[4, 4.75, 5.5, 6.25, 7, 7.75], [2, 2.5, 3.75, 4.5, 5.25, 6]]
    np.testing.assert_array_equal(schedule(work).attention[..., 1], ends)


@pytest.mark.parametrize(
    ("cost", "rows"),
    [(replace(SECONDS, ranks_per_host=1), [[4, 0]]), (SECONDS, [[4, 0], [4, 0]])],
    ids=["two hosts", "two steps"],
)
def test_forward_pass_between_hosts_without_rows_over_the_network(
    small_parts: None, cost: CostModel, rows: list[list[int]]
) -> None:
    """No part is computed in halves. A pass of two steps is never one within a host."""
    work = work_of(TILES, np.array(rows), cost, cost.forward)
    of_parts = [(part, [0.75, 0.75]) for part in range(4)]
    assert seconds_of(work) == [(OWN_KEYS, [4, 2]), *of_parts]


def test_backward_pass_between_hosts(small_parts: None) -> None:
    """Own tiles of the first part come first, and those of the others last, while gradients return."""
    cost = replace(SECONDS, ranks_per_host=1)
    work = work_of(TILES, np.array([[0, 4]]), cost, cost.backward)
    of_parts = [(part, [0.75, 0.75]) for part in range(4)]
    assert seconds_of(work) == [(OWN_KEYS, [1, 0.5]), *of_parts, (OWN_KEYS, [3, 1.5])]
    assert (work.parts, work.fetch, work.give_back) == (4, 1, 2)
    made = schedule(work)
    ends = [[1, 1.75, 2.75, 3.75, 4.75, 7.75], [0.5, 1.75, 2.75, 3.75, 4.75, 6.25]]
    np.testing.assert_array_equal(made.attention[..., 1], ends)
    np.testing.assert_array_equal(made.returns, [[4, 6], [6, 8], [8, 10], [10, 12]])


def test_times_of_a_part(small_parts: None) -> None:
    """A part has a quarter of the bytes, but whole latencies of links, because its rows travel alone."""
    cost = replace(COST, ranks_per_host=1)
    tiles, rows = TILES._replace(own=np.array([[3, 1], [0, 0]])), np.array([[1000, 100]])
    forward, backward = (work_of(tiles, rows, cost, each) for each in (cost.forward, cost.backward))
    assert forward.parts == backward.parts == 4
    # Links of both kinds work at once for keys, in 1 + 0.256 s and 3 + 0.256 s, and in turn for gradients.
    assert forward.fetch == backward.fetch == pytest.approx(3.256)
    assert forward.give_back is None
    assert backward.give_back == pytest.approx(1.512 + 3.512)
    # A full tile counts for one and a partial one for two. Each cell takes 256 operations of 1e9 a second for
    # the head of a part, in the backward pass 640 of 2e9. A part has a quarter of the latency of a call.
    own, own_half = (launch.seconds for launch in forward.launches[:2])
    np.testing.assert_allclose(own, [4 * ((3 + 2) * 192 * 128 * 256e-9 + 0.25), 0])
    np.testing.assert_allclose(own_half, [(1 + 2) * 192 * 128 * 256e-9 + 0.25, 2 * 192 * 128 * 256e-9 + 0.25])
    np.testing.assert_allclose(backward.launches[0].seconds, [(3 + 2) * 128 * 128 * 320e-9 + 0.25, 0])


def test_times_of_a_part_in_two_steps(small_parts: None) -> None:
    """Steps follow each other, and ranks copy what the first one brings: they read and write 1100 rows."""
    rows = np.array([[1000, 100], [500, 0]])
    work = work_of(TILES, rows, COST, COST.backward)
    assert work.fetch == pytest.approx(3.256 + 1.128 + 2 * 1100 * 256 / 1e6)
    assert work.give_back == pytest.approx(1.512 + 3.512 + 1.256 + 2 * 1100 * 512 / 1e6)


@pytest.mark.parametrize("steps", [1, 2])
def test_transfers_without_rows_take_no_time(steps: int) -> None:
    work = work_of(TILES, np.zeros((steps, 2), int), COST, COST.backward)
    assert (work.fetch, work.give_back) == (0, 0)


def test_passes_of_a_plan() -> None:
    """Rank 1 receives the 192 rows of rank 0, of which each takes 1024 bytes, and gradients twice as many."""
    plan = plan_context(masks.causal(384), 2, layout="contiguous")
    forward, backward = (
        schedule_pass(np.asarray(plan.bands), plan.transfer, COST, each)
        for each in (COST.forward, COST.backward)
    )
    fetch, give_back = 1 + 192 * 1024 / 1e6, 1 + 192 * 2048 / 1e6
    np.testing.assert_allclose(forward.fetches, [[0, fetch]])
    # Rank 0 has two partial tiles of 192 x 128, which count as 4. All queries of rank 1 see received keys, of
    # which a full and a partial tile count as 3 more.
    tile = 192 * 128 * 1024e-9
    first = max(fetch, 4 * tile + 1)
    np.testing.assert_allclose(forward.attention[0], [[0, 4 * tile + 1], [first, first]])
    np.testing.assert_allclose(forward.attention[1], [[0, 0], [fetch, fetch + 7 * tile + 1]])
    assert forward.seconds == plan.report(COST).predicted_seconds
    # Own tiles have the first 128 keys of a rank, which 192 queries see: two partial tiles of 128 x 128, of
    # which those of one head come first. The other own keys are in one partial tile, and those that rank 1
    # receives in three partial ones and a full one.
    tile = 128 * 128 * 1280e-9
    first, own = (4 * tile + 1) / 4, (4 * tile + 1) * 3 / 4
    ends = fetch + own + np.array([2, 9]) * tile + 1
    np.testing.assert_allclose(backward.attention, [[[0, first], [fetch, end]] for end in ends])
    np.testing.assert_allclose(backward.returns, [[ends[1], ends[1] + give_back]])
    assert backward.seconds == plan.report(COST).predicted_backward_seconds
