"""Defines attention on one device as users call it, with its derivative."""

from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .._checks import flag, integer, jax_array
from .._dtypes import accumulator_dtype
from .._hopper import MAX_SMS
from .._softmax import Partial, row_delta, sink_gradient
from ..masks import AttnMask
from ._primitive import attention_backward, attention_forward
from ._sharding import like_operand
from ._validation import check_mask, check_operands


class _Operands[Leaf](NamedTuple):
    """The operands of attention, or their gradients."""

    query: Leaf  # [B, T, N, D]
    key: Leaf  # [B, S, K, D]
    value: Leaf  # [B, S, K, Dv]
    bands: Leaf  # int32[1 or B, C, 6]
    sinks: Leaf | None  # [N]


class _Options(NamedTuple):
    """The static arguments."""

    scale: float
    soft_cap: float  # 0 for none
    deterministic: bool
    implementation: str | None
    sm_margin: int


@overload
def attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch S K D"],
    value: Float[Array | np.ndarray, "*batch S K Dv"],
    mask: AttnMask,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: Literal[False] = False,
    implementation: str | None = None,
    sm_margin: int = 0,
) -> Float[Array, "*batch T N Dv"]: ...
@overload
def attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch S K D"],
    value: Float[Array | np.ndarray, "*batch S K Dv"],
    mask: AttnMask,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: Literal[True],
    implementation: str | None = None,
    sm_margin: int = 0,
) -> tuple[Float[Array, "*batch T N Dv"], Float[Array, "*batch T N"]]: ...
def attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch S K D"],
    value: Float[Array | np.ndarray, "*batch S K Dv"],
    mask: AttnMask,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
    sm_margin: int = 0,
) -> Float[Array, "*batch T N Dv"] | tuple[Float[Array, "*batch T N Dv"], Float[Array, "*batch T N"]]:
    """Computes attention under a mask.

    The softmax is over the keys that each query sees. It is computed block by block: no [T, S] array is ever
    made, and masked blocks are skipped. Logits and sums are in float32 (float64 for float64 operands), matrix
    products in the dtype of the operands. The function is differentiable in query, key, value and sinks,
    through output and residual, in reverse mode and once: there is no ``jax.jvp`` and no second derivative.

    A query that sees nothing has output exactly 0, residual exactly -inf and gradient exactly 0. NaN in keys
    that no query sees, and in queries that see nothing, does not spread.

    Batch and heads stay sharded over a mesh, whether by Auto axes under ``jax.jit``, by Explicit axes or
    inside ``jax.shard_map``: each device runs the kernels on its own part. Key heads are split like the query
    heads where they can be; devices with query heads of one group all have its key head. Attention works on
    whole sequences: a sharded length is gathered, with a warning; `jaxmagi.context_attention` spreads it.
    Where Auto axes could shard length or heads, as with sequence-parallel layers, XLA may choose the length:
    constrain query, key and value by ``jax.lax.with_sharding_constraint``.

    Policies of ``jax.checkpoint`` can save the output and the residual by the names "jaxmagi_out" and
    "jaxmagi_lse"; then the forward pass is not run again.

    Args:
        query: [T, N, D] or [B, T, N, D], float64, float32, bfloat16 or float16.
        key: [S, K, D] or [B, S, K, D]; N is a multiple of K, and query head n uses key head n // (N // K).
        value: [S, K, Dv] or [B, S, K, Dv].
        mask: which query sees which key, of lengths (T, S). With bands [B, C, 6] (`AttnMask.stack`) each
            example has its own; otherwise all share it.
        scale: factor of q·k, finite, D**-0.5 by default. Static.
        logits_soft_cap: c, to use c · tanh(logits / c) as logits. Static.
        sinks: [N], per head a logit that takes part in the softmax and has no value.
        deterministic: whether gradients must be bitwise reproducible. On CPUs and with "xla" they always are;
            on GPUs the sums of dq otherwise have no fixed order, and having one takes longer.
        return_residual: whether to return the residual too.
        implementation: "ffi" (compiled kernels), "xla" (plain JAX, any platform), or None for "ffi" where it
            fits and "xla" elsewhere. Kernels run on CPUs and on GPUs of compute capability 9.0 (H100, H200);
            those for GPUs are for bfloat16 and float16 and D and Dv up to 256, at full speed for 64, 96, 128,
            192, 256 and for 192 with a Dv of 128. On other GPUs, and on any where jaxmagi was built without
            CUDA, None warns once per process.
        sm_margin: how many multiprocessors of a GPU the attention kernels of both passes leave to what else
            runs at the same time, from 0 to 131; the GPU must have more. The short kernels before and after
            them take all. Only the kernels for GPUs can. Static.

    Returns:
        The output [T, N, Dv] or [B, T, N, Dv] in the dtype of query. With ``return_residual`` a pair of it
        and the residual: the log-sum-exp (natural log) of the logits and the sink, or -inf for a query that
        sees nothing, also with a sink; [T, N] or [B, T, N] in float32 (float64 for float64 operands).

    Raises:
        ValueError: for arguments that do not fit together, and for Explicit shardings that exclude each other
            or split the head dimension.
        NotImplementedError: for "ffi" where it does not fit, for second derivatives, and when lowered for
            an ``sm_margin`` where the kernels for GPUs do not run.
    """
    query, key, value = (jax_array(x, name) for name, x in (("query", query), ("key", key), ("value", value)))
    sinks = None if sinks is None else jax_array(sinks, "sinks")
    check_operands(
        query,
        key,
        value,
        scale=scale,
        soft_cap=logits_soft_cap,
        sinks=sinks,
        implementation=implementation,
    )
    check_mask(mask, query, key)
    options = _Options(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(logits_soft_cap or 0),
        deterministic=flag(deterministic, "deterministic"),
        implementation=implementation,
        sm_margin=integer(sm_margin, "sm_margin", maximum=MAX_SMS - 1),
    )
    bands = jnp.asarray(mask.bands)
    operands = _Operands(query, key, value, bands if bands.ndim == 3 else bands[None], sinks)
    if query.ndim == 3:
        operands = operands._replace(query=query[None], key=key[None], value=value[None])
    out, lse = _attention(operands, options)
    if query.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _forward(operands: _Operands[jax.Array], options: _Options) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the log-sum-exp."""
    query, key, value, bands, sinks = operands
    accumulate = accumulator_dtype(query.dtype)
    if sinks is None:
        sinks = jnp.full(query.shape[2], -jnp.inf, accumulate)
    return attention_forward(
        query,
        key,
        value,
        bands,
        sinks.astype(accumulate),
        scale=options.scale,
        soft_cap=options.soft_cap,
        out_dtype=query.dtype,
        implementation=options.implementation,
        sm_margin=options.sm_margin,
    )


_attention = jax.custom_vjp(_forward, nondiff_argnums=(1,))


class _Residuals(NamedTuple):
    operands: _Operands[jax.Array]
    out: jax.Array
    lse: jax.Array


def _attention_fwd(
    operands: _Operands[jax.Array], options: _Options
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    out, lse = _forward(operands, options)
    out, lse = checkpoint_name(out, "jaxmagi_out"), checkpoint_name(lse, "jaxmagi_lse")
    return (out, lse), _Residuals(operands, out, lse)


def _attention_bwd(
    options: _Options, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[_Operands[jax.Array | None]]:
    operands, out, lse = residuals
    query, key, value, bands, sinks = operands
    delta = row_delta(Partial(out, lse), Partial(*cotangents))
    dq, dk, dv = attention_backward(
        query,
        key,
        value,
        bands,
        cotangents[0],
        lse,
        delta,
        scale=options.scale,
        soft_cap=options.soft_cap,
        deterministic=options.deterministic,
        grad_dtype=query.dtype,
        implementation=options.implementation,
        sm_margin=options.sm_margin,
    )
    dsinks = None if sinks is None else sink_gradient(sinks, lse, delta)
    gradients = (dq, dk, dv, None, dsinks)
    return (_Operands(*map(like_operand, gradients, operands)),)


_attention.defvjp(_attention_fwd, _attention_bwd)
