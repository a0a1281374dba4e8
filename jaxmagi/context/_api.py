"""Distributed attention as users call it."""

from typing import Literal, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._varying import vary_alike
from ..attention import MeshAxes, accumulator_dtype
from ..planning import ContextPlan
from ._sharding import Operands, Stages, find_axis, find_layout, place
from ._stages import Options
from ._validation import check_arguments, check_lengths
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
) -> Float[Array, "*batch T N Dv"] | tuple[Float[Array, "*batch T N Dv"], Float[Array, "*batch T N"]]:
    """Attention of a sequence whose tokens are spread over a mesh axis, under the mask of a plan.

    Each rank computes the rows of its own queries. It gets the keys and values that these see, and no others,
    by `group_cast`; their gradients return by `group_reduce`, added up in float32 (float64 for float64) in a
    fixed order. The meaning of all other arguments, and what queries get that see nothing, is that of
    `jaxmagi.attention`. Padding sees nothing and nothing sees it. Derivatives are in reverse mode and once,
    as there. On GPUs rows travel while the rank computes with those that are there, stage by stage of the
    plan; one after the other where mesh axes are left to XLA's partitioner.

    Inside ``jax.shard_map`` over ``axis_name`` the arrays are the local shards. Outside, with the mesh of
    ``jax.set_mesh``, they are global arrays in dispatched order, and the function maps itself over the mesh.
    Batch and query heads may be sharded over other mesh axes, and stay so: nothing is gathered, and of each
    row that a rank needs a device gets the part that belongs to its heads. Over Explicit axes their sharding
    is seen in the types. Over Auto axes XLA's partitioner sees it; or name the axes, and they are mapped over
    as well.

    ``jax.vmap`` works over the arrays, the plan (`ContextPlan.stack`) or both. Policies of ``jax.checkpoint``
    can save the output and the residual by the names "jaxmagi_out" and "jaxmagi_lse".

    Gradients of sinks: under ``shard_map(check_vma=True)`` they are summed over the ranks. With
    ``check_vma=False`` that is up to shard_map, which does so when it is differentiated as a whole;
    ``jax.grad`` *inside* gives each rank's own part, to be summed by ``jax.lax.psum``.

    Args:
        query: ``[shard_length, N, D]`` inside, ``[T_padded, N, D]`` outside; or with a batch in front.
        key: likewise with K heads; N is a multiple of K.
        value: likewise ``[..., K, Dv]``.
        plan: by `jaxmagi.plan_context`, whole or sharded by ``PartitionSpec(axis_name)``. With a batch, one
            for all or a stacked one.
        axis_name: mesh axis over which the tokens are spread.
        batch_axis_name: mesh axis, or axes, over which the batch is sharded. None: as query is. Static. Where
            an Auto axis does not divide the key heads, naming it spares the backward pass copies of these.
        head_axis_name: mesh axis, or axes, over which the query heads are sharded, and the key heads if it
            divides these; otherwise each device along it gets all key heads. None: as query is. Static.
        scale: factor of q·k, finite, D**-0.5 by default. Static.
        logits_soft_cap: c, to use c · tanh(logits / c) as logits. Static.
        sinks: ``[N]``, per head a logit that takes part in the softmax and has no value.
        deterministic: whether gradients must be bitwise reproducible: see `jaxmagi.attention`.
        return_residual: whether to return the residual too.
        implementation: see `jaxmagi.attention`.

    Returns:
        The output, in the shape of query with Dv for D, in the dtype of query. With ``return_residual`` a
        pair of it and the log-sum-exp (natural log) of the logits and the sink, without the last axis, in
        float32 (float64 for float64 operands).

    Raises:
        ValueError: an axis is unknown, named twice or does not divide what it is to shard, the plan is for
            another number of ranks or another length, or arguments do not fit together.
        NotImplementedError: for an explicit implementation that does not fit, and for second derivatives.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    check_arguments(
        query,
        key,
        value,
        plan,
        scale=scale,
        soft_cap=logits_soft_cap,
        sinks=sinks,
        implementation=implementation,
    )
    size, inside = find_axis(axis_name)
    check_lengths(query, key, value, plan, axis_name, size=size, inside=inside)
    layout = find_layout(query, key, axis_name, batch_axis_name, head_axis_name)
    options = Options(
        axis_name=axis_name,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(logits_soft_cap or 0),
        deterministic=bool(deterministic),
        implementation=implementation,
    )
    # Sinks are cast here, so that autodiff sums their gradient before it is rounded.
    sinks = None if sinks is None else sinks.astype(accumulator_dtype(query.dtype))
    operands = place(Operands(query, key, value, _stages_of(plan), sinks), layout)
    # Outside of the custom derivative, so that autodiff sums the gradient of what ranks share, the sinks.
    out, lse = attend(vary_alike(operands), layout, options)
    return (out, lse) if return_residual else out


def _stages_of(plan: ContextPlan) -> Stages:
    backward = None if plan.backward is None else Stages(plan.backward.bands, plan.backward.transfers)
    return Stages(plan.bands, plan.transfers, backward)
