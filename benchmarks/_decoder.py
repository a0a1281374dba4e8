"""A language model's decoder as plain functions of its parameters, its training step, and Megatron's layout.

It has grouped-query attention with rotary embeddings, SwiGLU, RMSNorm before each block, and a separate head.
Parameters and the state of AdamW are in float32, and products in bfloat16.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmagi import AttnMask

INITIAL_SCALE = 0.02  # standard deviation of the matrices
ROTARY_BASE = 10_000.0
OPTIMIZER = optax.adamw(1e-4)
DATA, TENSOR = "data", "tensor"  # mesh axes

type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Returns the output [B, T, N, D] from query [B, T, N, D], key [B, T, K, D] and value [B, T, K, D]."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder; query heads together are as wide as the residual stream."""

    layers: int
    width: int
    heads: int
    key_heads: int
    vocabulary: int

    @property
    def dim(self) -> int:
        """Returns the dimension of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Returns the width inside of an MLP: 8/3 of that outside, rounded up to a multiple of 256."""
        return 256 * math.ceil(8 * self.width / (3 * 256))


class Layer[Leaf](NamedTuple):
    """The parameters of a layer, or something for each of them."""

    attention_norm: Leaf  # [W]
    qkv: Leaf  # [W, K, N / K + 2, D], for each key head its query heads, the key and the value
    out: Leaf  # [N, D, W]
    mlp_norm: Leaf  # [W]
    gate_up: Leaf  # [W, 2, H]
    down: Leaf  # [H, W]


class Decoder[Leaf](NamedTuple):
    """The parameters of a decoder, or something for each of them."""

    embedding: Leaf  # [V, W]
    layers: tuple[Layer[Leaf], ...]
    norm: Leaf  # [W]
    head: Leaf  # [W, V]


def parameters(sizes: Sizes, mesh: Mesh) -> Decoder[jax.ShapeDtypeStruct]:
    """Returns the shapes of all parameters and Megatron's layout of them.

    Heads, the inside of MLPs and the vocabulary are split; norms are whole everywhere.
    """
    width, columns, rows, whole = sizes.width, P(None, TENSOR), P(TENSOR), P()

    def array(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    layer = Layer(
        attention_norm=array(whole, width),
        qkv=array(columns, width, sizes.key_heads, sizes.heads // sizes.key_heads + 2, sizes.dim),
        out=array(rows, sizes.heads, sizes.dim, width),
        mlp_norm=array(whole, width),
        gate_up=array(P(None, None, TENSOR), width, 2, sizes.hidden),
        down=array(rows, sizes.hidden, width),
    )
    embedding, head = array(rows, sizes.vocabulary, width), array(columns, width, sizes.vocabulary)
    return Decoder(embedding, (layer,) * sizes.layers, array(whole, width), head)


def _draw(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Draws a normal matrix, or ones for a norm."""
    if like.ndim == 1:
        return jnp.ones(like.shape, like.dtype)
    return INITIAL_SCALE * jax.random.normal(key, like.shape, like.dtype)


def loss(parameters: Decoder[jax.Array], tokens: jax.Array, targets: jax.Array, attend: Attend) -> jax.Array:
    """Returns the mean cross-entropy of the targets [B, T] in nats, given the tokens [B, T]."""
    parameters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)
    x = parameters.embedding[tokens]
    for layer in parameters.layers:
        x += _attention(layer, _normalize(x, layer.attention_norm), attend)
        x += _mlp(layer, _normalize(x, layer.mlp_norm))
    logits = jnp.einsum("btw,wv->btv", _normalize(x, parameters.norm), parameters.head)
    return _cross_entropy(logits.astype(jnp.float32), targets).mean()


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Multiplies with one-hot vectors, as the gradient of indexing would begin with an array of zeros."""
    one_hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jax.nn.logsumexp(logits, axis=-1) - (one_hot * logits).sum(-1)


def _attention(layer: Layer[jax.Array], x: jax.Array, attend: Attend) -> jax.Array:
    """Makes one product of query, key and value, so that the gradient of their operand is added up once."""
    qkv = jnp.einsum("btw,wkgd->btkgd", x, layer.qkv)
    query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    query = query.reshape(*x.shape[:2], *layer.out.shape[:2])
    return jnp.einsum("btnd,ndw->btw", attend(_rotate(query), _rotate(key), value), layer.out)


def _mlp(layer: Layer[jax.Array], x: jax.Array) -> jax.Array:
    gate_up = jnp.einsum("btw,wgh->btgh", x, layer.gate_up)
    return (jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]) @ layer.down


def _normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Divides by the root mean square, which is computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * gain


def _rotate(x: jax.Array) -> jax.Array:
    """Applies rotary embeddings of positions in the whole sequence: only differences of positions count."""
    length, dim = x.shape[1], x.shape[3]
    frequencies = ROTARY_BASE ** (-jnp.arange(0, dim, 2, jnp.float32) / dim)
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)[:, None]  # [T, 1, D / 2]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class State(NamedTuple):
    """The state that training carries from step to step."""

    parameters: Decoder[jax.Array]
    optimizer: Any


class Batch(NamedTuple):
    """Examples that share a mask."""

    tokens: jax.Array  # int32 [B, T]
    targets: jax.Array  # int32 [B, T]
    mask: AttnMask


def initial_state(sizes: Sizes, mesh: Mesh) -> State:
    """Draws parameters from a fixed seed; they and the state of the optimizer lie in Megatron's layout."""
    like = parameters(sizes, mesh)

    def draw() -> State:
        leaves, structure = jax.tree.flatten(like)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = structure.unflatten([_draw(*pair) for pair in zip(keys, leaves, strict=True)])
        return State(drawn, OPTIMIZER.init(drawn))

    optimizer = optax.tree.map_params(
        OPTIMIZER,
        lambda _, parameter: parameter.sharding,
        jax.eval_shape(draw).optimizer,
        like,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    layout = State(jax.tree.map(lambda x: x.sharding, like), optimizer)
    return jax.jit(draw, out_shardings=layout)()


def draw_batch(sizes: Sizes, mesh: Mesh, examples: int, mask: AttnMask) -> Batch:
    """Draws tokens from a fixed seed, each the target of the one before it."""
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (examples, mask.q_len), np.int32)
    rows, whole = NamedSharding(mesh, P(DATA)), NamedSharding(mesh, P())
    tokens, targets = jax.device_put((tokens, np.roll(tokens, -1, axis=1)), rows)
    return Batch(tokens, targets, jax.device_put(mask, whole))


def compile_step(attend: Callable[..., jax.Array], state: State, batch: Batch) -> jax.stages.Compiled:
    """Compiles a training step, from a state and a batch to the next state and the loss of the given one.

    Args:
        attend: attention as in `Attend`, which takes the mask of the batch as ``mask``.
        state: a state to compile for. Those that the step takes are donated.
        batch: a batch to compile for.
    """

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        under_mask = functools.partial(attend, mask=batch.mask)
        value, gradients = jax.value_and_grad(loss)(state.parameters, batch.tokens, batch.targets, under_mask)
        updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.parameters)
        return State(jax.tree.map(jnp.add, state.parameters, updates), optimizer), value

    layout = jax.tree.map(lambda x: x.sharding, state), None
    return jax.jit(step, donate_argnums=0, out_shardings=layout).lower(state, batch).compile()
