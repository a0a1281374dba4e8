"""One rank's attention, stage by stage, and its gradients.

All operands vary over the mesh axis; arrays of stages have the leading axis 1 of a sharded plan.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..attention import (
    Partial,
    accumulator_dtype,
    add_sinks,
    attention_backward,
    attention_forward,
    row_delta,
    sink_gradient,
)
from ..collectives import (
    AsyncTransfer,
    CollectiveOptions,
    GroupCastSpec,
    RelayedSpec,
    group_cast,
    group_reduce,
    in_order,
    make_transfer,
)
from ._sharding import ContextOperands, Stages


class ContextOptions(NamedTuple):
    """Holds the static arguments of the distributed op."""

    axis_name: str
    scale: float
    soft_cap: float  # 0 for none
    deterministic: bool
    implementation: str | None
    collectives: CollectiveOptions

    @property
    def casts(self) -> CollectiveOptions:
        """Returns how keys and values travel, whose gradients do not come from transposing that."""
        return replace(self.collectives, wire_dtype=None)


class KeyValue(NamedTuple):
    """Holds keys [S, K, D] and values [S, K, Dv], or their gradients."""

    key: jax.Array
    value: jax.Array


type Specs = tuple[GroupCastSpec | RelayedSpec, ...]

type Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Queries, cotangents of the output, log-sum-exps and deltas (`row_delta`)."""


def _num_stages(stages: Stages) -> int:
    return stages.bands.shape[1]


def forward(operands: ContextOperands, options: ContextOptions) -> Partial[jax.Array]:
    """Returns the output [T, N, Dv] and the log-sum-exp [T, N] of a rank's queries."""
    query, key, value, stages, sinks = operands
    wide = accumulator_dtype(query.dtype)
    no_sinks = jax.lax.full_like(query, -jnp.inf, wide, query.shape[1:2])
    sinks = no_sinks if sinks is None else sinks
    local = KeyValue(key, value)
    if _num_stages(stages) == 1:
        gathered = _gather_keys(local, stages, options)
        attend = functools.partial(_attend, query, gathered, stages.bands[:, 0], options=options)
        out, lse = attend(sinks=sinks, out_dtype=query.dtype)
        return Partial(out[0], lse[0])
    result = _attend_in_stages(query, local, stages, no_sinks, options)
    # Sinks count once per row, for rows with visible keys in any stage.
    out, lse = add_sinks(result, sinks)
    return Partial(out.astype(query.dtype), lse)


def _gather_keys(local: KeyValue, stages: Stages, options: ContextOptions) -> KeyValue:
    received = [
        group_cast(local, spec, axis_name=options.axis_name, options=options.casts)
        for spec in stages.transfers
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), local, *received)


# A transfer must start and end in one program, also in a shard_map without jit, where each primitive is one.
_one_program = functools.partial(jax.jit, static_argnames="options", inline=True)


@_one_program
def _attend_in_stages(
    query: jax.Array, local: KeyValue, stages: Stages, no_sinks: jax.Array, options: ContextOptions
) -> Partial[jax.Array]:
    """Attends to the local keys, then to those of each transfer, which runs during the stage before."""
    query, local, transfers = _tie_together((query, local, stages.transfers))
    buffer, result = local, None
    for stage in range(_num_stages(stages)):
        pending = _start_cast(local, transfers, stage, options)
        query, pending = in_order(query, pending)
        bands = stages.bands[:, stage]
        wide = accumulator_dtype(query.dtype)
        result = _attend(
            query, buffer, bands, sinks=no_sinks, out_dtype=wide, previous=result, options=options
        )
        (result, transfers), pending = in_order((result, transfers), pending)
        buffer = next((KeyValue(*transfer.wait()) for transfer in pending), buffer)
    assert result is not None
    return Partial(result.out[0], result.lse[0])


def _tie_together[Tree](tree: Tree) -> Tree:
    """Returns the tree behind a barrier, so that XLA cannot hoist a transfer out of a loop on its own."""
    return jax.lax.optimization_barrier(tree)


def _start_cast(local: KeyValue, specs: Specs, stage: int, options: ContextOptions) -> list[AsyncTransfer]:
    """Starts the transfer of the keys of the next stage, if there is one."""
    transfers = [make_transfer(spec, options.axis_name, options.casts) for spec in specs[stage : stage + 1]]
    return [transfer.start_cast(local, transfer_id=2 * stage, goes_first=True) for transfer in transfers]


def _attend(
    query: jax.Array,
    buffer: KeyValue,
    bands: jax.Array,
    *,
    sinks: jax.Array,
    out_dtype: jnp.dtype,
    options: ContextOptions,
    previous: Partial[jax.Array] | None = None,
) -> Partial[jax.Array]:
    """Attends to the keys of one stage, merged with ``previous``: [1, T, N, Dv] and [1, T, N]."""
    out, lse = attention_forward(
        query[None],
        buffer.key[None],
        buffer.value[None],
        bands,
        sinks,
        scale=options.scale,
        soft_cap=options.soft_cap,
        out_dtype=out_dtype,
        implementation=options.implementation,
        previous=previous,
    )
    return Partial(out, lse)


