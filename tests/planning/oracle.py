"""Slow, independent checks of plans, row by row."""

from typing import Any

import jax
import numpy as np

from jaxmagi import AttnMask, masks
from jaxmagi.planning import ContextPlan, CostModel, GroupCastSpec, RelayedSpec
from jaxmagi.planning._plan_context import Layout

NAMED_LAYOUTS: tuple[Layout, ...] = ("balanced", "zigzag", "contiguous")


def builder_masks() -> dict[str, AttnMask]:
    """Returns a self-attention mask from every builder, and combinations."""
    rng = np.random.default_rng(0)
    segments = np.repeat([1, 2, 0, 3, 2, 0], rng.integers(1, 60, 6))
    return {
        "full": masks.full(130),
        "causal": masks.causal(257),
        "window": masks.sliding_window(300, 17),
        "two_sided_window": masks.sliding_window(211, 5, 9),
        "causal_documents": masks.documents([70, 1, 33, 128, 5]),
        "full_documents": masks.documents([64, 64, 7, 90], inner="full"),
        "window_documents": masks.documents([100, 40, 60], inner=(12, 3)),
        "segments": masks.from_segment_ids(segments),
        "block_causal": masks.block_causal(250, 48),
        "prefix_lm": masks.prefix_lm(200, 61),
        "shared_prefix": masks.shared_prefix(50, [30, 41, 8]),
        "prefix_tree": masks.prefix_tree([-1, 0, 1, 1, 0, 2, -1, 6], [40, 21, 9, 30, 17, 25, 33, 12]),
        "chunked_causal": masks.chunked_causal(222, 50),
        "video": masks.video(6, 33, kv_range=3),
        "batch": AttnMask.concatenate([masks.causal(80), masks.full(41), masks.sliding_window(90, 8)]),
    }


def cast_tokens(plan: ContextPlan) -> np.ndarray:
    """Returns the token in each received row ``[cp, R]``, -1 for none, by carrying out the transfer."""
    return group_cast(plan.transfer, np.asarray(plan.token_order).reshape(plan.cp_size, -1), fill=-1)


def group_cast(spec: GroupCastSpec | RelayedSpec, shards: np.ndarray, fill: int = 0) -> np.ndarray:
    """Returns the rows ``[cp, output_rows]`` that ranks receive from the rows ``[cp, input_rows]``."""
    if isinstance(spec, RelayedSpec):
        return group_cast(spec.inside, group_cast(spec.across, shards, fill), fill)
    cp = len(shards)
    buffers = np.full((cp, cp, spec.pair_rows), -2)
    output = np.full((cp, spec.output_rows), fill)
    for src in range(cp):
        for dst, slot, row, length, _ in spec.sends[src]:
            buffers[src, dst, slot : slot + length] = shards[src, row : row + length]
    for dst in range(cp):
        for src, slot, row, length in spec.receives[dst]:
            output[dst, row : row + length] = buffers[src, dst, slot : slot + length]
    assert not (output == -2).any(), "a receive reads slots that nothing was sent to"
    return output


def check_spec(spec: GroupCastSpec | RelayedSpec) -> None:
    """Fails unless the tables agree: the same ranges of dense slots and rows, output rows filled once.

    Both must be sorted, and sends joined where they can be.
    """
    if isinstance(spec, RelayedSpec):
        check_spec(spec.across)
        check_spec(spec.inside)
        return
    cp = len(spec.sends)
    filled = np.zeros((2, cp, cp, spec.pair_rows), int)
    outputs = np.zeros((cp, spec.output_rows), int)
    arriving = np.full(filled.shape, -1)  # output rows of slots, as the tables of either side have them
    ranges: tuple[set[Any], set[Any]] = (set(), set())  # of the tables of either side
    for side, table in enumerate(map(np.asarray, (spec.sends, spec.receives))):
        for rank in range(cp):
            used = table[rank, table[rank, :, 3] > 0]
            assert not table[rank, len(used) :].any(), "unused entries must be zero and last"
            keys = [tuple(row) for row in (used[:, :2] if side == 0 else used[:, 2:3])]
            assert keys == sorted(keys)
            for entry in used:
                peer, slot, row, length = entry[:4]
                pair, slots = (rank, peer) if side == 0 else (peer, rank), slice(slot, slot + length)
                ranges[side].add((*pair, slot, length))
                filled[side][pair][slots] += 1
                arriving[side][pair][slots] = np.arange(length) + (entry[4] if side == 0 else row)
                assert row + length <= (spec.input_rows if side == 0 else spec.output_rows)
                if side == 1:
                    outputs[rank, row : row + length] += 1
            assert side == 1 or not _can_be_joined(used), "entries are not joined"
    assert ranges[0] == ranges[1], "the tables have rows in different ranges"
    np.testing.assert_array_equal(filled[0], filled[1])
    np.testing.assert_array_equal(arriving[0], arriving[1])
    assert filled.max(initial=0) <= 1 and outputs.max(initial=0) <= 1
    assert (np.diff(filled[0], axis=-1) <= 0).all(), "slots must be filled without gaps"


