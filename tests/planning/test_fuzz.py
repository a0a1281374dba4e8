"""Plans of random problems. ``python -m benchmarks.plan_fuzz`` checks thousands."""

import pytest

from .fuzz import check_problem, random_problem


@pytest.mark.parametrize("seed", range(300))
def test_random_plan(seed: int) -> None:
    check_problem(random_problem(seed))
