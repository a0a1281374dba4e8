"""Builders of masks against dense definitions in ``q`` and ``k``, at random sizes."""

import doctest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxmagi import masks
from jaxmagi.masks import AttnMask, _builders, _tree


@pytest.fixture(params=range(12))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def _qk(q_len: int, kv_len: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(q_len)[:, None], np.arange(q_len if kv_len is None else kv_len)


def _any(value: object) -> Any:
    """Hides a wrong type from the type checker."""
    return value


def _check(mask: AttnMask, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(mask.to_dense(), expected)
    AttnMask.from_bands(mask.bands, q_len=mask.q_len, kv_len=mask.kv_len)  # no cell counts twice
    assert mask.area() == expected.sum()


def test_full_and_causal(rng: np.random.Generator) -> None:
    q_len, kv_len = rng.integers(0, 30, 2).tolist()
    q, k = _qk(q_len, kv_len)
    _check(masks.full(q_len, kv_len), np.ones((q_len, kv_len), bool))
    _check(masks.full(q_len), np.ones((q_len, q_len), bool))
    _check(masks.causal(q_len, kv_len), k - kv_len <= q - q_len)
    _check(masks.causal(q_len), np.tri(q_len, dtype=bool))


def test_sliding_window(rng: np.random.Generator) -> None:
    length, kv_len = rng.integers(0, 30, 2).tolist()
    left, right = rng.integers(-1, 12, 2).tolist()
    q, k = _qk(length, kv_len)
    distance = k - (q + kv_len - length)
    expected = ((left == -1) | (distance >= -left)) & ((right == -1) | (distance <= right))
    _check(masks.sliding_window(length, left, right, kv_len=kv_len), expected)


@pytest.mark.parametrize(("left", "keys"), [(0, 1), (1, 2), (127, 128), (-1, 300)])
def test_window_counts_keys_besides_self(left: int, keys: int) -> None:
    """A window of W keys that counts the query itself, as in other libraries, is left = W - 1."""
    dense = masks.sliding_window(300, left).to_dense()
    assert dense.sum(1).max() == keys
    assert dense.diagonal().all()


@pytest.mark.parametrize("inner", ["causal", "full", (0, 0), (3, 0), (-1, 2), (2, -1), [2, 2]])
def test_documents(inner: str | tuple[int, int], rng: np.random.Generator) -> None:
    lengths = rng.integers(0, 9, rng.integers(0, 8))
    q, k = _qk(int(lengths.sum()))
    document = np.repeat(np.arange(len(lengths)), lengths)
    same = document[:, None] == document
    left, right = {"causal": (-1, 0), "full": (-1, -1)}[inner] if isinstance(inner, str) else inner
    window = ((left == -1) | (q - k <= left)) & ((right == -1) | (k - q <= right))
    _check(masks.documents(lengths, inner), same & window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding_id", [0, -1])
def test_segment_ids(causal: bool, padding_id: int, rng: np.random.Generator) -> None:
    ids = np.repeat(rng.integers(-1, 4, 10), rng.integers(0, 5, 10))
    q, k = _qk(len(ids))
    expected = (ids[:, None] == ids) & (ids != padding_id) & ((k <= q) | (not causal))
    _check(masks.from_segment_ids(ids, causal=causal, padding_id=padding_id), expected)


def test_segments_take_one_band_per_pair_of_runs() -> None:
    """Too many bands raise before they fill the memory."""
    assert masks.from_segment_ids(np.repeat([1, 2, 3, 0], 100)).num_bands == 3
    with pytest.raises(NotImplementedError, match=r"10000 runs of 2 segments need 25005000 bands"):
        masks.from_segment_ids(np.tile([1, 2], 5000))
    with pytest.raises(NotImplementedError, match=r"4096 runs of 2 segments need 8388608 bands"):
        masks.from_segment_ids(np.tile([1, 2], 2048), causal=False)
    assert masks.from_segment_ids(np.tile([1, 2], 2000)).num_bands == 2 * 2000 * 2001 // 2
    assert masks.from_segment_ids(np.arange(1, 100_001)).num_bands == 100_000


def test_video_without_tokens_takes_no_memory() -> None:
    mask = masks.video(2**30, 0)
    assert (mask.q_len, mask.num_bands) == (0, 0)


def test_blocks(rng: np.random.Generator) -> None:
    length, block = int(rng.integers(0, 40)), int(rng.integers(1, 12))
    q, k = _qk(length)
    _check(masks.block_causal(length, block), k // block <= q // block)
    _check(masks.chunked_causal(length, block), (k // block == q // block) & (k <= q))


def test_prefix_lm(rng: np.random.Generator) -> None:
    length = int(rng.integers(0, 30))
    prefix = int(rng.integers(0, length + 1))
    q, k = _qk(length)
    _check(masks.prefix_lm(length, prefix), (k <= q) | ((k < prefix) & (q < prefix)))


def test_shared_prefix(rng: np.random.Generator) -> None:
    prefix, branches = int(rng.integers(0, 8)), rng.integers(0, 6, rng.integers(0, 6))
    branch = np.concatenate([np.full(prefix, -1), np.repeat(np.arange(len(branches)), branches)])
    q, k = _qk(len(branch))
    _check(masks.shared_prefix(prefix, branches), (k <= q) & ((branch == -1) | (branch == branch[:, None])))


def _sees_tree(parents: list[int], lengths: list[int]) -> np.ndarray:
    """Returns which query sees which key of a tree, from a walk from every segment to its root."""
    ancestors = np.eye(len(parents), dtype=bool)
    for segment in range(len(parents)):
        parent = parents[segment]
        while parent >= 0:
            ancestors[segment, parent] = True
            parent = parents[parent]
    q, k = _qk(sum(lengths))
    return np.repeat(np.repeat(ancestors, lengths, axis=0), lengths, axis=1) & (k <= q)


def _random_tree(seed: int) -> tuple[list[int], list[int]]:
    """Returns a tree or forest: bushy, or long chains, or any, with and without empty segments."""
    rng = np.random.default_rng(seed)
    count, reach = int(rng.integers(0, 25)), int(rng.choice([1, 2, 5, 25]))
    parents = [int(rng.integers(max(-1, i - reach), i)) for i in range(count)]
    return parents, rng.integers(int(rng.integers(0, 2)), 5, count).tolist()


def _depth_first(parents: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Returns the same tree with its segments in depth-first order."""
    paths: list[tuple[int, ...]] = []
    for segment, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), segment))
    order = sorted(range(len(parents)), key=paths.__getitem__)
    return [order.index(parents[i]) if parents[i] >= 0 else -1 for i in order], [lengths[i] for i in order]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_prefix_tree(seed: int) -> None:
    parents, lengths = _random_tree(seed)
    mask = masks.prefix_tree(parents, lengths)
    _check(mask, _sees_tree(parents, lengths))
    parents, lengths = _depth_first(parents, lengths)
    mask = masks.prefix_tree(np.array(parents, int), np.array(lengths, int))
    _check(mask, _sees_tree(parents, lengths))
    assert mask.num_bands <= np.count_nonzero(lengths)


@pytest.mark.parametrize(
    ("parents", "lengths", "bands"),
    [
        ([], [], 0),
        ([-1, 0, 0], [0, 0, 0], 0),
        ([-1, 0, 1, 2, 3], [3, 1, 0, 2, 1], 1),  # a chain is one sequence
        ([-1, -1, -1], [3, 1, 2], 3),  # packed documents
        ([-1, 0, 0, 0], [5, 2, 3, 4], 4),  # a shared prefix
        ([-1, 0, 1, 1, 0, 4, 4], [1] * 7, 7),  # a binary tree in depth-first order
        ([-1, 0, 0, 1, 1, 2, 2], [1] * 7, 9),  # level by level: two segments are seen by two runs
        ([-1, 0, 0, 1, 2, 3, 4], [1] * 7, 13),  # two interleaved branches of three segments
        ([-1, 0, 1, 0, 0], [4, 4, 4, 0, 4], 3),  # the only child of a child
        ([-1, 0, 1, -1, 2], [1, 1, 1, 1, 1], 4),  # a chain, seen in one band from behind a tree
    ],
)
def test_bands_of_a_prefix_tree(parents: list[int], lengths: list[int], bands: int) -> None:
    mask = masks.prefix_tree(parents, lengths)
    _check(mask, _sees_tree(parents, lengths))
    assert mask.num_bands == bands


def test_prefix_tree_of_one_level_is_a_shared_prefix() -> None:
    tree, group = masks.prefix_tree([-1, 0, 0, 0], [4, 2, 0, 3]), masks.shared_prefix(4, [2, 0, 3])
    np.testing.assert_array_equal(tree.bands, group.bands)


def test_depth_of_a_prefix_tree() -> None:
    """Chains from the root count, whether their segments have tokens or not."""
    chain = np.arange(-1, 64)
    assert masks.prefix_tree(chain[:64], [1] * 64).num_bands == 1
    with pytest.raises(ValueError, match=r"depth must be at most 64, but it is 65, at segment 64"):
        masks.prefix_tree(chain, [0] * 65)
    with pytest.raises(ValueError, match=r"depth must be at most 64, but it is 1000, at segment 999"):
        masks.prefix_tree(np.arange(-1, 999), np.ones(1000, int))


def test_many_segments_of_a_prefix_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many bands raise before they fill the memory; in depth-first order there are few."""
    beams, depth = 100_000, 3
    interleaved = np.arange(beams * depth) - beams
    lengths = np.ones(beams * depth, int)
    by_beam = np.where(np.arange(beams * depth) % depth, np.arange(beams * depth) - 1, -1)
    assert masks.prefix_tree(by_beam, lengths).num_bands == beams
    assert masks.prefix_tree(np.maximum(-1, interleaved), lengths).num_bands == beams * 6
    monkeypatch.setattr(_tree, "_MAX_BANDS", beams * 6 - 1)
    with pytest.raises(NotImplementedError, match=r"300000 segments need more than 599999 bands"):
        masks.prefix_tree(np.maximum(-1, interleaved), lengths)


@pytest.mark.parametrize("kv_range", [None, 1, 2, 3, 100])
def test_video(kv_range: int | None, rng: np.random.Generator) -> None:
    chunks, tokens = rng.integers(0, 7, 2).tolist()
    chunk = np.arange(chunks * tokens) // max(tokens, 1)
    q, k = chunk[:, None], chunk
    expected = (k <= q) & (k > q - (chunks + 1 if kv_range is None else kv_range))
    _check(masks.video(chunks, tokens, kv_range), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.full(-1), r"q_len must be between 0 and 1073741824, but it is -1"),
        (lambda: masks.causal(2**30 + 1), r"but it is 1073741825"),
        (lambda: masks.causal(4, _any(2.5)), r"kv_len must be an integer, but it is 2.5"),
        (lambda: masks.full(True), r"q_len must be an integer, but it is True"),
        (lambda: masks.sliding_window(4, -2), r"left must be between -1 .* but it is -2"),
        (lambda: masks.documents([3, -1, -2]), r"lengths\[1\] = -1 is negative.*1 more: 2"),
        (lambda: masks.documents(_any([1.5])), r"lengths must hold integers, but has dtype float64"),
        (lambda: masks.documents(_any([[1], [2]])), r"lengths must have shape \[n\], but has shape \(2, 1\)"),
        (lambda: masks.documents([2, 2**64 - 1]), r"must fit into int64, but it holds 18446744073709551615"),
        (lambda: masks.from_segment_ids(np.array([1, 2**63], np.uint64)), r"it holds 9223372036854775808"),
        (lambda: masks.video(2**30, 2), r"num_chunks \* tokens_per_chunk must be .* but it is 2147483648"),
        (lambda: masks.documents([2**29] * 3), r"the sum of lengths must be between .* 1610612736"),
        (lambda: masks.documents([3], "casual"), r"inner must be .* but it is 'casual'"),
        (lambda: masks.documents([3], _any((1, 2, 3))), r"inner must be .* but it is \(1, 2, 3\)"),
        (lambda: masks.documents([3], (1, -2)), r"right must be between -1 .* but it is -2"),
        (lambda: masks.from_segment_ids(_any([[1, 2]])), r"segment_ids must have shape \[n\]"),
        (lambda: masks.from_segment_ids([1], padding_id=_any(None)), r"padding_id must be an integer"),
        (lambda: masks.block_causal(8, 0), r"block must be between 1 .* but it is 0"),
        (lambda: masks.chunked_causal(8, -3), r"chunk must be between 1 .* but it is -3"),
        (lambda: masks.prefix_lm(8, 9), r"prefix must be between 0 and 8, but it is 9"),
        (lambda: masks.shared_prefix(2, [1, -1]), r"branches\[1\] = -1 is negative"),
        (lambda: masks.prefix_tree([-1, 0], [1, 2, 3]), r"must have one length, but they have 2 and 3"),
        (lambda: masks.prefix_tree([-1, 1, 2], [1, 1, 1]), r"parents\[1\] = 1 is neither .* 1 more: 2"),
        (lambda: masks.prefix_tree([-2], [1]), r"parents\[0\] = -2 is neither -1 nor .* before segment 0"),
        (lambda: masks.prefix_tree(_any([-1.0]), [1]), r"parents must hold integers, .* float64"),
        (lambda: masks.prefix_tree([-1, 0], [3, -1]), r"lengths\[1\] = -1 is negative"),
        (lambda: masks.video(3, 4, 0), r"kv_range must be between 1 .* but it is 0"),
    ],
)
def test_errors_name_the_values(build: Callable[[], AttnMask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_examples() -> None:
    result = doctest.testmod(_builders)
    assert result.attempted > 5 and result.failed == 0
