"""Unsupported operands are an error where "ffi" was asked for, and run on plain XLA otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import attention

from .gpu_harness import Shape, make_operands
from .helpers import assert_close, backward, forward, make_inputs, run, run_reference

pytestmark = pytest.mark.gpu

LENGTH = 64
MASK = masks.causal(LENGTH)


def operands(dim: int, dtype: Any, v_dim: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key = jnp.ones((LENGTH, 4, dim), dtype), jnp.ones((LENGTH, 2, dim), dtype)
    return query, key, jnp.ones((LENGTH, 2, v_dim or dim), dtype)


@pytest.mark.parametrize(
    ("dim", "v_dim", "dtype", "message"),
    [
        (64, 64, jnp.float32, "float32"),
        (264, 264, jnp.bfloat16, "264"),
        (64, 320, jnp.float16, "320"),
    ],
)
def test_unsupported_by_name(dim: int, v_dim: int, dtype: Any, message: str) -> None:
    arrays = operands(dim, dtype, v_dim)
    with pytest.raises(NotImplementedError, match=message):
        attention(*arrays, MASK, implementation="ffi")
    assert bool(jnp.allclose(attention(*arrays, MASK), 1, atol=1e-2))  # the mean of values that are all 1


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 64), (64, 0), (0, 0)])
def test_nothing_to_do(q_len: int, kv_len: int) -> None:
    query, key = jnp.ones((q_len, 4, 64), jnp.bfloat16), jnp.ones((kv_len, 2, 64), jnp.bfloat16)
    out, lse = attention(query, key, key, masks.full(q_len, kv_len), return_residual=True)
    assert out.shape == query.shape and not bool(jnp.any(out)) and bool(jnp.isneginf(lse).all())


def test_margin_out_of_range() -> None:
    problem = make_operands(Shape(LENGTH, LENGTH), np.asarray(MASK.bands))
    with pytest.raises(ValueError, match="sm_margin must be at least 0, but is -1"):
        forward(problem, sm_margin=-1)
    message = r"sm_margin must be at least 0 and less than the \d+ SMs of the NVIDIA .*, got 1000"
    out, lse = forward(problem)
    for call in (forward, lambda x, **margin: backward([*x[:4], out, lse, lse], **margin)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(problem, sm_margin=1000))


def test_float32_gradients_by_default(rng: np.random.Generator) -> None:
    inputs = make_inputs(rng, q_len=LENGTH, kv_len=LENGTH)
    assert_close(run(inputs, MASK, with_sinks=True), run_reference(inputs, MASK, with_sinks=True), 4e-5)
