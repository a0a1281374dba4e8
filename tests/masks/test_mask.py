"""AttnMask: its constructors, what they reject, and its methods."""

import contextlib
import doctest
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import UNBOUNDED, AttnMask, MaskType, _mask, geometry

from ..cases import MaskCase, mask_cases
from .dense import any_bands, coverage


def _build(case: MaskCase, check: bool) -> AttnMask:
    return AttnMask.from_slices(
        case.q_ranges, case.k_ranges, case.mask_types, q_len=case.q_len, kv_len=case.kv_len, check=check
    )


def _strips(mask: AttnMask, rows: int = 1024) -> Iterator[np.ndarray]:
    """Yields the number of bands per cell by strips of rows, as all at once would take gigabytes."""
    for q0 in range(0, mask.q_len, rows):
        q1 = min(q0 + rows, mask.q_len)
        bands = geometry.crop(np.asarray(mask.bands), q0, q1, 0, mask.kv_len)
        yield geometry.to_dense(geometry.shift(bands, -q0, 0), q1 - q0, mask.kv_len)


@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_masks(case: MaskCase) -> None:
    """Masks agree with their known answers; those that overlap are rejected unless unchecked."""
    expectation = contextlib.nullcontext()
    if case.overlaps:
        expectation = pytest.raises(ValueError, match=r"bands \d+ and \d+ both cover query \d+, key \d+")
    with expectation:
        assert _build(case, check=True).area() == case.area
    mask = _build(case, check=False)
    strips = list(_strips(mask))
    assert max(strip.max() for strip in strips) == case.max_cell_coverage
    assert sum(int(strip.sum()) for strip in strips) == mask.area() == case.area
    assert sum(int((~strip.any(axis=1)).sum()) for strip in strips) == case.empty_q_rows


@pytest.mark.parametrize("mask_type", MaskType)
@pytest.mark.parametrize("sq", [0, 1, 2, 5])
@pytest.mark.parametrize("sk", [0, 1, 2, 3, 5, 9])
def test_types(mask_type: MaskType, sq: int, sk: int) -> None:
    i, j = np.arange(sq)[:, None], np.arange(sk)
    causal, inverse = j <= i + sk - sq, j >= i
    visible = {0: j >= 0 * i, 1: causal, 2: inverse, 3: causal & inverse}[int(mask_type)]
    expected = np.zeros((12, 14), bool)
    expected[3 : 3 + sq, 4 : 4 + sk] = visible
    mask = AttnMask.from_slices([(3, 3 + sq)], [(4, 4 + sk)], [mask_type], q_len=12, kv_len=14)
    np.testing.assert_array_equal(mask.to_dense(), expected)
    assert mask.num_bands == int(expected.any())


def test_lengths_default_to_the_largest_ends() -> None:
    mask = AttnMask.from_slices([(5, 9), (0, 2)], [(1, 3), (0, 7)], [0, 1])
    assert (mask.q_len, mask.kv_len) == (9, 7)
    nothing = AttnMask.from_slices([], [], [])
    assert (nothing.q_len, nothing.kv_len, nothing.num_bands, nothing.area()) == (0, 0, 0, 0)
    assert nothing.to_dense().shape == (0, 0)


