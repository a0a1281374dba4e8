"""The parts into which GPUs cut a pass of context_attention, and what changes its call, have one result."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import AttnMask, ContextPlan, attention, context_attention, dispatch, masks, plan_context
from jaxmagi.context import _custom_call

from ..collectives.groups import Group, assert_close, place, require_devices, require_one_host
from ..parts import let_parts_receive
from . import harness
from .harness import AXIS, Solution, check_solution
from .test_gpu import BF16_TOLERANCE, CHUNK, DIM, cut_in_parts

pytestmark = pytest.mark.gpu

LENGTH, HEADS = 4096, 8
MASKS = [masks.documents([1000, 2500, 3, 593]), masks.causal(LENGTH)]
LSE_TOLERANCE = 1e-3
TILE_KEYS = 128  # of the backward kernel for these head dimensions

ONE_LEVEL = [
    *(Group("native", size) for size in (1, 2, 4)),
    Group("nccl", 2),
    Group(None, 4, ranks_per_host=2),
]
TWO_LEVELS = [Group(None, 2, ranks_per_host=1), Group(None, 4, ranks_per_host=2)]
ON_GROUPS = pytest.mark.parametrize(
    ("group", "two_levels"),
    [
        *(pytest.param(group, False, id=str(group)) for group in ONE_LEVEL),
        *(pytest.param(group, True, id=f"{group}-two_levels") for group in TWO_LEVELS),
    ],
)
"""Ranks, and whether plans are for their hosts. Ranks of one host may be taken for several."""


def make_plan(
    mask: AttnMask, group: Group, two_levels: bool, layout: Any = None, chunk_size: int = CHUNK
) -> ContextPlan:
    """Returns a plan; skips the test where there are no such ranks."""
    require_devices(group.size)
    require_one_host(group)
    options: dict[str, Any] = {"chunk_size": chunk_size} if layout is None else {"layout": layout}
    plan = plan_context(mask, group.size, **options)
    return plan.by_host(group.ranks_per_host) if two_levels and group.ranks_per_host else plan


def check_close(solution: Solution, expected: Solution) -> None:
    """Compares with one GPU."""
    check_solution(solution, expected, BF16_TOLERANCE)
    np.testing.assert_allclose(solution.lse, expected.lse, rtol=0, atol=LSE_TOLERANCE)


def check_with_one_gpu(
    mask: AttnMask,
    plan: ContextPlan,
    group: Group,
    rng: np.random.Generator,
    *,
    deterministic: bool,
    dims: tuple[int, int] = (DIM, DIM),
) -> None:
    """Compares both passes of a random problem, with these dims of keys and of values, with one GPU."""
    dim, v_dim = dims
    problem = harness.random_problem(rng, mask.q_len, jnp.bfloat16, heads=HEADS, dim=dim, v_dim=v_dim)
    options = {"collectives": group.options, "deterministic": deterministic}
    check_close(harness.solve_distributed(problem, plan, **options), harness.solve_alone(problem, mask))


@ON_GROUPS
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_numbers_of_parts(
    group: Group,
    two_levels: bool,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """1, 2, 4 and 8 parts, as far as key heads allow, have one result, which is that of one GPU."""
    plan = make_plan(MASKS[0], group, two_levels)
    problem = harness.random_problem(
        rng, LENGTH, jnp.bfloat16, heads=HEADS, kv_heads=kv_heads, dim=DIM, v_dim=DIM
    )
    expected = harness.solve_alone(problem, MASKS[0])
    solutions = []
    for parts in (parts for parts in (1, 2, 4, 8) if kv_heads % parts == 0):
        cut_in_parts(monkeypatch, plan, kv_heads, parts)
        # The cache may have a program that is cut otherwise.
        run = harness.distributed.__wrapped__(group.size, collectives=group.options)
        solution = run(harness.dispatch_problem(problem, plan), plan)
        solutions.append(harness.undispatch_solution(solution, plan))
        check_close(solutions[-1], expected)
    for solution in solutions[1:]:
        check_solution(solution, solutions[0], BF16_TOLERANCE)
        if group.implementation == "native":  # others merge the result of the first part from two
            np.testing.assert_array_equal(solution.out, solutions[0].out)
            np.testing.assert_array_equal(solution.lse, solutions[0].lse)
        np.testing.assert_allclose(solution.lse, solutions[0].lse, rtol=0, atol=1e-5)


@ON_GROUPS
@pytest.mark.parametrize("keep_received", [False, True])
@pytest.mark.parametrize(("kv_heads", "within_host"), [(8, 2), (8, 4), (6, 2)])
def test_fewer_parts_within_a_host(
    group: Group,
    two_levels: bool,
    keep_received: bool,
    kv_heads: int,
    within_host: int,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Arrays have as many parts as key heads, of which the forward pass within a host joins some."""
    plan = make_plan(MASKS[0], group, two_levels)
    cut_in_parts(monkeypatch, plan, kv_heads, kv_heads, within_host)
    problem = harness.random_problem(
        rng, LENGTH, jnp.bfloat16, heads=2 * kv_heads, kv_heads=kv_heads, dim=DIM, v_dim=DIM
    )
    # The cache may have a program that is cut otherwise.
    run = harness.distributed.__wrapped__(group.size, collectives=group.options, keep_received=keep_received)
    solution = run(harness.dispatch_problem(problem, plan), plan)
    check_close(harness.undispatch_solution(solution, plan), harness.solve_alone(problem, MASKS[0]))


