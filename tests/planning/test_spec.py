"""Group cast tables from splits."""

import jax
import numpy as np
import pytest

from jaxmagi.planning import GroupCastSpec

from .oracle import check_spec, group_cast


def random_splits(seed: int) -> tuple[list, list, list, list, np.ndarray]:
    """Random splits, and the output ``[cp, R]`` for inputs ``1000 * rank + row + 1``."""
    rng = np.random.default_rng(seed)
    cp = int(rng.integers(1, 6))
    sizes = [rng.integers(0, 9, rng.integers(1, 6)).tolist() for _ in range(cp)]
    dst = [[rng.permutation(cp)[: rng.integers(0, cp + 1)].tolist() for _ in own] for own in sizes]
    out_sizes, src = [], []
    outputs = []
    for rank in range(cp):
        queues = {
            s: [(1000 * s + sum(sizes[s][:i]) + 1, n) for i, n in enumerate(sizes[s]) if rank in dst[s][i]]
            for s in range(cp)
        }
        order = rng.permutation(np.repeat(np.arange(cp), [len(queues[s]) for s in range(cp)])).tolist()
        picked = [queues[s].pop(0) for s in order]
        out_sizes.append([n for _, n in picked])
        src.append(order)
        outputs.append([start + i for start, n in picked for i in range(n)])
    rows = max(map(len, outputs))
    return sizes, dst, out_sizes, src, np.array([own + [0] * (rows - len(own)) for own in outputs])


@pytest.mark.parametrize("seed", range(40))
def test_random_splits(seed: int) -> None:
    *splits, expected = random_splits(seed)
    spec = GroupCastSpec.from_splits(*splits)
    check_spec(spec)
    assert spec.input_rows == max(sum(sizes) for sizes in splits[0])
    assert spec.output_rows == expected.shape[1]
    ranks = np.arange(len(splits[0]))[:, None]
    inputs = 1000 * ranks + np.arange(spec.input_rows) + 1
    np.testing.assert_array_equal(group_cast(spec, inputs), expected.reshape(len(ranks), -1))


