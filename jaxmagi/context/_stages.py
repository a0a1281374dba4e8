"""One rank's attention, stage by stage, and its gradients.

All operands vary over the mesh axis; stages have the leading axis 1 of a sharded plan.
"""

import functools
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
    GroupCastSpec,
    RelayedSpec,
    group_cast,
    group_reduce,
    in_order,
    make_transfer,
)
from ._sharding import Operands, Stages


class Options(NamedTuple):
    """The static arguments."""

    axis_name: str
    scale: float
    soft_cap: float  # 0 for none
    deterministic: bool
    implementation: str | None


class KeyValue(NamedTuple):
    """Keys [S, K, D] and values [S, K, Dv], or their gradients."""

    key: jax.Array
    value: jax.Array


type Specs = tuple[GroupCastSpec | RelayedSpec, ...]

type Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Queries, the cotangents of their outputs, log-sum-exps, and what `row_delta` has for them."""


def _num_stages(stages: Stages) -> int:
    return stages.bands.shape[1]


def forward(operands: Operands, options: Options) -> Partial[jax.Array]:
    """The output [T, N, Dv] and the log-sum-exp [T, N] of a rank's queries."""
    query, key, value, stages, sinks = operands
    wide = accumulator_dtype(query.dtype)
    no_sinks = jax.lax.full_like(query, -jnp.inf, wide, query.shape[1:2])
    sinks = no_sinks if sinks is None else sinks
    own = KeyValue(key, value)
    if _num_stages(stages) == 1:
        everything = _own_and_received(own, stages, options)
        attend = functools.partial(_attend, query, everything, stages.bands[:, 0], options=options)
        out, lse = attend(sinks=sinks, out_dtype=query.dtype)
        return Partial(out[0], lse[0])
    result = _attend_in_stages(query, own, stages, no_sinks, options)
    # Sinks count once, and for every row that sees something in any of the stages.
    out, lse = add_sinks(result, sinks)
    return Partial(out.astype(query.dtype), lse)


def _own_and_received(own: KeyValue, stages: Stages, options: Options) -> KeyValue:
    received = [group_cast(own, spec, axis_name=options.axis_name) for spec in stages.transfers]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), own, *received)


# Transfers must begin and end in one program, also in a shard_map without jit, which runs step by step.
_one_program = functools.partial(jax.jit, static_argnames="options", inline=True)


@_one_program
def _attend_in_stages(
    query: jax.Array, own: KeyValue, stages: Stages, no_sinks: jax.Array, options: Options
) -> Partial[jax.Array]:
    """Attention to the own keys and to those of each transfer, which travel during the stage before."""
    query, own, transfers = _inseparable((query, own, stages.transfers))
    buffer, result = own, None
    for stage in range(_num_stages(stages)):
        flights = _start_cast(own, transfers, stage, options)
        query, flights = in_order(query, flights)
        bands = stages.bands[:, stage]
        wide = accumulator_dtype(query.dtype)
        result = _attend(
            query, buffer, bands, sinks=no_sinks, out_dtype=wide, previous=result, options=options
        )
        (result, transfers), flights = in_order((result, transfers), flights)
        buffer = next((KeyValue(*flight.wait()) for flight in flights), buffer)
    assert result is not None
    return Partial(result.out[0], result.lse[0])


def _inseparable[Tree](tree: Tree) -> Tree:
    """The same. Else transfers could leave a loop without the computation that they run beside."""
    return jax.lax.optimization_barrier(tree)


def _start_cast(own: KeyValue, specs: Specs, stage: int, options: Options) -> list[AsyncTransfer]:
    """Starts the transfer that arrives behind a stage, if there is one."""
    transfers = [make_transfer(spec, options.axis_name) for spec in specs[stage : stage + 1]]
    return [transfer.start_cast(own, transfer_id=2 * stage, goes_first=True) for transfer in transfers]


