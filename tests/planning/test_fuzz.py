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
    """SHA-256 of plans, with stages by predicted times, to compare machines and numpy versions."""
    digest = hashlib.sha256()
    for seed in range(150):
        mask, arguments = random_problem(seed)
        plan = plan_context(mask, **{**arguments, "num_stages": "auto"})
        digest.update(str(plan.stage_counts).encode())
        for leaf in jax.tree.leaves(plan):
            digest.update(np.ascontiguousarray(leaf, "<i4").tobytes())
    assert digest.hexdigest() == "c094d037145c5be4e842d60a816fbcf856bc7b758302b3eef90018be593a352b"
