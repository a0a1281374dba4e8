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
from .harness import (
    AXIS,
    LARGE,
    LENGTH,
    Problem,
    Solution,
    check_solution,
    dispatch_problem,
    distributed,
    embedded,
    make_mesh,
    make_plan,
    oracle,
    random_masks,
    random_problem,
    single_device,
    undispatch_solution,
)

BF16_TOLERANCE = 5e-2


def scattered(rng: np.random.Generator, length: int, chunk: int = 8) -> np.ndarray:
    """An order of the user's own: chunks anywhere."""
    return rng.permutation(np.arange(length).reshape(-1, chunk)).ravel()


def padded_length(cp_size: int) -> int:
    return -(-LENGTH // (2 * cp_size)) * 2 * cp_size


type NumStages = int | tuple[int, int]


def check(
    problem: Problem, mask: AttnMask, cp_size: int, num_stages: NumStages, layout: Any = "balanced"
) -> None:
    chunk = padded_length(cp_size) // (2 * cp_size)
    options = {"chunk_size": chunk} if isinstance(layout, str) and layout == "balanced" else {}
    plan = make_plan(mask, cp_size, num_stages, layout, **options)
    solution = distributed(cp_size)(dispatch_problem(problem, plan), plan)
    check_solution(undispatch_solution(solution, plan), oracle(problem, mask), FP64_TOLERANCE)


@pytest.mark.parametrize("num_stages", [1, 2, 3, (1, 3), (3, 2)])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_random_masks_and_layouts(
    cp_size: int, num_stages: NumStages, x64: None, rng: np.random.Generator
) -> None:
    """All with one compilation at most (other tests may have made it): masks and layouts are data."""
    compiled = distributed(cp_size)._cache_size()
    padding = np.full(padded_length(cp_size) - LENGTH, -1)
    layouts = ["balanced", "zigzag", "contiguous", np.concatenate([padding, scattered(rng, LENGTH)])]
    for mask, layout in zip(random_masks(rng, 4), layouts, strict=True):
        check(random_problem(rng), mask, cp_size, num_stages, layout)
    assert distributed(cp_size)._cache_size() <= compiled + 1


SMALL_CASES = [case for case in mask_cases() if max(case.q_len, case.kv_len) <= LENGTH]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_small_public_masks(case: MaskCase, x64: None, rng: np.random.Generator) -> None:
    check(random_problem(rng), embedded(case, LENGTH), 4, 3)


LARGE_CASES = [case for case in mask_cases() if max(case.q_len, case.kv_len) > LENGTH]


def one_head(problem: Problem) -> Problem:
    return Problem(*(x[:1] if x.ndim == 1 else x[:, :1] for x in problem))


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_public_masks(case: MaskCase, x64: None, rng: np.random.Generator) -> None:
    """Against the local op, which has its own tests against the dense reference."""
    problem, mask = one_head(random_problem(rng, LARGE)), embedded(case, LARGE)
    capacity = PlanCapacity(bands=4096, copies=256, pair_rows=1920, output_rows=LARGE)
    plan = make_plan(mask, 8, 2, chunk_size=128, capacity=capacity)
    solution = distributed(8)(dispatch_problem(problem, plan), plan)
    expected = Solution(*map(np.asarray, single_device()(problem, mask.pad_to(4096))))
    check_solution(undispatch_solution(solution, plan), expected, FP64_TOLERANCE)


def test_soft_cap(x64: None, rng: np.random.Generator) -> None:
    problem, mask = random_problem(rng), masks.documents([100, 56, 3, 97])
    plan = make_plan(mask, 4, 2)
    solution = distributed(4, logits_soft_cap=0.7)(dispatch_problem(problem, plan), plan)
    expected = oracle(problem, mask, logits_soft_cap=0.7)
    check_solution(undispatch_solution(solution, plan), expected, FP64_TOLERANCE)


def test_mask_that_hides_everything(x64: None, rng: np.random.Generator) -> None:
    check(random_problem(rng), AttnMask.from_slices([], [], [], q_len=LENGTH, kv_len=LENGTH), 4, 3)


def test_without_sinks(x64: None, rng: np.random.Generator) -> None:
    """A sink of -inf is none, and the gradients have no NaN from it."""
    problem = random_problem(rng)._replace(sinks=np.full(4, -np.inf))
    mask = masks.causal(LENGTH)
    check(problem, mask, 4, 3)
    plan = make_plan(mask, 4, 3)
    problem = dispatch_problem(problem, plan)
    expected = distributed(4)(problem, plan)
    mapped = mapped_over(4, lambda q, k, v: attend(q, k, v, plan))
    np.testing.assert_array_equal(jax.jit(mapped)(*problem[:3]), expected.out)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, plan: ContextPlan) -> Any:
    return context_attention(query, key, value, plan, axis_name=AXIS)


def mapped_over(cp_size: int, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=make_mesh(cp_size), in_specs=P(AXIS), out_specs=P(AXIS))


def test_layers_of_different_masks_on_one_layout(x64: None, rng: np.random.Generator) -> None:
    """Local and global layers: the second plan takes the order of the first."""
    local, whole = masks.sliding_window(LENGTH, 31), masks.causal(LENGTH)
    first = make_plan(whole, 4, 1)
    second = make_plan(local, 4, 2, first.token_order)
    problem = random_problem(rng)
    results = dispatch_problem(problem, first)
    both = jax.jit(mapped_over(4, lambda q, k, v: (attend(q, k, v, first), attend(q, k, v, second))))
    for out, mask in zip(both(*results[:3]), (whole, local), strict=True):
        no_sinks = problem._replace(sinks=np.full(4, -np.inf))
        expected = oracle(no_sinks, mask).out
        np.testing.assert_allclose(undispatch(np.asarray(out), first), expected, atol=FP64_TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "num_stages"),
    [(np.float32, FP32_TOLERANCE, 3), (jnp.bfloat16, BF16_TOLERANCE, 1), (jnp.bfloat16, BF16_TOLERANCE, 3)],
    ids=["fp32-3", "bf16-1", "bf16-3"],
)
def test_precision(dtype: type, tolerance: float, num_stages: int, rng: np.random.Generator) -> None:
    problem, mask = random_problem(rng, dtype=dtype), masks.documents([100, 56, 3, 97])
    plan = make_plan(mask, 4, num_stages)
    solution = distributed(4)(dispatch_problem(problem, plan), plan)
    assert [x.dtype for x in solution[2:5]] == [dtype] * 3
    assert (solution.out.dtype, solution.lse.dtype) == (dtype, np.float32)
    check_solution(undispatch_solution(solution, plan), oracle(problem, mask), tolerance)


def test_reruns_are_bitwise_equal(rng: np.random.Generator) -> None:
    problem = random_problem(rng, dtype=np.float32)
    plan = make_plan(masks.documents([100, 56, 3, 97]), 4, 3)
    first, second = (distributed(4)(dispatch_problem(problem, plan), plan) for _ in range(2))
    for name, x, y in zip(Solution._fields, first, second, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
