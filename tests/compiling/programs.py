"""Compiles a program for four H200s that are not there, and prints its custom calls and collectives.

    python -m tests.compiling.programs NAME

With XLA's compiler for GPUs on the path (``jax-cuda13-plugin``) that needs no GPU: XLA and the lowering of
jaxmagi say what they would say on one, at the sizes of a real model. Nothing can run.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmagi
from jaxmagi import (
    CollectiveOptions,
    GroupCastSpec,
    attention,
    context_attention,
    group_cast,
    group_reduce,
    masks,
    plan_context,
)
from jaxmagi.attention._cuda import BACKWARD, FORWARD, TILE_SCHEDULE
from jaxmagi.collectives._support import CAST, REDUCE
from jaxmagi.context._custom_call import BACKWARD as CONTEXT_BACKWARD, FORWARD as CONTEXT_FORWARD

from .. import compiled
from .described import REPLICATED, h200s, like

TOKENS, HEADS, KV_HEADS = 4096, 64, 8
AXIS = "context"


class Program(NamedTuple):
    """A function on a mesh, and the shapes of its arguments: pytrees of jax.ShapeDtypeStruct."""

    mesh: Mesh
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def rows(mesh: Mesh, heads: int, dim: int, spec: P = REPLICATED, *batch: int) -> jax.ShapeDtypeStruct:
    shape = (*batch, TOKENS, heads, dim)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def local(dim: int, v_dim: int | None = None, *batch: int, **options: Any) -> Program:
    """Attention on one GPU and its gradients."""
    mesh, v_dim = h200s((1,), ("data",)), v_dim or dim
    operands = [
        rows(mesh, heads, d, REPLICATED, *batch)
        for heads, d in ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, v_dim))
    ]
    mask = masks.documents([TOKENS // 2 - 100, TOKENS // 2 + 100])

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, mask, **options).astype(jnp.float32).sum()

    return Program(mesh, jax.grad(loss, argnums=(0, 1, 2)), tuple(operands))


def collectives(kind: AxisType, **options: Any) -> Program:
    """A cast and a reduction over an axis of a mesh of two, inside of shard_map over both axes."""
    mesh = h200s((2, 2), ("data", AXIS), kind)
    spec = GroupCastSpec.from_splits(
        input_split_sizes=[[60, 4], [64]],
        dst_ranks=[[[1], [0, 1]], [[0]]],
        output_split_sizes=[[4, 64], [60, 4]],
        src_ranks=[[0, 1], [0, 0]],
    )

    def there_and_back(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        given = CollectiveOptions(**options)
        cast = group_cast(x, spec, axis_name=AXIS, options=given)
        return group_reduce(cast, spec, axis_name=AXIS, options=given)

    both = P(("data", AXIS))
    run = jax.shard_map(there_and_back, mesh=mesh, in_specs=(both, P()), out_specs=both)
    x = np.zeros((4 * spec.input_rows, KV_HEADS, 128), np.float32)
    return Program(mesh, run, (like(x, mesh, both), like(spec, mesh)))


def sharded(kind: AxisType, kv_heads: int = KV_HEADS, shape: tuple[int, int] = (2, 2)) -> Program:
    """Two layers under one mask and their gradients, with batch over "data" and heads over "tensor"."""
    mesh = h200s(shape, ("data", "tensor"), kind)
    both = P("data", None, "tensor")
    keys = both if kv_heads % shape[1] == 0 else P("data")
    mask = masks.documents([TOKENS // 2 - 100, TOKENS // 2 + 100])

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = attention(query, key, value, mask)
        return attention(query, key, value, mask).astype(jnp.float32).sum()

    operands = (rows(mesh, HEADS, 128, both, 2), *[rows(mesh, kv_heads, 128, keys, 2)] * 2)
    return Program(mesh, jax.grad(loss, argnums=(0, 1, 2)), operands)


def sharded_context(kind: AxisType, **options: Any) -> Program:
    """Context attention and its gradients, outside of shard_map, with a sharded batch."""
    mesh = h200s((2, 2), ("data", AXIS), kind)
    plan = plan_context(masks.documents([TOKENS - 1000, 1000]), 2)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, plan: Any) -> jax.Array:
        return context_attention(query, key, value, plan, axis_name=AXIS, **options).astype(jnp.float32).sum()

    operands = [rows(mesh, heads, 128, P("data", AXIS), 2) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return Program(mesh, jax.grad(loss, argnums=(0, 1, 2)), (*operands, like(plan, mesh)))


def collectives_and_another_axis(kind: AxisType) -> Program:
    """The batch is sharded over an axis that shard_map leaves to the compiler."""
    mesh = h200s((2, 2), ("data", AXIS), kind)
    spec = GroupCastSpec.from_splits([[64], [64]], [[[1]], [[0]]], [[64], [64]], [[1], [0]])

    def local_cast(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return jax.vmap(lambda one: group_cast(one, spec, axis_name=AXIS))(x)

    run = jax.shard_map(
        local_cast, mesh=mesh, in_specs=(P(None, AXIS), P()), out_specs=P(None, AXIS), axis_names={AXIS}
    )
    x = np.zeros((2, 2 * spec.input_rows, KV_HEADS, 128), np.float32)
    return Program(mesh, run, (like(x, mesh, P("data", AXIS)), like(spec, mesh)))


def context(ranks_per_host: int | None = None, *, layers: int = 1) -> Program:
    """Context parallelism over four GPUs and its gradients, in a scan over rematerialised layers."""
    mesh = h200s((4,), (AXIS,))
    plan = plan_context(masks.documents([TOKENS - 1000, 1000]), 4)
    plan = plan if ranks_per_host is None else plan.by_host(ranks_per_host)
    operands = [rows(mesh, heads, 128, P(AXIS)) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, plan: Any) -> jax.Array:
        @jax.checkpoint
        def layer(query: jax.Array, _: None) -> tuple[jax.Array, None]:
            return context_attention(query, key, value, plan, axis_name=AXIS), None

        query, _ = jax.lax.scan(layer, query, length=layers)
        return jax.lax.psum(query.astype(jnp.float32).sum(), AXIS)

    def run(*operands: Any) -> Any:
        specs = (P(AXIS), P(AXIS), P(AXIS), P())
        mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.grad(mapped, argnums=(0, 1, 2))(*operands)

    return Program(mesh, run, (*operands, like(plan, mesh)))


def flax_layer() -> Program:
    """The README's five lines, and the gradients of the parameters."""
    mesh = h200s((2, 2), ("data", AXIS))
    attention_fn = functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data")
    layer = nnx.MultiHeadAttention(
        HEADS, 2048, dtype=jnp.bfloat16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    plan = plan_context(masks.causal(TOKENS), 2)

    def loss(state: Any, x: jax.Array, plan: Any) -> jax.Array:
        return nnx.merge(graph, state)(x, mask=plan).astype(jnp.float32).sum()

    x = np.zeros((2, TOKENS, 2048), np.float32)
    operands = like(state, mesh), like(x, mesh, P("data", AXIS)), like(plan, mesh)
    return Program(mesh, jax.grad(loss), operands)


class Case(NamedTuple):
    """A program, and what has to be in it once it is compiled."""

    make: Callable[[], Program]
    calls: dict[str, int]
    collectives: tuple[str, ...] = ()  # those of XLA


LOCAL = {TILE_SCHEDULE: 2, FORWARD: 1, BACKWARD: 1}
TWO_LAYERS = {TILE_SCHEDULE: 2, FORWARD: 2, BACKWARD: 2}
CAST_AND_REDUCE = {CAST: 1, REDUCE: 1}
ONE_CALL_A_PASS = {TILE_SCHEDULE: 2, CONTEXT_FORWARD: 1, CONTEXT_BACKWARD: 1}
# Rematerialised: the forward pass comes twice, with a tile schedule each time.
TWO_REMATERIALISED_LAYERS = {TILE_SCHEDULE: 3, CONTEXT_FORWARD: 2, CONTEXT_BACKWARD: 1}
# The gradients of keys and values, added up over the devices that share them, and whole as these are.
SHARED_KEY_HEADS = ("1 x all-reduce f32[4194304]", "2 x all-gather bf16[2,4096,2,128]")
PARAMETERS = ("2 x all-reduce bf16[12589056]", "2 x all-reduce bf16[64,32,2048]")  # their gradients

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PROGRAMS = {
    "attention 64": Case(lambda: local(64), LOCAL),
    "attention 96, deterministic": Case(lambda: local(96, deterministic=True), LOCAL),
    "attention 128, batch": Case(lambda: local(128, None, 2), LOCAL),
    "attention 192 and 128, capped": Case(lambda: local(192, 128, logits_soft_cap=30.0), LOCAL),
    "attention 256": Case(lambda: local(256), LOCAL),
    "native collectives, Auto": Case(lambda: collectives(AUTO, implementation="native"), CAST_AND_REDUCE),
    "native collectives, Explicit": Case(
        lambda: collectives(EXPLICIT, implementation="native"), CAST_AND_REDUCE
    ),
    "collectives by NCCL": Case(lambda: collectives(EXPLICIT, implementation="nccl"), CAST_AND_REDUCE),
    "collectives of hosts with one rank": Case(lambda: collectives(AUTO, ranks_per_host=1), CAST_AND_REDUCE),
    "collectives and an Auto axis": Case(lambda: collectives_and_another_axis(AUTO), {CAST: 1}),
    "collectives and an Explicit axis": Case(lambda: collectives_and_another_axis(EXPLICIT), {CAST: 1}),
    "attention, Auto": Case(lambda: sharded(AUTO), TWO_LAYERS),
    "attention, Explicit": Case(lambda: sharded(EXPLICIT), TWO_LAYERS),
    "attention, more devices than key heads": Case(
        lambda: sharded(AUTO, 2, (1, 4)), TWO_LAYERS, SHARED_KEY_HEADS
    ),
    "context": Case(context, ONE_CALL_A_PASS),
    "context, two levels": Case(lambda: context(2), ONE_CALL_A_PASS),
    "context, two layers": Case(lambda: context(layers=2), TWO_REMATERIALISED_LAYERS),
    "context and data, Auto": Case(lambda: sharded_context(AUTO), LOCAL | CAST_AND_REDUCE),
    "context and data, Explicit": Case(lambda: sharded_context(EXPLICIT), ONE_CALL_A_PASS),
    "context and data, by arguments": Case(
        lambda: sharded_context(AUTO, batch_axis_name="data"), ONE_CALL_A_PASS
    ),
    "flax": Case(flax_layer, ONE_CALL_A_PASS, PARAMETERS),
}


def compile_program(name: str) -> str:
    """Returns the text of a compiled program."""
    mesh, function, arguments = PROGRAMS[name].make()
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return text


def custom_calls(text: str) -> list[str]:
    """Lists the targets of all custom calls of jaxmagi in the order of the program."""
    return re.findall(r'custom_call_target="(jaxmagi\w+)"', text)


if __name__ == "__main__":
    program = compile_program(sys.argv[1])
    print(*custom_calls(program), sep="\n")
    for collective, count in compiled.collectives(program).items():
        print(count, "x", collective)
