"""context_attention on GPUs with transfers in two steps, and step after step with a new mask each."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import ContextPlan, dispatch

from ..cases import MaskCase, mask_cases
from ..collectives.groups import Group, local_parts, require_devices, require_one_host
from . import harness
from .harness import CAPACITY, LARGE, Solution, make_plan
from .test_gpu import BANDS, BF16_TOLERANCE, CHUNK, DIM, large_problem

pytestmark = pytest.mark.gpu

STEPS, PARTS = 2000, 4
LSE_TOLERANCE = 1e-3


@functools.cache
def plans_in_two_steps(cp_size: int, ranks_per_host: int) -> dict[str, ContextPlan]:
    """Plans of one size for all public masks, by the names of these."""
    plans = {
        case.name: make_plan(harness.embedded(case, LARGE), cp_size, chunk_size=CHUNK, capacity=None).by_host(
            ranks_per_host
        )
        for case in mask_cases()
    }
    capacity = functools.reduce(lambda a, b: a.union(b), (plan.capacity for plan in plans.values()))
    return {name: plan.pad_to(capacity) for name, plan in plans.items()}


@pytest.mark.parametrize(("cp_size", "ranks_per_host"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_masks_in_two_steps(cp_size: int, ranks_per_host: int, case: MaskCase) -> None:
    """In bfloat16, both passes; ranks of one host may be taken for several."""
    require_devices(cp_size)
    require_one_host(Group(None, cp_size, ranks_per_host=ranks_per_host))
    problem, mask = large_problem(), harness.embedded(case, LARGE)
    plan = plans_in_two_steps(cp_size, ranks_per_host)[case.name]
    solution = harness.solve_distributed(problem, plan)
    expected = harness.solve_alone(problem, mask.pad_to(BANDS))
    harness.check_solution(solution, expected, BF16_TOLERANCE)
    np.testing.assert_allclose(solution.lse, expected.lse, rtol=0, atol=LSE_TOLERANCE)


def check_own_rows(solution: Solution, expected: Solution, plan: ContextPlan) -> None:
    """Compares this process's part of a solution in dispatched order with a whole one in global order."""
    *rows, sinks = expected
    wanted = Solution(*(dispatch(np.asarray(x), plan) for x in rows), sinks=sinks)
    for name, whole, other in zip(Solution._fields, solution, wanted, strict=True):
        tolerance = LSE_TOLERANCE if name == "lse" else BF16_TOLERANCE
        for mine, want in local_parts(whole, np.asarray(other)):
            mine, want = mine.astype(np.float32), want.astype(np.float32)
            np.testing.assert_allclose(mine, want, rtol=tolerance, atol=tolerance, err_msg=name)


def check_steps(cp_size: int, steps: int, seed: int) -> None:
    """Both passes under a new random mask in each step, by one compilation."""
    rng = np.random.default_rng(seed)
    problem = harness.random_problem(rng, dtype=jnp.bfloat16, dim=DIM, v_dim=DIM)
    run = harness.distributed(cp_size)
    for mask in harness.random_masks(rng, steps):
        plan = make_plan(mask, cp_size)
        solution = run(harness.dispatch_problem(problem, plan), plan)
        check_own_rows(solution, harness.solve_alone(problem, mask.pad_to(CAPACITY.bands)), plan)


@pytest.mark.parametrize("cp_size", [2, 4], indirect=True)
@pytest.mark.parametrize("part", range(PARTS))
def test_new_mask_in_each_step(cp_size: int, part: int) -> None:
    check_steps(cp_size, STEPS // PARTS, part)
