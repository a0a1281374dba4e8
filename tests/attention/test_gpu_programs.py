"""The forward kernel inside programs: transformations, repeated and captured runs, dirty memory, staging."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi.attention import Partial, attention
from jaxmagi.masks import AttnMask
from tests.cases import tile_edge_bands

from .device_reference import Operands, check, judge
from .gpu_harness import Shape, as_mask, assert_same, default_logits, forward, make_operands, pad_bands, run

pytestmark = pytest.mark.gpu

SHAPE, CAPACITY = Shape(1111, 1234, 8, 2), 64


def random_operands(rng: np.random.Generator, shape: Shape = SHAPE) -> Operands:
    bands = pad_bands(tile_edge_bands(rng, shape.q_len, shape.kv_len, 40), CAPACITY)
    return make_operands(shape, bands, rng.standard_normal(shape.heads))


def test_two_runs_are_equal_bit_for_bit(rng: np.random.Generator) -> None:
    operands = random_operands(rng, Shape(4099, 4093, 16, 2))
    first = run(operands, default_logits(operands))
    for _ in range(10):
        assert_same(run(operands, default_logits(operands)), first)


def test_jit_and_eager_are_equal(rng: np.random.Generator) -> None:
    operands = random_operands(rng)
    assert_same(forward(operands), run(operands, default_logits(operands)))


def test_mask_is_an_argument(rng: np.random.Generator, compilations: list[str]) -> None:
    """Another mask of the same capacity needs no compilation."""
    operands = random_operands(rng)
    other = random_operands(rng)
    run(operands, default_logits(operands))
    compilations.clear()
    out, lse = run(other, default_logits(other))
    assert not compilations
    check(judge(other, default_logits(other), out, lse), other.query.dtype)


def test_vmap(rng: np.random.Generator) -> None:
    each = [random_operands(rng) for _ in range(3)]
    stacked = Operands(*(jnp.stack(x) for x in zip(*each, strict=True)))
    logits = default_logits(each[0])
    shared_sinks = stacked._replace(sinks=each[0].sinks)
    out, lse = jax.vmap(lambda x: run(x, logits), in_axes=(Operands(0, 0, 0, 0, None),))(shared_sinks)
    for i, operands in enumerate(each):
        assert_same((out[i], lse[i]), run(operands._replace(sinks=each[0].sinks), logits))
    out, lse = jax.vmap(lambda x: run(x, logits))(stacked)
    for i, operands in enumerate(each):
        check(judge(operands, logits, out[i], lse[i]), operands.query.dtype)


def make_loss(implementation: str | None) -> Callable[..., jax.Array]:
    """Three checkpointed layers in a scan."""

    def loss(operands: Operands, mask: AttnMask) -> jax.Array:
        def layer(x: jax.Array, sinks: jax.Array) -> tuple[jax.Array, None]:
            out = attention(x, operands.key, operands.value, mask, sinks=sinks, implementation=implementation)
            return x + out, None

        sinks = jnp.stack([operands.sinks, -operands.sinks, 2 * operands.sinks])
        x, _ = jax.lax.scan(jax.checkpoint(layer), operands.query, sinks)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def test_scan_remat_and_grad(rng: np.random.Generator) -> None:
    operands = random_operands(rng)
    got, want = (
        jax.jit(jax.value_and_grad(make_loss(implementation), allow_int=True))(operands, as_mask(operands))
        for implementation in (None, "xla")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 0.05 * np.abs(b).max()


def test_shard_map_over_one_device(rng: np.random.Generator) -> None:
    operands = random_operands(rng)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), auto, devices=jax.devices()[:1])
    specs = Operands(*[P("data", None, "model")] * 3, bands=P(), sinks=P("model"))
    result_spec = P("data", None, "model")
    logits = default_logits(operands)
    sharded = jax.jit(
        jax.shard_map(
            lambda x: run(x, logits), mesh=mesh, in_specs=(specs,), out_specs=(result_spec, result_spec)
        )
    )
    assert_same(sharded(operands), run(operands, logits))


def stack_of_layers(operands: Operands) -> list[tuple[jax.Array, jax.Array]]:
    """Ten calls, each on the output of the one before, with ordinary operations between them."""
    results = []
    for _ in range(10):
        results.append(forward(operands))
        operands = operands._replace(query=(operands.query + results[-1][0]).astype(operands.query.dtype))
    return results


def test_command_buffers_change_nothing(rng: np.random.Generator) -> None:
    """Captured into a CUDA graph and replayed, with new operands too, against launches one by one."""
    launched, captured = (
        jax.jit(
            stack_of_layers,
            compiler_options={
                "xla_gpu_enable_command_buffer": kinds,
                "xla_gpu_graph_min_graph_size": 1,
            },
        )
        for kinds in ("", "FUSION,CUSTOM_CALL")
    )
    problems = [random_operands(rng) for _ in range(3)]
    problems[1] = problems[1]._replace(query=-problems[1].query)  # at another address
    for operands in problems:
        wanted = launched(operands)
        for _ in range(3):
            for got, want in zip(captured(operands), wanted, strict=True):
                assert_same(got, want)


def test_results_are_fully_written(rng: np.random.Generator) -> None:
    """Into memory that held NaN before."""
    operands = random_operands(rng)
    logits = default_logits(operands)
    run(operands, logits)
    size = operands.query.size
    for _ in range(3):
        dirt = [jnp.full(size, jnp.nan, dtype) for dtype in (jnp.bfloat16, jnp.float32) for _ in range(64)]
        dirt += [jnp.full(length, -1, jnp.int32) for length in (1, 64, 1024, 8192) for _ in range(64)]
        jax.block_until_ready(dirt)
        for x in dirt:
            x.delete()
        check(judge(operands, logits, *run(operands, logits)), operands.query.dtype)


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_result_dtype(rng: np.random.Generator, out_dtype: Any) -> None:
    operands = random_operands(rng)
    out, lse = jax.jit(functools.partial(forward, out_dtype=out_dtype))(operands)
    assert (out.dtype, lse.dtype) == (out_dtype, jnp.float32)
    check(judge(operands, default_logits(operands), out, lse), operands.query.dtype)


@pytest.mark.parametrize("sm_margin", [0, 16, 113])
def test_sm_margin(rng: np.random.Generator, sm_margin: int) -> None:
    """Fewer multiprocessors, the same result."""
    operands = random_operands(rng)
    with_margin = jax.jit(functools.partial(forward, sm_margin=sm_margin))
    assert_same(with_margin(operands), run(operands, default_logits(operands)))


def split_keys(bands: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    """Bands [1, C, 6] cut into those of keys [0, cut), [cut, next cut), and so on."""
    parts = []
    for first, end in zip([0, *cuts], [*cuts, 2**30], strict=True):
        part = np.array(bands)
        part[..., 2] = np.clip(part[..., 2], first, end)
        part[..., 3] = np.clip(part[..., 3], first, end)
        parts.append(part)
    return parts


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (64, 64), (256, 256), (192, 128), (40, 72)])
def test_stages_accumulate(rng: np.random.Generator, dim: int, v_dim: int, donate: bool) -> None:
    """The keys in three stages, each merged into the result so far, are as good as all keys at once."""
    operands = random_operands(rng, SHAPE._replace(dim=dim, v_dim=v_dim))
    operands = operands._replace(sinks=jnp.full(SHAPE.heads, -jnp.inf))

    def stage(previous: Partial[jax.Array], operands: Operands) -> Partial[jax.Array]:
        return Partial(*forward(operands, previous=previous, out_dtype=jnp.float32))

    stage = jax.jit(stage, donate_argnums=0 if donate else ())
    first, *others = (
        operands._replace(bands=jnp.asarray(part))
        for part in split_keys(np.asarray(operands.bands), [400, 431])
    )
    result = Partial(*forward(first, out_dtype=jnp.float32))
    for part in others:
        result = stage(result, part)
    check(judge(operands, default_logits(operands), *result), operands.query.dtype)


def test_accumulates_in_16_bits(rng: np.random.Generator) -> None:
    """A stage that sees nothing leaves the previous result as it is."""
    operands = random_operands(rng)._replace(sinks=jnp.full(SHAPE.heads, -jnp.inf))
    previous = Partial(*forward(operands))
    nothing = operands._replace(bands=jnp.zeros_like(operands.bands))
    assert_same(forward(nothing, previous=previous), previous)


def test_portable_implementation_runs_on_the_gpu(rng: np.random.Generator) -> None:
    operands = random_operands(rng)
    logits = default_logits(operands)
    out, lse = forward(operands, implementation="xla")
    check(judge(operands, logits, out, lse), operands.query.dtype)
