"""Batch and heads sharded over a data x context x tensor mesh: only rows of keys are transferred.

The collectives are read from the compiled program. In plain JAX rows are transferred by all-to-all.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jaxmagi import AttnMask, ContextPlan, attention, context_attention, dispatch, masks, undispatch

from ..cases import FP64_TOLERANCE
from ..compiled import collective_names, collectives
from .harness import AXIS, CAPACITY, make_plan

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 64, 4, 2, 8
MASKS = [masks.documents([30, 20, 14]), masks.sliding_window(LENGTH, 20)] * 2
REPLICATED = P()
BY_ARGUMENTS: dict[str, Any] = {"batch_axis_name": "data", "head_axis_name": "tensor"}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


class Problem(NamedTuple):
    """Holds a batch in its global order, and the plan of each example, or one plan for all."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    sinks: np.ndarray
    plans: list[ContextPlan]

    @property
    def is_stacked(self) -> bool:
        return len(self.plans) > 1

    @property
    def plan(self) -> ContextPlan:
        return ContextPlan.stack(self.plans) if self.is_stacked else self.plans[0]

    @property
    def mask(self) -> AttnMask:
        return AttnMask.stack(MASKS) if self.is_stacked else MASKS[0]

    def reorder(self, move: Any, x: Any) -> np.ndarray:
        """Returns each example of x, dispatched or undispatched by its plan."""
        plans = self.plans if self.is_stacked else self.plans * BATCH
        return np.stack([move(one, plan) for one, plan in zip(np.asarray(x), plans, strict=True)])

    def place(self, mesh: Mesh) -> tuple[Any, ...]:
        """Returns the operands, dispatched and sharded over all three axes as far as these divide them."""
        heads = [P("data", AXIS, "tensor" if x.shape[2] > 1 else None) for x in self[:3]]
        rows = [self.reorder(dispatch, x) for x in self[:3]]
        return jax.device_put(
            (*rows, self.sinks), tuple(jax.NamedSharding(mesh, spec) for spec in (*heads, P("tensor")))
        )


def make_problem(rng: np.random.Generator, *, stacked: bool, kv_heads: int = KV_HEADS) -> Problem:
    query, key, value = (rng.normal(size=(BATCH, LENGTH, n, DIM)) for n in (HEADS, kv_heads, kv_heads))
    chosen = MASKS if stacked else MASKS[:1]
    plans = [make_plan(mask, 2, chunk_size=4) for mask in chosen]
    return Problem(query, key, value, rng.normal(size=HEADS), plans)


def gradients(attend: Any) -> Any:
    def loss(*operands: Any) -> Any:
        out, lse = attend(*operands)
        return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum(), (out, lse)

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


@jax.jit
def solve_on_one_device(query: Any, key: Any, value: Any, sinks: Any, mask: AttnMask) -> Any:
    def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return attention(query, key, value, mask, sinks=sinks, return_residual=True)

    return gradients(attend)(query, key, value, sinks)


