"""The simulated scaling: other schemes under simple masks, where their times are known."""

import pytest

from benchmarks import _schemes, scaling
from jaxmagi import CostModel, masks

COST = CostModel(partial_tile_cost=1.0, latency_us=0.0, network_latency_us=0.0)
LENGTH, CP_SIZE = 8 * 24 * 80, 8
ROWS = LENGTH // CP_SIZE


def test_ring_and_all_gather_move_everything() -> None:
    bytes_of_a_row = 2 * COST.row_bytes + COST.gradient_row_bytes
    for scheme in (_schemes.ring, _schemes.all_gather):
        for mask in (masks.full(LENGTH), masks.sliding_window(LENGTH, 7)):
            assert scheme(mask, CP_SIZE, COST).received_bytes == 7 * ROWS * bytes_of_a_row


def test_gathering_is_not_hidden() -> None:
    """On one host everything comes by NVLink; on two, half of it also by the cards of its host."""
    mask = masks.sliding_window(LENGTH, 7)
    near, far = (
        _schemes.all_gather(
            mask, CP_SIZE, CostModel(ranks_per_host=ranks, latency_us=0, network_latency_us=0)
        )
        for ranks in (8, 4)
    )
    moved = near.received_bytes
    between = moved * 4 / 7 / 4 / 45e9
    assert far.seconds - near.seconds == pytest.approx(max(0, between - moved / 350e9), rel=1e-6)


def test_heads_in_hosts_move_their_part_of_rows_between_hosts() -> None:
    """Under a full mask, each of 16 GPUs gets an eighth of the other host's rows, or with one level all."""
    cost, mask = CostModel(), masks.full(1 << 15)
    row_bytes = (2 * cost.row_bytes + cost.gradient_row_bytes) << 14
    assert scaling.planned_over_hosts(mask, 16, cost).network_bytes == row_bytes / 8
    assert scaling.planned(mask, 16, cost, two_levels=False).network_bytes == row_bytes
    assert scaling.planned(mask, 16, cost, two_levels=True).network_bytes == row_bytes / 8
    assert scaling.planned_over_hosts(mask, 8, cost).network_bytes == 0


def test_one_rank_moves_nothing() -> None:
    mask = masks.causal(4096)
    times = [scheme(mask, 1, COST) for scheme in (_schemes.ring, _schemes.all_gather, _schemes.ulysses)]
    assert all(made is not None and made.received_bytes == 0 for made in times)


def test_heads_run_out() -> None:
    assert _schemes.ulysses(masks.full(1 << 12), 64, COST) is not None
    assert _schemes.ulysses(masks.full(1 << 12), 128, COST) is None


def test_everything_is_linear_where_links_are_fast() -> None:
    """Full tiles only: 24 x 80 cells forward; backward 80 x 128, of which some are not filled."""
    fast = CostModel(
        partial_tile_cost=1.0, link_gb_per_second=1e9, network_gb_per_second=1e9, memory_gb_per_second=1e9,
        latency_us=0.0, network_latency_us=0.0,
    )  # fmt: skip
    mask = masks.full(1 << 15)
    best = scaling.linear_seconds(mask, CP_SIZE)
    for name, scheme in scaling.SCHEMES.items():
        made = scheme(mask, CP_SIZE, fast)
        assert made is not None
        assert 0.95 < best / made.seconds <= 1, name


def test_rows_of_the_benchmark() -> None:
    rows = scaling.measure("window 4095", 8)
    assert [row.scheme for row in rows] == list(scaling.SCHEMES)
    over_hosts = scaling.measure("documents", 16)
    assert [row.scheme for row in over_hosts] == [*scaling.SCHEMES, *scaling.LEVELS]
    assert "| 16 | 0." in scaling.network_table(over_hosts, "documents")
    assert all(row.share_of_linear is not None and 0 < row.share_of_linear <= 1 for row in rows)
    assert "| 8 | 0." in scaling.table(rows, "window 4095")
