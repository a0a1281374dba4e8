"""A decoder-only transformer in Flax nnx: RoPE, grouped-query attention, RMSNorm, SwiGLU, sliding windows."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmagi

type Mask = jaxmagi.AttnMask | jaxmagi.ContextPlan


@dataclass(frozen=True)
class Config:
    """Holds the sizes of the model. Even layers see a sliding window, odd layers the whole document.

    Attributes:
        batch_axis_name: mesh axis over which the batch is sharded; None on one device.
        tensor_axis_name: mesh axis over which heads and hidden units are sharded, as in Megatron (Shoeybi et
            al., arXiv:1909.08053); None keeps all weights whole.
        attention_dtype: dtype that attention casts its operands to; None for that of the parameters.
        implementation: implementation of attention, as in `jaxmagi.attention`.
    """

    vocabulary: int
    layers: int = 4
    width: int = 128
    hidden: int = 341
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    batch_axis_name: str | None = None
    tensor_axis_name: str | None = None
    attention_dtype: jax.typing.DTypeLike | None = None
    implementation: str | None = None

    @property
    def key_axis_name(self) -> str | None:
        """Returns the tensor axis if it divides the key heads, or None: each device then has all of them."""
        axis = self.tensor_axis_name
        return axis if axis and self.kv_heads % jax.sharding.get_abstract_mesh().shape[axis] == 0 else None


def kernel_init(*axes: str | None) -> nnx.Initializer:
    """Returns an initializer that creates a kernel with its dimensions sharded over mesh axes."""
    init = nnx.initializers.lecun_normal()
    return nnx.with_partitioning(init, axes) if any(axes) else init


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies the rotary position embedding (Su et al., arXiv:2104.09864).

    Args:
        x: ``[B, T, N, D]``.
        positions: int32 ``[B, T]``.
    """
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        axis, key_axis = config.tensor_axis_name, config.key_axis_name
        heads, key_heads = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
        project = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query = project(config.width, heads, kernel_init=kernel_init(None, axis, None))
        self.key = project(config.width, key_heads, kernel_init=kernel_init(None, key_axis, None))
        self.value = project(config.width, key_heads, kernel_init=kernel_init(None, key_axis, None))
        self.out = project(heads, config.width, axis=(-2, -1), kernel_init=kernel_init(axis, None, None))
        self.attention_fn = functools.partial(
            jaxmagi.nn.attention_fn,
            dtype=config.attention_dtype,
            implementation=config.implementation,
            batch_axis_name=config.batch_axis_name,
            head_axis_name=axis,
        )

    def __call__(self, x: jax.Array, mask: Mask, positions: jax.Array) -> jax.Array:
        query, key = rope(self.query(x), positions), rope(self.key(x), positions)
        # An AttnMask is applied on each device; a ContextPlan runs over the mesh's "context" axis.
        return self.out(self.attention_fn(query, key, self.value(x), mask=mask))


class SwiGLU(nnx.Module):
    """Gated feed-forward network (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        axis = config.tensor_axis_name
        project = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate = project(config.width, config.hidden, kernel_init=kernel_init(None, axis))
        self.up = project(config.width, config.hidden, kernel_init=kernel_init(None, axis))
        self.down = project(config.hidden, config.width, kernel_init=kernel_init(axis, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.feed_forward = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array, mask: Mask, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask, positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        # Embedding and head are replicated: 257 is prime, and the loss then needs no communication.
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, window: Mask, full: Mask) -> jax.Array:
        """Returns logits ``[B, T, vocabulary]``.

        Args:
            tokens: int32 ``[B, T]``.
            positions: int32 ``[B, T]``, each token's position in its document.
            window: mask or plan of the even layers.
            full: mask or plan of the odd layers.
        """
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, full if index % 2 else window, positions)
        return self.head(self.norm(x))
