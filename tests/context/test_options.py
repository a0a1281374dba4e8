"""The collectives of context_attention: gradients that are rounded before they return, and messages."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import CollectiveOptions, ContextPlan, masks, plan_context

from ..cases import FP64_TOLERANCE
from . import harness
from .harness import Solution, make_plan
from .test_errors import run

MASK = masks.documents([100, 56, 3, 97])
PLANS = {
    "one step": make_plan(MASK, 8),
    "two steps": make_plan(MASK, 8, ranks_per_host=4),
}


def solutions(plan: ContextPlan, dtype: Any, **options: Any) -> tuple[Solution, Solution]:
    """Solutions of a problem without and with these options."""
    problem = harness.random_problem(np.random.default_rng(0), dtype=dtype)
    return (
        harness.solve_distributed(problem, plan),
        harness.solve_distributed(problem, plan, collectives=CollectiveOptions(**options)),
    )


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_rounded_on_the_way(name: str) -> None:
    """Nothing else changes."""
    exact, given = solutions(PLANS[name], np.float32, wire_dtype=jnp.bfloat16)
    for field in ("out", "lse", "query", "sinks"):
        np.testing.assert_array_equal(getattr(given, field), getattr(exact, field))
    for field in ("key", "value"):
        got, want = getattr(given, field), getattr(exact, field)
        assert got.dtype == np.float32
        assert 1e-4 < np.abs(got - want).max() < 2.0**-7 * np.abs(want).max()


@pytest.mark.parametrize("name", PLANS)
def test_doubles_that_return_as_floats(name: str, x64: None) -> None:
    exact, given = solutions(PLANS[name], np.float64, wire_dtype=jnp.float32)
    harness.check_solution(given, exact, 1e-5)
    assert np.abs(given.key - exact.key).max() > 10 * FP64_TOLERANCE


@pytest.mark.parametrize(
    ("collectives", "message"),
    [
        ("nccl", "collectives must be a jaxmagi.CollectiveOptions, but it is str"),
        (
            CollectiveOptions(wire_dtype=np.float64),
            "wire_dtype=float64, but the gradients of keys and values are float32",
        ),
    ],
)
def test_collectives_that_do_not_fit(collectives: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(collectives=collectives)


def test_native_collectives_between_hosts() -> None:
    plan = plan_context(masks.causal(32), 4, chunk_size=4).by_host(2)
    with pytest.raises(NotImplementedError, match="brings rows across hosts: use None"):
        run(plan, collectives=CollectiveOptions(implementation="native"))


def test_wire_dtype_of_the_operands() -> None:
    """It may be that of 16-bit operands, and that of their gradients."""
    for wire in (jnp.bfloat16, jnp.float16, jnp.float32):
        options = CollectiveOptions(wire_dtype=wire)
        assert run(dtypes=(jnp.bfloat16, jnp.bfloat16), collectives=options).dtype == jnp.bfloat16
