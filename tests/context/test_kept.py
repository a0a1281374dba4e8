"""context_attention with received keys that stay in memory until the backward pass.

Results are those of a call that sends them again, to the last bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, context_attention, masks, plan_context
from jaxmagi.context._primitives import context_backward_p, context_forward_p

from ..cases import FP64_TOLERANCE
from . import harness
from .harness import AXIS, make_plan

LENGTH, HEADS, KV_HEADS, DIM = 64, 4, 2, 8
MASK = masks.documents([30, 20, 14])
PLAN = make_plan(MASK, 4, chunk_size=4)
LEVELS = pytest.mark.parametrize("ranks_per_host", [None, 2], ids=["one_level", "two_levels"])
NAMES = ("jaxmagi_out", "jaxmagi_lse", "jaxmagi_received")


def attend(keep_received: bool, query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
    options: Any = {"axis_name": AXIS, "sinks": sinks, "return_residual": True}
    return context_attention(query, key, value, plan, keep_received=keep_received, **options)


def gradients(function: Any, *operands: Any) -> Any:
    """Returns results, and gradients of four operands with cotangents that depend on the results."""
    results, vjp = jax.vjp(lambda *first: function(*first, *operands[4:]), *operands[:4])
    return results, vjp(jax.tree.map(jnp.cos, results))


def assert_equal(given: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


@LEVELS
def test_one_sequence(ranks_per_host: int | None, x64: None, rng: np.random.Generator) -> None:
    problem = harness.random_problem(rng, LENGTH)
    plan = make_plan(MASK, 4, chunk_size=4, ranks_per_host=ranks_per_host)
    kept, sent = (harness.solve_distributed(problem, plan, keep_received=keep) for keep in (True, False))
    assert_equal(kept, sent)
    harness.check_solution(kept, harness.oracle(problem, MASK), FP64_TOLERANCE)


@pytest.mark.parametrize(
    ("mapped", "ranks_per_host"),
    [
        *((mapped, None) for mapped in ("sequences", "plans", "sinks", "everything")),
        *((mapped, 2) for mapped in ("plans", "everything")),
    ],
)
def test_vmap(mapped: str, ranks_per_host: int | None, rng: np.random.Generator) -> None:
    """Two levels only have more tables, which are mapped with the plans."""
    axes = {
        "sequences": (0, 0, 0, None, None),
        "plans": (None, None, None, None, 0),
        "sinks": (None, None, None, 0, None),
        "everything": (0, 0, 0, 0, 0),
    }[mapped]
    plans = [plan_context(MASK, 4, chunk_size=4)]
    plans.append(plan_context(masks.causal(LENGTH), 4, layout=plans[0].token_order))
    if ranks_per_host is not None:
        plans = [plan.by_host(ranks_per_host) for plan in plans]
    plan = ContextPlan.stack(plans)
    tokens = plans[0].token_order.size
    sizes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    operands = [rng.normal(size=(2, *size)).astype(np.float32) for size in sizes]
    operands += [rng.normal(size=(2, HEADS)).astype(np.float32), plan]
    given = [
        x if axis == 0 else jax.tree.map(lambda a: a[0], x) for x, axis in zip(operands, axes, strict=True)
    ]
    rows = P(None, AXIS) if axes[0] == 0 else P(AXIS)

    def run(keep_received: bool) -> Any:
        mapped_attend = jax.vmap(functools.partial(attend, keep_received), axes)
        on_ranks = jax.shard_map(
            mapped_attend,
            mesh=harness.make_mesh(4),
            in_specs=(rows, rows, rows, P(), P()),
            out_specs=P(None, AXIS),
        )
        return jax.jit(functools.partial(gradients, on_ranks))(*given)

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batch_and_heads_over_other_axes(kind: AxisType, kv_heads: int, rng: np.random.Generator) -> None:
    """Devices along the axis of the heads hold all key heads where it does not divide these."""
    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "tensor"), axis_types=(kind,) * 3)
    plan = make_plan(MASK, 2, chunk_size=4)
    heads = (HEADS, kv_heads, kv_heads)
    rows = [rng.normal(size=(2, plan.token_order.size, n, DIM)).astype(np.float32) for n in heads]
    specs = [P("data", AXIS, "tensor" if n > 1 else None) for n in heads]
    sinks = rng.normal(size=HEADS).astype(np.float32)

    def run(keep_received: bool) -> Any:
        function = functools.partial(
            context_attention,
            plan=plan,
            axis_name=AXIS,
            batch_axis_name="data",
            head_axis_name="tensor",
            keep_received=keep_received,
        )

        def on_mesh(query: Any, key: Any, value: Any, sinks: Any) -> Any:
            return function(query, key, value, sinks=sinks)

        return jax.jit(functools.partial(gradients, on_mesh))(*placed, sinks)

    with jax.set_mesh(mesh):
        placed = jax.device_put(rows, [jax.NamedSharding(mesh, spec) for spec in specs])
        assert_equal(run(True), run(False))


def passes_and_casts(names: tuple[str, ...], keep_received: bool) -> tuple[int, int, int]:
    """Counts the passes of a layer whose checkpoint saves some names, and the casts of keys in it."""
    x = jnp.zeros((PLAN.token_order.size, 2, DIM))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    sinks = jnp.zeros(2)
    layer = jax.shard_map(
        lambda x: attend(keep_received, x, x, x, sinks, PLAN)[0],
        mesh=harness.make_mesh(4),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
    )
    step = jax.checkpoint(layer, policy=policy)
    function = jax.grad(lambda x: (step(x) ** 2).sum())
    text = str(jax.make_jaxpr(function)(x))
    forward, backward = (text.count(f"{x.name}[") for x in (context_forward_p, context_backward_p))
    # In plain JAX each cast exchanges keys and values once, and each return their gradients.
    exchanges = jax.jit(function).lower(x).as_text().count("all_to_all")
    return forward, backward, exchanges


def test_names_that_a_checkpoint_saves() -> None:
    sent = passes_and_casts(NAMES, keep_received=False)
    kept = passes_and_casts(NAMES, keep_received=True)
    assert sent[:2] == kept[:2] == (1, 1) and 3 * kept[2] == 2 * sent[2] > 0
    assert passes_and_casts(NAMES[:2], keep_received=True)[:2] == (2, 1)


def test_without_a_gradient_nothing_is_kept() -> None:
    x = jnp.zeros((PLAN.token_order.size, 2, DIM))
    with jax.set_mesh(harness.make_mesh(4)):
        text = str(jax.make_jaxpr(functools.partial(attend, True, plan=PLAN))(x, x, x, jnp.zeros(2)))
    assert "keeps_received=False" in text and "keeps_received=True" not in text


def test_wrong_option() -> None:
    x = jnp.zeros((PLAN.token_order.size, 2, DIM))
    message = "keep_received must be True or False, but it is 'yes'"
    with jax.set_mesh(harness.make_mesh(4)), pytest.raises(ValueError, match=message):
        context_attention(x, x, x, PLAN, axis_name=AXIS, keep_received="yes")  # pyright: ignore
