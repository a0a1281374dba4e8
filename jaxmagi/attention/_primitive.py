"""Defines the primitives of both passes, and checks the types of their operands.

Operands have any number of batch dimensions *B: q [*B, T, N, D], k [*B, S, K, D], v [*B, S, K, Dv]; bands
int32 [*B, C, 6], with 1 for a dimension of *B whose examples share them; sinks [N]. An output [*B, T, N, Dv]
and its log-sum-exp [*B, T, N], to merge with, may follow. The accumulator dtype is float64 for float64
operands and float32 for all others.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._checks import check_one_of
from .._dtypes import DTYPES, accumulator_dtype, is_positive_normal
from .._lowering import run_compiled
from .._partitioning import can_be_partitioned
from .._softmax import Partial
from .._varying import vary_alike
from ._batching import batch_backward, batch_forward
from ._lowering import register_backward, register_forward
from ._sharding import result_sharding

IMPLEMENTATIONS = ("ffi", "xla", None)


def _expect(name: str, x: Any, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> None:
    if x.shape != tuple(shape) or x.dtype != jnp.dtype(dtype):
        wanted = f"{jnp.dtype(dtype).name}{list(shape)}"
        raise ValueError(f"{name} must be {wanted}, but is {x.dtype.name}{list(x.shape)}.")


def _check_common(
    q: Any, k: Any, v: Any, bands: Any, *, soft_cap: float, implementation: str | None, sm_margin: int
) -> None:
    if q.dtype.name not in DTYPES:
        raise ValueError(f"The dtype of query must be one of {', '.join(DTYPES)}, but is {q.dtype.name}.")
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3 or x.ndim != q.ndim:
            raise ValueError(f"{name} must be [*B, T, N, D], like query {q.shape}, but has shape {x.shape}.")
    *batch, _, heads, dim = q.shape
    *_, length, kv_heads, v_dim = v.shape
    _expect("key", k, (*batch, length, kv_heads, dim), q.dtype)
    _expect("value", v, (*batch, length, kv_heads, v_dim), q.dtype)
    if 0 in (heads, kv_heads):
        raise ValueError(f"There must be heads, but query has {heads} and key has {kv_heads}.")
    if heads % kv_heads:
        raise ValueError(f"The number of query heads {heads} is no multiple of that of key heads {kv_heads}.")
    _check_bands(bands, batch)
    if soft_cap != 0 and not is_positive_normal(soft_cap):
        raise ValueError(f"soft_cap must be a positive normal float32, or 0 for none, but is {soft_cap}.")
    check_one_of("implementation", implementation, IMPLEMENTATIONS)
    if sm_margin < 0:
        raise ValueError(f"sm_margin must be at least 0, but is {sm_margin}.")


def _check_bands(bands: Any, batch: Sequence[int]) -> None:
    fits = bands.ndim == len(batch) + 2 and bands.shape[-1] == 6 and bands.dtype == jnp.int32
    if not fits or any(size not in (1, wanted) for size, wanted in zip(bands.shape, batch, strict=False)):
        lead = "".join(f"{size}, " for size in batch)
        raise ValueError(
            f"bands must be int32[{lead}C, 6], or with 1 for a batch dimension that shares them, but is "
            f"{bands.dtype.name}{list(bands.shape)}."
        )


def _check_result_dtype(name: str, dtype: jnp.dtype, operand: jnp.dtype) -> None:
    allowed = (operand, accumulator_dtype(operand))
    if dtype not in allowed:
        wanted = " or ".join(sorted({x.name for x in allowed}))
        raise ValueError(f"{name} must be {wanted} for operands in {operand.name}, but is {dtype.name}.")


def _forward_types(
    q: Any,
    k: Any,
    v: Any,
    bands: Any,
    sinks: Any,
    *previous: Any,
    out_dtype: jnp.dtype,
    soft_cap: float,
    sm_margin: int,
    implementation: str | None,
    **_: float,
) -> tuple[Any, Any]:
    _check_common(q, k, v, bands, soft_cap=soft_cap, implementation=implementation, sm_margin=sm_margin)
    accumulate = accumulator_dtype(q.dtype)
    _expect("sinks", sinks, q.shape[-2:-1], accumulate)
    _check_result_dtype("out_dtype", out_dtype, q.dtype)
    sharding = result_sharding(q, k, v)
    # update() keeps the varying mesh axes of the operand.
    out = q.update(shape=(*q.shape[:-1], v.shape[-1]), dtype=out_dtype, sharding=sharding)
    by_row = sharding.update(spec=sharding.spec[:-1])
    lse = q.update(shape=q.shape[:-1], dtype=accumulate, sharding=by_row)
    if previous:
        _expect("previous.out", previous[0], out.shape, out_dtype)
        _expect("previous.lse", previous[1], lse.shape, accumulate)
    return out, lse


def _backward_types(
    q: Any,
    k: Any,
    v: Any,
    bands: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    *,
    grad_dtype: jnp.dtype,
    soft_cap: float,
    sm_margin: int,
    implementation: str | None,
    **_: float,
) -> tuple[Any, Any, Any]:
    _check_common(q, k, v, bands, soft_cap=soft_cap, implementation=implementation, sm_margin=sm_margin)
    accumulate = accumulator_dtype(q.dtype)
    result_sharding(q, k, v)
    _expect("dout", dout, (*q.shape[:-1], v.shape[-1]), q.dtype)
    _expect("lse", lse, q.shape[:-1], accumulate)
    _expect("delta", delta, q.shape[:-1], accumulate)
    _check_result_dtype("grad_dtype", grad_dtype, q.dtype)
    return q.update(dtype=grad_dtype), k.update(dtype=grad_dtype), v.update(dtype=grad_dtype)


def _no_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "Attention can be differentiated once and in reverse mode (jax.grad, jax.vjp): there are no second "
        "derivatives, nor derivatives of attention_forward and attention_backward."
    )


def _primitive(name: str, types: Callable[..., tuple[Any, ...]], static: Sequence[str]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    run_compiled(primitive, static)
    ad.primitive_jvps[primitive] = _no_derivative
    can_be_partitioned(primitive)
    return primitive


attention_forward_p = _primitive(
    "jaxmagi_attention_forward",
    _forward_types,
    ("scale", "soft_cap", "out_dtype", "sm_margin", "implementation"),
)
attention_backward_p = _primitive(
    "jaxmagi_attention_backward",
    _backward_types,
    ("scale", "soft_cap", "deterministic", "grad_dtype", "sm_margin", "implementation"),
)
batching.primitive_batchers[attention_forward_p] = functools.partial(batch_forward, attention_forward_p)
batching.primitive_batchers[attention_backward_p] = functools.partial(batch_backward, attention_backward_p)
register_forward(attention_forward_p)
register_backward(attention_backward_p)


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    out_dtype: jax.typing.DTypeLike,
    implementation: str | None,
    previous: Partial[jax.Array] | None = None,
    sm_margin: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention under bands, without derivatives.

    Args:
        q: [*B, T, N, D], with any number of batch dimensions.
        k: [*B, S, K, D], in the dtype of q; N is a multiple of K.
        v: [*B, S, K, Dv], in the dtype of q.
        bands: int32 [*B, C, 6], or with 1 for a batch dimension that shares them.
        sinks: [N] in accumulator dtype, -inf for no sink.
        scale: factor of q·k.
        soft_cap: c of c · tanh(logits / c), a normal number of float32; 0 for none.
        out_dtype: dtype of the output, that of q or the accumulator dtype.
        implementation: "ffi", "xla", or None for "ffi" where it fits and "xla" elsewhere. On GPUs "ffi" needs
            compute capability 9.0, bfloat16 or float16, and head dimensions of at most 256.
        previous: attention to other keys, the output [*B, T, N, Dv] in ``out_dtype`` and the log-sum-exp
            [*B, T, N] in accumulator dtype. The result is then the attention to those keys and these; a row
            that sees nothing here keeps it exactly. Sinks count for the rows that see a key in the call that
            gets them: give them to one call only.
        sm_margin: how many multiprocessors of a GPU the attention kernel leaves to other kernels. The short
            kernels before and after it take all. Static.

    Returns:
        The output [*B, T, N, Dv] and the log-sum-exp [*B, T, N] in accumulator dtype. A row that sees
        nothing, or nothing but logits of -inf, has output 0 and log-sum-exp -inf, also where it has a sink.

    Raises:
        ValueError: for shapes, dtypes or numbers other than these.
        NotImplementedError: when lowered, for implementation="ffi" where it cannot run, and for an
            ``sm_margin`` where no kernel for GPUs runs.
    """
    out, lse = attention_forward_p.bind(
        *vary_alike((q, k, v, bands, sinks, *(previous or ()))),
        scale=float(scale),
        soft_cap=float(soft_cap),
        out_dtype=jnp.dtype(out_dtype),
        sm_margin=operator.index(sm_margin),
        implementation=implementation,
    )
    return out, lse


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bands: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    deterministic: bool,
    grad_dtype: jax.typing.DTypeLike,
    implementation: str | None,
    sm_margin: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v.

    Probabilities come from ``lse``, so it may span more keys than these, and a sink.

    Args:
        q: as in `attention_forward`.
        k: as in `attention_forward`.
        v: as in `attention_forward`.
        bands: as in `attention_forward`.
        dout: cotangent of the output [*B, T, N, Dv], in the dtype of q.
        lse: [*B, T, N] in accumulator dtype; rows with -inf get and give no gradient.
        delta: [*B, T, N] in accumulator dtype, rowsum(dout · out) minus the cotangent of lse.
        scale: as in `attention_forward`.
        soft_cap: as in `attention_forward`.
        deterministic: whether gradients must be bitwise reproducible. On CPUs and with "xla" they always are.
        grad_dtype: dtype of the gradients, that of q or the accumulator dtype.
        implementation: as in `attention_forward`.
        sm_margin: as in `attention_forward`.

    Returns:
        The gradients of q, k and v.

    Raises:
        ValueError: for shapes, dtypes or numbers other than these.
        NotImplementedError: when lowered, for implementation="ffi" where it cannot run, and for an
            ``sm_margin`` where no kernel for GPUs runs.
    """
    dq, dk, dv = attention_backward_p.bind(
        *vary_alike((q, k, v, bands, dout, lse, delta)),
        scale=float(scale),
        soft_cap=float(soft_cap),
        deterministic=bool(deterministic),
        grad_dtype=jnp.dtype(grad_dtype),
        sm_margin=operator.index(sm_margin),
        implementation=implementation,
    )
    return dq, dk, dv
