"""`attention_fn`, which Flax's attention modules call in place of dot-product attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxmagi._checks import check_unmasked, flag, number
from jaxmagi.attention import MeshAxes, attention
from jaxmagi.collectives import CollectiveOptions
from jaxmagi.context import context_attention
from jaxmagi.masks import AttnMask, causal, full
from jaxmagi.planning import ContextPlan


def attention_fn(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch S K D"],
    value: Float[Array | np.ndarray, "*batch S K Dv"],
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
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic_gradients: bool = False,
    implementation: str | None = None,
    sm_margin: int = 0,
    axis_name: str = "context",
    batch_axis_name: MeshAxes = None,
    head_axis_name: MeshAxes = None,
    collectives: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
    keep_received: bool = False,
    **kwargs: Any,
) -> Float[Array, "*batch T N Dv"]:
    """Computes attention under an `AttnMask`, or a `ContextPlan` over a mesh axis, as Flax calls it.

    Use it as ``nnx.MultiHeadAttention(..., attention_fn=jaxmagi.nn.attention_fn)`` (or linen's
    ``MultiHeadDotProductAttention``) and pass the mask or the plan where the layer takes its ``mask``.
    Bind options with ``functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data")``.

    Args:
        query: ``[*batch, T, N, D]``, not yet scaled.
        key: ``[*batch, S, K, D]``, ``N % K == 0``.
        value: ``[*batch, S, K, Dv]``.
        bias: must be None.
        mask: an `AttnMask` (one for all examples, or one per example), a `ContextPlan` (one for all, or
            `ContextPlan.stack` for one per example), or None (every query sees every key; with
            ``is_causal=True``, the keys up to its own position). With a plan, the sequence is in the plan's
            token order and sharded over ``axis_name`` of the mesh of ``jax.set_mesh``, or of the
            surrounding ``shard_map``.
        dropout_rng: unused, as there is no dropout.
        dropout_rate: must be 0 unless ``deterministic``.
        broadcast_dropout: unused, as there is no dropout.
        deterministic: whether dropout is off, as in Flax.
        dtype: the dtype that query, key and value are cast to; None promotes them to a common type.
        precision: must be None.
        force_fp32_for_softmax: unused, as the softmax is always computed in float32 (or float64).
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        module: must be None, as weights are never formed and cannot be sown.
        is_causal: whether attention is causal; only without ``mask``.
        scale: factor of the logits, ``D**-0.5`` by default.
        logits_soft_cap: as in `jaxmagi.attention`.
        sinks: ``[N]``, as in `jaxmagi.attention`.
        deterministic_gradients: whether gradients must be bitwise reproducible.
        implementation: as in `jaxmagi.attention`.
        sm_margin: as in `jaxmagi.attention`; with an `AttnMask` only.
        axis_name: mesh axis over which a plan distributes the sequence.
        batch_axis_name: mesh axis, or axes, over which the batch ``[B, T, N, D]`` is sharded, as
            in `jaxmagi.context_attention`; with a plan only. None: as query is.
        head_axis_name: mesh axis, or axes, over which the heads are sharded; with a plan only.
        collectives: how keys and values travel between ranks, as in `jaxmagi.context_attention`; with a plan
            only.
        keep_received: whether received keys and values stay in memory until the backward pass, as in
            `jaxmagi.context_attention`; with a plan only.
        **kwargs: arguments of newer versions of Flax; anything but None raises.

    Returns:
        ``[*batch, T, N, Dv]``.

    Raises:
        NotImplementedError: bias, dropout, a dense mask, precision, a custom einsum, sown weights or decoding
            is asked for.
        ValueError: shapes, dtypes or lengths do not fit, ``is_causal`` is given together with a mask, or an
            option that goes with a plan together with an `AttnMask`, or the other way round.
    """
    del dropout_rng, broadcast_dropout, force_fp32_for_softmax
    _check_unset(
        bias=bias,
        precision=precision,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        module=module,
        **kwargs,
    )
    if not 0 <= number(dropout_rate, "dropout_rate") <= 1:
        raise ValueError(f"dropout_rate must be between 0 and 1, but it is {dropout_rate}.")
    if dropout_rate > 0.0 and not flag(deterministic, "deterministic"):
        raise NotImplementedError(f"attention_fn has no dropout on attention weights, got {dropout_rate=}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_unmasked(x, name)
        if np.ndim(x) < 3:
            raise ValueError(f"{name} must be [*batch, T, N, D], but it has shape {np.shape(x)}")
    is_causal = flag(is_causal, "is_causal")
    from flax.nnx.nn import dtypes  # only here: flax takes as long to import as the rest, jax included

    query, key, value = dtypes.promote_dtype((query, key, value), dtype=dtype)
    mask = _resolve_mask(mask, is_causal, query.shape[-3], key.shape[-3])
    options = {
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "deterministic": flag(deterministic_gradients, "deterministic_gradients"),
        "implementation": implementation,
    }
    if isinstance(mask, ContextPlan):
        if sm_margin:
            raise ValueError(f"{sm_margin=} goes with an AttnMask, but mask is a ContextPlan")
        _check_batch(query.shape, mask)
        attend = functools.partial(
            context_attention,
            plan=mask,
            axis_name=axis_name,
            batch_axis_name=batch_axis_name,
            head_axis_name=head_axis_name,
            collectives=collectives,
            keep_received=keep_received,
            **options,
        )
        return _over_batch(attend, query.ndim)(query, key, value)
    for name, given in (("batch_axis_name", batch_axis_name), ("head_axis_name", head_axis_name)):
        if given is not None:
            raise ValueError(
                f"{name}={given!r} goes with a ContextPlan; under an AttnMask both stay as they are"
            )
    for name, given, default in (
        ("collectives", collectives, CollectiveOptions()),
        ("keep_received", flag(keep_received, "keep_received"), False),
    ):
        if given != default:
            raise ValueError(f"{name}={given} goes with a ContextPlan; under an AttnMask nothing travels")
    attend = functools.partial(attention, mask=mask, sm_margin=sm_margin, **options)
    return _over_batch(attend, query.ndim)(query, key, value)


def _check_unset(**unsupported: Any) -> None:
    """Raises NotImplementedError if an argument that would change the result is set."""
    for name, given in unsupported.items():
        if given is not None:
            raise NotImplementedError(f"attention_fn does not support {name}, got {_describe(given)}")


def _describe(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"an array of shape {tuple(shape)}"


def _resolve_mask(mask: Any, is_causal: bool, q_len: int, kv_len: int) -> AttnMask | ContextPlan:
    if mask is None:
        # Flax aligns its causal mask top-left, jaxmagi bottom-right; they agree where the lengths are equal.
        if is_causal and q_len != kv_len:
            raise NotImplementedError(
                f"is_causal needs equal lengths, got {q_len} queries and {kv_len} keys: "
                "masks.causal(q_len, kv_len) aligns them at the bottom right"
            )
        return causal(q_len) if is_causal else full(q_len, kv_len)
    if not isinstance(mask, AttnMask | ContextPlan):
        raise NotImplementedError(
            f"attention_fn takes an AttnMask or a ContextPlan as mask, got {_describe(mask)}; dense masks "
            "(also those that Flax makes for decoding) are not supported: build one with jaxmagi.masks"
        )
    if is_causal:
        raise ValueError("is_causal=True with a mask is ambiguous: build a causal mask instead")
    return mask


def _over_batch(attend: Callable[..., jax.Array], ndim: int) -> Callable[..., jax.Array]:
    """Maps a function that takes at most one batch axis over all further ones in front of it."""
    for _ in range(ndim - 4):
        attend = jax.vmap(attend)
    return attend


def _check_batch(shape: tuple[int, ...], plan: ContextPlan) -> None:
    if len(shape) > 4 and np.ndim(plan.token_order) > 1:
        raise NotImplementedError(
            f"a stacked plan goes with one batch axis, but query has shape {shape}: flatten its batch"
        )