@ON_GROUPS
@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_that_share_workspaces(
    group: Group,
    two_levels: bool,
    kv_heads: int,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Parts take turns with two workspaces, and have the gradients of one GPU."""
    monkeypatch.setattr(_custom_call, "_MOST_SUMS", 0)
    plan = make_plan(MASKS[0], group, two_levels)
    cut_in_parts(monkeypatch, plan, kv_heads, kv_heads)
    problem = harness.random_problem(
        rng, LENGTH, jnp.bfloat16, heads=3 * kv_heads, kv_heads=kv_heads, dim=DIM, v_dim=DIM
    )
    # The cache may have a program whose parts have workspaces of their own.
    run = harness.distributed.__wrapped__(group.size, collectives=group.options, deterministic=deterministic)
    placed = harness.dispatch_problem(problem, plan)
    solutions = [harness.undispatch_solution(run(placed, plan), plan) for _ in range(2)]
    check_close(solutions[0], harness.solve_alone(problem, MASKS[0]))
    if deterministic:
        jax.tree.map(np.testing.assert_array_equal, *solutions)


@ON_GROUPS
@pytest.mark.parametrize("wire", [jnp.bfloat16, jnp.float16])
def test_gradients_that_are_rounded_on_the_way(
    group: Group, two_levels: bool, wire: Any, rng: np.random.Generator
) -> None:
    plan = make_plan(MASKS[0], group, two_levels)
    problem = harness.random_problem(rng, LENGTH, jnp.bfloat16, heads=HEADS, dim=DIM, v_dim=DIM)
    options = replace(group.options, wire_dtype=wire)
    solution = harness.solve_distributed(problem, plan, collectives=options)
    check_close(solution, harness.solve_alone(problem, MASKS[0]))


@ON_GROUPS
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_kept_keys(
    group: Group,
    two_levels: bool,
    deterministic: bool,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Received keys that stay for the backward pass are those that it would receive."""
    plan = make_plan(MASKS[0], group, two_levels)
    cut_in_parts(monkeypatch, plan, harness.KV_HEADS, parts)
    harness.distributed.cache_clear()  # it may have programs that are cut otherwise
    problem = harness.random_problem(rng, LENGTH, jnp.bfloat16, heads=HEADS, dim=DIM, v_dim=DIM)
    options = {"collectives": group.options, "deterministic": deterministic}
    kept, sent = (
        harness.solve_distributed(problem, plan, **options, keep_received=keep) for keep in (True, False)
    )
    check_close(kept, harness.solve_alone(problem, MASKS[0]))
    if deterministic:
        jax.tree.map(np.testing.assert_array_equal, kept, sent)


@pytest.mark.parametrize("group", [Group("native", 2), Group("nccl", 2)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (192, 192), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(768), masks.sliding_window(4096, 100)], ids=["few", "window"])
def test_head_dims(
    mask: AttnMask, dims: tuple[int, int], deterministic: bool, group: Group, rng: np.random.Generator
) -> None:
    """Own tiles have gradients that nobody adds to, with kernels of other head dimensions too."""
    plan = make_plan(mask, group, False)
    check_with_one_gpu(mask, plan, group, rng, deterministic=deterministic, dims=dims)


@pytest.mark.parametrize("group", [Group("native", 2), Group("nccl", 2)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_tile_of_own_keys(group: Group, deterministic: bool, rng: np.random.Generator) -> None:
    """The rank has fewer tokens than a tile of keys."""
    half = TILE_KEYS // 2
    mask = masks.causal(half * group.size)
    plan = make_plan(mask, group, False, chunk_size=half)
    assert plan.shard_length == half
    check_with_one_gpu(mask, plan, group, rng, deterministic=deterministic)


@ON_GROUPS
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_that_have_own_and_received_keys(
    group: Group, two_levels: bool, deterministic: bool, rng: np.random.Generator
) -> None:
    """The rank's tokens are no multiple of a tile of keys."""
    half = TILE_KEYS // 2
    mask = masks.causal(LENGTH - half * group.size)
    plan = make_plan(mask, group, two_levels, chunk_size=half)
    assert plan.shard_length % TILE_KEYS == half
    check_with_one_gpu(mask, plan, group, rng, deterministic=deterministic)


def random_examples(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns query, key, value and a cotangent of two sequences, and two sets of sinks."""
    sizes = [(HEADS, DIM), (2, DIM), (2, 2 * DIM), (HEADS, 2 * DIM)]
    rows = [rng.normal(size=(2, LENGTH, *size)).astype(jnp.bfloat16) for size in sizes]
    return rows, rng.normal(size=(2, HEADS)).astype(np.float32)


def gradients(attend: Any, *given: Any) -> Any:
    *operands, dout = given
    out, pull = jax.vjp(attend, *operands)
    return out, *pull(dout)


@ON_GROUPS
@pytest.mark.parametrize("mapped", ["sequences", "plans", "sinks"])
@pytest.mark.parametrize("least_part_bytes", [1, 2**30])
def test_examples(
    group: Group,
    two_levels: bool,
    mapped: str,
    least_part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Two sequences with one plan or with one for each, or two sets of sinks of one, in a call for a pass.

    There is a soft cap, and values have another size than keys. Each key head is a part, or there is one.
    """
    let_parts_receive(monkeypatch, least_part_bytes)
    chosen = MASKS if mapped == "plans" else MASKS[:1] * 2
    first = make_plan(chosen[0], group, two_levels)
    plan = ContextPlan.stack([first, make_plan(chosen[1], group, two_levels, first.token_order)])
    rows, sinks = random_examples(rng)
    options: dict[str, Any] = {"logits_soft_cap": 5.0, "implementation": "ffi"}
    axes = {
        "sequences": (0, 0, 0, None, None),
        "plans": (0, 0, 0, None, 0),
        "sinks": (None, None, None, 0, None),
    }
    along = axes[mapped]
    sinks, plan = sinks if along[3] == 0 else sinks[0], plan if along[4] == 0 else first
    rows[:3] = [x if along[0] == 0 else x[0] for x in rows[:3]]

    def one(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array, plan: Any) -> jax.Array:
        return context_attention(
            query, key, value, plan, axis_name=AXIS, sinks=sinks, collectives=group.options, **options
        )

    def alone(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
        mask = AttnMask.stack(chosen) if along[4] == 0 else chosen[0]
        if along[3] is None:
            return attention(query, key, value, mask, sinks=sinks, **options)
        return jnp.stack([attention(query, key, value, mask, sinks=one, **options) for one in sinks])

    spec = P(None, AXIS)
    specs = spec if along[0] == 0 else P(AXIS)
    mesh = harness.make_mesh(group.size)
    on_ranks = jax.shard_map(
        jax.vmap(one, along), mesh=mesh, in_specs=(specs, specs, specs, P(), P()), out_specs=spec
    )

    @jax.jit
    def run(plan: Any, *given: Any) -> Any:
        return gradients(lambda q, k, v, sinks: on_ranks(q, k, v, sinks, plan), *given)

    def order(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return dispatch(x, first, axis=x.ndim - 3)

    *operands, dout = [place(order(x), mesh, P(*[None] * (x.ndim - 3), AXIS)) for x in rows]
    got = run(place(plan, mesh, P()), *operands, place(sinks, mesh, P()), dout)
    *operands, dout = map(jnp.asarray, rows)
    *want, want_sinks = jax.jit(gradients, static_argnums=0)(alone, *operands, jnp.asarray(sinks), dout)
    assert_close(got, [*map(order, want), np.asarray(want_sinks)], BF16_TOLERANCE)
