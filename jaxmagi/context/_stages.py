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
from ..collectives import group_cast, group_reduce
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


def _key_buffers(own: KeyValue, stages: Stages, options: Options) -> list[KeyValue]:
    """What each stage attends to. No transfer waits for a stage, so that they may overlap."""
    received = [group_cast(own, spec, axis_name=options.axis_name) for spec in stages.transfers]
    if _num_stages(stages) > 1:
        return [own, *received]
    return [jax.tree.map(lambda *parts: jnp.concatenate(parts), own, *received)]


def _num_stages(stages: Stages) -> int:
    return stages.bands.shape[1]


def forward(operands: Operands, options: Options) -> Partial[jax.Array]:
    """The output [T, N, Dv] and the log-sum-exp [T, N] of a rank's queries."""
    query, key, value, stages, sinks = operands
    wide = accumulator_dtype(query.dtype)
    no_sinks = jax.lax.full_like(query, -jnp.inf, wide, query.shape[1:2])
    sinks = no_sinks if sinks is None else sinks
    buffers = _key_buffers(KeyValue(key, value), stages, options)
    attend = functools.partial(_attend, query, options=options)
    whole = len(buffers) == 1
    result = attend(
        buffers[0],
        stages.bands[:, 0],
        sinks=sinks if whole else no_sinks,
        out_dtype=query.dtype if whole else wide,
    )
    for i, buffer in enumerate(buffers[1:], start=1):
        result = attend(buffer, stages.bands[:, i], sinks=no_sinks, out_dtype=wide, previous=result)
    result = Partial(result.out[0], result.lse[0])
    if whole:
        return result
    # Sinks count once, and for every row that sees something in any of the stages.
    out, lse = add_sinks(result, sinks)
    return Partial(out.astype(query.dtype), lse)


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
    buffers = _key_buffers(KeyValue(key, value), stages, options)
    rows = (query, cotangents.out, result.lse, delta)
    grads = [_stage_gradients(rows, buffer, stages.bands[:, i], options) for i, buffer in enumerate(buffers)]
    dq = functools.reduce(jnp.add, [dq for dq, _ in grads])
    dk, dv = _return_gradients([dkv for _, dkv in grads], stages, query.shape[0], options)
    dsinks = None if sinks is None else sink_gradient(sinks, result.lse, delta)
    return Operands(dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, dsinks)


def _stage_gradients(
    rows: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
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


def _return_gradients(grads: list[KeyValue], stages: Stages, shard_length: int, options: Options) -> KeyValue:
    """The gradients of the rank's own keys and values: its own part, then what each transfer brings back."""
    own, *fetched = grads
    if not fetched:
        fetched = [jax.tree.map(lambda x: x[shard_length:], own)]
        own = jax.tree.map(lambda x: x[:shard_length], own)
    for part, spec in zip(fetched, stages.transfers, strict=True):
        own = group_reduce(part, spec, axis_name=options.axis_name, accumulate=own)
    return own
