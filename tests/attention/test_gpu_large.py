"""Past 2**31 elements: a million tokens of 64 heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from tests.cases import document_lengths

from .device_reference import check, judge
from .gpu_harness import default_logits, run
from .helpers import Operands

pytestmark = pytest.mark.gpu

TOKENS, HEADS, KV_HEADS, DIM = 2**20, 64, 8, 128


@functools.partial(jax.jit, static_argnames="heads")
def normal(key: jax.Array, heads: int) -> jax.Array:
    """Unit-normal [1, TOKENS, heads, DIM], made in pieces: the generator's words would fill the memory."""
    pieces = 64
    shape = (TOKENS // pieces, heads, DIM)
    x = jax.lax.map(
        lambda piece: jax.random.normal(piece, shape, jnp.bfloat16), jax.random.split(key, pieces)
    )
    return x.reshape(1, TOKENS, heads, DIM)


@jax.jit
def all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def test_a_million_tokens(rng: np.random.Generator) -> None:
    """Every result is written, and rows all over are right."""
    lengths = document_lengths(2**15)
    mask = masks.documents(rng.permutation(lengths * (TOKENS // 2**15)))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (normal(key, heads) for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True))
    operands = Operands(q, k, v, jnp.asarray(mask.bands)[None], jnp.full(HEADS, -jnp.inf, jnp.float32))
    out, lse = run(operands, default_logits(operands))
    assert out.size > 2**32 and bool(all_finite(out)) and bool(all_finite(lse))
    rows = [0, 1, 262_143, 262_144, 524_287, 524_288, TOKENS - 1, *rng.integers(0, TOKENS, 9)]
    check(judge(operands, default_logits(operands), out, lse, rows), jnp.bfloat16)
