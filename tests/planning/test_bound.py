"""No plan beats the bound that the benchmark prints."""

import itertools

import numpy as np
import pytest

from benchmarks._plan_bound import fewest_received_rows
from jaxmagi import AttnMask, masks

CASES = {
    "full": masks.full(8),
    "causal": masks.causal(8),
    "window": masks.sliding_window(8, 2),
    "documents": masks.documents([1, 5, 2]),
    "full documents": masks.documents([5, 3], inner="full"),
    "nothing": AttnMask.from_bands(np.zeros((0, 6), np.int32), q_len=8, kv_len=8),
}


def received_by_area(mask: AttnMask, cp_size: int) -> dict[int, int]:
    """For each largest area of a rank, the fewest rows that any assignment of single tokens receives."""
    dense = mask.to_dense()
    fewest: dict[int, int] = {}
    for owner in set(itertools.permutations(np.repeat(np.arange(cp_size), 8 // cp_size).tolist())):
        owned = np.array(owner) == np.arange(cp_size)[:, None]
        largest = max(int(dense[own].sum()) for own in owned)
        rows = sum(int((dense[own].any(axis=0) & ~own).sum()) for own in owned)
        fewest[largest] = min(rows, fewest.get(largest, rows))
    return fewest


@pytest.mark.parametrize("name", CASES)
def test_no_assignment_is_below_the_bound(name: str) -> None:
    mask = CASES[name]
    bounds = []
    for largest, rows in received_by_area(mask, 2).items():
        bounds.append(fewest_received_rows(np.asarray(mask.bands), 8, 4, largest))
        assert bounds[-1] <= rows
    assert (max(bounds) > 0) == (name in ("full", "causal", "documents", "full documents"))


def test_bound_is_reached_where_every_rank_needs_everything() -> None:
    assert fewest_received_rows(np.asarray(masks.full(64).bands), 64, 16, 16 * 64) == 3 * 64
