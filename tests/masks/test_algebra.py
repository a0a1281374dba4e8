"""Masks made of masks (``&``, ``|``, crop and shift) against dense masks."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxmagi import masks
from jaxmagi.masks import UNBOUNDED, AttnMask, _intersection

from ..cases import random_bands
from .dense import any_bands, coverage

seeds = given(seed=st.integers(0, 2**32))


def _mask(rng: np.random.Generator, q_len: int, kv_len: int) -> AttnMask:
    """Returns a mask without overlaps, with empty bands and limits out of reach."""
    bands = random_bands(rng, q_len, kv_len, int(rng.integers(1, 9)))
    return AttnMask.from_bands(bands, q_len=q_len, kv_len=kv_len)


def _check(mask: AttnMask, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(mask.to_dense(), expected)
    AttnMask.from_bands(mask.bands, q_len=mask.q_len, kv_len=mask.kv_len)  # no cell counts twice
    assert mask.area() == expected.sum()


def _any(value: object) -> Any:
    """Hides a wrong type from the type checker."""
    return value


def _range(rng: np.random.Generator, length: int) -> tuple[int, int]:
    begin, end = np.sort(rng.integers(0, length + 1, 2)).tolist()
    return begin, end


@settings(max_examples=300, deadline=None)
@seeds
def test_and(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, 2).tolist()
    a, b = _mask(rng, *lengths), _mask(rng, *lengths)
    both = a.to_dense() & b.to_dense()
    _check(a & b, both)
    _check(b & a, both)
    assert (a & b).num_bands <= a.num_bands * b.num_bands
    _check(a & masks.full(*lengths), a.to_dense())
    _check(a & a, a.to_dense())


@settings(max_examples=100, deadline=None)
@seeds
def test_and_counts_pairs_of_overlapping_bands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q_len, kv_len = rng.integers(1, 20, 2).tolist()
    bands = [any_bands(rng, q_len, kv_len, int(rng.integers(0, 6))) for _ in range(2)]
    a, b = (AttnMask.from_bands(one, q_len=q_len, kv_len=kv_len, check=False) for one in bands)
    counts = [coverage(one, q_len, kv_len).sum(0) for one in bands]
    np.testing.assert_array_equal(
        coverage(np.asarray((a & b).bands), q_len, kv_len).sum(0), counts[0] * counts[1]
    )


@settings(max_examples=200, deadline=None)
@seeds
def test_or(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 2).tolist()
    whole = _mask(rng, *lengths)
    bands = np.asarray(whole.bands)
    first = rng.random(len(bands)) < 0.5
    a, b = (AttnMask.from_bands(bands[kept], q_len=lengths[0], kv_len=lengths[1]) for kept in (first, ~first))
    _check(a | b, whole.to_dense())
    _check(a | b | masks.full(0).shift(q_len=lengths[0], kv_len=lengths[1]), whole.to_dense())
    other = _mask(rng, *lengths)
    both = whole.to_dense() & other.to_dense()
    if not both.any():
        _check(whole | other, whole.to_dense() | other.to_dense())
        return
    with pytest.raises(ValueError, match=r"both masks let query .*, which would count twice") as error:
        _ = whole | other
    found = re.search(r"query (\d+) see key (\d+),", str(error.value))
    assert found and both[int(found[1]), int(found[2])]


@settings(max_examples=300, deadline=None)
@seeds
def test_crop_and_shift(seed: int) -> None:
    """A part has the cells of the whole, and comes back to its place; parts make the whole again."""
    rng = np.random.default_rng(seed)
    q_len, kv_len = rng.integers(0, 40, 2).tolist()
    mask = _mask(rng, q_len, kv_len)
    dense = mask.to_dense()
    (q0, q1), (k0, k1) = _range(rng, q_len), _range(rng, kv_len)
    part = mask.crop((q0, q1), slice(k0, k1))
    _check(part, dense[q0:q1, k0:k1])
    cleared = np.zeros_like(dense)
    cleared[q0:q1, k0:k1] = dense[q0:q1, k0:k1]
    _check(part.shift(q0, k0, q_len=q_len, kv_len=kv_len), cleared)
    above, below = mask.crop(slice(q0)), mask.crop(queries=slice(q0, None))
    _check(above.shift(q_len=q_len) | below.shift(q0), dense)
    left, right = mask.crop(keys=slice(None, k1)), mask.crop(keys=(k1, kv_len))
    _check(left.shift(kv_len=kv_len) | right.shift(keys=k1), dense)
    far = mask.shift(UNBOUNDED - 100, 7).shift(100 - UNBOUNDED, UNBOUNDED - 100)
    _check(far.shift(keys=100 - UNBOUNDED - 7), dense)


@settings(max_examples=200, deadline=None)
@seeds
def test_shift_keeps_all_cells_or_says_what_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 20, (2, 2)).tolist()
    mask = _mask(rng, *old)
    distance = rng.integers(-10, 11, 2)
    cells = np.argwhere(mask.to_dense()) + distance
    move = {"queries": int(distance[0]), "keys": int(distance[1]), "q_len": new[0], "kv_len": new[1]}
    if ((cells >= 0) & (cells < new)).all():
        expected = np.zeros(new, bool)
        expected[tuple(cells.T)] = True
        _check(mask.shift(**move), expected)
    else:
        with pytest.raises(ValueError, match=r"(query|key) range .* is not inside the \d+ (query|key)"):
            mask.shift(**move)


def test_lengths_of_shifted_masks() -> None:
    mask = masks.full(3, 5)
    moved = mask.shift(2, 4)
    assert (moved.q_len, moved.kv_len) == (5, 9)
    moved = mask.shift(q_len=7)
    assert (moved.q_len, moved.kv_len) == (7, 5)
    moved = masks.causal(4, 2).shift(-2)  # its first two queries see nothing
    np.testing.assert_array_equal(moved.to_dense(), np.tri(2, dtype=bool))


def test_empty_results_are_masks() -> None:
    nothing = masks.documents([4, 4], "full") & AttnMask.from_slices([(0, 4)], [(4, 8)], [0], q_len=8)
    assert (nothing.num_bands, nothing.area(), nothing.bands.shape) == (0, 0, (8, 6))
    assert (nothing | nothing).num_bands == 0
    assert (nothing & masks.full(8)).num_bands == 0
    np.testing.assert_array_equal((nothing | masks.causal(8)).to_dense(), np.tri(8, dtype=bool))
    assert masks.causal(8).crop((3, 3)).to_dense().shape == (0, 8)
    assert (masks.full(0) & masks.full(0)).to_dense().shape == (0, 0)
    upper = masks.causal(8).crop((0, 4), (4, 8))
    assert (upper.q_len, upper.kv_len, upper.num_bands) == (4, 4, 0)


def test_sizes_are_compact() -> None:
    """Capacities do not grow with those of the operands."""
    a = masks.documents([10] * 100).pad_to(1000)
    window = masks.sliding_window(1000, 3).pad_to(500)
    assert (a & window).bands.shape == (128, 6)
    assert a.crop((0, 100)).bands.shape == (16, 6)
    assert a.shift(1).bands.shape == (128, 6)
    assert (a & window).num_bands == 100


@pytest.mark.parametrize("rows", [True, False], ids=["disjoint in rows", "disjoint in keys"])
def test_and_of_many_bands_is_linear(rows: bool) -> None:
    """Bands that are disjoint in their rows, or in their keys, meet few others of 100,000."""
    begin = np.arange(100_000)
    narrow, wide = (begin, begin + 1), (0 * begin, 0 * begin + 100_000)
    ranges = np.column_stack(narrow + wide if rows else wide + narrow)
    mask = AttnMask.from_bands(
        np.column_stack([ranges, 0 * begin - UNBOUNDED, 0 * begin + UNBOUNDED]),
        q_len=100_000,
        kv_len=100_000,
        check=False,
    )
    assert (mask & masks.documents([2] * 50_000, "full")).num_bands == 100_000
    assert (mask & mask).area() == 10**10


def test_and_of_too_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = masks.block_causal(60, 1)
    columns = AttnMask.from_bands([(0, 60, k, k + 1, -60, 60) for k in range(60)], q_len=60, kv_len=60)
    assert (rows & columns).num_bands == 60 * 61 // 2
    monkeypatch.setattr(_intersection, "_MAX_PAIRS", 1829)
    with pytest.raises(NotImplementedError, match=r"60 and 60 bands make 1830 pairs .* more than 1829"):
        _ = rows & columns


_OVERLAPPING = AttnMask.from_bands([(0, 2, 0, 2, -9, 9)] * 2, q_len=4, kv_len=4, check=False)
_CORNER = AttnMask.from_slices([(2, 4)], [(2, 4)], [0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.full(4) & masks.full(4, 5), r"& needs .* but they have \(4, 4\) and \(4, 5\)"),
        (lambda: masks.full(3) | masks.full(4), r"\| needs .* but they have \(3, 3\) and \(4, 4\)"),
        (lambda: masks.full(4) & AttnMask.stack([masks.full(4)]), r"& takes .* mask 1 are \(1, 8, 6\)"),
        (lambda: AttnMask.stack([masks.full(4)]) | masks.full(4), r"\| takes .* mask 0 are \(1, 8, 6\)"),
        (lambda: AttnMask.stack([masks.full(4)]).crop(), r"crop takes masks with bands \[S, 6\]"),
        (lambda: AttnMask.stack([masks.full(4)]).shift(), r"shift takes masks with bands \[S, 6\]"),
        (lambda: masks.full(4) | _CORNER, r"both masks let query 2 see key 2, .* \(2, 4, 2, 4, -1073"),
        (lambda: _OVERLAPPING | _CORNER, r"two bands of the first mask let query 0 see key 0"),
        (lambda: _CORNER | _OVERLAPPING, r"two bands of the second mask let query 0 see key 0"),
        (lambda: masks.full(4).crop((0, 5)), r"the end of queries must be between 0 and 4, but it is 5"),
        (lambda: masks.full(4).crop(slice(-2, None)), r"beginning of queries must be .* but it is -2"),
        (lambda: masks.full(4, 6).crop(keys=(7, 8)), r"beginning of keys must be between 0 and 6, .* 7"),
        (lambda: masks.full(4).crop(keys=(3, 2)), r"keys: the range \(3, 2\) ends before it begins"),
        (lambda: masks.full(4).crop(slice(0, 4, 2)), r"queries must be a slice .* slice\(0, 4, 2\)"),
        (lambda: masks.full(4).crop(_any(3)), r"queries must be a slice without a step or .* it is 3"),
        (lambda: masks.full(4).crop(_any((1, 2, 3))), r"it is \(1, 2, 3\)"),
        (lambda: masks.full(4).crop(_any((0, 2.0))), r"the end of queries must be an integer, .* 2.0"),
        (lambda: masks.full(4).shift(1, q_len=4), r"band 0: query range \(1, 5\) is not inside the 4"),
        (lambda: masks.full(4).shift(keys=-1), r"band 0: key range \(-1, 3\) is not inside the 3 key"),
        (lambda: masks.full(4).shift(-5), r"q_len must be between 0 and 1073741824, but it is -1"),
        (lambda: masks.full(4).shift(2**30), r"queries must be between .* but it is 1073741824"),
        (lambda: masks.full(2**29).shift(0, 2**29 + 1), r"kv_len must be .* but it is 1073741825"),
        (lambda: masks.full(2**30).shift(2**30 - 1, q_len=2**30), r"range \(1073741823, 2147483647\)"),
        (lambda: masks.full(4).shift(_any(1.0)), r"queries must be an integer, but it is 1.0"),
    ],
)
def test_errors_name_the_values(build: Callable[[], AttnMask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("other", [True, 3, None, np.ones((4, 4), bool)], ids=str)
def test_only_masks_are_operands(other: Any) -> None:
    for operate in (lambda: masks.full(4) & other, lambda: masks.full(4) | other):
        with pytest.raises(TypeError, match="unsupported operand type"):
            operate()
