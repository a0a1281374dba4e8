"""Attention in JAX, as work to be timed: ours, and the peers that JAX has.

A peer that is not installed raises ModuleNotFoundError.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import DeviceWork
from benchmarks._workloads import HEADS, KV_HEADS, Causal, Full, Workload, shuffled_documents
from jaxmagi import AttnMask, _native, attention
from jaxmagi.attention import _cuda

type Forward = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnames=("length", "heads", "dim"))
def _normal(key: jax.Array, length: int, heads: int, dim: int) -> jax.Array:
    return jax.random.normal(key, (1, length, heads, dim), jnp.bfloat16)


@functools.lru_cache(maxsize=1)
def inputs(workload: Workload, layers: int) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Unit-normal queries, one for each layer, key and value, [1, length, heads, dim] in bfloat16."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    length = workload.pattern.length
    queries = [_normal(key, length, HEADS, workload.dim) for key in keys[2:]]
    key, value = (
        _normal(key, length, KV_HEADS, dim)
        for key, dim in zip(keys[:2], (workload.dim, workload.v_dim), strict=True)
    )
    return queries, key, value


def _in_stream_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled to launches one after another: in a captured graph, independent layers might run together."""
    return jax.jit(function, compiler_options={"xla_gpu_enable_command_buffer": ""})


def _work(layers: Callable[..., list[jax.Array]], num_layers: int, *operands: Any) -> DeviceWork:
    run = functools.partial(_in_stream_order(layers), *operands)
    return DeviceWork(run, jax.block_until_ready, num_layers)


def _by_layer(forward: Forward, workload: Workload, num_layers: int) -> DeviceWork:
    queries, key, value = inputs(workload, num_layers)

    def layers(queries: list[jax.Array], key: jax.Array, value: jax.Array) -> list[jax.Array]:
        return [forward(query, key, value) for query in queries]

    return _work(layers, num_layers, queries, key, value)


def ours(workload: Workload, num_layers: int) -> DeviceWork:
    """All layers share a mask, and so its plan, as those of a model do."""
    mask = workload.pattern.mask()

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, mask, implementation="ffi")

    return _by_layer(forward, workload, num_layers)


def ours_planned_each_time(workload: Workload, num_layers: int) -> DeviceWork:
    """Each layer has a mask of its own (they are equal, which the compiler does not know)."""
    queries, key, value = inputs(workload, num_layers)
    mask = workload.pattern.mask()
    copies = [AttnMask(jnp.array(mask.bands), mask.q_len, mask.kv_len) for _ in queries]

    def layers(
        queries: list[jax.Array], key: jax.Array, value: jax.Array, copies: list[AttnMask]
    ) -> list[jax.Array]:
        pairs = zip(queries, copies, strict=True)
        return [attention(query, key, value, mask, implementation="ffi") for query, mask in pairs]

    return _work(layers, num_layers, queries, key, value, copies)


def cudnn_by_jax(workload: Workload, num_layers: int) -> DeviceWork:
    """`jax.nn.dot_product_attention`."""
    forward = functools.partial(
        jax.nn.dot_product_attention, is_causal=isinstance(workload.pattern, Causal), implementation="cudnn"
    )
    return _by_layer(forward, workload, num_layers)


def tokamax(workload: Workload, num_layers: int) -> DeviceWork:
    """Its Mosaic kernel."""
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    forward = functools.partial(
        dot_product_attention, is_causal=isinstance(workload.pattern, Causal), implementation="mosaic"
    )
    return _by_layer(forward, workload, num_layers)


def candidates(workload: Workload) -> dict[str, Callable[[Workload, int], DeviceWork]]:
    """Which of them can express the workload, by name."""
    found = {"ours": ours}
    if workload.is_short:
        found["ours, own plans"] = ours_planned_each_time
    if isinstance(workload.pattern, Full | Causal):
        found["cuDNN (jax.nn)"] = cudnn_by_jax
        found["tokamax"] = tokamax
    return found


def plan(num_bands: int, num_tiles: int, passes: int) -> dict[str, DeviceWork]:
    """The plan op of a mask of ``num_bands`` shuffled causal documents at head dimension 128.

    In a captured graph, as in a compiled step. An addition makes each wait for the last: "plan" is both,
    "additions" what is to be subtracted.
    """
    extension = _native.extension("cuda")
    if extension is None:
        raise RuntimeError("jaxmagi was built without CUDA")
    rows, _ = extension.forward_tile(128, 128)
    length = num_tiles * rows
    mask = jnp.asarray(shuffled_documents(np.random.default_rng(0), length, num_bands)[None])

    def chain(bands: jax.Array, with_plan: bool) -> jax.Array:
        for _ in range(passes):
            last = _cuda.plan(bands, length, length, (128, 128))[1] if with_plan else bands
            # 0, but XLA does not know; nor may it join additions.
            bands = jax.lax.optimization_barrier(bands + jnp.minimum(last[0, 0, 1], 0))
        return bands

    run = jax.jit(chain, static_argnames="with_plan")
    return {
        name: DeviceWork(functools.partial(run, mask, with_plan), jax.block_until_ready, passes)
        for name, with_plan in (("plan", True), ("additions", False))
    }
