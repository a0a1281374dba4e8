"""The Qwen3 of google-tunix, unmodified but for its attention, which is jaxmagi's."""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

import jaxmagi

type Mask = jaxmagi.AttnMask | jaxmagi.ContextPlan
type AttentionFn = Callable[..., jax.Array]


class Attention(qwen3.Attention):
    """Holds the projections and norms of the attention that it replaces, and attends by jaxmagi.

    They keep their names, so that checkpoints still fit. `__call__`, which may remat, is inherited.
    """

    def __init__(self, replaced: qwen3.Attention, attention_fn: AttentionFn):
        for name in ("config", "shd_config", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            setattr(self, name, getattr(replaced, name))
        self.attention_fn = attention_fn

    def block(
        self, x: jax.Array, segment_pos: jax.Array, cache: None, attn_mask: Mask, segment_ids: None = None
    ) -> tuple[None, jax.Array]:
        if cache is not None:
            raise NotImplementedError(f"there is no decoding cache, but cache is {type(cache).__name__}")
        if segment_ids is not None:
            ids = type(segment_ids).__name__
            raise NotImplementedError(f"the mask says where documents end, but segment_ids is {ids}")
        query = qwen3.apply_rope(self.q_norm(self.q_proj(x)), segment_pos, self.head_dim)
        key = qwen3.apply_rope(self.k_norm(self.k_proj(x)), segment_pos, self.head_dim)
        return None, self.o_proj(self.attention_fn(query, key, self.v_proj(x), mask=attn_mask))


def use_jaxmagi(model: qwen3.Qwen3, attention_fn: AttentionFn) -> None:
    """Replaces the attention of each layer. The model then takes a mask or a plan as its attention mask."""
    for layer in model.layers:
        layer.attn = Attention(layer.attn, attention_fn)


def small_qwen3(vocabulary: int) -> qwen3.Qwen3:
    """Returns a Qwen3 of tunix, small and with random weights."""
    config = dataclasses.replace(qwen3.ModelConfig.qwen3_0p6b(), num_layers=2, vocab_size=vocabulary)
    config = dataclasses.replace(
        config, embed_dim=64, hidden_dim=192, num_heads=4, num_kv_heads=2, head_dim=32
    )
    model, rngs = qwen3.Qwen3(config, rngs=nnx.Rngs(0)), nnx.Rngs(1)
    for mlp in (layer.mlp for layer in model.layers):
        for kernel in (mlp.gate_proj.kernel, mlp.up_proj.kernel, mlp.down_proj.kernel):
            # Tunix has zeros here until a checkpoint is loaded, and these would never get a gradient.
            kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), kernel.shape)
    return model
