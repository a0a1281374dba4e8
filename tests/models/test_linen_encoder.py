"""A linen encoder of stock layers with `jaxmagi.nn.attention_fn`, next to the one with Flax's attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmagi
from jaxmagi import masks

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 32, 4, 2
BATCH, LENGTH, CP_SIZE, TOLERANCE = 2, 125, 4, 1e-4  # a plan pads the length
DOCUMENTS = [[90, 1, 34], [34, 1, 90]]

type AttentionFn = Callable[..., jax.Array]


class Block(linen.Module):
    """A pre-norm block."""

    attention_fn: AttentionFn

    @linen.compact
    def __call__(self, x: jax.Array, mask: Any) -> tuple[jax.Array, None]:
        attention = linen.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)
        x = x + attention(linen.LayerNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH)(hidden), None


class Encoder(linen.Module):
    """Maps tokens to logits, with learned positions. Its layers are a loop, or scanned and recomputed."""

    attention_fn: AttentionFn = linen.dot_product_attention
    scanned: bool = False

    @linen.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, mask: Any) -> jax.Array:
        x = linen.Embed(VOCABULARY, WIDTH)(tokens) + linen.Embed(LENGTH, WIDTH)(positions)
        if self.scanned:
            options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            options |= {"in_axes": linen.broadcast, "length": LAYERS}
            scan = linen.scan(linen.remat(Block), **options)
            x, _ = scan(self.attention_fn)(x, mask)
        else:
            for _ in range(LAYERS):
                x, _ = Block(self.attention_fn)(x, mask)
        return linen.Dense(VOCABULARY)(linen.LayerNorm()(x))


def make_inputs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens, positions, and cotangents of the logits with which all gradients are about 1."""
    tokens = rng.integers(VOCABULARY, size=(BATCH, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    cotangents = rng.normal(size=(BATCH, LENGTH, VOCABULARY)).astype(np.float32) * LENGTH**-0.5
    return tokens, positions, cotangents


@functools.cache
def make_variables(scanned: bool = False) -> Any:
    """Returns the variables of Flax's own encoder: others take them as they are."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return jax.jit(Encoder(scanned=scanned).init)(jax.random.key(0), tokens, tokens, None)


# Both compile once for equal models and shapes, so that tests share what Flax's own encoder takes.
@functools.partial(jax.jit, static_argnums=0)
def apply(model: Encoder, variables: Any, tokens: Any, positions: Any, mask: Any) -> jax.Array:
    return model.apply(variables, tokens, positions, mask)  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradients(
    model: Encoder, variables: Any, tokens: Any, positions: Any, cotangents: Any, mask: Any
) -> Any:
    logits, pull_back = jax.vjp(lambda variables: model.apply(variables, tokens, positions, mask), variables)
    return logits, pull_back(cotangents)[0]


def assert_trees_agree(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), got, want)


@pytest.mark.parametrize(("kind", "scanned"), [("full", False), ("causal", False), ("causal", True)])
def test_agrees_with_flax(rng: np.random.Generator, kind: str, scanned: bool) -> None:
    """Logits, and gradients of all parameters, are those with Flax's own attention."""
    inputs, variables = make_inputs(rng), make_variables(scanned)
    ours, theirs = {
        "full": (masks.full(LENGTH), None),
        "causal": (masks.causal(LENGTH), linen.make_causal_mask(inputs[0], dtype=bool)),
    }[kind]
    got = logits_and_gradients(Encoder(jaxmagi.nn.attention_fn, scanned), variables, *inputs, ours)
    want = logits_and_gradients(Encoder(scanned=scanned), variables, *inputs, theirs)
    assert_trees_agree(got, want)


def test_packed_documents_have_the_logits_of_each_alone(rng: np.random.Generator) -> None:
    """Alone they go through the encoder with Flax's own attention."""
    (tokens, _, _), variables = make_inputs(rng), make_variables()
    positions = np.stack([np.concatenate([np.arange(n) for n in lengths]) for lengths in DOCUMENTS])
    mask = jaxmagi.AttnMask.stack([masks.documents(lengths, "full") for lengths in DOCUMENTS])
    packed = apply(Encoder(jaxmagi.nn.attention_fn), variables, tokens, positions, mask)
    for row, got, lengths in zip(tokens, packed, DOCUMENTS, strict=True):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            alone = np.s_[end - length : end]
            want = apply(Encoder(), variables, row[None, alone], np.arange(length)[None], None)
            np.testing.assert_allclose(got[alone], want[0], atol=TOLERANCE)


@pytest.mark.parametrize("scanned", [False, True])
def test_mesh_agrees_with_flax(rng: np.random.Generator, scanned: bool) -> None:
    """Logits and gradients with a plan for each sequence are those with dense masks on one device."""
    inputs, variables = make_inputs(rng), make_variables(scanned)
    each = [masks.documents(lengths, "full") for lengths in DOCUMENTS]
    dense = jnp.asarray(jaxmagi.AttnMask.stack(each).to_dense())[:, None]
    want = logits_and_gradients(Encoder(scanned=scanned), variables, *inputs, dense)
    plans = [jaxmagi.plan_context(mask, CP_SIZE, chunk_size=4) for mask in each]
    plan = jaxmagi.ContextPlan.stack(plans)
    assert (plan.token_order[0] != plan.token_order[1]).any() and plan.token_order.shape[1] > LENGTH
    dispatched = [jax.vmap(jaxmagi.dispatch)(rows, plan) for rows in inputs]
    mesh = jax.make_mesh((BATCH, CP_SIZE), ("data", "context"), (AxisType.Auto,) * 2)
    model = Encoder(functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data"), scanned)
    with jax.set_mesh(mesh):
        operands = jax.device_put((*dispatched, plan), NamedSharding(mesh, P("data", "context")))
        logits, gradients = logits_and_gradients(model, variables, *operands)
    restored = jax.vmap(jaxmagi.undispatch)(np.asarray(logits), plan)
    assert_trees_agree((restored, gradients), want)
