"""context_attention under scan, remat and vmap."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import context_attention, dispatch, masks
from jaxmagi.attention import attention_reference, attention_reference_vjp
from jaxmagi.collectives import AsyncTransfer

from ..cases import FP64_TOLERANCE
from .harness import AXIS, dispatch_problem, make_mesh, make_plan, random_problem

LENGTH = 64
MASK = masks.documents([30, 20, 14])


def layer(x: jax.Array, plan: Any) -> jax.Array:
    """Attends with x [T, N, D] as query, key and value."""
    return context_attention(x, x, x, plan, axis_name=AXIS)


def on_ranks(function: Any, cp_size: int = 4) -> Any:
    return jax.shard_map(function, mesh=make_mesh(cp_size), in_specs=P(AXIS), out_specs=P(AXIS))


def test_scan_over_rematerialised_layers(x64: None, rng: np.random.Generator) -> None:
    """Three layers agree with layers of the oracle, also in their gradients."""
    plan = make_plan(MASK, 4, 2, chunk_size=4)
    x, dy = rng.normal(size=(2, LENGTH, 2, 8))

    def network(x: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, _: (layer(x, plan), None))
        return jax.lax.scan(step, x, length=3)[0]

    @jax.jit
    def both(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, vjp = jax.vjp(on_ranks(network), x)
        return y, vjp(dy)[0]

    y, dx = both(dispatch(x, plan), dispatch(dy, plan))
    inputs = [x]
    for _ in range(3):
        x = inputs[-1]
        inputs.append(attention_reference(x, x, x, MASK)[0])
    gradient = dy
    for x in reversed(inputs[:-1]):
        gradient = sum(attention_reference_vjp(x, x, x, MASK, gradient)[:3])
    np.testing.assert_allclose(y, dispatch(inputs[-1], plan), atol=FP64_TOLERANCE)
    np.testing.assert_allclose(dx, dispatch(np.asarray(gradient), plan), atol=FP64_TOLERANCE)


def test_saved_names_spare_the_second_forward_pass(rng: np.random.Generator) -> None:
    plan = make_plan(MASK, 4, 2, chunk_size=4)
    x = rng.normal(size=(plan.token_order.size, 2, 8)).astype(np.float32)
    mapped = on_ranks(lambda x: layer(x, plan))

    def forward_calls(policy: Any) -> int:
        step = jax.checkpoint(mapped, policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda x: (step(x) ** 2).sum()))(x)).count(
            "jaxmagi_attention_forward["
        )

    saved = jax.checkpoint_policies.save_only_these_names("jaxmagi_out", "jaxmagi_lse")
    assert forward_calls(saved) == plan.num_stages
    assert forward_calls(jax.checkpoint_policies.nothing_saveable) == 2 * plan.num_stages


def test_vmap_over_one_operand(x64: None, rng: np.random.Generator) -> None:
    """Several sets of sinks, or several queries, share one sequence of keys."""
    plan = make_plan(MASK, 4, 2, chunk_size=4)
    query, key, value, sinks, _, _ = dispatch_problem(random_problem(rng, LENGTH), plan)
    queries, sink_sets = np.stack([query, -query]), np.stack([sinks, sinks + 1])

    def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return context_attention(query, key, value, plan, axis_name=AXIS, sinks=sinks)

    def local(query: Any, key: Any, value: Any, queries: Any) -> Any:
        by_sinks = jax.vmap(attend, (None, None, None, 0))(query, key, value, sink_sets)
        by_queries = jax.vmap(attend, (0, None, None, None))(queries, key, value, sinks)
        alone = [attend(query, key, value, sink_sets[1]), attend(queries[1], key, value, sinks)]
        return [by_sinks[1], by_queries[1]], alone

    mapped = jax.shard_map(
        local, mesh=make_mesh(4), in_specs=(P(AXIS), P(AXIS), P(AXIS), P(None, AXIS)), out_specs=P(AXIS)
    )
    batched, alone = jax.jit(mapped)(query, key, value, queries)
    for x, y in zip(batched, alone, strict=True):
        np.testing.assert_allclose(x, y, atol=FP64_TOLERANCE)


def test_vmap_over_nothing() -> None:
    """vmap over an axis of size 0 works with transfers between the stages of both passes."""
    plan = make_plan(MASK, 4, 3, chunk_size=4)

    def local(x: jax.Array) -> Any:
        y, vjp = jax.vjp(jax.vmap(lambda x: layer(x, plan), 1, 1), x)
        return y, vjp(y)[0]

    x = np.zeros((plan.token_order.size, 0, 2, 8), np.float32)
    y, dx = jax.jit(on_ranks(local))(x)
    assert y.shape == dx.shape == x.shape


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for each wait whether its transfer was asynchronous."""
    seen = []
    wait = AsyncTransfer.wait

    def note(transfer: AsyncTransfer) -> list[jax.Array]:
        seen.append(bool(transfer.arrays))
        return wait(transfer)

    monkeypatch.setattr(AsyncTransfer, "wait", note)
    return seen


def test_stages_without_jit(waits: list[bool], rng: np.random.Generator) -> None:
    """A transfer starts and ends in one program, which is traced once; without jit it is synchronous."""
    plan = make_plan(MASK, 2, 3, chunk_size=4)
    x = rng.normal(size=(plan.token_order.size, 2, 8)).astype(np.float32)
    mapped = on_ranks(lambda x: layer(x, plan), 2)

    def both() -> Any:
        y, vjp = jax.vjp(mapped, x)
        return y, vjp(y)

    expected = jax.jit(both)()
    waits.clear()
    for _ in range(2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both(), expected)
    assert waits in ([], [True] * 6)
    waits.clear()
    with jax.disable_jit():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both(), expected)
    assert waits == [False] * 6
