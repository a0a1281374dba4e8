"""The search for swaps, against received rows counted one by one."""

import numpy as np
import pytest

from jaxmagi.planning._swaps import Demand, _rows_after, _traffic, reduce_rows


def random_demand(
    seed: int, cp_size: int = 3, per_rank: int = 4, split: int = 2
) -> tuple[np.ndarray, Demand]:
    rng = np.random.default_rng(seed)
    count = cp_size * per_rank
    deal = rng.permutation(count).reshape(cp_size, per_rank)
    needs = (rng.random((count, count * split)) < 0.2).astype(np.float32)
    rows = rng.integers(0, 9, count * split).astype(np.float32)
    return deal, Demand(needs, rows, rng.integers(0, 100, count))


def received_rows(deal: np.ndarray, demand: Demand) -> list[int]:
    """Rows that each rank receives, granule by granule."""
    split = len(demand.rows) // deal.size
    return [
        sum(
            int(demand.rows[granule])
            for granule in range(len(demand.rows))
            if granule // split not in hand and any(demand.needs[chunk, granule] for chunk in hand)
        )
        for hand in deal.tolist()
    ]


def swapped(deal: np.ndarray, a: tuple[int, int], b: tuple[int, int]) -> np.ndarray:
    deal = deal.copy()
    deal[a], deal[b] = deal[b], deal[a]
    return deal


@pytest.mark.parametrize("seed", range(4))
def test_rows_after_every_swap(seed: int) -> None:
    deal, demand = random_demand(seed)
    traffic = _traffic(deal, demand)
    np.testing.assert_array_equal(traffic.received, received_rows(deal, demand))
    assert traffic.sent.sum() == traffic.received.sum()
    after = _rows_after(deal, demand, traffic.owned)
    places = list(np.ndindex(deal.shape))
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            if a[0] != b[0]:
                assert after[i, j] == received_rows(swapped(deal, a, b), demand)[a[0]]


@pytest.mark.parametrize("seed", range(10))
def test_strict_search_respects_the_limit(seed: int) -> None:
    deal, demand = random_demand(seed, cp_size=4, per_rank=6)
    limit = int(demand.areas[deal].sum(axis=1).max())
    better = reduce_rows(deal, demand, limit, strict=True)
    assert sorted(better.ravel()) == list(range(deal.size))
    assert demand.areas[better].sum(axis=1).max() <= limit
    assert sum(received_rows(better, demand)) < sum(received_rows(deal, demand))


def test_strict_search_moves_nothing_that_would_unbalance() -> None:
    areas = np.array([10**6, 10**6, 10**6 + 1, 10**6 + 1])
    deal = np.array([[0, 3], [1, 2]])
    needs = np.eye(4, dtype=np.float32)[[1, 0, 3, 2]]  # the chunks 0, 1 and 2, 3 need each other
    demand = Demand(needs, np.ones(4, np.float32), areas)
    np.testing.assert_array_equal(reduce_rows(deal, demand, 2 * 10**6 + 1, strict=True), deal)
    assert sum(received_rows(reduce_rows(deal, demand, 2 * 10**6 + 2, strict=True), demand)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_search_approaches_the_limit(seed: int) -> None:
    _, demand = random_demand(seed, cp_size=4, per_rank=8)
    order = np.argsort(demand.areas).reshape(4, 8)
    mean = demand.areas.sum() / 4
    assert demand.areas[order].sum(axis=1).max() > 1.5 * mean
    deal = reduce_rows(order, demand, int(1.05 * mean), strict=False)
    assert demand.areas[deal].sum(axis=1).max() < 1.08 * mean
