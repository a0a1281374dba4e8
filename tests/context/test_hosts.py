"""Plans with transfers in two steps, inside and between hosts, have the same results."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import ContextPlan, context_attention, dispatch, masks

from ..cases import FP64_TOLERANCE
from . import harness
from .harness import AXIS, LENGTH, make_plan

MASKS = (masks.causal(LENGTH), masks.documents([100, 56, 3, 97]))


def test_masks_of_one_compilation(x64: None, rng: np.random.Generator) -> None:
    """Plans have one stage forward and two backward, on two hosts of four ranks."""
    compiled = harness.distributed(8)._cache_size()
    plans = [make_plan(mask, 8, (1, 2)).by_host(4) for mask in MASKS]
    capacity = plans[0].capacity.union(plans[1].capacity)
    for mask, plan in zip(MASKS, plans, strict=True):
        problem, plan = harness.random_problem(rng), plan.pad_to(capacity)
        solution = harness.solve_distributed(problem, plan)
        harness.check_solution(solution, harness.oracle(problem, mask), FP64_TOLERANCE)
    assert harness.distributed(8)._cache_size() == compiled + 1


def test_stacked_plans(rng: np.random.Generator) -> None:
    """Each example has its mask, and gradients equal those of plans with transfers in one step."""
    plans = [make_plan(mask, 4, 2) for mask in MASKS]
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
