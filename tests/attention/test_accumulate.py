"""`attention_forward` with a previous result: attention to the keys of several calls."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmagi.attention import Partial
from jaxmagi.masks import UNBOUNDED
from tests.cases import FP32_TOLERANCE, FP64_TOLERANCE, random_bands

from . import helpers
from .helpers import Operands, make_inputs, max_error

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM, V_DIM = 2, 30, 40, 4, 2, 8, 12


def make_operands(rng: np.random.Generator, *leading: int, dtype: Any = np.float32) -> Operands:
    """Operands with bands that leave some rows without keys, and with leading axes for vmap."""
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "v_dim": V_DIM, "dtype": dtype}
    x = make_inputs(rng, batch=(*leading, BATCH), q_len=Q_LEN, kv_len=KV_LEN, **sizes)
    bands = [random_bands(rng, Q_LEN // 2, KV_LEN, 4) for _ in range(int(np.prod(leading)))]
    sinks = rng.standard_normal((*leading, HEADS)).astype(x.sinks.dtype)
    bands = np.reshape(bands, (*leading, 1, 4, 6))
    return Operands(*map(jnp.asarray, (x.query, x.key, x.value, bands, sinks)))


def make_previous(rng: np.random.Generator, *leading: int, dtype: Any = np.float32) -> Partial[jax.Array]:
    """Previous results, of which a third of the rows is fully masked."""
    accumulate = np.float64 if dtype == np.float64 else np.float32
    out = rng.standard_normal((*leading, BATCH, Q_LEN, HEADS, V_DIM))
    lse = rng.standard_normal((*leading, BATCH, Q_LEN, HEADS))
    out[..., ::3, :, :], lse[..., ::3, :] = 0, -np.inf
    return Partial(jnp.asarray(out, dtype), jnp.asarray(lse, accumulate))


def forward(
    operands: Operands, previous: Partial[jax.Array] | None = None, **options: Any
) -> Partial[jax.Array]:
    out_dtype = operands.query.dtype if previous is None else previous.out.dtype
    defaults: dict[str, Any] = {"out_dtype": out_dtype, "implementation": None}
    return Partial(*helpers.forward(operands, previous=previous, **(defaults | options)))


def merge(*parts: Partial[jax.Array]) -> Partial[np.ndarray]:
    """Returns the attention to the keys of both parts by the definition, in fp64."""
    outs, lses = (np.stack([np.asarray(x, np.float64) for x in field]) for field in zip(*parts, strict=True))
    outs[np.isneginf(lses)] = 0
    lse = np.logaddexp(*lses)
    weights = np.exp(lses - np.where(np.isneginf(lse), 0, lse))
    return Partial((weights[..., None] * outs).sum(axis=0), lse)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, jnp.bfloat16])
def test_equals_merge(x64: None, rng: np.random.Generator, implementation: str, dtype: Any) -> None:
    """Outputs of masked rows may be anything; some rows are masked in both parts."""
    operands, wide = make_operands(rng, dtype=dtype), np.float64 if dtype == np.float64 else np.float32
    previous = make_previous(rng, dtype=wide)
    previous = previous._replace(out=jnp.where(jnp.isneginf(previous.lse)[..., None], jnp.nan, previous.out))
    run = jax.jit(functools.partial(forward, implementation=implementation))
    got = run(operands, previous)
    part = jax.jit(functools.partial(forward, implementation=implementation, out_dtype=wide))(operands)
    assert np.isneginf(got.lse).any()
    for a, b in zip(got, merge(previous, part), strict=True):
        assert a.dtype == wide
        assert max_error(a, b) <= (FP64_TOLERANCE if dtype == np.float64 else 1e-6)


def test_masked_rows_keep_the_previous_result(rng: np.random.Generator, implementation: str) -> None:
    """Rows stay exactly as they were, with or without sinks; those that were empty stay empty."""
    operands = make_operands(rng, dtype=jnp.bfloat16)
    masked = operands._replace(bands=jnp.zeros_like(operands.bands))
    for dtype in (jnp.bfloat16, jnp.float32):
        previous = make_previous(rng)
        previous = previous._replace(out=previous.out.astype(dtype))
        for a, b in zip(forward(masked, previous, implementation=implementation), previous, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_rounds_once(rng: np.random.Generator, implementation: str) -> None:
    """Both parts meet in float32, also where the results are bfloat16."""
    operands = make_operands(rng, dtype=jnp.bfloat16)
    previous = make_previous(rng)
    previous = previous._replace(out=previous.out.astype(jnp.bfloat16))
    got = forward(operands, previous, implementation=implementation)
    part = forward(operands, implementation=implementation, out_dtype=jnp.float32)
    want = merge(previous, part)
    half_ulp = np.ldexp(1.0, np.frexp(want.out)[1] - 9)
    assert (np.abs(np.asarray(got.out, np.float64) - want.out) <= half_ulp + 1e-6).all()
    assert max_error(got.lse, want.lse) <= 1e-6


def test_stages_are_as_good_as_all_keys_at_once(rng: np.random.Generator, implementation: str) -> None:
    """Sinks in one call only: they count once for every row that sees a key there, here all."""
    operands = make_operands(rng)._replace(
        bands=jnp.asarray([[[0, Q_LEN, 0, KV_LEN, -UNBOUNDED, UNBOUNDED]]], jnp.int32)
    )
    whole = forward(operands, implementation=implementation)
    result = None
    for first in range(0, KV_LEN, 10):
        stage = operands._replace(
            key=operands.key[:, first : first + 10],
            value=operands.value[:, first : first + 10],
            bands=jnp.asarray([[[0, Q_LEN, 0, 10, -UNBOUNDED, UNBOUNDED]]], jnp.int32),
            sinks=operands.sinks if first == 10 else jnp.full(HEADS, -jnp.inf),
        )
        result = forward(stage, result, implementation=implementation)
    assert result is not None
    for a, b in zip(result, whole, strict=True):
        assert max_error(a, b) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    "mapped",
    ["all", "previous", "sinks", "query", "sinks+previous", "query+sinks", "bands+previous"],
)
def test_vmap(rng: np.random.Generator, mapped: str) -> None:
    size = 3
    stacked = {**make_operands(rng, size)._asdict(), "previous": make_previous(rng, size)}
    names = stacked.keys() if mapped == "all" else mapped.split("+")

    def op(x: dict[str, Any]) -> Partial[jax.Array]:
        previous = x["previous"]
        return forward(Operands(*(x[name] for name in Operands._fields)), previous)

    args = {name: x if name in names else jax.tree.map(lambda x: x[0], x) for name, x in stacked.items()}
    got = jax.vmap(op, in_axes=({name: 0 if name in names else None for name in args},))(args)
    for i in range(size):
        one = {
            name: jax.tree.map(operator.itemgetter(i), args[name]) if name in names else args[name]
            for name in args
        }
        for a, b in zip(got, op(one), strict=True):
            assert max_error(a[i], b) <= 1e-6


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_meshes(rng: np.random.Generator, implementation: str, axis_type: AxisType) -> None:
    operands, previous = make_operands(rng), make_previous(rng)
    want = forward(operands, previous, implementation=implementation)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    rows, op = P("data", None, "tensor"), functools.partial(forward, implementation=implementation)
    specs = (Operands(rows, rows, rows, bands=P(), sinks=P("tensor")), Partial(rows, rows))
    mapped = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=True)
    with jax.set_mesh(mesh):
        placed = jax.device_put(
            (operands, previous), jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        )
        results = [jax.jit(function)(*placed) for function in (op, mapped)]
    for result in results:
        for a, b in zip(result, want, strict=True):
            assert max_error(a, b) <= 1e-6
    if axis_type == AxisType.Explicit:
        assert jax.typeof(results[0].out).sharding.spec == P("data", None, "tensor", None)


def test_misuse(rng: np.random.Generator) -> None:
    operands, previous = make_operands(rng), make_previous(rng)
    cases = [
        (
            {"previous": Partial(previous.out[..., 1:], previous.lse)},
            r"previous\.out must be float32\[2, 30, 4, 12\]",
        ),
        (
            {"previous": Partial(previous.out, previous.lse[:, 1:])},
            r"previous\.lse must be float32\[2, 30, 4\]",
        ),
        (
            {"previous": Partial(previous.out.astype(jnp.float16), previous.lse), "out_dtype": jnp.float32},
            r"previous\.out must be float32.*but is float16",
        ),
        ({"sm_margin": -1}, r"sm_margin must be at least 0, but is -1"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            forward(operands, **change)