def backward(
    operands: ContextOperands,
    result: Partial[jax.Array],
    cotangents: Partial[jax.Array],
    options: ContextOptions,
) -> ContextOperands:
    """Returns the gradients of a rank's operands from the results of `forward` and their cotangents."""
    query, key, value, stages, sinks = operands
    stages = stages.backward or stages
    delta = row_delta(result, cotangents)
    rows, local = (query, cotangents.out, result.lse, delta), KeyValue(key, value)
    backward = _gradients_at_once if _num_stages(stages) == 1 else _gradients_in_stages
    dq, (dk, dv) = backward(rows, local, stages, options)
    dsinks = None if sinks is None else sink_gradient(sinks, result.lse, delta)
    return ContextOperands(dq, dk.astype(key.dtype), dv.astype(value.dtype), None, dsinks)


def _gradients_at_once(
    rows: Rows, local: KeyValue, stages: Stages, options: ContextOptions
) -> tuple[jax.Array, KeyValue]:
    """Returns the gradients of queries, in their dtype, and of local keys, in accumulator dtype."""
    length = local.key.shape[0]
    gathered = _gather_keys(local, stages, options)
    dq, grads = _stage_gradients(rows, gathered, stages.bands[:, 0], options)
    part = jax.tree.map(lambda x: x[:length], grads)
    for spec in stages.transfers:
        received = jax.tree.map(lambda x: x[length:], grads)
        part = group_reduce(
            received, spec, axis_name=options.axis_name, accumulate=part, options=options.collectives
        )
    return dq.astype(rows[0].dtype), part


@_one_program
def _gradients_in_stages(
    rows: Rows, local: KeyValue, stages: Stages, options: ContextOptions
) -> tuple[jax.Array, KeyValue]:
    """Does what `_gradients_at_once` does, with keys sent a stage ahead and gradients a stage later."""
    rows, local, transfers = _tie_together((rows, local, stages.transfers))
    buffer, dqs, parts, returned = local, [], [], []
    for stage in range(_num_stages(stages)):
        casts = _start_cast(local, transfers, stage, options)
        (rows, transfers), casts = in_order((rows, transfers), casts)
        returns = _start_return(parts, transfers, options, goes_first=not casts)
        rows, pending = in_order(rows, [*casts, *returns])
        results = _stage_gradients(rows, buffer, stages.bands[:, stage], options)
        ((dq, part), transfers), pending = in_order((results, transfers), pending)
        buffer = next((KeyValue(*transfer.wait()) for transfer in pending[: len(casts)]), buffer)
        returned += [transfer.wait() for transfer in pending[len(casts) :]]
        dqs.append(dq)
        parts.append(part)
    # The last gradients of keys are returned while those of the queries are summed.
    dqs, pending = in_order(dqs, _start_return(parts, transfers, options, goes_first=False))
    dq = functools.reduce(jnp.add, dqs).astype(rows[0].dtype)
    dq, pending = in_order(dq, pending)
    returned += [transfer.wait() for transfer in pending]
    # The barrier keeps the ends of all started transfers, even if only the gradients of queries are used.
    dq, returned = jax.lax.optimization_barrier((dq, returned))
    sums = [functools.reduce(jnp.add, addends) for addends in zip(parts[0], *returned, strict=True)]
    return dq, KeyValue(*sums)


def _start_return(
    parts: list[KeyValue], specs: Specs, options: ContextOptions, *, goes_first: bool
) -> list[AsyncTransfer]:
    """Starts to return the gradients of the last stage, unless they are those of the local keys."""
    if len(parts) < 2:
        return []
    index = len(parts) - 2
    transfer = make_transfer(specs[index], options.axis_name, options.collectives)
    dtypes = [x.dtype for x in parts[-1]]
    return [transfer.start_reduce(parts[-1], dtypes, transfer_id=2 * index + 1, goes_first=goes_first)]


def _stage_gradients(
    rows: Rows,
    buffer: KeyValue,
    bands: jax.Array,
    options: ContextOptions,
) -> tuple[jax.Array, KeyValue]:
    """Returns the gradients of the queries and of a stage's keys and values, in accumulator dtype."""
    query, dout, lse, delta = (x[None] for x in rows)
    dq, dk, dv = attention_backward(
        query,
        buffer.key[None],
        buffer.value[None],
        bands,
        dout,
        lse,
        delta,
        scale=options.scale,
        soft_cap=options.soft_cap,
        deterministic=options.deterministic,
        grad_dtype=accumulator_dtype(query.dtype),
        implementation=options.implementation,
    )
    return dq[0], KeyValue(dk[0], dv[0])
