"""Meshes of all kinds: the same results inside and outside of shard_map, on one axis or several."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, attention, context_attention, masks, undispatch

from ..cases import FP32_TOLERANCE, FP64_TOLERANCE
from .harness import (
    AXIS,
    Problem,
    Solution,
    check_solution,
    dispatch_problem,
    distributed,
    make_mesh,
    make_plan,
    oracle,
    random_problem,
    solve,
    undispatch_solution,
)

LENGTH = 64
MASKS = [masks.documents([30, 20, 14]), masks.sliding_window(LENGTH, 20)]
KINDS = [AxisType.Auto, AxisType.Explicit]


def attend(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
    return context_attention(query, key, value, plan, axis_name=AXIS, sinks=sinks, return_residual=True)


def plans(cp_size: int = 4, num_stages: int = 2) -> list[ContextPlan]:
    return [make_plan(mask, cp_size, num_stages, chunk_size=4) for mask in MASKS]


def place(problem: Problem, mesh: jax.sharding.Mesh, rows: P) -> Problem:
    """On the mesh: rows [..., T, heads, ...] by ``rows``, the sinks everywhere."""
    by_rows, everywhere = jax.NamedSharding(mesh, rows), jax.NamedSharding(mesh, P())
    layout = Problem(*[by_rows] * 6)._replace(sinks=everywhere)
    return jax.device_put(problem, layout)


def check_one(run: Any, plan: ContextPlan, problem: Problem, mesh: jax.sharding.Mesh, rows: P) -> None:
    with jax.set_mesh(mesh):
        solution = jax.jit(run)(place(dispatch_problem(problem, plan), mesh, rows), plan)
    check_solution(undispatch_solution(solution, plan), oracle(problem, MASKS[0]), FP64_TOLERANCE)


def check_batch(run: Any, problems: list[Problem], batch: Any, shared: ContextPlan | None = None) -> None:
    """Checks ``run(batched problem in dispatched order, stacked plans) → batched solution``."""
    own = plans() if shared is None else [shared] * 2
    solution = jax.device_get(run(batch, ContextPlan.stack(own) if shared is None else shared))
    expected = [
        oracle(p, mask) for p, mask in zip(problems, MASKS if shared is None else MASKS[:1] * 2, strict=True)
    ]
    sink_gradient = sum(e.sinks for e in expected)
    np.testing.assert_allclose(solution.sinks, sink_gradient, atol=FP64_TOLERANCE)
    for i, plan in enumerate(own):
        one = undispatch_solution(Solution(*[x[i] for x in solution[:5]], sinks=solution.sinks), plan)
        check_solution(one, expected[i]._replace(sinks=sink_gradient), FP64_TOLERANCE)


def problem_batch(
    rng: np.random.Generator, shared: ContextPlan | None = None
) -> tuple[list[Problem], Problem]:
    first, second = random_problem(rng, LENGTH), random_problem(rng, LENGTH)
    second = second._replace(sinks=first.sinks)
    own = plans() if shared is None else [shared] * 2
    dispatched = [dispatch_problem(p, plan) for p, plan in zip((first, second), own, strict=True)]
    batch = Problem(*(np.stack(x) for x in zip(*dispatched, strict=True)))._replace(sinks=first.sinks)
    return [first, second], batch


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_shard_map(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    run = functools.partial(solve, attend)
    check_one(run, plans()[0], random_problem(rng, LENGTH), make_mesh(4, kind), P(AXIS))


@pytest.mark.parametrize("kind", KINDS)
def test_outside_without_jit(kind: AxisType, rng: np.random.Generator) -> None:
    """Beside an axis that nothing is sharded over; as it is, and inside a shard_map over that axis alone."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    plan = plans()[0]
    query, key, value, sinks, _, _ = dispatch_problem(random_problem(rng, LENGTH, np.float32), plan)
    rows = P("data")

    def one_of_batch(query: jax.Array) -> jax.Array:
        return attend(query[0], key, value, sinks, plan)[0][None]

    with jax.set_mesh(mesh):
        out, _ = attend(query, key, value, sinks, plan)
        expected = undispatch(np.asarray(out), plan)
        placed = jax.device_put(np.stack([query, query]), jax.NamedSharding(mesh, rows))
        mapped = jax.shard_map(one_of_batch, in_specs=rows, out_specs=rows, axis_names={"data"})
        both = undispatch(np.asarray(jax.jit(mapped)(placed)), plan, axis=1)
    for given in both:
        np.testing.assert_allclose(given, expected, atol=1e-6)
    query, key, value = (undispatch(jax.numpy.asarray(x), plan) for x in (query, key, value))
    single = attention(query, key, value, MASKS[0], sinks=jax.numpy.asarray(sinks))
    np.testing.assert_allclose(expected, single, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_second_call_without_jit_compiles_nothing(
    kind: AxisType, num_stages: int, compilations: list[str], rng: np.random.Generator
) -> None:
    plan = plans(num_stages=num_stages)[0]
    query, key, value, sinks, _, _ = dispatch_problem(random_problem(rng, LENGTH, np.float32), plan)

    def loss(query: Any, key: Any, value: Any) -> jax.Array:
        return attend(query, key, value, sinks, plan)[0].sum()

    with jax.set_mesh(make_mesh(4, kind)):
        for function in (loss, jax.grad(loss, argnums=(0, 1, 2))):
            function(query, key, value)
            compilations.clear()
            function(query, key, value)
            assert not compilations


def test_equal_meshes_of_other_devices(rng: np.random.Generator) -> None:
    """What the first call compiles serves other devices only as far as it may."""
    plan = plans()[0]
    query, key, value, sinks, _, _ = dispatch_problem(random_problem(rng, LENGTH, np.float32), plan)
    for devices in (jax.devices()[:4], jax.devices()[4:8]):
        mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Explicit,), devices=devices)
        with jax.set_mesh(mesh):
            out, _ = attend(query, key, value, sinks, plan)
        assert out.devices() == set(devices)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_over_another_axis(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2, 4), ("tensor", AXIS), axis_types=(kind, kind))
    run = functools.partial(solve, attend)
    check_one(run, plans()[0], random_problem(rng, LENGTH), mesh, P(AXIS, "tensor"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_over_one_of_two_axes(
    kind: AxisType, check_vma: bool, x64: None, rng: np.random.Generator
) -> None:
    """The other axis stays with the compiler; where it is Explicit, the heads are sharded over it."""
    mesh = jax.make_mesh((2, 4), ("tensor", AXIS), axis_types=(kind, kind))
    spec = P(AXIS)
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(spec, spec, spec, P(), P()),
        out_specs=spec,
        axis_names={AXIS},
        check_vma=check_vma,
    )
    rows = P(AXIS, "tensor")
    check_one(functools.partial(solve, mapped), plans()[0], random_problem(rng, LENGTH), mesh, rows)


def test_sharded_plan(x64: None, rng: np.random.Generator) -> None:
    problem, plan = random_problem(rng), make_plan(masks.causal(256), 4, 3)
    sharded = distributed(4, plan_sharded=True)(dispatch_problem(problem, plan), plan)
    whole = distributed(4)(dispatch_problem(problem, plan), plan)
    for x, y in zip(sharded, whole, strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradient_of_shared_sinks_inside(x64: None, rng: np.random.Generator) -> None:
    """jax.grad inside shard_map sums over the ranks where it checks what varies, and only there."""
    problem, plan = random_problem(rng, LENGTH), plans()[0]
    expected = oracle(problem._replace(dlse=np.zeros_like(problem.dlse)), MASKS[0]).sinks
    query, key, value, sinks, dout, _ = dispatch_problem(problem, plan)
    dout = np.where(plan.token_order[:, None, None] < 0, 0, dout)

    def gradient(query: Any, key: Any, value: Any, dout: Any, sinks: Any) -> jax.Array:
        return jax.grad(lambda sinks: (attend(query, key, value, sinks, plan)[0] * dout).sum())(sinks)

    def summed(*operands: Any) -> jax.Array:
        return jax.lax.psum(gradient(*operands), AXIS)

    for function, check_vma in ((gradient, True), (summed, False)):
        mapped = jax.shard_map(
            function, mesh=make_mesh(4), in_specs=(P(AXIS),) * 4 + (P(),), out_specs=P(), check_vma=check_vma
        )
        result = jax.jit(mapped)(query, key, value, dout, sinks)
        np.testing.assert_allclose(result, expected, atol=FP64_TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched_call", [True, False])
def test_data_and_context_inside(
    kind: AxisType, batched_call: bool, x64: None, rng: np.random.Generator
) -> None:
    """A mask for each example, one example on each row of the mesh; by a batch axis or by vmap."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    spec = P("data", AXIS)
    mapped = jax.shard_map(
        attend if batched_call else jax.vmap(attend, (0, 0, 0, None, 0)),
        mesh=mesh,
        in_specs=(spec, spec, spec, P(), spec),
        out_specs=spec,
    )
    problems, batch = problem_batch(rng)
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(solve, mapped))
        plan_layout = jax.NamedSharding(mesh, spec)
        check_batch(
            lambda p, plan: run(p, jax.device_put(plan, plan_layout)), problems, place(batch, mesh, spec)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_vmap", [True, False])
def test_data_and_context_outside(kind: AxisType, by_vmap: bool, x64: None, rng: np.random.Generator) -> None:
    """A mask for each example with the batch axis of the call itself, and one mask for all with vmap."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    plan = plans()[0] if by_vmap else None
    problems, batch = problem_batch(rng, plan)
    function = jax.vmap(attend, (0, 0, 0, None, None), spmd_axis_name="data") if by_vmap else attend
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(solve, function))
        check_batch(run, problems, place(batch, mesh, P("data", AXIS)), plan)
