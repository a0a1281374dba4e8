"""The model of the machine: tiles, links, and the times that follow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import geometry
from jaxmagi.planning import CostModel, num_parts, plan_context
from jaxmagi.planning._cost import Tile
from jaxmagi.planning._schedule import busiest_links
from jaxmagi.planning._tiles import count_tiles

from ..cases import random_bands

SLOW = CostModel(
    tflops=1e-3, backward_tflops=1e-3, partial_tile_cost=2.0, link_gb_per_second=1e-3,
    network_gb_per_second=1e-4, ranks_per_host=2, memory_gb_per_second=1e-3, latency_us=0.0,
    network_latency_us=0.0, num_heads=1, num_kv_heads=1, head_dim=64,
)  # fmt: skip


def tiles_by_rows(band: np.ndarray, rows: int, keys: int, size: int) -> tuple[int, int]:
    """Full and partial tiles of one band, from the dense mask."""
    dense = geometry.to_dense(band[None], size, size) > 0
    full = partial = 0
    for begin in range(0, size, rows):
        tile = dense[begin : begin + rows]
        seen = np.flatnonzero(tile.any(axis=0))
        if seen.size:
            tiles = -(-(seen[-1] + 1 - seen[0]) // keys)
            whole = int(tile.all(axis=0).sum()) // keys if len(tile) == rows else 0
            full, partial = full + whole, partial + tiles - whole
    return full, partial


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (4, 3), (24, 8), (7, 16)])
@pytest.mark.parametrize("seed", range(6))
def test_tiles_are_those_of_the_dense_mask(seed: int, rows: int, keys: int) -> None:
    bands = random_bands(np.random.default_rng(seed), 96, 96, 12)
    expected = np.array([tiles_by_rows(band, rows, keys, 96) for band in bands])
    direction = CostModel().forward._replace(tile=Tile(rows, keys))
    np.testing.assert_array_equal(count_tiles(bands, np.ones(len(bands), int), direction), expected)
    counts = np.array([[3, 0], [1, len(bands) - 4]])
    groups = [group.sum(axis=0) for group in np.split(expected, np.cumsum(counts)[:-1])]
    np.testing.assert_array_equal(count_tiles(bands, counts, direction), np.reshape(groups, (2, 2, 2)))


@pytest.mark.parametrize("counts", [[2, 2], [4], [-1, 3]])
def test_groups_of_other_bands(counts: list[int]) -> None:
    bands = random_bands(np.random.default_rng(0), 96, 96, 3)
    with pytest.raises(ValueError, match="at most 3, but one has"):
        count_tiles(bands, np.array(counts), CostModel().forward)


@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128, 160, 192, 224, 256])
def test_tiles_are_what_the_extension_says(dim: int) -> None:
    compiled = pytest.importorskip("jaxmagi._cuda")
    cost = CostModel(num_heads=1, num_kv_heads=1, head_dim=dim)
    assert cost.forward.tile == compiled.forward_tile(dim, dim)
    assert cost.backward.tile == compiled.backward_tile(dim, dim)


def test_tiles_of_the_backward_pass_own_keys() -> None:
    """A causal triangle is its own mirror image: 8 x 4 tiles forward are 4 x 8 backward."""
    bands = np.asarray(masks.documents([37, 27]).bands)
    forward, backward = CostModel().forward._replace(tile=Tile(4, 8)), CostModel().backward
    mirrored = np.array([[0, 37, 0, 37, 0, 2**30], [37, 64, 37, 64, 0, 2**30]], np.int32)
    each = np.ones(2, int)
    counted = count_tiles(mirrored, each, backward._replace(tile=Tile(8, 4)))
    np.testing.assert_array_equal(counted, count_tiles(bands[bands.any(axis=1)], each, forward))


def test_tiles_are_those_of_the_kernels() -> None:
    assert CostModel().forward.tile == (24, 80)  # eight heads of a group at each of 24 queries
    assert CostModel(num_heads=8, num_kv_heads=8).forward.tile == (192, 80)
    assert CostModel(num_heads=32, num_kv_heads=1, head_dim=64).forward.tile == (12, 128)
    assert CostModel(num_heads=6, num_kv_heads=1, head_dim=200).forward.tile == (64, 80)
    assert CostModel().backward.tile == (80, 128)
    assert CostModel(head_dim=256).backward.tile == (64, 64)


def test_head_dimensions_are_filled_up() -> None:
    times = [CostModel(head_dim=dim).forward.cell_seconds for dim in (65, 96, 128)]
    assert times[0] == times[1] < times[2]
    assert CostModel(num_heads=128).forward.cell_seconds == 2 * CostModel().forward.cell_seconds


def test_busiest_link_decides() -> None:
    """Rows [rank, sent or received, within a host or between hosts]."""
    rows = np.zeros((3, 2, 2), np.int64)
    rows[1, 0, 0], rows[2, 1, 0] = 40, 70
    assert SLOW.transfer_seconds(busiest_links(rows), 10) == pytest.approx(700 / 1e6)
    rows[0, 1, 1] = 8
    assert SLOW.transfer_seconds(busiest_links(rows), 10) == pytest.approx(80 / 1e5)
    assert SLOW.reduction_seconds(busiest_links(rows), 10) == pytest.approx(700 / 1e6 + 80 / 1e5)
    assert SLOW.transfer_seconds(busiest_links(0 * rows), 10) == 0


def test_cells_that_take_as_long_as_a_row() -> None:
    """Over the slowest link between so many ranks: 256 bytes, and 256 operations a cell at 1e9 a second."""
    assert (SLOW.cells_per_row(2), SLOW.cells_per_row(3)) == (1000, 10_000)


PARTS = {1: 1, 2: 2, 3: 3, 4: 4, 6: 6, 7: 7, 8: 8, 9: 3, 10: 5, 11: 1, 12: 6, 16: 8, 22: 2}


@pytest.mark.parametrize(("num_kv_heads", "parts"), PARTS.items())
def test_parts_divide_the_key_heads(num_kv_heads: int, parts: int) -> None:
    assert num_parts(num_kv_heads, 2**40) == parts


def test_parts_have_enough_rows() -> None:
    """A part of less than 4 MiB is joined with others, as far as parts of one size allow."""
    mib = 2**20
    sizes = (0, 4 * mib, 8 * mib - 1, 8 * mib, 15.6 * mib, 16 * mib, 28 * mib, 32 * mib)
    assert [num_parts(8, size) for size in sizes] == [1, 1, 1, 2, 2, 4, 4, 8]
    assert [num_parts(6, size) for size in sizes] == [1, 1, 1, 2, 3, 3, 6, 6]
    assert [num_parts(8, 4 * size, within_host=True) for size in sizes] == [1, 1, 1, 2, 2, 4, 4, 8]


def test_predicted_seconds_of_a_known_plan() -> None:
    """Two ranks of 192 rows: the forward pass has tiles of 192 x 128, the backward pass of 128 x 128.

    There is one part. All queries of rank 1 see received keys. Backward the fetch hides its own tiles, and
    gradients return behind all others.
    """
    plan = plan_context(masks.causal(384), 2, layout="contiguous")
    report = plan.report(SLOW)
    fetch, forward, own, others, gradients = known_times()
    assert 0 < own < fetch
    assert report.predicted_seconds == pytest.approx(fetch + forward)
    assert report.predicted_backward_seconds == pytest.approx(fetch + others + gradients)


def known_times() -> tuple[float, float, float, float, float]:
    """Returns the times in which a head's keys come, rank 1 computes both passes, and gradients return.

    Those of its backward pass are of own tiles and of the others.
    """
    cells, tile = 4 * 64 / 1e9, 192 * 128
    fetch = 192 * SLOW.row_bytes / 1e6
    # Rank 1 has two tiles of its own triangle, and two of the received keys, of which one is full.
    forward = (1 + 2 * 3) * tile * cells
    # By keys [0, 128), [128, 192) | [192, 256), [256, 384): 2 + 1 partial tiles, then 2, and 1 full and 1.
    own, others = (count * 128 * 128 * 10 * 64 / 1e9 for count in (2 * 2, 1 + 2 * 4))
    return fetch, forward, own, others, fetch * 4 / 2  # gradients in fp32


def test_predicted_seconds_of_a_known_plan_in_four_parts(small_parts: None) -> None:
    """Each part has a head, which takes as long as the only one of the test above, between two hosts."""
    plan = plan_context(masks.causal(384), 2, layout="contiguous")
    slow = replace(SLOW, num_heads=4, num_kv_heads=4, ranks_per_host=1, network_gb_per_second=1e-3)
    fetch, forward, own, others, gradients = known_times()
    assert 0 < own < forward < fetch < others < gradients < own + others
    # Keys of a part come in 49 ms, and it computes in 44 ms: attention waits for the keys of each part.
    report = plan.report(slow)
    assert report.predicted_seconds == pytest.approx(4 * fetch + forward)
    # In the backward pass parts have computed after 144, 238, 332 and 427 ms, and own tiles of the last three
    # after 553 ms. The last keys come after 197 ms, and then gradients return in 98 ms for each part.
    assert report.predicted_backward_seconds == pytest.approx(4 * fetch + 4 * gradients)
    # With twice the speed of links, own keys of the first part hide its transfer, of 25 ms, and of the others
    # only the second one waits, for 5 ms. Gradients have returned before all own tiles are computed.
    faster = plan.report(replace(slow, network_gb_per_second=2e-3))
    assert faster.predicted_seconds == pytest.approx(fetch + 3 * forward)
    assert faster.predicted_backward_seconds == pytest.approx(4 * own + 4 * others)


@pytest.mark.parametrize("num_bytes", [1, 2, 8])
def test_gradients_of_another_width(num_bytes: int) -> None:
    """Their bytes and the time of their way back scale, and nothing else does."""
    plan = plan_context(masks.causal(384), 4, layout="contiguous")
    usual, other = plan.report(SLOW), plan.report(replace(SLOW, bytes_per_gradient=num_bytes))
    for link, same in ((usual.within_hosts, other.within_hosts), (usual.between_hosts, other.between_hosts)):
        keys = 2 * link.rows * SLOW.row_bytes
        assert link.rows == same.rows > 0
        assert 4 * (same.bytes_moved - keys) == num_bytes * (link.bytes_moved - keys)
    # Ranks 2 and 3 get the 192 rows of the first host over the network, and rank 3 those of rank 2 by NVLink.
    back = 192 * SLOW.gradient_row_bytes / 1e5 + 96 * SLOW.gradient_row_bytes / 1e6
    saved = usual.predicted_backward_seconds - other.predicted_backward_seconds
    assert saved == pytest.approx((1 - num_bytes / 4) * back)
    assert other.predicted_seconds == usual.predicted_seconds


def test_the_planner_charges_gradients_as_they_travel() -> None:
    """Two levels save rows between hosts, but with half the width of gradients less than 1 % of the time.

    That holds for one key head, which makes one part, and networks of 34 to 56 GB/s. With a faster one, one
    level is best for either width; with a slower one it is two.
    """
    narrow, wide = (CostModel(ranks_per_host=4, num_kv_heads=1, bytes_per_gradient=width) for width in (2, 4))
    mask = masks.full(1 << 14)
    first, second = (plan_context(mask, 8, cost=cost) for cost in (narrow, wide))
    assert (first.two_levels, second.two_levels) == (False, True)


BAD = [
    ({"tflops": 0}, "CostModel.tflops must be from 1e-12 to 1e12, but it is 0"),
    ({"latency_us": -1}, "latency_us .* -1"),
    ({"network_gb_per_second": float("inf")}, "network_gb_per_second .* inf"),
    ({"backward_tflops": 1e-300}, "backward_tflops .* 1e-300"),
    ({"bytes_per_element": 0.5}, "bytes_per_element must be an integer .* 0.5"),
    ({"bytes_per_gradient": 0}, "bytes_per_gradient must be from 1e-12 to 1e12, but it is 0"),
    ({"bytes_per_gradient": 2.0}, "bytes_per_gradient must be an integer .* 2.0"),
    ({"ranks_per_host": 2.0}, "ranks_per_host must be an integer .* 2.0"),
    ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 is no multiple of num_kv_heads=4"),
    *[
        ({"head_dim": value}, f"head_dim .* but it is {value!r}")
        for value in (float("nan"), True, "fast", None)
    ],
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_cost_model_refuses_nonsense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(**arguments)
