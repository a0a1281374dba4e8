"""Attention in JAX, as work to be timed: ours, and the peers that JAX has.

A peer that is not installed raises ModuleNotFoundError.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._workloads import (
    HEADS,
    KV_HEADS,
    Causal,
    Direction,
    Full,
    Workload,
    held_against,
    shuffled_documents,
)
from jaxmagi import AttnMask, _native, attention
from jaxmagi.attention import Partial, _cuda, attention_backward, row_delta
from jaxmagi.calibration._timing import DeviceWork

DETERMINISTIC = "ours, deterministic"


def ours_on(name: str) -> str:
    """Names ours on another workload, which is measured in turns, for a card's clock wanders."""
    return f"ours, {name}"


type Arrays = tuple[jax.Array, ...]
type Layer = Callable[[AttnMask, Arrays, Arrays], Any]
"""Runs a layer, given its mask, its separate operands and those that layers share."""
type MakeWork = Callable[[Workload, int], DeviceWork]
"""Makes the work of so many layers of a workload."""


@functools.partial(jax.jit, static_argnames=("length", "heads", "dim"))
def _normal(key: jax.Array, length: int, heads: int, dim: int) -> jax.Array:
    return jax.random.normal(key, (1, length, heads, dim), jnp.bfloat16)


@functools.lru_cache(maxsize=2)
def inputs(workload: Workload, layers: int) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Draws unit-normal queries, one for each layer, key and value, [1, length, heads, dim] in bfloat16."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    length = workload.pattern.length
    queries = [_normal(key, length, HEADS, workload.dim) for key in keys[2:]]
    key, value = (
        _normal(key, length, KV_HEADS, dim)
        for key, dim in zip(keys[:2], (workload.dim, workload.v_dim), strict=True)
    )
    return queries, key, value


def _in_stream_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles to launches one after another: in a captured graph, independent layers might run together."""
    return jax.jit(function, compiler_options={"xla_gpu_enable_command_buffer": ""})


@functools.lru_cache(maxsize=2)
def operands(workload: Workload, num_layers: int, direction: Direction) -> tuple[list[Arrays], Arrays]:
    """Returns the operands of each layer, then those that layers share.

    Forward, these are query; key and value. Backward, they are query, output and its log-sum-exp; key, value
    and cotangent.
    """
    queries, key, value = inputs(workload, num_layers)
    if direction == "forward":
        return [(query,) for query in queries], (key, value)
    forward = jax.jit(
        functools.partial(attention, mask=workload.pattern.mask(), return_residual=True, implementation="ffi")
    )
    cotangent = _normal(jax.random.key(1), workload.pattern.length, HEADS, workload.v_dim)
    return [(query, *forward(query, key, value)) for query in queries], (key, value, cotangent)


def _forward(mask: AttnMask, separate: Arrays, shared: Arrays) -> jax.Array:
    query, key, value = separate + shared
    return attention(query, key, value, mask, implementation="ffi")


def _backward(mask: AttnMask, separate: Arrays, shared: Arrays, *, deterministic: bool = False) -> Arrays:
    """Runs what differentiating `attention` runs behind the forward pass."""
    (query, out, lse), (key, value, cotangent) = separate, shared
    delta = row_delta(Partial(out, lse), Partial(cotangent, jnp.zeros_like(lse)))
    return attention_backward(
        query,
        key,
        value,
        jnp.asarray(mask.bands)[None],
        cotangent,
        lse,
        delta,
        scale=query.shape[-1] ** -0.5,
        soft_cap=0,
        deterministic=deterministic,
        grad_dtype=query.dtype,
        implementation="ffi",
    )


def _work(layers: Callable[..., list[Any]], num_layers: int, *operands: Any) -> DeviceWork:
    run = functools.partial(_in_stream_order(layers), *operands)
    return DeviceWork(run, jax.block_until_ready, num_layers)


def _by_layer(layer: Layer, direction: Direction, workload: Workload, num_layers: int) -> DeviceWork:
    """Makes the work of layers that share a mask, and so its tile schedule, as those of a model do."""
    mask = workload.pattern.mask()

    def layers(separate: list[Arrays], shared: Arrays) -> list[Any]:
        return [layer(mask, each, shared) for each in separate]

    return _work(layers, num_layers, *operands(workload, num_layers, direction))


def _planned_each_time(layer: Layer, direction: Direction, workload: Workload, num_layers: int) -> DeviceWork:
    """Makes the work of layers with separate masks (they are equal, which the compiler does not know)."""
    mask = workload.pattern.mask()
    copies = [AttnMask(jnp.array(mask.bands), mask.q_len, mask.kv_len) for _ in range(num_layers)]

    def layers(separate: list[Arrays], shared: Arrays, copies: list[AttnMask]) -> list[Any]:
        return [layer(mask, each, shared) for each, mask in zip(separate, copies, strict=True)]

    return _work(layers, num_layers, *operands(workload, num_layers, direction), copies)


def _cudnn(is_causal: bool, mask: AttnMask, separate: Arrays, shared: Arrays) -> jax.Array:
    """Calls `jax.nn.dot_product_attention`."""
    del mask
    return jax.nn.dot_product_attention(*separate, *shared, is_causal=is_causal, implementation="cudnn")


def _tokamax(is_causal: bool, mask: AttnMask, separate: Arrays, shared: Arrays) -> jax.Array:
    """Calls tokamax's Mosaic kernel."""
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    del mask
    return dot_product_attention(*separate, *shared, is_causal=is_causal, implementation="mosaic")


