"""Past 2**31 elements: a million tokens of 64 heads, and keys as long as a mask may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.masks import UNBOUNDED
from tests.cases import document_lengths

from .device_reference import check, judge
from .gpu_harness import Shape, assert_same, default_logits, random_operands, run
from .gradient_harness import gradients, make_cotangents
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


def shift_keys(operands: Operands, by: int) -> Operands:
    """Operands with masked keys in front of the keys."""

    @jax.jit
    def shift(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (by, 0), (0, 0), (0, 0)))

    bands = np.asarray(operands.bands, np.int64)
    limited = np.abs(bands) < UNBOUNDED
    limited[..., :2] = False  # queries
    bands = jnp.asarray(bands + by * limited, jnp.int32)
    return operands._replace(key=shift(operands.key), value=shift(operands.value), bands=bands)


def test_gradients_of_keys_whose_sums_are_past_2_31(rng: np.random.Generator) -> None:
    """Two head sets of a key head add up what 32 million masked keys, and some that are seen, get in fp32."""
    shape, before = Shape(300, 1_000, 4, 1, 8, 8), 2**25
    operands, cotangents = random_operands(rng, shape, count=40), make_cotangents(shape)
    far = shift_keys(operands, before)
    _, want, _ = gradients(operands, default_logits(operands), cotangents, deterministic=True)
    _, got, _ = gradients(far, default_logits(far), cotangents, deterministic=True)
    last = got._replace(key=got.key[:, before:], value=got.value[:, before:])
    assert_same(last, want)
    assert not bool(jnp.any(got.key[:, :before])) and not bool(jnp.any(got.value[:, :before]))


def test_last_keys_of_the_longest(rng: np.random.Generator) -> None:
    """Bit for bit what the same keys give alone."""
    operands = random_operands(rng, Shape(300, 1_000, 2, 1, 8, 8), count=40)
    assert_same(
        run(operands, default_logits(operands)),
        run(shift_keys(operands, UNBOUNDED - 1_000), default_logits(operands)),
    )
