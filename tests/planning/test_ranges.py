"""Ranges, against sets of their integers."""

import itertools

import numpy as np
import pytest

from jaxmagi.planning._ranges import meet, union


@pytest.mark.parametrize("seed", range(20))
def test_union(seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 60, seed % 7)
    end = begin + rng.integers(0, 9, seed % 7)
    first, last = union(begin, end)
    assert as_set(first, last) == as_set(begin, end)
    assert (first[1:] > last[:-1]).all()


@pytest.mark.parametrize("seed", range(20))
def test_meet(seed: int) -> None:
    """Each part is what a range shares with one of disjoint ranges, and no part is missing."""
    rng = np.random.default_rng(seed)
    begin, other_begin = rng.integers(0, 60, seed % 7), np.flatnonzero(rng.integers(0, 4, 60) == 0)
    end = begin + rng.integers(0, 9, len(begin))
    other_end = np.minimum(other_begin + rng.integers(1, 9, len(other_begin)), np.append(other_begin[1:], 60))
    parts = {
        (i, j): (max(begin[i], other_begin[j]), min(end[i], other_end[j]))
        for i, j in itertools.product(range(len(begin)), range(len(other_begin)))
    }
    index, other, first, last = meet(begin, end, other_begin, other_end)
    found = list(zip(index.tolist(), other.tolist(), first.tolist(), last.tolist(), strict=True))
    assert found == [(i, j, b, e) for (i, j), (b, e) in parts.items() if b < e]


def as_set(begin: np.ndarray, end: np.ndarray) -> set[int]:
    return {token for b, e in zip(begin, end, strict=True) for token in range(b, e)}
