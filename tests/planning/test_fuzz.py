"""Plans of random problems. ``python -m benchmarks.plan_fuzz`` checks thousands."""

import hashlib

import jax
import numpy as np
import pytest

from jaxmagi.planning import plan_context

from .fuzz import check_problem, random_problem


@pytest.mark.parametrize("seed", range(300))
def test_random_plan(seed: int) -> None:
    check_problem(random_problem(seed))


def test_plans_are_the_same_on_every_host() -> None:
    """SHA-256 of plans, with levels by predicted times, to compare machines and numpy versions."""
    digest = hashlib.sha256()
    for seed in range(150):
        mask, arguments = random_problem(seed)
        plan = plan_context(mask, **arguments)
        digest.update(str(plan.ranks_per_host).encode())
        for leaf in jax.tree.leaves(plan):
            digest.update(np.ascontiguousarray(leaf, "<i4").tobytes())
    assert digest.hexdigest() == "5bfdeafe4e57c5c8a9591d7e0d1ea5c3cc6a9240c8442c70fb2dd247807db2d7"
