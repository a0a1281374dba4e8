"""context_attention over GPUs: small masks against fp64, large ones against one GPU with all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import PlanCapacity, masks

from ..cases import MaskCase, mask_cases
from .harness import (
    LARGE,
    Problem,
    Solution,
    check_solution,
    dispatch_problem,
    distributed,
    embedded,
    make_plan,
    oracle,
    random_masks,
    random_problem,
    single_device,
    undispatch_solution,
)

pytestmark = pytest.mark.gpu

CHUNK, BANDS, DIM = 128, 4096, 64
BF16_TOLERANCE = 5e-2


@pytest.fixture
def cp_size(request: pytest.FixtureRequest) -> int:
    """As the test is parametrised by; skips it where there are fewer devices."""
    if request.param > len(jax.devices()):
        pytest.skip(f"needs {request.param} GPUs, and there are {len(jax.devices())}")
    return request.param


@functools.cache
def large_problem() -> Problem:
    return random_problem(np.random.default_rng(0), LARGE, jnp.bfloat16, dim=DIM, v_dim=DIM)


@pytest.mark.parametrize("cp_size", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("num_stages", [1, 2, (2, 3)])
def test_small_masks(cp_size: int, num_stages: int | tuple[int, int], rng: np.random.Generator) -> None:
    """In float32, on plain XLA."""
    problem = random_problem(rng, dtype=np.float32)
    for mask in (masks.documents([100, 56, 3, 97]), *random_masks(rng, 5)):
        plan = make_plan(mask, cp_size, num_stages)
        solution = distributed(cp_size)(dispatch_problem(problem, plan), plan)
        check_solution(undispatch_solution(solution, plan), oracle(problem, mask), 1e-4)


@pytest.mark.parametrize("cp_size", [2, 4], indirect=True)
@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_masks(cp_size: int, case: MaskCase) -> None:
    """In bfloat16, by the kernels; all masks at the length of the largest, to share compilations."""
    problem, mask = large_problem(), embedded(case, LARGE)
    capacity = PlanCapacity(bands=BANDS, copies=256, pair_rows=LARGE // 2, output_rows=LARGE)
    plan = make_plan(mask, cp_size, 2, chunk_size=CHUNK, capacity=capacity)
    solution = undispatch_solution(distributed(cp_size)(dispatch_problem(problem, plan), plan), plan)
    expected = Solution(*map(np.asarray, single_device()(problem, mask.pad_to(BANDS))))
    check_solution(solution, expected, BF16_TOLERANCE)
    np.testing.assert_allclose(solution.lse, expected.lse, rtol=0, atol=1e-3)