def _can_be_joined(entries: np.ndarray) -> bool:
    """Returns whether a send continues the previous one; ``entries`` of a rank are sorted by slot."""
    first, second = entries[:-1], entries[1:]
    same = first[:, 0] == second[:, 0]
    goes_on = (first[:, [2, 4]] + first[:, 3:4] == second[:, [2, 4]]).all(axis=1)
    return bool((same & goes_on).any())


def key_tokens(plan: ContextPlan) -> np.ndarray:
    """Returns the token of every key of every rank, -1 for none: its shard, then what it receives."""
    shards = np.asarray(plan.token_order).reshape(plan.cp_size, -1)
    return np.concatenate([shards, cast_tokens(plan)], axis=1)


def computed_cells(plan: ContextPlan) -> np.ndarray:
    """Returns how often the plan computes each cell ``[T, T]``; fails if padding computes anything."""
    counts = np.zeros((plan.length + 1, plan.length + 1), np.int32)
    shards = plan.token_order.reshape(plan.cp_size, -1)
    bands = np.asarray(plan.bands)
    for shard, tokens, own in zip(shards, key_tokens(plan), bands, strict=True):
        local = masks.geometry.to_dense(own, len(shard), len(tokens))
        np.add.at(counts, (shard[:, None], tokens[None]), local)
    assert not counts[-1].any() and not counts[:, -1].any(), "a padding row or key is visible"
    return counts[:-1, :-1]


def needed_keys(mask: AttnMask, tokens: np.ndarray) -> np.ndarray:
    """Returns whether one of the rows sees each key, row by row: bool ``[T]``."""
    steps = np.zeros(mask.kv_len + 1, np.int64)
    for q0, q1, k0, k1, lo, hi in np.asarray(mask.bands, np.int64):
        rows = tokens[(tokens >= q0) & (tokens < q1)]
        begin, end = np.maximum(k0, rows + lo), np.minimum(k1, rows + hi + 1)
        visible = begin < end
        np.add.at(steps, begin[visible], 1)
        np.add.at(steps, end[visible], -1)
    return np.cumsum(steps)[:-1] > 0


def check_rows(mask: AttnMask, plan: ContextPlan) -> None:
    """Fails unless ranks receive exactly the keys that they need and do not own, once, as reported."""
    received = cast_tokens(plan)
    shards = np.asarray(plan.token_order, np.int64).reshape(plan.cp_size, -1)
    report = plan.report()
    needs = [np.setdiff1d(np.flatnonzero(needed_keys(mask, own[own >= 0])), own) for own in shards]
    for rank, needed in enumerate(needs):
        np.testing.assert_array_equal(np.sort(received[rank][received[rank] >= 0]), needed)
        if not plan.two_levels:
            assert report.rows_received[rank] == len(needed)
    if plan.ranks_per_host is not None:
        _check_rows_of_hosts(plan, needs, plan.ranks_per_host)
    assert report.redundant_rows == 0
    check_traffic(plan)
    np.testing.assert_array_equal(report.area.sum(), masks.geometry.area(np.asarray(mask.bands)).sum())