_ROW = (0, 4, 0, 4, -UNBOUNDED, UNBOUNDED)


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        ([_ROW, (3, 2, 0, 4, 0, 0)], r"band 1: query range \(3, 2\) ends before it begins"),
        ([(0, 1, 4, 2, 0, 0)] * 9, r"band 0: key range \(4, 2\) ends .* 8 more: 1, 2, 3, 4, 5, …"),
        ([(0, 5, 0, 4, 0, 0)], r"band 0: query range \(0, 5\) is not inside the 4 query tokens"),
        ([(0, 4, 0, 9, 0, 0)], r"band 0: key range \(0, 9\) is not inside the 8 key tokens"),
        ([(-1, 4, 0, 4, 0, 0)], r"band 0: query range \(-1, 4\) is not inside"),
        ([_ROW, (0, 1, 4, 5, 0, 9), (2, 3, 1, 2, -5, 5)], r"bands 0 and 2 both cover query 2, key 1,"),
        (np.zeros((2, 6)), r"bands must hold integers, but has dtype float64"),
        (np.zeros((2, 6), bool), r"dtype bool"),
        (np.zeros((2, 5), int), r"bands must have shape \[n, 6\], but has shape \(2, 5\)"),
        (np.zeros((5, 0), int), r"but has shape \(5, 0\)"),
        (np.zeros((1, 2, 6), int), r"but has shape \(1, 2, 6\)"),
        ([[2**70] * 6], r"bands must fit into int64, but it holds 1180591620717411303424"),
        ([[0, 1], [0]], r"bands must be an array, but numpy cannot make one of it: .* inhomogeneous"),
        ([[0, 1, 0, 1, 2**63, 2**63]], r"bands must fit into int64, but it holds 9223372036854775808"),
    ],
)
def test_bad_bands(bands: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttnMask.from_bands(bands, q_len=4, kv_len=8)


@pytest.mark.parametrize(
    ("q", "k", "types", "lengths", "message"),
    [
        ([(0, 4)], [(0, 4)], [4], {}, r"band 0: mask_types\[0\] = 4 is no MaskType"),
        ([(0, 4)], [(0, 4)], [-1], {}, r"mask_types\[0\] = -1"),
        ([(0, 4)], [(0, 4)], ["causal"], {}, r"mask_types must hold integers"),
        ([(0, 4)], [(0, 4)] * 2, [0], {}, r"must have one length, but they have 1, 2 and 1"),
        ([(0, 4, 1)], [(0, 4)], [0], {}, r"q_ranges must have shape \[n, 2\]"),
        ([(0, 4)], [(0, 4)], [0], {"q_len": 3}, r"band 0: query range \(0, 4\) is not inside the 3"),
        ([(0, 4)], [(0, 4)], [0], {"kv_len": -4}, r"kv_len must be between 0 and 1073741824, but it is -4"),
        ([(0, 2**31)], [(0, 4)], [0], {}, r"q_len must be between 0 and 1073741824, but it is 2147483648"),
        ([(4, 0)], [(0, 4)], [1], {}, r"band 0: query range \(4, 0\)"),
    ],
)
def test_bad_slices(q: Any, k: Any, types: Any, lengths: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttnMask.from_slices(q, k, types, **lengths)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: AttnMask.from_bands([_ROW], q_len=4, kv_len=4, check=cast("Any", "no")),
            "check must be True or False, but it is 'no'",
        ),
        (
            lambda: AttnMask.from_slices([(0, 4)], [(0, 4)], [0], check=cast("Any", None)),
            "check must be True or False, but it is None",
        ),
        (
            lambda: masks.from_segment_ids([1, 1], causal=cast("Any", "False")),
            "causal must be True or False, but it is 'False'",
        ),
        (
            lambda: masks.from_segment_ids(np.ma.array([1, 1], mask=[False, True])),
            "segment_ids must not be a masked array, whose mask would be lost",
        ),
        (lambda: masks.documents(np.ma.array([1, 1])), "lengths must not be a masked array"),
    ],
)
def test_flags_and_masked_arrays(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_unchecked_overlaps_count_per_band() -> None:
    mask = AttnMask.from_bands([_ROW, _ROW], q_len=4, kv_len=4, check=False)
    assert mask.area() == 32
    assert mask.to_dense().sum() == 16


def test_area_is_exact_beyond_int64() -> None:
    row = (0, 2**30, 0, 2**30, -UNBOUNDED, UNBOUNDED)
    mask = AttnMask.from_bands([row] * 16, q_len=2**30, kv_len=2**30, check=False)
    assert mask.area() == 2**64


def test_bands_are_stored_compactly() -> None:
    limits = np.array(
        [(0, 4, 0, 4, -(2**40), 2**40), (1, 1, 0, 4, 0, 0), (0, 4, 4, 8, 9, 9), (0, 1, 4, 5, 4, 4)]
    )
    mask = AttnMask.from_bands(limits, q_len=4, kv_len=8)
    assert mask.bands.shape == (8, 6) and mask.bands.dtype == np.int32
    np.testing.assert_array_equal(mask.bands[:2], [_ROW, (0, 1, 4, 5, 4, 4)])
    assert not mask.bands[2:].any()
    assert mask.num_bands == 2
    assert masks.documents([1] * 9).bands.shape == (16, 6)
    assert masks.documents([1] * 16).bands.shape == (16, 6)


def test_bands_equal_their_definition(rng: np.random.Generator) -> None:
    for _ in range(50):
        bands = any_bands(rng, 12, 15, 6)
        mask = AttnMask.from_bands(bands, q_len=12, kv_len=15, check=False)
        np.testing.assert_array_equal(mask.to_dense(), coverage(bands, 12, 15).any(0))


def test_concatenate_is_block_diagonal(rng: np.random.Generator) -> None:
    parts = [
        masks.causal(5, 9),
        masks.full(3),
        masks.full(0, 2),
        masks.sliding_window(6, 2, 1, kv_len=4),
        masks.documents([2, 4], "full").pad_to(40),
    ]
    whole = AttnMask.concatenate(parts)
    q = k = 0
    expected = np.zeros((whole.q_len, whole.kv_len), bool)
    for part in parts:
        expected[q : q + part.q_len, k : k + part.kv_len] = part.to_dense()
        q, k = q + part.q_len, k + part.kv_len
    assert (q, k) == expected.shape
    np.testing.assert_array_equal(whole.to_dense(), expected)
    assert whole.bands.shape == (8, 6)


@pytest.mark.parametrize(
    ("function", "parts", "message"),
    [
        (AttnMask.concatenate, [], r"concatenate needs at least one mask"),
        (AttnMask.stack, [], r"stack needs at least one mask"),
        (AttnMask.stack, [masks.full(4), masks.full(3)], r"but there are \[\(3, 3\), \(4, 4\)\]"),
        (AttnMask.concatenate, [masks.full(4), AttnMask.stack([masks.full(4)])], r"mask 1 are \(1, 8, 6\)"),
        (AttnMask.concatenate, [masks.full(2**29)] * 3, r"q_len must be between 0 and 1073741824"),
    ],
)
def test_bad_parts(function: Any, parts: list[AttnMask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(parts)


@pytest.mark.parametrize("function", [AttnMask.concatenate, AttnMask.stack])
def test_kinds_of_parts(function: Any) -> None:
    parts = [masks.causal(4), masks.full(4)]
    np.testing.assert_array_equal(function(part for part in parts).bands, function(parts).bands)
    for given, message in (
        ([1], r"masks\[0\] must be an AttnMask, but it is 1"),
        ([parts[0], None], r"masks\[1\] must be an AttnMask, but it is None"),
        (None, r"masks must be a list, but it is None"),
        (parts[0], r"masks must be a list, but it is AttnMask\."),
    ):
        with pytest.raises(ValueError, match=message):
            function(given)


def test_stack() -> None:
    parts = [masks.causal(20), masks.documents([1] * 20), masks.from_segment_ids([0] * 20)]
    mask = AttnMask.stack(parts)
    assert mask.bands.shape == (3, 32, 6)
    np.testing.assert_array_equal(mask.to_dense(), [part.to_dense() for part in parts])
    assert mask.area() == sum(part.area() for part in parts)
    assert mask.num_bands == 1 + 20
    np.testing.assert_array_equal(mask.pad_to(20).to_dense(), mask.to_dense())
    with pytest.raises(ValueError, match=r"capacity 19 is too small: the mask's bands take 20 rows"):
        mask.pad_to(19)


def test_pad_to() -> None:
    mask = masks.documents([3, 4, 5])
    for capacity in (3, 7, 100):
        padded = mask.pad_to(capacity)
        assert padded.bands.shape == (capacity, 6) and padded.bands.dtype == np.int32
        np.testing.assert_array_equal(padded.to_dense(), mask.to_dense())
    with pytest.raises(ValueError, match=r"capacity 2 is too small: the mask's bands take 3 rows"):
        mask.pad_to(2)
    with pytest.raises(ValueError, match=r"capacity must be between 0 and 16777216, but it is 1073741824"):
        mask.pad_to(2**30)
    assert masks.full(0).pad_to(0).bands.shape == (0, 6)


def test_no_rows_of_bands() -> None:
    """Nothing sees anything, whether there is room for bands or not."""
    one = AttnMask.from_bands([], q_len=4, kv_len=5).pad_to(0)
    for mask, examples in ((one, ()), (AttnMask.stack([one] * 3), (3,))):
        assert mask.bands.shape == (*examples, 0, 6)
        assert (mask.num_bands, mask.area()) == (0, 0)
        np.testing.assert_array_equal(mask.to_dense(), np.zeros((*examples, 4, 5), bool))
        np.testing.assert_array_equal(mask.pad_to(0).bands, mask.bands)
        np.testing.assert_array_equal(mask.pad_to(2).bands, np.zeros((*examples, 2, 6)))
    assert AttnMask.concatenate([one, masks.full(2)]).area() == 4


def test_examples() -> None:
    result = doctest.testmod(_mask)
    assert result.attempted > 0 and result.failed == 0
