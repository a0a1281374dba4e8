"""One rank's attention and its gradients. All operands vary over the mesh axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._varying import vary_alike
from ..attention import Partial, accumulator_dtype, row_delta, sink_gradient
from ..collectives import CollectiveOptions, OneStep, Route, make_transfer
from ..planning import GroupCastSpec, RelayedSpec
from ._primitives import context_backward_p, context_forward_p
from ._sharding import ContextOperands


class ContextOptions(NamedTuple):
    """Holds the static arguments of the distributed op."""

    axis_name: str
    scale: float
    soft_cap: float  # 0 for none
    deterministic: bool
    implementation: str | None
    collectives: CollectiveOptions
    keeps_received: bool


type Received = tuple[jax.Array, ...]
"""Keys [R, K, D] and values [R, K, Dv] that a rank has received; empty where they are not kept."""


def forward(operands: ContextOperands, options: ContextOptions) -> tuple[Partial[jax.Array], Received]:
    """Returns the output [T, N, Dv] and the log-sum-exp [T, N] of a rank's queries, and what is kept."""
    query, key, value, work, sinks = operands
    routes, tables = _steps(work.transfer, options)
    wide = accumulator_dtype(query.dtype)
    sinks = jax.lax.full_like(query, -jnp.inf, wide, query.shape[1:2]) if sinks is None else sinks
    rows = (x[None] for x in (query, key, value))
    out, lse, *received = context_forward_p.bind(
        *vary_alike((*rows, work.bands, sinks, *tables)),
        scale=options.scale,
        soft_cap=options.soft_cap,
        out_dtype=query.dtype,
        implementation=options.implementation,
        routes=routes,
        keeps_received=options.keeps_received,
    )
    return Partial(out[0], lse[0]), tuple(x[0] for x in received)


def backward(
    operands: ContextOperands,
    result: Partial[jax.Array],
    received: Received,
    cotangents: Partial[jax.Array],
    options: ContextOptions,
) -> ContextOperands:
    """Returns the gradients of a rank's operands from what `forward` has returned, and cotangents."""
    query, key, value, work, sinks = operands
    routes, tables = _steps(work.transfer, options)
    delta = row_delta(result, cotangents)
    keys, rows = ([x[None] for x in xs] for xs in ((key, value), (cotangents.out, result.lse, delta)))
    dq, dk, dv = context_backward_p.bind(
        *vary_alike((query[None], *keys, work.bands, *rows, *tables, *(x[None] for x in received))),
        scale=options.scale,
        soft_cap=options.soft_cap,
        deterministic=options.deterministic,
        implementation=options.implementation,
        routes=routes,
        keeps_received=options.keeps_received,
    )
    dsinks = None if sinks is None else sink_gradient(sinks, result.lse, delta)
    return ContextOperands(dq[0], dk[0], dv[0], None, dsinks)


def _steps(
    spec: GroupCastSpec | RelayedSpec, options: ContextOptions
) -> tuple[tuple[Route, ...], list[jax.Array]]:
    """Returns the routes and the tables of the steps of a transfer."""
    transfer = make_transfer(spec, options.axis_name, options.collectives)
    steps = [transfer] if isinstance(transfer, OneStep) else [transfer.across, transfer.inside]
    tables = [table[None] for step in steps for table in (step.sends, step.receives)]
    return tuple(step.route for step in steps), tables
