"""context_attention under scan and remat, and without jit."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import context_attention, dispatch, masks
from jaxmagi.attention import attention_reference, attention_reference_vjp
from jaxmagi.context._primitives import context_backward_p, context_forward_p

from ..cases import FP64_TOLERANCE
from .harness import AXIS, make_mesh, make_plan

LENGTH = 64
MASK = masks.documents([30, 20, 14])


def layer(x: jax.Array, plan: Any) -> jax.Array:
    """Attends with x [T, N, D] as query, key and value."""
    return context_attention(x, x, x, plan, axis_name=AXIS)


def on_ranks(function: Any, cp_size: int = 4) -> Any:
    return jax.shard_map(function, mesh=make_mesh(cp_size), in_specs=P(AXIS), out_specs=P(AXIS))


def test_scan_over_rematerialised_layers(x64: None, rng: np.random.Generator) -> None:
    """Three layers agree with layers of the oracle, also in their gradients."""
    plan = make_plan(MASK, 4, chunk_size=4)
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
    plan = make_plan(MASK, 4, chunk_size=4)
    x = rng.normal(size=(plan.token_order.size, 2, 8)).astype(np.float32)
    mapped = on_ranks(lambda x: layer(x, plan))

    def calls(policy: Any) -> list[int]:
        step = jax.checkpoint(mapped, policy=policy)
        text = str(jax.make_jaxpr(jax.grad(lambda x: (step(x) ** 2).sum()))(x))
        return [text.count(f"{primitive.name}[") for primitive in (context_forward_p, context_backward_p)]

    saved = jax.checkpoint_policies.save_only_these_names("jaxmagi_out", "jaxmagi_lse")
    assert calls(saved) == [1, 1]
    assert calls(jax.checkpoint_policies.nothing_saveable) == [2, 1]


def test_without_jit(rng: np.random.Generator) -> None:
    """Each pass then is a program of its own, which is traced once, also where jit is disabled."""
    plan = make_plan(MASK, 2, chunk_size=4)
    x = rng.normal(size=(plan.token_order.size, 2, 8)).astype(np.float32)
    mapped = on_ranks(lambda x: layer(x, plan), 2)

    def both() -> Any:
        y, vjp = jax.vjp(mapped, x)
        return y, vjp(y)

    expected = jax.jit(both)()
    for disabled in (False, False, True):
        with jax.disable_jit(disabled):
            given = both()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), given, expected)
