"""context_attention against dense fp64 attention on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import AttnMask, ContextPlan, PlanCapacity, context_attention, masks, undispatch

from ..cases import FP32_TOLERANCE, FP64_TOLERANCE, MaskCase, mask_cases
from . import harness
from .harness import AXIS, LARGE, LENGTH, Problem, Solution, check_solution, make_plan, oracle, random_problem

BF16_TOLERANCE = 5e-2
NO_SINKS = np.full(4, -np.inf)


def scattered(rng: np.random.Generator, length: int, chunk: int = 8) -> np.ndarray:
    """Returns a layout of the user: chunks of tokens in random order."""
    return rng.permutation(np.arange(length).reshape(-1, chunk)).ravel()


def padded_length(cp_size: int) -> int:
    return -(-LENGTH // (2 * cp_size)) * 2 * cp_size


SMALL_CASES = [case for case in mask_cases() if max(case.q_len, case.kv_len) <= LENGTH]
LARGE_CASES = [case for case in mask_cases() if max(case.q_len, case.kv_len) > LENGTH]


def check(
    problem: Problem,
    mask: AttnMask,
    cp_size: int,
    layout: Any = "balanced",
    ranks_per_host: int | None = None,
) -> None:
    chunk = padded_length(cp_size) // (2 * cp_size)
    options = {"chunk_size": chunk} if isinstance(layout, str) and layout == "balanced" else {}
    plan = make_plan(mask, cp_size, layout, ranks_per_host=ranks_per_host, **options)
    check_solution(harness.solve_distributed(problem, plan), oracle(problem, mask), FP64_TOLERANCE)


@pytest.mark.parametrize(
    ("cp_size", "ranks_per_host"),
    [*((ranks, None) for ranks in (1, 2, 3, 4, 8)), (2, 1), (3, 3), (4, 2), (8, 4)],
)
def test_random_masks_and_layouts(
    cp_size: int, ranks_per_host: int | None, x64: None, rng: np.random.Generator
) -> None:
    """Masks and layouts are data: all share one compilation, which another test may have made."""
    compiled = harness.distributed(cp_size)._cache_size()
    padding = np.full(padded_length(cp_size) - LENGTH, -1)
    layouts = ["balanced", "zigzag", "contiguous", np.concatenate([padding, scattered(rng, LENGTH)])]
    for mask, layout in zip(harness.random_masks(rng, 8), layouts * 2, strict=True):
        check(random_problem(rng), mask, cp_size, layout, ranks_per_host)
    assert harness.distributed(cp_size)._cache_size() <= compiled + 1


LEVELS = pytest.mark.parametrize("ranks_per_host", [None, 2], ids=["one_level", "two_levels"])


@LEVELS
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_small_public_masks(
    case: MaskCase, ranks_per_host: int | None, x64: None, rng: np.random.Generator
) -> None:
    mask = harness.embedded(case, LENGTH)
    check(random_problem(rng), mask, 4, ranks_per_host=ranks_per_host)


def one_head(problem: Problem) -> Problem:
    return Problem(*(x[:1] if x.ndim == 1 else x[:, :1] for x in problem))


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_public_masks(case: MaskCase, x64: None, rng: np.random.Generator) -> None:
    """The results are those of the local op, which has tests against the dense reference."""
    problem, mask = one_head(random_problem(rng, LARGE)), harness.embedded(case, LARGE)
    capacity = PlanCapacity(bands=4096, copies=256, pair_rows=1920, output_rows=LARGE)
    plan = make_plan(mask, 8, chunk_size=128, capacity=capacity)
    expected = harness.solve_alone(problem, mask.pad_to(4096))
    check_solution(harness.solve_distributed(problem, plan), expected, FP64_TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "ranks_per_host"),
    [
        (4, 4, 8, 8, None),
        (6, 3, 5, 9, None),
        (8, 1, 16, 4, None),
        (1, 1, 4, 16, None),
        (6, 3, 5, 9, 2),
        (8, 1, 16, 4, 2),
    ],
)
def test_heads(
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    ranks_per_host: int | None,
    x64: None,
    rng: np.random.Generator,
) -> None:
    """A query head may have a key head for itself, or share it with some or all others.

    Transfers have key heads alone: two levels are tested with one of them, and with several.
    """
    problem = random_problem(rng, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    check(problem, masks.documents([100, 56, 3, 97]), 4, ranks_per_host=ranks_per_host)


def test_soft_cap(x64: None, rng: np.random.Generator) -> None:
    problem, mask = random_problem(rng), masks.documents([100, 56, 3, 97])
    plan = make_plan(mask, 4)
    solution = harness.solve_distributed(problem, plan, logits_soft_cap=0.7)
    check_solution(solution, oracle(problem, mask, logits_soft_cap=0.7), FP64_TOLERANCE)


@LEVELS
def test_mask_that_hides_everything(ranks_per_host: int | None, x64: None, rng: np.random.Generator) -> None:
    nothing = AttnMask.from_slices([], [], [], q_len=LENGTH, kv_len=LENGTH)
    check(random_problem(rng), nothing, 4, ranks_per_host=ranks_per_host)


def test_without_sinks(x64: None, rng: np.random.Generator) -> None:
    """Sinks of -inf have no effect, and no NaN in gradients."""
    problem, mask = random_problem(rng)._replace(sinks=NO_SINKS), masks.causal(LENGTH)
    check(problem, mask, 4)
    plan = make_plan(mask, 4)
    problem = harness.dispatch_problem(problem, plan)
    out = jax.jit(on_ranks(lambda q, k, v: attend(q, k, v, plan)))(*problem[:3])
    np.testing.assert_array_equal(out, harness.distributed(4)(problem, plan).out)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, plan: ContextPlan) -> Any:
    return context_attention(query, key, value, plan, axis_name=AXIS)


def on_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=harness.make_mesh(4), in_specs=P(AXIS), out_specs=P(AXIS))


def test_layers_of_different_masks_on_one_layout(x64: None, rng: np.random.Generator) -> None:
    """The plan of local layers takes the token order of the plan of global layers."""
    local, whole = masks.sliding_window(LENGTH, 31), masks.causal(LENGTH)
    plans = [first := make_plan(whole, 4), make_plan(local, 4, first.token_order)]
    problem = random_problem(rng)._replace(sinks=NO_SINKS)
    both = jax.jit(on_ranks(lambda q, k, v: [attend(q, k, v, plan) for plan in plans]))
    outs = both(*harness.dispatch_problem(problem, first)[:3])
    for out, mask in zip(outs, (whole, local), strict=True):
        expected = oracle(problem, mask).out
        np.testing.assert_allclose(undispatch(np.asarray(out), first), expected, atol=FP64_TOLERANCE)


@LEVELS
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float32, FP32_TOLERANCE), (jnp.bfloat16, BF16_TOLERANCE)],
    ids=["fp32", "bf16"],
)
def test_precision(
    dtype: type, tolerance: float, ranks_per_host: int | None, rng: np.random.Generator
) -> None:
    problem, mask = random_problem(rng, dtype=dtype), masks.documents([100, 56, 3, 97])
    plan = make_plan(mask, 4, ranks_per_host=ranks_per_host)
    solution = harness.solve_distributed(problem, plan)
    assert [x.dtype for x in solution[2:5]] == [dtype] * 3
    assert (solution.out.dtype, solution.lse.dtype) == (dtype, np.float32)
    check_solution(solution, oracle(problem, mask), tolerance)


@LEVELS
def test_reruns_are_bitwise_equal(ranks_per_host: int | None, rng: np.random.Generator) -> None:
    problem = random_problem(rng, dtype=np.float32)
    plan = make_plan(masks.documents([100, 56, 3, 97]), 4, ranks_per_host=ranks_per_host)
    first, second = (harness.solve_distributed(problem, plan) for _ in range(2))
    for name, x, y in zip(Solution._fields, first, second, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