def check(
    problem: Problem,
    kind: AxisType,
    wrap: Any = None,
    *,
    plan_spec: P = REPLICATED,
    **options: Any,
) -> str | None:
    """Checks values and gradients; returns the compiled program of both passes.

    Args:
        problem: the batch.
        kind: type of all mesh axes.
        wrap: wraps a function of the operands and the plan in a transformation.
        plan_spec: how the plan is sharded.
        options: options of `context_attention`.
    """
    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "tensor"), (kind,) * 3)

    def call(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
        return context_attention(
            query, key, value, plan, axis_name=AXIS, sinks=sinks, return_residual=True, **options
        )

    attend = wrap(call) if wrap else call
    with jax.set_mesh(mesh):
        plan = jax.device_put(problem.plan, jax.NamedSharding(mesh, plan_spec))
        operands = (*problem.place(mesh), plan)
        compiled = jax.jit(gradients(attend)).lower(*operands).compile()
        (dq, dk, dv, dsinks), (out, lse) = compiled(*operands)
    assert out.sharding.spec[:3] == dq.sharding.spec[:3] == ("data", AXIS, "tensor")
    back = functools.partial(problem.reorder, undispatch)
    got = (back(dq), back(dk), back(dv), dsinks), (back(out), back(lse))
    want = solve_on_one_device(*problem[:4], problem.mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=FP64_TOLERANCE)
    return compiled.as_text()


def shard_mapped(*rows: str | None, plan_spec: P = REPLICATED, **options: Any) -> Any:
    """Returns a wrapper in shard_map over those axes that shard batch and tokens of the operands."""
    spec = P(*rows)

    def wrap(call: Any) -> Any:
        in_specs = (spec, spec, spec, P(), plan_spec)
        names = {name for name in rows if name}
        return jax.shard_map(call, in_specs=in_specs, out_specs=spec, axis_names=names, **options)

    return wrap


def check_collectives(text: str | None) -> None:
    """Checks that a program transfers only rows of a device's heads and examples, and gradients of sinks.

    Rows are sent forward and back, and once more for the backward pass unless XLA keeps them. An all-to-all
    counts once for each of two ranks.
    """
    counts = {"all-to-all f64": 0, "all-reduce f64": 0}
    for key, count in collectives(text).items():
        name, shape = key.split("[")
        counts[name] += count
        sizes = [int(size) for size in shape[:-1].split(",")]
        # Rows of a pair of ranks, keys beside values, or their gradients.
        rows = CAPACITY.pair_rows * (BATCH // 2) * (KV_HEADS // 2) * 2 * DIM
        assert math.prod(sizes) == (rows if name == "all-to-all f64" else HEADS // 2), key
    assert counts["all-to-all f64"] in (4, 6) and counts["all-reduce f64"] in (1, 2)


@KINDS
@pytest.mark.parametrize("stacked", [False, True], ids=["one_plan", "stacked"])
def test_axes_by_arguments(kind: AxisType, stacked: bool, x64: None, rng: np.random.Generator) -> None:
    check_collectives(check(make_problem(rng, stacked=stacked), kind, **BY_ARGUMENTS))


@KINDS
@pytest.mark.parametrize("stacked", [False, True], ids=["one_plan", "stacked"])
def test_axes_as_they_are(kind: AxisType, stacked: bool, x64: None, rng: np.random.Generator) -> None:
    """Types say how Explicit axes shard, and XLA's partitioner finds out about Auto ones."""
    check_collectives(check(make_problem(rng, stacked=stacked), kind))


@KINDS
@pytest.mark.parametrize("options", [{}, BY_ARGUMENTS], ids=["as_they_are", "by_arguments"])
def test_inside_a_shard_map_over_the_tokens(
    kind: AxisType, options: Any, x64: None, rng: np.random.Generator
) -> None:
    check_collectives(check(make_problem(rng, stacked=False), kind, shard_mapped(None, AXIS), **options))


@pytest.mark.parametrize("options", [{}, BY_ARGUMENTS], ids=["as_they_are", "by_arguments"])
def test_heads_in_a_shard_map_over_the_batch(options: Any, x64: None, rng: np.random.Generator) -> None:
    problem = make_problem(rng, stacked=False)
    check_collectives(check(problem, AxisType.Auto, shard_mapped("data"), **options))


@KINDS
def test_without_check_vma(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    check(make_problem(rng, stacked=False), kind, shard_mapped(None, AXIS, check_vma=False))


def by_vmap(call: Any) -> Any:
    return jax.vmap(call, (0, 0, 0, None, 0))


@KINDS
@pytest.mark.parametrize("transform", [lambda call: call, by_vmap], ids=["batch", "vmap"])
def test_a_plan_for_each_example_inside(
    kind: AxisType, transform: Any, x64: None, rng: np.random.Generator
) -> None:
    """The batch in a shard_map over data and context is an axis of the call, or of jax.vmap."""
    spec = P("data", AXIS)
    wrap = shard_mapped(*spec, plan_spec=spec)
    check(make_problem(rng, stacked=True), kind, lambda call: wrap(transform(call)), plan_spec=spec)


@KINDS
def test_vmap_outside(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    def wrap(call: Any) -> Any:
        return jax.vmap(call, (0, 0, 0, None, None), spmd_axis_name="data")

    check(make_problem(rng, stacked=False), kind, wrap)


@KINDS
@pytest.mark.parametrize("options", [{}, BY_ARGUMENTS], ids=["as_they_are", "by_arguments"])
def test_more_devices_than_key_heads(
    kind: AxisType, options: Any, x64: None, rng: np.random.Generator
) -> None:
    """All devices along "tensor" have the one key head, and add up its gradients."""
    problem = make_problem(rng, stacked=False, kv_heads=1)
    names = collective_names(check(problem, kind, **options))
    assert names.keys() == {"all-to-all", "all-reduce"}


def check_rows(problem: Problem, kinds: tuple[AxisType, ...], attend: Any, spec: tuple[Any, ...]) -> None:
    """Checks output and gradients of ``attend(query, key, value)``, and how the output is sharded."""

    def run(attend: Any, *rows: Any) -> Any:
        out, pull = jax.vjp(attend, *rows)
        return out, *pull(out)

    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "tensor"), kinds)
    with jax.set_mesh(mesh):
        dispatched = [problem.reorder(dispatch, x) for x in problem[:3]]
        got = jax.jit(functools.partial(run, attend))(*dispatched)
    assert got[0].sharding.spec[: len(spec)] == spec
    want = run(functools.partial(attention, mask=problem.mask), *map(jnp.asarray, problem[:3]))
    for x, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(problem.reorder(undispatch, x), expected, atol=FP64_TOLERANCE)


@pytest.mark.parametrize(
    ("data", "options", "spec"),
    [
        (AxisType.Auto, {"head_axis_name": ("data", "tensor")}, (None, AXIS, ("data", "tensor"))),
        (AxisType.Explicit, {"batch_axis_name": ("data", "tensor")}, (("data", "tensor"), AXIS)),
    ],
    ids=["heads", "batch_over_axes_of_two_kinds"],
)
def test_one_dimension_over_two_axes(
    data: AxisType, options: Any, spec: tuple[Any, ...], x64: None, rng: np.random.Generator
) -> None:
    problem = make_problem(rng, stacked=False)
    attend = functools.partial(context_attention, plan=problem.plan, axis_name=AXIS, **options)
    check_rows(problem, (data, AxisType.Auto, AxisType.Auto), attend, spec)


def test_vmap_over_an_axis_inside_a_shard_map(x64: None, rng: np.random.Generator) -> None:
    problem, rows = make_problem(rng, stacked=False), P(None, AXIS)
    one = functools.partial(context_attention, plan=problem.plan, axis_name=AXIS, head_axis_name="tensor")
    mapped = jax.shard_map(
        jax.vmap(one, spmd_axis_name="data"),
        in_specs=(rows,) * 3,
        out_specs=rows,
        axis_names={AXIS},
        check_vma=False,
    )
    check_rows(problem, (AxisType.Auto,) * 3, mapped, ("data", AXIS, "tensor"))