def candidates(workload: Workload, direction: Direction) -> dict[str, MakeWork]:
    """Returns what can express the workload, by name. Of the backward pass, only ours are measured."""
    layer = _forward if direction == "forward" else _backward
    found: dict[str, MakeWork] = {"ours": functools.partial(_by_layer, layer, direction)}
    if workload.is_short:
        found["ours, own plans"] = functools.partial(_planned_each_time, layer, direction)
    if other := held_against(workload, direction):
        found[ours_on(other.name)] = lambda _, num_layers: _by_layer(layer, direction, other, num_layers)
    if direction == "backward":
        in_fixed_order = functools.partial(_backward, deterministic=True)
        found[DETERMINISTIC] = functools.partial(_by_layer, in_fixed_order, direction)
    elif isinstance(workload.pattern, Full | Causal):
        is_causal = isinstance(workload.pattern, Causal)
        for name, peer in (("cuDNN (jax.nn)", _cudnn), ("tokamax", _tokamax)):
            found[name] = functools.partial(_by_layer, functools.partial(peer, is_causal), direction)
    return found


def plan(num_bands: int, num_tiles: int, passes: int, direction: Direction) -> dict[str, DeviceWork]:
    """Makes tile schedules of a mask of ``num_bands`` shuffled causal documents at head dimension 128.

    They run in a captured graph, as in a compiled step. An addition makes each wait for the last: "plan" is
    both, and "additions" what is to be subtracted.
    """
    extension = _native.extension("cuda")
    if extension is None:
        raise RuntimeError("jaxmagi was built without CUDA")
    dims, by_keys = (128, 128), direction == "backward"
    length = num_tiles * (extension.backward_tile(*dims)[1] if by_keys else extension.forward_tile(*dims)[0])
    mask = jnp.asarray(shuffled_documents(np.random.default_rng(0), length, num_bands)[None])
    schedule = functools.partial(_cuda.tile_schedule, by_keys=by_keys, aligns_to_documents=by_keys)

    def chain(bands: jax.Array, with_plan: bool) -> jax.Array:
        for _ in range(passes):
            last = schedule(bands, length, length, dims)[1] if with_plan else bands
            # 0, but XLA does not know; nor may it join additions.
            bands = jax.lax.optimization_barrier(bands + jnp.minimum(last[0, 0, 1], 0))
        return bands

    run = jax.jit(chain, static_argnames="with_plan")
    return {
        name: DeviceWork(functools.partial(run, mask, with_plan), jax.block_until_ready, passes)
        for name, with_plan in (("plan", True), ("additions", False))
    }
