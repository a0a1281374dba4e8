"""Inside scan and jax.checkpoint: right, and no forward pass more than the policy asks for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagi import masks
from jaxmagi.attention import attention
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE

from .helpers import count_primitives, make_inputs, max_error

LAYERS, LENGTH = 3, 40
SAVE = jax.checkpoint_policies.save_only_these_names("jaxmagi_out", "jaxmagi_lse")


def make_loss(
    implementation: str, policy: Any = None, *, remat: bool = True, scan: bool = True
) -> Callable[..., Any]:
    """A stack of layers, each with its own sinks, as a scan of checkpointed steps."""

    def layer(x: jax.Array, sinks: jax.Array, mask: AttnMask) -> jax.Array:
        out = attention(jnp.sin(x), x, x[..., ::-1], mask, sinks=sinks, implementation=implementation)
        return x + out

    step = jax.checkpoint(layer, policy=policy) if remat else layer

    def loss(x: jax.Array, sinks: jax.Array, mask: AttnMask) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(lambda x, sinks: (step(x, sinks, mask), None), x, sinks)
        else:
            for one in sinks:
                x = step(x, one, mask)
        return (x**2).sum()

    return loss


def inputs(rng: np.random.Generator) -> tuple[Any, Any, AttnMask]:
    x = make_inputs(rng, q_len=LENGTH, kv_len=LENGTH, heads=2, dim=8).query
    return x, rng.standard_normal((LAYERS, 2)).astype(np.float32), masks.documents([25, 15])


def test_equals_no_remat(rng: np.random.Generator, implementation: str) -> None:
    args = inputs(rng)
    want = jax.jit(jax.grad(make_loss(implementation, remat=False, scan=False), argnums=(0, 1)))(*args)
    for policy in (None, SAVE):
        got = jax.jit(jax.grad(make_loss(implementation, policy), argnums=(0, 1)))(*args)
        for a, b in zip(got, want, strict=True):
            scale = max(1.0, float(np.abs(b).max()))
            assert max_error(a, b) <= FP32_TOLERANCE * scale


def test_policy_saves_the_forward(rng: np.random.Generator) -> None:
    args = inputs(rng)

    def count(policy: Any) -> dict[str, int]:
        return count_primitives(jax.grad(make_loss("xla", policy)), *args)

    assert count(None) == {"forward": 2, "backward": 1}
    assert count(SAVE) == {"forward": 1, "backward": 1}