def _attend(
    query: jax.Array,
    buffer: KeyValue,
    bands: jax.Array,
    *,
    sinks: jax.Array,
    out_dtype: jnp.dtype,
    options: Options,
    previous: Partial[jax.Array] | None = None,
) -> Partial[jax.Array]:
    """Attention to the keys of one stage and of the previous ones, [1, T, N, Dv] and [1, T, N]."""
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
    operands: Operands, result: Partial[jax.Array], cotangents: Partial[jax.Array], options: Options
) -> Operands:
    """The gradients of a rank's operands, for the results of `forward` and their cotangents."""
    query, key, value, stages, sinks = operands
    stages = stages.backward or stages
    delta = row_delta(result, cotangents)
    rows, own = (query, cotangents.out, result.lse, delta), KeyValue(key, value)
    backward = _gradients_at_once if _num_stages(stages) == 1 else _gradients_in_stages
    dq, (dk, dv) = backward(rows, own, stages, options)
    dsinks = None if sinks is None else sink_gradient(sinks, result.lse, delta)
    return Operands(dq, dk.astype(key.dtype), dv.astype(value.dtype), None, dsinks)


def _gradients_at_once(
    rows: Rows, own: KeyValue, stages: Stages, options: Options
) -> tuple[jax.Array, KeyValue]:
    """Of the queries, in their dtype, and of the own keys and values, in accumulator dtype."""
    length = own.key.shape[0]
    everything = _own_and_received(own, stages, options)
    dq, grads = _stage_gradients(rows, everything, stages.bands[:, 0], options)
    part = jax.tree.map(lambda x: x[:length], grads)
    for spec in stages.transfers:
        received = jax.tree.map(lambda x: x[length:], grads)
        part = group_reduce(received, spec, axis_name=options.axis_name, accumulate=part)
    return dq.astype(rows[0].dtype), part


@_one_program
def _gradients_in_stages(
    rows: Rows, own: KeyValue, stages: Stages, options: Options
) -> tuple[jax.Array, KeyValue]:
    """The same. Keys travel during the stage before theirs, their gradients during the one behind it."""
    rows, own, transfers = _inseparable((rows, own, stages.transfers))
    buffer, dqs, parts, returned = own, [], [], []
    for stage in range(_num_stages(stages)):
        casts = _start_cast(own, transfers, stage, options)
        (rows, transfers), casts = in_order((rows, transfers), casts)
        returns = _start_return(parts, transfers, options, goes_first=not casts)
        rows, flights = in_order(rows, [*casts, *returns])
        results = _stage_gradients(rows, buffer, stages.bands[:, stage], options)
        ((dq, part), transfers), flights = in_order((results, transfers), flights)
        buffer = next((KeyValue(*flight.wait()) for flight in flights[: len(casts)]), buffer)
        returned += [flight.wait() for flight in flights[len(casts) :]]
        dqs.append(dq)
        parts.append(part)
    # The last gradients travel while those of the queries are added up.
    dqs, flights = in_order(dqs, _start_return(parts, transfers, options, goes_first=False))
    dq = functools.reduce(jnp.add, dqs).astype(rows[0].dtype)
    dq, flights = in_order(dq, flights)
    returned += [flight.wait() for flight in flights]
    # Whoever wants but the gradients of the queries may not drop the end of what has been started.
    dq, returned = jax.lax.optimization_barrier((dq, returned))
    sums = [functools.reduce(jnp.add, addends) for addends in zip(parts[0], *returned, strict=True)]
    return dq, KeyValue(*sums)


def _start_return(
    parts: list[KeyValue], specs: Specs, options: Options, *, goes_first: bool
) -> list[AsyncTransfer]:
    """Starts the transfer of the last stage's gradients to their owners, unless they are the rank's own."""
    if len(parts) < 2:
        return []
    index = len(parts) - 2
    transfer = make_transfer(specs[index], options.axis_name)
    dtypes = [x.dtype for x in parts[-1]]
    return [transfer.start_reduce(parts[-1], dtypes, transfer_id=2 * index + 1, goes_first=goes_first)]


def _stage_gradients(
    rows: Rows,
    buffer: KeyValue,
    bands: jax.Array,
    options: Options,
) -> tuple[jax.Array, KeyValue]:
    """The gradients of the queries and of a stage's keys and values, in accumulator dtype."""
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
