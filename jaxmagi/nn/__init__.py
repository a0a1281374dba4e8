"""Flax integration: an ``attention_fn`` for the attention modules of nnx and linen."""

from ._attention_fn import attention_fn as attention_fn
