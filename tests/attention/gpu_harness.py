"""The forward kernel on the GPU, on cached inputs, judged against fp64."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.attention import attention
from jaxmagi.masks import AttnMask
from tests.cases import random_bands, tile_edge_bands

from .device_reference import Logits, Report, check, judge
from .helpers import Operands

both_dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])

CAPACITY = 64  # of random masks
FUZZ_MASKS, FUZZ_CAPACITY = 42, 512  # for each shape
KERNEL_DIMS = [*[(dim, dim) for dim in (64, 96, 128, 192, 256)], (192, 128)]


class Shape(NamedTuple):
    """Sizes of a problem; a name in the ids of tests."""

    q_len: int
    kv_len: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    v_dim: int = 128
    dtype: Any = jnp.bfloat16
    batch: int = 1

    def __str__(self) -> str:
        heads, dims = f"{self.heads}:{self.kv_heads}", f"{self.dim}:{self.v_dim}"
        return f"{self.batch}x{self.q_len}x{self.kv_len}-h{heads}-d{dims}-{jnp.dtype(self.dtype).name}"


class Arrays(NamedTuple):
    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, Dv]


@functools.lru_cache(maxsize=2)
def arrays(shape: Shape) -> Arrays:
    """Unit-normal query, key and value on the device."""
    rng = np.random.default_rng(0)

    def normal(length: int, heads: int, dim: int) -> jax.Array:
        x = rng.standard_normal((shape.batch, length, heads, dim), np.float32)
        return jnp.asarray(x).astype(shape.dtype)

    return Arrays(
        query=normal(shape.q_len, shape.heads, shape.dim),
        key=normal(shape.kv_len, shape.kv_heads, shape.dim),
        value=normal(shape.kv_len, shape.kv_heads, shape.v_dim),
    )


def pad_bands(bands: np.ndarray, capacity: int) -> np.ndarray:
    """[..., capacity, 6]; what is added is unused, and what is empty stays where it is."""
    padded = np.zeros((*bands.shape[:-2], capacity, 6), np.int32)
    padded[..., : bands.shape[-2], :] = bands
    return padded


def make_operands(shape: Shape, bands: np.ndarray, sinks: np.ndarray | None = None) -> Operands:
    """Operands under bands [C, 6] or [B, C, 6]; without sinks they are -inf."""
    sinks = np.full(shape.heads, -np.inf) if sinks is None else sinks
    bands = bands if bands.ndim == 3 else bands[None]
    return Operands(*arrays(shape), jnp.asarray(bands), jnp.asarray(sinks, np.float32))


def random_operands(
    rng: np.random.Generator, shape: Shape, *, count: int = 20, with_sinks: bool = False
) -> Operands:
    """Under random bands that many rows share."""
    bands = pad_bands(tile_edge_bands(rng, shape.q_len, shape.kv_len, count), CAPACITY)
    return make_operands(shape, bands, rng.standard_normal(shape.heads) if with_sinks else None)


def fuzz(rng: np.random.Generator, shape: Shape) -> Iterator[Operands]:
    """`FUZZ_MASKS` of 1 to 300 bands, scattered or ending at the edges of tiles; half of them with sinks.

    The examples of a batch share half of the masks, and have their own in the other half.
    """
    for index in range(FUZZ_MASKS):
        make = (random_bands, tile_edge_bands)[index % 2]
        count = (300, 1)[index] if index < 2 else int(np.exp(rng.uniform(0, np.log(300))))
        bands = [
            pad_bands(make(rng, shape.q_len, shape.kv_len, count), FUZZ_CAPACITY)
            for _ in range(shape.batch if index % 8 >= 4 else 1)
        ]
        sinks = rng.standard_normal(shape.heads) if index % 4 < 2 else None
        yield make_operands(shape, np.stack(bands), sinks)


def default_logits(operands: Operands) -> Logits:
    return Logits(operands.query.shape[-1] ** -0.5)


def as_mask(operands: Operands) -> AttnMask:
    """The mask, per example where it is; the bands stay as they are, the empty ones too."""
    bands = operands.bands if operands.bands.shape[0] > 1 else operands.bands[0]
    return AttnMask(bands, operands.query.shape[1], operands.key.shape[1])


def poison_masked(operands: Operands, poison: float) -> tuple[Operands, jax.Array]:
    """Puts ``poison`` into fully masked keys, values and queries. Also returns which queries these are."""
    dense = as_mask(operands).to_dense()
    masked_keys = jnp.asarray(~dense.any(axis=0))[None, :, None, None]
    masked_queries = jnp.asarray(~dense.any(axis=1))[None, :, None, None]
    poisoned = operands._replace(
        query=jnp.where(masked_queries, poison, operands.query),
        key=jnp.where(masked_keys, poison, operands.key),
        value=jnp.where(masked_keys, poison, operands.value),
    )
    return poisoned, masked_queries


@functools.partial(jax.jit, static_argnames="logits")
def run(operands: Operands, logits: Logits) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of the kernel."""
    return attention(
        operands.query,
        operands.key,
        operands.value,
        as_mask(operands),
        scale=logits.scale,
        logits_soft_cap=logits.soft_cap or None,
        sinks=operands.sinks,
        return_residual=True,
        implementation="ffi",
    )


def run_and_check(operands: Operands, logits: Logits | None = None, rows: Any = None) -> Report:
    """Runs the kernel and asserts that it is right (at some rows; by default at all)."""
    logits = logits or default_logits(operands)
    out, lse = run(operands, logits)
    assert out.dtype == operands.query.dtype and lse.dtype == jnp.float32
    report = judge(operands, logits, out, lse, rows)
    check(report, operands.query.dtype)
    return report


def with_command_buffers(function: Callable[..., Any], kinds: str, dump: Path) -> Callable[..., Any]:
    """Compiled, the operations of these kinds ("" for none) captured; XLA dumps what it runs."""
    options = {
        "xla_gpu_enable_command_buffer": kinds,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_dump_to": str(dump),
    }
    return jax.jit(function, compiler_options=options)


def has_command_buffers(dump: Path) -> bool:
    """True if a program compiled by `with_command_buffers` runs any."""
    sequences = list(dump.glob("*thunk_sequence*.txt"))
    assert sequences, f"XLA left no list of what it runs among {sorted(x.name for x in dump.iterdir())}"
    return any("kCommandBuffer" in path.read_text() for path in sequences)


def assert_same(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> None:
    """Bit for bit."""
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bits = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
        assert bool(jnp.array_equal(a.view(bits), b.view(bits)))