def test_adjacent_ranges_are_joined() -> None:
    spec = GroupCastSpec.from_splits([[2, 3], [4]], [[[1], [1]], [[]]], [[], [1, 4]], [[], [0, 0]])
    np.testing.assert_array_equal(spec.sends[0, :2], [[1, 0, 0, 5, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(spec.receives[1, :2], [[0, 0, 0, 5], [0, 0, 0, 0]])
    assert (spec.input_rows, spec.output_rows) == (5, 5)


def test_both_tables_are_cut_where_either_side_is() -> None:
    spec = GroupCastSpec.from_splits([[6], [1]], [[[1]], [[1]]], [[], [2, 1, 4]], [[], [0, 1, 0]])
    np.testing.assert_array_equal(spec.sends[0, :3], [[1, 0, 0, 2, 0], [1, 2, 2, 4, 3], [0, 0, 0, 0, 0]])
    spec = GroupCastSpec.from_splits([[2, 1, 4]], [[[0], [], [0]]], [[6]], [[0]])
    np.testing.assert_array_equal(spec.sends[0, :3], [[0, 0, 0, 2, 0], [0, 2, 3, 4, 2], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(spec.receives[0, :3], [[0, 0, 0, 2], [0, 2, 2, 4], [0, 0, 0, 0]])


def test_a_row_may_go_to_a_rank_twice() -> None:
    spec = GroupCastSpec.from_splits([[2]], [[[0, 0]]], [[2, 2]], [[0, 0]])
    np.testing.assert_array_equal(group_cast(spec, np.array([[5, 6]])), [[5, 6, 5, 6]])


def test_nothing_to_send() -> None:
    spec = GroupCastSpec.from_splits([[4], [0]], [[[]], [[]]], [[], []], [[], []])
    assert not spec.sends.any() and not spec.receives.any()
    assert spec.output_rows == 0


def test_unsigned_sizes_do_not_wrap() -> None:
    sizes, ranks = np.array([[200, 100]], np.uint8), np.array([[0, 0]], np.uint8)
    spec = GroupCastSpec.from_splits(list(sizes), [[[0], [0]]], list(sizes), list(ranks))
    assert (spec.input_rows, spec.output_rows) == (300, 300)
    np.testing.assert_array_equal(spec.sends[0, 0], [0, 0, 0, 300, 0])


def test_padded_keeps_what_is_sent() -> None:
    spec = GroupCastSpec.from_splits([[3], [0]], [[[1]], [[]]], [[], [3]], [[], [0]])
    tight = spec.padded(copies=1, output_rows=3, pair_rows=3)
    assert (tight.sends.shape, tight.receives.shape) == ((2, 1, 5), (2, 1, 4))
    check_spec(tight)
    with pytest.raises(ValueError, match=r"too small: copies=0 \(needs 1\), pair_rows=2 \(needs 3\)"):
        spec.padded(copies=0, output_rows=3, pair_rows=2)


def test_spec_is_a_pytree() -> None:
    spec = GroupCastSpec.from_splits([[2], [1]], [[[1]], [[]]], [[], [2]], [[], [0]])
    leaves, structure = jax.tree.flatten(spec)
    assert [leaf.dtype for leaf in leaves] == [np.int32, np.int32]
    assert jax.tree.unflatten(structure, leaves).pair_rows == spec.pair_rows


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (([[1], [1]], [[[]]], [[], []], [[], []]), "dst_ranks is for 1 ranks, input_split_sizes is for 2"),
        (([[1]], [[[], []]], [[]], [[]]), "rank 0 has 1 input_split_sizes but 2 dst_ranks"),
        (([[1]], [[[]]], [[2]], [[]]), "rank 0 has 1 output_split_sizes but 0 src_ranks"),
        (([[-1]], [[[]]], [[]], [[]]), r"input_split_sizes\[0\]\[0\] must be between 0 and .* it is -1"),
        (([], [], [], []), "the number of ranks in input_split_sizes must be between 1 and"),
        (
            ([[True]], [[[0]]], [[1]], [[0]]),
            r"input_split_sizes\[0\]\[0\] must be an integer, .* True",
        ),
        (([[1.0]], [[[0]]], [[1]], [[0]]), r"input_split_sizes\[0\]\[0\] must be an integer, but it is 1.0"),
        (([[1]], [[[0]]], [[1]], [[0.0]]), r"src_ranks\[0\]\[0\] must be an integer, but it is 0.0"),
        (
            ([[1], [1]], [[1], [0]], [[1], [1]], [[1], [0]]),
            r"dst_ranks\[0\]\[0\] must be a list, .* 1\.",
        ),
        (([4], [[[]]], [[]], [[]]), r"input_split_sizes\[0\] must be a list, but it is 4"),
        (([[2**30, 1]], [[[], []]], [[]], [[]]), r"sum of input_split_sizes\[0\] must .* it is 1073741825"),
        (
            ([[1]], [[[]]], [[2**30] * 8], [[0] * 8]),
            r"sum of output_split_sizes\[0\] must .* 8589934592",
        ),
        (([[1]], [[[1]]], [[]], [[]]), r"dst_ranks\[0\]\[0\]\[0\] must be between 0 and 0, but it is 1"),
        (([[1]], [[[0]]], [[1]], [[-1]]), r"src_ranks\[0\]\[0\] must be between 0 and 0, but it is -1"),
        (([[3], [0]], [[[1]], [[]]], [[], [2]], [[], [0]]), "rank 0 sends 3 rows to rank 1, which expects 2"),
        (([[3], [0]], [[[]], [[]]], [[], [2]], [[], [0]]), "rank 0 sends 0 rows to rank 1, which expects 2"),
    ],
)
def test_inconsistent_splits(splits: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupCastSpec.from_splits(*splits)


def test_tables_too_large() -> None:
    spec = GroupCastSpec.from_splits([[1], [1]], [[[1]], [[0]]], [[1], [1]], [[1], [0]])
    with pytest.raises(
        ValueError, match=r"the tables of 2 ranks take 77309411328 bytes, more than 4294967296"
    ):
        spec.padded(copies=2**30, output_rows=8, pair_rows=8)
    with pytest.raises(ValueError, match=r"the tables of 2 ranks take 77309411328 bytes"):
        spec.by_host(1).padded(
            copies=2**30, output_rows=8, pair_rows=8, across=spec.by_host(1).across.capacity
        )
