"""context_attention on GPUs: small masks against fp64, large ones against one GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import (
    ContextPlan,
    PlanCapacity,
    attention,
    context_attention,
    dispatch,
    masks,
    plan_context,
    undispatch,
)
from jaxmagi.planning import num_parts

from ..cases import MaskCase, mask_cases
from ..parts import let_parts_receive
from . import harness
from .harness import AXIS, LARGE, Problem, check_solution, dispatch_problem, make_mesh, make_plan, whole

pytestmark = pytest.mark.gpu

CHUNK, BANDS, DIM = 128, 4096, 64
BF16_TOLERANCE = 5e-2


@functools.cache
def large_problem() -> Problem:
    return harness.random_problem(np.random.default_rng(0), LARGE, jnp.bfloat16, dim=DIM, v_dim=DIM)


@pytest.mark.parametrize("cp_size", [1, 2, 4], indirect=True)
def test_small_masks(cp_size: int, rng: np.random.Generator) -> None:
    """float32 runs in plain XLA."""
    problem = harness.random_problem(rng, dtype=np.float32)
    for mask in (masks.documents([100, 56, 3, 97]), *harness.random_masks(rng, 5)):
        plan = make_plan(mask, cp_size)
        check_solution(harness.solve_distributed(problem, plan), harness.oracle(problem, mask), 1e-4)


@pytest.mark.parametrize("cp_size", [2, 4], indirect=True)
@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_masks(cp_size: int, case: MaskCase) -> None:
    """bfloat16 runs in the kernels; all masks have the length of the largest, to share compilations."""
    problem, mask = large_problem(), harness.embedded(case, LARGE)
    capacity = PlanCapacity(bands=BANDS, copies=256, pair_rows=LARGE // 2, output_rows=LARGE)
    plan = make_plan(mask, cp_size, chunk_size=CHUNK, capacity=capacity)
    solution = harness.solve_distributed(problem, plan)
    expected = harness.solve_alone(problem, mask.pad_to(BANDS))
    check_solution(solution, expected, BF16_TOLERANCE)
    np.testing.assert_allclose(solution.lse, expected.lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("cp_size", [2, 4], indirect=True)
def test_without_jit(cp_size: int, rng: np.random.Generator) -> None:
    """Without jit each primitive in a shard_map is a program of its own."""
    problem, mask = harness.random_problem(rng, LARGE, jnp.bfloat16, dim=DIM, v_dim=DIM), masks.causal(LARGE)
    plan = plan_context(mask, cp_size, chunk_size=CHUNK)

    def local(*operands: jax.Array) -> jax.Array:
        return context_attention(*operands, plan=plan, axis_name=AXIS)

    mapped = jax.shard_map(local, mesh=make_mesh(cp_size), in_specs=P(AXIS), out_specs=P(AXIS))
    operands = [jnp.asarray(x) for x in dispatch_problem(problem, plan)[:3]]
    dout = jnp.asarray(dispatch_problem(problem, plan).dout)

    def both(attend: Callable[..., jax.Array]) -> Any:
        out, vjp = jax.vjp(attend, *operands)
        return out, vjp(dout)

    expected = jax.jit(both, static_argnums=0)(mapped)
    with jax.disable_jit():
        whole_calls = both(mapped)
    for got in (both(mapped), whole_calls):
        for mine, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            check_tokens(whole(mine), whole(wanted))


def cut_in_parts(
    monkeypatch: pytest.MonkeyPatch,
    plan: ContextPlan,
    kv_heads: int,
    parts: int,
    within_host: int | None = None,
) -> None:
    """Has programs that are lowered from now on cut 16-bit keys and values of `DIM` into so many parts.

    Args:
        within_host: parts where all ranks are of one host, if they are another number there.
    """
    within_host = within_host or parts
    received = plan.transfer.output_rows * kv_heads * 2 * DIM * 2
    let_parts_receive(monkeypatch, received // parts, within_host=received // within_host)
    assert num_parts(kv_heads, received) == parts
    assert num_parts(kv_heads, received, within_host=True) == within_host


LAYERS = 4


def layers(attend: Callable[..., jax.Array], query: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
    """Runs layers of attention with different keys and values in a loop, and their gradients."""

    def run(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kv: (attend(x, *kv), None), query, (keys, values))[0]

    out, vjp = jax.vjp(run, query, keys, values)
    return out, vjp(query)


def check_tokens(got: np.ndarray, expected: np.ndarray) -> None:
    """Compares vectors of all heads relative to their lengths, which averages over many tokens shorten."""
    got, expected = (x.astype(np.float32).reshape(*x.shape[:-2], -1) for x in (got, expected))
    lengths = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(got - expected, axis=-1)
    assert (errors <= BF16_TOLERANCE * (lengths + lengths.mean())).all()


@pytest.mark.parametrize("cp_size", [2, 4], indirect=True)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_layers_in_a_loop(
    cp_size: int, parts: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Buffers are reused at once, by overlapping computation and by the next transfers."""
    length, heads = 4096, 8
    problem = harness.random_problem(
        rng, length, jnp.bfloat16, heads=heads, kv_heads=heads, dim=DIM, v_dim=DIM
    )
    keys, values = rng.normal(size=(2, LAYERS, *problem.key.shape)).astype(jnp.bfloat16)
    mask = masks.causal(length)
    plan = plan_context(mask, cp_size, chunk_size=CHUNK)
    cut_in_parts(monkeypatch, plan, heads, parts)
    rows, stacked = P(AXIS), P(None, AXIS)
    mapped = jax.shard_map(
        functools.partial(layers, functools.partial(context_attention, plan=plan, axis_name=AXIS)),
        mesh=make_mesh(cp_size),
        in_specs=(rows, stacked, stacked),
        out_specs=(rows, (rows, stacked, stacked)),
    )
    placed = [dispatch(x, plan, axis=1) for x in (keys, values)]
    got_out, got = jax.jit(mapped)(dispatch(problem.query, plan), *placed)
    alone = jax.jit(functools.partial(layers, functools.partial(attention, mask=mask)))
    out, expected = alone(problem.query, keys, values)
    results = zip((0, 0, 1, 1), (got_out, *got), (out, *expected), strict=True)
    for axis, mine, wanted in results:
        check_tokens(undispatch(whole(mine), plan, axis=axis), np.asarray(wanted))
