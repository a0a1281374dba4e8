"""Plans with transfers in two steps, and plans over hosts with heads inside them, have the same results."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, CostModel, context_attention, dispatch, masks, plan_context, undispatch
from jaxmagi.attention import attention_reference, attention_reference_vjp

from ..cases import FP64_TOLERANCE
from ..compiled import collectives
from . import harness
from .harness import AXIS, LENGTH, make_plan

MASKS = (masks.causal(LENGTH), masks.documents([100, 56, 3, 97]))


def test_masks_of_one_compilation(x64: None, rng: np.random.Generator) -> None:
    """Plans are for two hosts of four ranks."""
    compiled = harness.distributed(8)._cache_size()
    plans = [make_plan(mask, 8).by_host(4) for mask in MASKS]
    capacity = plans[0].capacity.union(plans[1].capacity)
    for mask, plan in zip(MASKS, plans, strict=True):
        problem, plan = harness.random_problem(rng), plan.pad_to(capacity)
        solution = harness.solve_distributed(problem, plan)
        harness.check_solution(solution, harness.oracle(problem, mask), FP64_TOLERANCE)
    assert harness.distributed(8)._cache_size() == compiled + 1


def test_stacked_plans(rng: np.random.Generator) -> None:
    """Each example has its mask, and gradients equal those of plans with transfers in one step."""
    plans = [make_plan(mask, 4) for mask in MASKS]
    x = np.stack([dispatch(rng.normal(size=(LENGTH, 1, 8)).astype(np.float32), plan) for plan in plans])

    def local(x: jax.Array, one_step: ContextPlan, two_steps: ContextPlan) -> Any:
        def attend(key: jax.Array, plan: ContextPlan) -> jax.Array:
            return context_attention(x, key, key, plan, axis_name=AXIS)

        return [
            jax.grad(lambda key, plan=plan: (attend(key, plan) ** 2).sum())(x)
            for plan in (one_step, two_steps)
        ]

    rows = P(None, AXIS)
    mapped = jax.shard_map(local, mesh=harness.make_mesh(4), in_specs=(rows, rows, rows), out_specs=rows)
    two_steps = ContextPlan.stack([plan.by_host(2) for plan in plans])
    expected, given = jax.jit(mapped)(x, ContextPlan.stack(plans), two_steps)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)


def test_two_levels_that_the_planner_chose(x64: None, rng: np.random.Generator) -> None:
    cost = CostModel(ranks_per_host=4, network_gb_per_second=1e-3)
    plan = plan_context(MASKS[0], 8, cost=cost, chunk_size=8)
    assert plan.two_levels
    problem = harness.random_problem(rng)
    solution = harness.solve_distributed(problem, plan)
    harness.check_solution(solution, harness.oracle(problem, MASKS[0]), FP64_TOLERANCE)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "documents"])
def test_a_plan_over_hosts_with_heads_inside_them(
    kind: AxisType, mask: Any, x64: None, rng: np.random.Generator
) -> None:
    """Two hosts of four devices, each with two query heads and their key head: it receives no others."""
    heads, kv_heads, dim = 8, 4, 8
    plan = plan_context(mask, 2, chunk_size=8, cost=CostModel(ranks_per_host=1, num_heads=2, num_kv_heads=1))
    query, key, value, dout = (rng.normal(size=(LENGTH, n, dim)) for n in (heads, kv_heads, kv_heads, heads))
    mesh = jax.make_mesh((2, 4), (AXIS, "tensor"), (kind,) * 2)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return context_attention(query, key, value, plan, axis_name=AXIS, head_axis_name="tensor")

        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(dout)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, P(AXIS, "tensor"))
        operands = jax.device_put([dispatch(x, plan) for x in (query, key, value, dout)], sharding)
        compiled = jax.jit(run).lower(*operands).compile()
        results = compiled(*operands)
    out, _ = attention_reference(query, key, value, mask)
    dlse = np.zeros((LENGTH, heads))
    expected = (out, *attention_reference_vjp(query, key, value, mask, dout, dlse)[:3])
    for given, wanted in zip(results, expected, strict=True):
        assert given.sharding.spec[:2] == (AXIS, "tensor")
        np.testing.assert_allclose(undispatch(np.asarray(given), plan), wanted, atol=FP64_TOLERANCE)
    # Keys beside values of one head for each row of a pair, and nothing else: no heads, no whole rows.
    sent = plan.capacity.pair_rows * 2 * dim
    sizes = {
        name: [int(size) for size in name.split("[")[1][:-1].split(",")]
        for name in collectives(compiled.as_text())
    }
    assert sizes and all(
        name.startswith("all-to-all") and math.prod(size) == sent for name, size in sizes.items()
    ), sizes
