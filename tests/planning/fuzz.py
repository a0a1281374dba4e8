"""Random masks and options of `plan_context`, and all properties that a plan must have."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxmagi import AttnMask, masks
from jaxmagi.planning import ContextPlan, CostModel, GroupCastSpec, PlanCapacity, RelayedSpec, plan_context
from jaxmagi.planning._capacity import bucket

from ..cases import random_bands
from .oracle import NAMED_LAYOUTS, assert_same, check_plan, check_traffic, group_cast

_MOST_RANKS, _MOST_SHARD = 12, 20
_LEVELS = ("auto", "auto", False, True)


class Problem(NamedTuple):
    """A mask and arguments of `plan_context`."""

    mask: AttnMask
    arguments: dict[str, Any]


def random_problem(seed: int) -> Problem:
    """Returns any mask, numbers of ranks and of hosts, chunk size, layout and levels."""
    rng = np.random.default_rng(seed)
    cp_size, shard = int(rng.integers(1, _MOST_RANKS + 1)), int(rng.integers(1, _MOST_SHARD + 1))
    length = int(rng.integers(cp_size * (shard - 1), cp_size * shard)) + 1
    arguments: dict[str, Any] = {"cp_size": cp_size, "cost": _random_cost(rng)}
    kind = rng.integers(len(NAMED_LAYOUTS) + 1)
    if kind == len(NAMED_LAYOUTS):
        arguments["layout"] = _random_layout(rng, length, cp_size)
    else:
        arguments["layout"] = NAMED_LAYOUTS[kind]
        if arguments["layout"] == "balanced":
            arguments["chunk_size"] = int(rng.integers(1, -(-length // cp_size) + 1))
    mask, two_levels = _random_mask(rng, length), _LEVELS[rng.integers(len(_LEVELS))]
    has_hosts = cp_size % arguments["cost"].ranks_per_host == 0
    return Problem(mask, {**arguments, "two_levels": two_levels if has_hosts else "auto"})


def _random_cost(rng: np.random.Generator) -> CostModel:
    """Returns a model with links from too slow to hide to so fast that they take no time."""
    link, network = 10.0 ** rng.uniform(-4, 4, 2)
    heads = 2 ** rng.integers(0, 4, 2)
    return CostModel(
        link_gb_per_second=float(link),
        network_gb_per_second=float(network),
        ranks_per_host=int(rng.integers(1, 9)),
        num_heads=int(heads[0] * heads[1]),
        num_kv_heads=int(heads[0]),
        head_dim=int(rng.integers(1, 300)),
        latency_us=float(rng.choice([0.0, 15.0])),
    )


def _random_layout(rng: np.random.Generator, length: int, cp_size: int) -> np.ndarray:
    padding = -length % cp_size + cp_size * int(rng.integers(0, 3))
    tokens = np.concatenate([np.arange(length), np.full(padding, -1)])
    run = int(rng.integers(1, 12))
    runs = [tokens[i : i + run] for i in range(0, len(tokens), run)]
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))])


def _random_mask(rng: np.random.Generator, length: int) -> AttnMask:
    parts = np.diff(np.sort(rng.integers(0, length + 1, int(rng.integers(0, 6)))), prepend=0, append=length)
    lengths = parts[parts > 0].tolist()
    left, right = rng.integers(0, length + 1, 2).tolist()
    random = AttnMask.from_bands(
        random_bands(rng, length, length, int(rng.integers(1, 12))), q_len=length, kv_len=length
    )
    several = [
        masks.causal(length),
        masks.full(length),
        masks.sliding_window(length, left, right),
        masks.documents(lengths),
        masks.documents(lengths, inner="full"),
        masks.documents(lengths, inner=(left, 0)),
        masks.shared_prefix(lengths[0], lengths[1:]),
        masks.block_causal(length, max(1, left)),
        random,
        random,
        random,
    ]
    return several[rng.integers(len(several))]


def check_problem(problem: Problem) -> ContextPlan:
    """Returns the plan; fails unless it is right, in two steps too, and the same when it is made again."""
    plan = plan_context(problem.mask, **problem.arguments)
    ranks_per_host = problem.arguments["cost"].ranks_per_host
    hosts = [plan.by_host(ranks_per_host)] if plan.cp_size % ranks_per_host == 0 else []
    for each in (plan, *hosts):
        check_plan(problem.mask, each)
        check_traffic(each, problem.arguments["cost"])
        check_gradients(each)
        check_sizes(each)
        assert each.pad_to(each.capacity).capacity == each.capacity
    assert_same(plan_context(problem.mask, **problem.arguments), plan)
    return plan


def check_sizes(plan: ContextPlan) -> None:
    """Fails unless static sizes are what the plan uses, rounded up."""
    bands = int(np.asarray(plan.bands).any(axis=-1).sum(axis=-1).max())
    assert plan.capacity == _rounded_up(replace(plan.transfer.used, bands=bands))


def _rounded_up(used: PlanCapacity) -> PlanCapacity:
    sizes = {name: bucket(getattr(used, name)) for name in ("bands", "copies", "pair_rows", "output_rows")}
    across = used.across and replace(_rounded_up(used.across), bands=0)
    return replace(used, **sizes, across=across)


def check_gradients(plan: ContextPlan) -> None:
    """Fails unless all that ranks return for received rows arrives at the owners, once."""
    shards = np.asarray(plan.token_order).reshape(plan.cp_size, -1)
    received = group_cast(plan.transfer, shards, fill=-1)
    returned = np.random.default_rng(0).integers(1, 1000, received.shape)
    expected = np.zeros(plan.length, np.int64)
    np.add.at(expected, received[received >= 0], returned[received >= 0])
    owned = shards >= 0
    np.testing.assert_array_equal(group_reduce(plan.transfer, returned)[owned], expected[shards[owned]])


def group_reduce(spec: GroupCastSpec | RelayedSpec, rows: np.ndarray) -> np.ndarray:
    """Returns the sums ``[cp, input_rows]`` of rows ``[cp, output_rows]``, sent back where they came from."""
    if isinstance(spec, RelayedSpec):
        return group_reduce(spec.across, group_reduce(spec.inside, rows))
    cp = len(rows)
    buffers = np.zeros((cp, cp, spec.pair_rows), np.int64)
    sums = np.zeros((cp, spec.input_rows), np.int64)
    for dst in range(cp):
        for src, slot, row, length in np.asarray(spec.receives)[dst]:
            buffers[src, dst, slot : slot + length] += rows[dst, row : row + length]
    for src in range(cp):
        for dst, slot, row, length, _ in np.asarray(spec.sends)[src]:
            sums[src, row : row + length] += buffers[src, dst, slot : slot + length]
    return sums
