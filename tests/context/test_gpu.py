"""context_attention over the GPUs that there are, on plain XLA."""

import jax
import numpy as np
import pytest

from jaxmagi import masks

from .harness import (
    check_solution,
    dispatch_problem,
    distributed,
    make_plan,
    oracle,
    random_problem,
    undispatch_solution,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_stages", [1, 2])
def test_all_gpus(num_stages: int, rng: np.random.Generator) -> None:
    cp_size = 1 << (len(jax.devices()).bit_length() - 1)
    problem, mask = random_problem(rng, dtype=np.float32), masks.documents([100, 56, 3, 97])
    plan = make_plan(mask, cp_size, num_stages)
    solution = distributed(cp_size)(dispatch_problem(problem, plan), plan)
    check_solution(undispatch_solution(solution, plan), oracle(problem, mask), 1e-4)
