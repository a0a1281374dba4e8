"""The function that Flax's attention modules call in place of their own dot-product attention."""

from typing import Any

import jax
import numpy as np
from flax.nnx.nn import dtypes

from jaxmagi.attention import MeshAxes, attention
from jaxmagi.context import context_attention
from jaxmagi.masks import AttnMask, causal, full
from jaxmagi.planning import ContextPlan


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: AttnMask | ContextPlan | None = None,
    *,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = True,
    dtype: Any = None,
    precision: None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    module: None = None,
    is_causal: bool = False,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    deterministic_gradients: bool = False,
    implementation: str | None = None,
    axis_name: str = "context",
    batch_axis_name: MeshAxes = None,
    head_axis_name: MeshAxes = None,
    **kwargs: Any,
) -> jax.Array:
    """Attention under an `AttnMask`, or distributed by a `ContextPlan`, with the signature Flax expects.

    Use it as ``nnx.MultiHeadAttention(..., attention_fn=jaxmagi.nn.attention_fn)`` (or linen's
    ``MultiHeadDotProductAttention``) and pass the mask or the plan where the layer takes its ``mask``.
    Bind options with ``functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data")``.

    Args:
        query: ``[*batch, T, N, D]``, not yet scaled.
        key: ``[*batch, S, K, D]``, ``N % K == 0``.
        value: ``[*batch, S, K, Dv]``.
        bias: must be None.
        mask: an `AttnMask` (one for all examples, or one per example), a `ContextPlan`, or None (every
            query sees every key; with ``is_causal=True``, the keys up to its own position). With a plan,
            the sequence axis is in the plan's token order and sharded over ``axis_name``; the mesh is the
            one of ``jax.set_mesh``, or of the ``shard_map`` that the call stands in. A plan built by
            `ContextPlan.stack` holds one plan for each example.
        dropout_rng: unused, as there is no dropout.
        dropout_rate: must be 0 unless ``deterministic``.
        broadcast_dropout: unused, as there is no dropout.
        deterministic: Flax's meaning: no dropout.
        dtype: query, key and value are cast to it; None promotes them to a common type.
        precision: must be None.
        force_fp32_for_softmax: the softmax is always computed in float32 (or float64).
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        module: must be None: weights are never formed, so that they cannot be sown.
        is_causal: only without ``mask``: a mask says itself who sees whom.
        scale: factor of the logits, ``D**-0.5`` by default.
        logits_soft_cap: see `jaxmagi.attention`.
        sinks: ``[N]``, see `jaxmagi.attention`.
        deterministic_gradients: gradients are bitwise equal from run to run.
        implementation: see `jaxmagi.attention`.
        axis_name: mesh axis over which a plan distributes the sequence.
        batch_axis_name: mesh axis, or axes, over which the batch ``[B, T, N, D]`` is sharded, see
            `jaxmagi.context_attention`; with a plan only. None: as query is.
        head_axis_name: likewise for the heads.
        **kwargs: what newer versions of Flax may pass; anything but None raises.

    Returns:
        ``[*batch, T, N, Dv]``.

    Raises:
        NotImplementedError: bias, dropout, dense masks, precision, custom einsums, sown weights, decoding.
        ValueError: shapes, dtypes or lengths that do not fit; ``is_causal`` together with a mask.
    """
    del dropout_rng, broadcast_dropout, force_fp32_for_softmax
    _refuse(
        bias=bias,
        precision=precision,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        module=module,
        **kwargs,
    )
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(f"attention_fn has no dropout on attention weights, got {dropout_rate=}")
    query, key, value = dtypes.promote_dtype((query, key, value), dtype=dtype)
    mask = _resolve_mask(mask, is_causal, query.shape[-3], key.shape[-3])
    options = {
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "deterministic": deterministic_gradients,
        "implementation": implementation,
    }
    axes = {"batch_axis_name": batch_axis_name, "head_axis_name": head_axis_name}
    if isinstance(mask, ContextPlan):
        return _distributed(query, key, value, mask, options | axes | {"axis_name": axis_name})
    for name, given in axes.items():
        if given is not None:
            raise ValueError(
                f"{name}={given!r} goes with a ContextPlan; under an AttnMask both stay as they are"
            )
    return _local(query, key, value, mask, options)


def _refuse(**unsupported: Any) -> None:
    """Raises on every argument that is set and would change the result."""
    for name, given in unsupported.items():
        if given is not None:
            raise NotImplementedError(f"attention_fn does not support {name}, got {_describe(given)}")


def _describe(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"an array of shape {tuple(shape)}"


def _resolve_mask(mask: Any, is_causal: bool, q_len: int, kv_len: int) -> AttnMask | ContextPlan:
    if mask is None:
        # Flax aligns its causal mask top-left; the two conventions meet where the lengths are equal.
        if is_causal and q_len != kv_len:
            raise NotImplementedError(f"is_causal needs equal lengths, got {q_len} queries and {kv_len} keys")
        return causal(q_len) if is_causal else full(q_len, kv_len)
    if not isinstance(mask, AttnMask | ContextPlan):
        raise NotImplementedError(
            f"attention_fn takes an AttnMask or a ContextPlan as mask, got {_describe(mask)}; dense masks "
            "(also those that Flax makes for decoding) are not supported: build one with jaxmagi.masks"
        )
    if is_causal:
        raise ValueError("is_causal=True with a mask is ambiguous: build a causal mask instead")
    return mask


def _local(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttnMask, options: dict[str, Any]
) -> jax.Array:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, mask, **options)

    # attention takes one batch axis; any in front of it are mapped over.
    for _ in query.shape[:-4]:
        attend = jax.vmap(attend)
    return attend(query, key, value)


def _distributed(
    query: jax.Array, key: jax.Array, value: jax.Array, plan: ContextPlan, options: dict[str, Any]
) -> jax.Array:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context_attention(query, key, value, plan, **options)

    _check_batch(query, plan)
    for _ in query.shape[:-4]:
        attend = jax.vmap(attend)
    return attend(query, key, value)


def _check_batch(query: jax.Array, plan: ContextPlan) -> None:
    if query.ndim > 4 and np.ndim(plan.token_order) > 1:
        raise NotImplementedError(
            f"a stacked plan goes with one batch axis, but query has shape {query.shape}: flatten its batch"
        )
