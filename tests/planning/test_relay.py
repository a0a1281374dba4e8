"""Transfers in two steps: what crosses to other hosts, over whom, and that everything arrives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import ContextPlan, GroupCastSpec, PlanCapacity, RelayedSpec, plan_context

from ..cases import document_lengths
from ..collectives.routes import Transfer, random_transfer
from .fuzz import group_reduce
from .oracle import assert_same, check_plan, check_spec, group_cast

CP = 8


def is_far(table: Any, ranks_per_host: int) -> np.ndarray:
    """Returns whether each entry is used, and is for a rank of another host."""
    rank = np.arange(len(table))[:, None]
    return (table[..., 3] > 0) & (table[..., 0] // ranks_per_host != rank // ranks_per_host)


def far_rows(table: Any, ranks_per_host: int) -> np.ndarray:
    """The rows of each rank that come from other hosts, or go there."""
    return np.asarray(table)[..., 3].sum(axis=1, where=is_far(table, ranks_per_host))


def crossings(transfer: Transfer, ranks_per_host: int) -> set[tuple[tuple[int, int], int]]:
    """Each row, as (rank, row), with each other host that needs it."""
    needed = {(source, rank // ranks_per_host) for source, (rank, _) in transfer.contributions()}
    return {(source, host) for source, host in needed if source[0] // ranks_per_host != host}


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8])
@pytest.mark.parametrize("repeats", [False, True])
def test_random_transfers(ranks_per_host: int, repeats: bool, rng: np.random.Generator) -> None:
    for _ in range(10):
        transfer = random_transfer(rng, CP, repeats=repeats)
        spec, relayed = transfer.spec, transfer.spec.by_host(ranks_per_host)
        check_spec(relayed)
        assert (relayed.input_rows, relayed.output_rows) == (spec.input_rows, spec.output_rows)
        assert not is_far(relayed.inside.sends, ranks_per_host).any()
        assert relayed.rows_between_hosts == len(crossings(transfer, ranks_per_host))

        rows = rng.integers(1, 1000, (CP, spec.input_rows))
        received = group_cast(relayed, rows)
        np.testing.assert_array_equal(received, group_cast(spec, rows))
        np.testing.assert_array_equal(group_reduce(relayed, received), group_reduce(spec, received))


@pytest.mark.parametrize("repeats", [False, True])
def test_near_rows_do_not_wait_for_the_network(repeats: bool, rng: np.random.Generator) -> None:
    """They come in the step across all ranks, and then move in the memory of the rank that has got them.

    So links inside hosts only move rows that have come from other hosts in the step inside hosts, and all of
    these to the ranks that need them but do not have them yet.
    """
    for _ in range(10):
        transfer = random_transfer(rng, CP, repeats=repeats)
        relayed = transfer.spec.by_host(4)
        input_rows = relayed.input_rows
        host = np.arange(CP)[:, None] // 4
        numbers = np.arange(CP * input_rows).reshape(CP, -1) + 1  # 0 is none
        brought = group_cast(relayed.across, numbers)
        needed = group_cast(transfer.spec, numbers)
        for rank, (got, wanted) in enumerate(zip(brought, needed, strict=True)):
            near = [x[(x > 0) & ((x - 1) // input_rows // 4 == host[rank])] for x in (got, wanted)]
            np.testing.assert_array_equal(*near)
            sends = np.asarray(relayed.inside.sends[rank])
            for peer, _, row, length, _ in sends[sends[:, 3] > 0]:
                source = (got[row : row + length] - 1) // input_rows
                assert peer == rank or (source // 4 != host[rank]).all()


def test_relays_need_what_they_get_or_their_host_has_more_than_its_share(rng: np.random.Generator) -> None:
    for _ in range(20):
        transfer = random_transfer(rng, CP)
        relayed = transfer.spec.by_host(4)
        numbers = np.arange(CP * transfer.spec.input_rows).reshape(CP, -1) + 1
        needed, got = group_cast(transfer.spec, numbers), group_cast(relayed.across, numbers)
        received, most = far_rows(relayed.across.receives, 4), most_rows(relayed)
        assert received.any()
        for rank in range(CP):
            helps = not set(got[rank][got[rank] > 0]) <= set(needed[rank])
            host = received[rank // 4 * 4 :][:4]
            assert not helps or host.max() >= most - 1


def most_rows(spec: RelayedSpec) -> int:
    """The rows between hosts that some rank has to send, or to receive if its host shares them out evenly."""
    rows, received = (
        far_rows(table, spec.ranks_per_host) for table in (spec.across.sends, spec.across.receives)
    )
    hosts = received.reshape(-1, spec.ranks_per_host)
    return max(rows.max(), -(-hosts.sum(axis=1) // spec.ranks_per_host).max())


BALANCED = {
    "documents": lambda length: masks.documents(document_lengths(length)),
    "window": lambda length: masks.sliding_window(length, 4095),
    "causal": masks.causal,
    "video": lambda length: masks.video(length // 8192, 8192, 4),
}


@pytest.mark.parametrize("cp_size", [16, 64, 128])
@pytest.mark.parametrize("name", BALANCED)
def test_relays_receive_as_little_as_can_be(name: str, cp_size: int) -> None:
    """No relay receives more than the busiest sender sends, or than the fair share of the busiest host."""
    plan = plan_context(BALANCED[name](cp_size << 14), cp_size, two_levels=True)
    spec = plan.transfer
    assert isinstance(spec, RelayedSpec)
    received = far_rows(spec.across.receives, spec.ranks_per_host)
    assert received.max() <= 1.01 * most_rows(spec)


def test_one_rank_that_needs_most_rows_of_its_host_is_helped() -> None:
    """Rank 4 needs all rows of ranks 0 to 3, and no other rank of its host any."""
    sizes = [[100]] * 4 + [[0]] * 4
    spec = GroupCastSpec.from_splits(
        sizes,
        [[[4]]] * 4 + [[[]]] * 4,
        [[]] * 4 + [[100] * 4] + [[]] * 3,
        [[]] * 4 + [[0, 1, 2, 3]] + [[]] * 3,
    )
    relayed = spec.by_host(4)
    assert (far_rows(relayed.across.receives, 4) == [0, 0, 0, 0, 100, 100, 100, 100]).all()
    numbers = np.arange(800).reshape(8, 100) + 1
    np.testing.assert_array_equal(group_cast(relayed, numbers), group_cast(spec, numbers))


def broadcast(num_rows: int, cp_size: int) -> GroupCastSpec:
    """All rows of each rank to all ranks."""
    everyone = list(range(cp_size))
    sizes = [[num_rows]] * cp_size
    return GroupCastSpec.from_splits(
        sizes, [[everyone]] * cp_size, [[num_rows] * cp_size] * cp_size, [everyone] * cp_size
    )


def test_rows_for_all_go_to_the_same_place_in_other_hosts() -> None:
    relayed = broadcast(100, CP).by_host(4)
    assert relayed.rows_between_hosts == 100 * CP
    sends = np.asarray(relayed.across.sends)
    rank, entry = np.nonzero(is_far(sends, 4))
    np.testing.assert_array_equal(rank, range(CP))
    np.testing.assert_array_equal(sends[rank, entry][:, [0, 3]], [[(i + 4) % 8, 100] for i in range(CP)])


def test_what_few_need_is_balanced_by_what_many_need() -> None:
    """Rank 2 alone needs rows 0 to 5 of rank 0; ranks 2 and 3 need all others."""
    spec = GroupCastSpec.from_splits(
        [[6, 6], [], [], []], [[[2], [2, 3]], [], [], []], [[], [], [12], [6]], [[], [], [0], [0]]
    )
    np.testing.assert_array_equal(spec.by_host(2).across.sends[0, :2], [[2, 0, 0, 6, 0], [3, 0, 6, 6, 0]])


def test_short_runs_of_different_sources_go_to_different_relays() -> None:
    relayed = broadcast(1, CP).by_host(4)
    assert (far_rows(relayed.across.receives, 4) == 1).all()


def test_sizes_grow_and_shrink_with_the_capacity() -> None:
    stream = [masks.causal(512), masks.documents([100] * 5 + [12]), masks.sliding_window(512, 40)]
    plans = [plan_context(mask, CP).by_host(4) for mask in stream]
    capacity = functools.reduce(PlanCapacity.union, [plan.capacity for plan in plans])
    padded = [plan.pad_to(capacity) for plan in plans]
    assert len({jax.tree.structure(plan) for plan in padded}) == 1
    assert len({tuple(leaf.shape for leaf in jax.tree.leaves(plan)) for plan in padded}) == 1
    for mask, plan, tight in zip(stream, padded, plans, strict=True):
        assert plan.capacity == capacity
        check_plan(mask, plan)
        assert_same(plan.pad_to(tight.capacity), tight)
    assert ContextPlan.stack(plans).capacity == capacity


def test_bad_arguments() -> None:
    spec = broadcast(2, 4)
    with pytest.raises(ValueError, match="for 4 ranks, which is no multiple of ranks_per_host=3"):
        spec.by_host(3)
    with pytest.raises(ValueError, match=r"ranks_per_host must be between 1 and .* it is 0"):
        spec.by_host(0)
    with pytest.raises(ValueError, match=r"by_host takes one spec with sends .* call it on each spec"):
        jax.tree.map(lambda table: np.stack([table] * 2), spec).by_host(2)
    with pytest.raises(ValueError, match="this one is a part: it leads with 2 ranks and sends to rank 3"):
        jax.tree.map(lambda table: table[:2], spec).by_host(2)
    with pytest.raises(ValueError, match="by_host needs the spec's host data, but the spec is traced"):
        jax.eval_shape(lambda spec: spec.by_host(2), jax.tree.map(jnp.asarray, spec))
    plan = plan_context(masks.causal(64), 4)
    with pytest.raises(ValueError, match=r"by_host\(4\): .* in two steps already, by_host\(2\)"):
        plan.by_host(2).by_host(4)
    with pytest.raises(ValueError, match="by_host needs one whole plan"):
        ContextPlan.stack([plan, plan]).by_host(2)