def _check_rows_of_hosts(plan: ContextPlan, needs: list[np.ndarray], ranks_per_host: int) -> None:
    """Fails unless each row crosses once to each other host with a rank that needs it."""
    assert isinstance(plan.transfer, RelayedSpec)
    shards = np.asarray(plan.token_order).reshape(plan.cp_size, -1)
    brought = group_cast(plan.transfer.across, shards, fill=-1)
    for first in range(0, plan.cp_size, ranks_per_host):
        ranks = slice(first, first + ranks_per_host)
        crossed = brought[ranks][(brought[ranks] >= 0) & ~np.isin(brought[ranks], shards[ranks])]
        wanted = np.setdiff1d(np.concatenate(needs[ranks]), shards[ranks])
        np.testing.assert_array_equal(np.sort(crossed), wanted)


def moved_rows(plan: ContextPlan, ranks_per_host: int) -> np.ndarray:
    """Returns the rows that each rank sends and receives within its host and between hosts, row by row.

    They are int64 ``[cp, 2, 2]``, and follow from what receivers find in the buffers of pairs.
    """
    rows, spec = np.zeros((plan.cp_size, 2, 2), np.int64), plan.transfer
    for step in (spec.across, spec.inside) if isinstance(spec, RelayedSpec) else (spec,):
        for dst, table in enumerate(np.asarray(step.receives)):
            for src, _, _, length in table:
                kind = int(src // ranks_per_host != dst // ranks_per_host)
                if src != dst:
                    rows[src, 0, kind] += length
                    rows[dst, 1, kind] += length
    return rows


def check_traffic(plan: ContextPlan, cost: CostModel = CostModel()) -> None:  # noqa: B008
    """Fails unless the report counts the rows and bytes that the transfer moves in both passes."""
    report = plan.report(cost)
    rows = moved_rows(plan, cost.ranks_per_host)
    np.testing.assert_array_equal(report.rows_sent, rows[:, 0].sum(axis=-1))
    np.testing.assert_array_equal(report.rows_received, rows[:, 1].sum(axis=-1))
    np.testing.assert_array_equal(report.network_rows_sent, rows[:, 0, 1])
    np.testing.assert_array_equal(report.network_rows_received, rows[:, 1, 1])
    assert report.rows_moved == rows[:, 0].sum()
    keys = 2 * cost.num_kv_heads * cost.head_dim * cost.bytes_per_element
    gradients = 2 * cost.num_kv_heads * cost.head_dim * cost.bytes_per_gradient
    # Keys and values travel in both passes, and gradients come back from where these went in the second.
    sent = 2 * rows[:, 0] * keys + rows[:, 1] * gradients
    received = 2 * rows[:, 1] * keys + rows[:, 0] * gradients
    for kind, link in enumerate((report.within_hosts, report.between_hosts)):
        assert link.rows == rows[:, 0, kind].sum()
        assert link.bytes_moved == sent[:, kind].sum() == received[:, kind].sum()
        assert link.busiest_bytes == max(sent[:, kind].max(), received[:, kind].max())


def check_layout(plan: ContextPlan) -> None:
    """Fails unless every token is there once, and positions are the tokens."""
    tokens = plan.token_order
    np.testing.assert_array_equal(np.sort(tokens[tokens >= 0]), np.arange(plan.length))
    np.testing.assert_array_equal(plan.position_ids, np.where(tokens < 0, 0, tokens))
    assert tokens.size == plan.cp_size * plan.shard_length
    assert plan.bands.shape == (plan.cp_size, plan.capacity.bands, 6)
    assert plan.transfer.input_rows == plan.shard_length


def check_plan(mask: AttnMask, plan: ContextPlan) -> None:
    """Checks a plan against the dense mask."""
    check_layout(plan)
    check_spec(plan.transfer)
    check_rows(mask, plan)
    dense = masks.geometry.to_dense(np.asarray(mask.bands), mask.q_len, mask.kv_len)
    np.testing.assert_array_equal(computed_cells(plan), dense)


def assert_same(first: ContextPlan, second: ContextPlan) -> None:
    """Fails unless two plans are equal to the byte."""
    leaves, structure = jax.tree.flatten(first)
    others, other_structure = jax.tree.flatten(second)
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.dtype == other.dtype == np.int32
        assert leaf.shape == other.shape
        assert leaf.tobytes() == other.tobytes()
