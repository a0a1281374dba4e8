"""The public function of context parallelism, `context_attention`."""

from typing import Literal, overload

import numpy as np
from jaxtyping import Array, Float

from .._checks import flag, jax_array
from .._varying import vary_alike
from ..attention import MeshAxes, accumulator_dtype, check_operands
from ..collectives import CollectiveOptions
from ..planning import ContextPlan
from ._passes import ContextOptions
from ._sharding import ContextOperands, PlannedWork, find_axis, find_sharding, shard_operands
from ._validation import check_batch, check_collectives, check_lengths, check_plan
from ._vjp import attend


@overload
def context_attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch T K D"],
    value: Float[Array | np.ndarray, "*batch T K Dv"],
    plan: ContextPlan,
    *,
    axis_name: str,
    batch_axis_name: MeshAxes = None,
    head_axis_name: MeshAxes = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: Literal[False] = False,
    implementation: str | None = None,
    collectives: CollectiveOptions = ...,
    keep_received: bool = False,
) -> Float[Array, "*batch T N Dv"]: ...
@overload
def context_attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch T K D"],
    value: Float[Array | np.ndarray, "*batch T K Dv"],
    plan: ContextPlan,
    *,
    axis_name: str,
    batch_axis_name: MeshAxes = None,
    head_axis_name: MeshAxes = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: Literal[True],
    implementation: str | None = None,
    collectives: CollectiveOptions = ...,
    keep_received: bool = False,
) -> tuple[Float[Array, "*batch T N Dv"], Float[Array, "*batch T N"]]: ...
def context_attention(
    query: Float[Array | np.ndarray, "*batch T N D"],
    key: Float[Array | np.ndarray, "*batch T K D"],
    value: Float[Array | np.ndarray, "*batch T K Dv"],
    plan: ContextPlan,
    *,
    axis_name: str,
    batch_axis_name: MeshAxes = None,
    head_axis_name: MeshAxes = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
    collectives: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
    keep_received: bool = False,
) -> Float[Array, "*batch T N Dv"] | tuple[Float[Array, "*batch T N Dv"], Float[Array, "*batch T N"]]:
    """Computes attention of a sequence whose tokens are spread over a mesh axis, under the mask of a plan.

    Each rank computes the rows of its own queries. It receives by `group_cast` only the keys and values that
    are visible to these; their gradients return by `group_reduce`, summed in float32 (float64 for float64) in
    a fixed order. All other arguments, fully masked queries and derivatives (reverse mode, first order) are
    those of `jaxmagi.attention`. Padding sees nothing and nothing sees it. On GPUs each
    pass is one custom call, unless mesh axes are left to XLA's partitioner: rows of some heads travel while
    attention of others computes.

    Inside ``jax.shard_map`` over ``axis_name`` the arrays are the local shards. Outside, with the mesh of
    ``jax.set_mesh``, they are global arrays in dispatched order, and the function maps itself over the mesh.
    Batch and query heads may be sharded over other mesh axes, and stay so: nothing is gathered, and a device
    receives only the part of each row that belongs to its heads. Types say how arrays are sharded over
    Explicit axes. Auto axes are left to XLA's partitioner, or mapped over where the call names them.

    ``jax.vmap`` works over the arrays, the plan (`ContextPlan.stack`) or both. Policies of ``jax.checkpoint``
    can save the output and the residual by the names "jaxmagi_out" and "jaxmagi_lse", and with
    ``keep_received`` what a rank has received by "jaxmagi_received"; the forward pass runs again unless all
    of them are saved.

    Gradients of sinks are summed over the ranks under ``shard_map(check_vma=True)``, and under
    ``check_vma=False`` when the shard_map is differentiated as a whole. ``jax.grad`` *inside* the latter
    returns each rank's part, to be summed by ``jax.lax.psum``.

    Args:
        query: ``[shard_length, N, D]`` inside, ``[T_padded, N, D]`` outside; optionally with a leading batch.
        key: ``[..., K, D]`` with the tokens of query; N is a multiple of K.
        value: ``[..., K, Dv]`` with the tokens of query.
        plan: a plan by `jaxmagi.plan_context`, whole or sharded by ``PartitionSpec(axis_name)``; with a batch
            one for all examples, or a stacked one.
        axis_name: mesh axis over which the tokens are spread.
        batch_axis_name: mesh axis, or axes, over which the batch is sharded. None: as query is. Static. Where
            an Auto axis does not divide the key heads, naming it saves copies of them in the backward pass.
        head_axis_name: mesh axis, or axes, over which the query heads are sharded, and the key heads if it
            divides these; otherwise each device along it gets all key heads. None: as query is. Static.
        scale: factor of q·k, finite, D**-0.5 by default. Static.
        logits_soft_cap: c, to use c · tanh(logits / c) as logits. Static.
        sinks: ``[N]``, per head a logit that takes part in the softmax and has no value.
        deterministic: whether gradients must be bitwise reproducible, as in `jaxmagi.attention`.
        return_residual: whether to return the log-sum-exp too.
        implementation: as in `jaxmagi.attention`.
        collectives: how keys and values travel and their gradients return, in both passes.
            Static. It has a name of its own as all other options, ``implementation`` too, are those of
            attention. Keys and values travel in their dtype. With ``wire_dtype``, which may be that of the
            operands, the gradients that a rank has computed for keys of another one are rounded to it.
        keep_received: whether the keys and values that a rank receives stay in its memory until the backward
            pass, ``[output_rows, K, D + Dv]`` of the plan's transfer, instead of being sent again. It pays
            where links between hosts are the bottleneck, and memory is not. Static.

    Returns:
        The output ``[..., N, Dv]`` in the dtype of query. With ``return_residual`` a pair of the output and
        the log-sum-exp ``[..., N]`` (natural log) of the logits and the sink, in float32 (float64 for float64
        operands), or -inf for a query that sees nothing, also with a sink.

    Raises:
        ValueError: an axis is unknown, named twice or does not divide its dimension, the plan is for another
            number of ranks or another length, or arguments do not fit together.
        NotImplementedError: an explicit implementation, of attention or of transfers, does not fit, or a
            second derivative is taken.
    """
    query, key, value = (jax_array(x, name) for name, x in (("query", query), ("key", key), ("value", value)))
    sinks = None if sinks is None else jax_array(sinks, "sinks")
    check_plan(plan)
    check_operands(
        query,
        key,
        value,
        scale=scale,
        soft_cap=logits_soft_cap,
        sinks=sinks,
        implementation=implementation,
    )
    check_collectives(collectives, query.dtype)
    check_batch(query, plan)
    size, inside = find_axis(axis_name)
    check_lengths(query, key, value, plan, axis_name, size=size, inside=inside)
    sharding = find_sharding(query, key, axis_name, batch_axis_name, head_axis_name)
    options = ContextOptions(
        axis_name=axis_name,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(logits_soft_cap or 0),
        deterministic=flag(deterministic, "deterministic"),
        implementation=implementation,
        collectives=collectives,
        keeps_received=flag(keep_received, "keep_received"),
    )
    # Casting sinks here lets autodiff sum their gradients before it rounds them.
    sinks = None if sinks is None else sinks.astype(accumulator_dtype(query.dtype))
    work = PlannedWork(plan.bands, plan.transfer)
    operands = shard_operands(ContextOperands(query, key, value, work, sinks), sharding)
    # vary_alike outside of the custom derivative lets autodiff sum the gradients of the shared sinks.
    out, lse = attend(vary_alike(operands), sharding, options)
    return (out, lse) if return_residual else out
