"""context_attention outside of shard_map and without jit, on meshes of both kinds, and sharded plans."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, attention, context_attention, masks, undispatch

from ..cases import FP32_TOLERANCE, FP64_TOLERANCE
from .harness import (
    AXIS,
    Problem,
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
MASK = masks.documents([30, 20, 14])
PLAN = make_plan(MASK, 4, chunk_size=4)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def attend(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
    return context_attention(query, key, value, plan, axis_name=AXIS, sinks=sinks, return_residual=True)


def float32_operands(rng: np.random.Generator) -> tuple[Any, ...]:
    """Returns query, key, value and sinks of a random problem, dispatched by `PLAN`."""
    return dispatch_problem(random_problem(rng, LENGTH, np.float32), PLAN)[:4]


@KINDS
def test_outside_of_shard_map(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    problem, mesh = random_problem(rng, LENGTH), make_mesh(4, kind)
    specs = Problem(*[P(AXIS)] * 6)._replace(sinks=P())
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs)
        placed = jax.device_put(dispatch_problem(problem, PLAN), shardings)
        solution = jax.jit(functools.partial(solve, attend))(placed, PLAN)
    check_solution(undispatch_solution(solution, PLAN), oracle(problem, MASK), FP64_TOLERANCE)


@KINDS
def test_outside_without_jit(kind: AxisType, rng: np.random.Generator) -> None:
    """The mesh has a second axis that shards nothing, or that a surrounding shard_map maps over."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    query, key, value, sinks = float32_operands(rng)
    rows = P("data")

    def one_of_batch(query: jax.Array) -> jax.Array:
        return attend(query[0], key, value, sinks, PLAN)[0][None]

    with jax.set_mesh(mesh):
        out, _ = attend(query, key, value, sinks, PLAN)
        expected = undispatch(np.asarray(out), PLAN)
        placed = jax.device_put(np.stack([query, query]), jax.NamedSharding(mesh, rows))
        mapped = jax.shard_map(one_of_batch, in_specs=rows, out_specs=rows, axis_names={"data"})
        both = undispatch(np.asarray(jax.jit(mapped)(placed)), PLAN, axis=1)
    for given in both:
        np.testing.assert_allclose(given, expected, atol=1e-6)
    query, key, value = (undispatch(jnp.asarray(x), PLAN) for x in (query, key, value))
    single = attention(query, key, value, MASK, sinks=jnp.asarray(sinks))
    np.testing.assert_allclose(expected, single, atol=FP32_TOLERANCE)


@KINDS
def test_second_call_without_jit_compiles_nothing(
    kind: AxisType, compilations: list[str], rng: np.random.Generator
) -> None:
    query, key, value, sinks = float32_operands(rng)

    def loss(query: Any, key: Any, value: Any) -> jax.Array:
        return attend(query, key, value, sinks, PLAN)[0].sum()

    with jax.set_mesh(make_mesh(4, kind)):
        for function in (loss, jax.grad(loss, argnums=(0, 1, 2))):
            function(query, key, value)
            compilations.clear()
            function(query, key, value)
            assert not compilations


def test_equal_meshes_of_other_devices(rng: np.random.Generator) -> None:
    """A program compiled for some devices does not run on others."""
    query, key, value, sinks = float32_operands(rng)
    for devices in (jax.devices()[:4], jax.devices()[4:8]):
        mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Explicit,), devices=devices)
        with jax.set_mesh(mesh):
            out, _ = attend(query, key, value, sinks, PLAN)
        assert out.devices() == set(devices)


def test_sharded_plan(x64: None, rng: np.random.Generator) -> None:
    problem, plan = random_problem(rng), make_plan(masks.causal(256), 4)
    sharded = distributed(4, plan_sharded=True)(dispatch_problem(problem, plan), plan)
    whole = distributed(4)(dispatch_problem(problem, plan), plan)
    for x, y in zip(sharded, whole, strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradient_of_shared_sinks_inside(x64: None, rng: np.random.Generator) -> None:
    """jax.grad inside shard_map sums over the ranks with check_vma and only with it."""
    problem = random_problem(rng, LENGTH)
    expected = oracle(problem._replace(dlse=np.zeros_like(problem.dlse)), MASK).sinks
    query, key, value, sinks, dout, _ = dispatch_problem(problem, PLAN)
    dout = np.where(PLAN.token_order[:, None, None] < 0, 0, dout)

    def gradient(query: Any, key: Any, value: Any, dout: Any, sinks: Any) -> jax.Array:
        return jax.grad(lambda sinks: (attend(query, key, value, sinks, PLAN)[0] * dout).sum())(sinks)

    def summed(*operands: Any) -> jax.Array:
        return jax.lax.psum(gradient(*operands), AXIS)

    for function, check_vma in ((gradient, True), (summed, False)):
        mapped = jax.shard_map(
            function, mesh=make_mesh(4), in_specs=(P(AXIS),) * 4 + (P(),), out_specs=P(), check_vma=check_vma
        )
        result = jax.jit(mapped)(query, key, value, dout, sinks)
        np.testing.assert_allclose(result, expected, atol=FP64_TOLERANCE)
