"""The CPU FFI handlers called directly, against the dense float64 reference."""

import dataclasses
import importlib
import itertools
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jaxmagi import _native
from jaxmagi.attention._reference import attention_reference, attention_reference_vjp
from jaxmagi.masks import UNBOUNDED
from tests.cases import FP32_TOLERANCE, random_bands

from .helpers import max_error

FORWARD, BACKWARD = "jaxmagi_attention_forward_test", "jaxmagi_attention_backward_test"


def _cpu() -> types.ModuleType:
    return importlib.import_module("jaxmagi._cpu")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """Registers the handlers under names of their own: the package registers them under the real ones."""
    if not _native.has_handler("jaxmagi_attention_forward", "cpu"):
        pytest.skip("the compiled extension jaxmagi._cpu is missing")
    for name, handler in _cpu().registrations().items():
        jax.ffi.register_ffi_target(f"{name}_test", handler, platform="cpu")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Operands of one attention call; ``scale`` and ``soft_cap`` are attributes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    bands: np.ndarray
    sinks: np.ndarray
    scale: float
    soft_cap: float = 0.0


def make_inputs(
    rng: np.random.Generator,
    bands: ArrayLike,
    q_shape: tuple[int, int, int, int],
    kv_shape: tuple[int, int, int],
    v_dim: int | None = None,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Inputs:
    """Unit-normal inputs under bands [C, 6] or [B, C, 6]."""
    *rows, heads, dim = q_shape
    v_dim = dim if v_dim is None else v_dim
    bands = np.asarray(bands, np.int32)
    return Inputs(
        q=rng.standard_normal(q_shape),
        k=rng.standard_normal((*kv_shape, dim)),
        v=rng.standard_normal((*kv_shape, v_dim)),
        dout=rng.standard_normal((*rows, heads, v_dim)),
        bands=bands if bands.ndim == 3 else bands[None],
        sinks=rng.standard_normal(heads) if sinks else np.full(heads, -np.inf),
        scale=dim**-0.5,
        soft_cap=soft_cap,
    )


def cast(inputs: Inputs, dtype: DTypeLike) -> Inputs:
    """Rounds to ``dtype`` and back, so that the reference sees what the handler sees."""
    rounded = {
        name: np.asarray(getattr(inputs, name), dtype).astype(np.float64) for name in ("q", "k", "v", "dout")
    }
    return dataclasses.replace(inputs, **rounded)


def reference(inputs: Inputs) -> dict[str, np.ndarray]:
    """Outputs and gradients by dense float64 attention."""
    options = {"scale": inputs.scale, "logits_soft_cap": inputs.soft_cap or None, "sinks": inputs.sinks}
    operands = (inputs.q, inputs.k, inputs.v, inputs.bands)
    out, lse = attention_reference(*operands, **options)
    grads = attention_reference_vjp(*operands, inputs.dout, **options)
    delta = (out * inputs.dout).sum(-1)
    return {"out": out, "lse": lse, "delta": delta, "dq": grads.query, "dk": grads.key, "dv": grads.value}


def accumulator(dtype: DTypeLike) -> DTypeLike:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def operands(inputs: Inputs, dtype: DTypeLike) -> list[jax.Array]:
    return [*(jnp.asarray(x, dtype) for x in (inputs.q, inputs.k, inputs.v)), jnp.asarray(inputs.bands)]


def attributes(inputs: Inputs) -> dict[str, np.float64]:
    return {"scale": np.float64(inputs.scale), "soft_cap": np.float64(inputs.soft_cap)}


def call_forward(inputs: Inputs, dtype: DTypeLike, out_dtype: DTypeLike | None = None) -> list[np.ndarray]:
    rows = inputs.q.shape[:3]
    out = jax.ShapeDtypeStruct((*rows, inputs.v.shape[3]), out_dtype or dtype)
    call = jax.ffi.ffi_call(FORWARD, [out, jax.ShapeDtypeStruct(rows, accumulator(dtype))])
    sinks = jnp.asarray(inputs.sinks, accumulator(dtype))
    return [np.asarray(x) for x in call(*operands(inputs, dtype), sinks, **attributes(inputs))]


def call_backward(
    inputs: Inputs, lse: np.ndarray, delta: np.ndarray, dtype: DTypeLike, grad_dtype: DTypeLike | None = None
) -> list[np.ndarray]:
    grads = [jax.ShapeDtypeStruct(x.shape, grad_dtype or dtype) for x in (inputs.q, inputs.k, inputs.v)]
    rows = [jnp.asarray(inputs.dout, dtype), *(jnp.asarray(x, accumulator(dtype)) for x in (lse, delta))]
    call = jax.ffi.ffi_call(BACKWARD, grads)
    return [np.asarray(x) for x in call(*operands(inputs, dtype), *rows, **attributes(inputs))]


def run(
    inputs: Inputs,
    want: dict[str, np.ndarray],
    dtype: DTypeLike = jnp.float32,
    result: DTypeLike | None = None,
) -> dict[str, np.ndarray]:
    """The results of both handlers; the backward pass gets lse and delta from ``want``."""
    out, lse = call_forward(inputs, dtype, result)
    dq, dk, dv = call_backward(inputs, want["lse"], want["delta"], dtype, result)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    for name, x in got.items():
        assert max_error(x, want[name]) <= tolerance, name


def assert_equal(runs: list[dict[str, np.ndarray]]) -> None:
    for other in runs[1:]:
        assert all(np.array_equal(runs[0][name], other[name]) for name in other)


def check(inputs: Inputs, dtype: DTypeLike = jnp.float32, tolerance: float = FP32_TOLERANCE) -> None:
    """Compares both handlers, with results in the accumulation type, to the reference."""
    inputs = cast(inputs, dtype)
    want = reference(inputs)
    got = run(inputs, want, dtype, accumulator(dtype))
    assert_close(got, want, tolerance)
    empty = np.isneginf(want["lse"])
    assert not np.any(got["out"][empty]) and not np.any(got["dq"][empty])


@pytest.mark.parametrize("q_len", [1, 3, 17, 64, 130, 300])
@pytest.mark.parametrize("kv_len", [1, 5, 64, 131, 520])
def test_random_bands(rng: np.random.Generator, q_len: int, kv_len: int) -> None:
    for count in (1, 4, 9):
        bands = random_bands(rng, q_len, kv_len, count)
        check(make_inputs(rng, bands, (1, q_len, 2, 16), (1, kv_len, 1)))


@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (3, 7), (40, 24), (64, 80), (128, 128), (192, 128)])
def test_head_dims(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    bands = random_bands(rng, 100, 150, 4)
    check(make_inputs(rng, bands, (1, 100, 2, dim), (1, 150, 2), v_dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6)])
def test_grouped_heads_and_batch(rng: np.random.Generator, heads: int, kv_heads: int) -> None:
    bands = np.stack([random_bands(rng, 90, 70, 5) for _ in range(3)])
    check(make_inputs(rng, bands, (3, 90, heads, 8), (3, 70, kv_heads)))
    check(make_inputs(rng, bands[:1], (3, 90, heads, 8), (3, 70, kv_heads)))


@pytest.mark.parametrize("soft_cap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_soft_cap_and_sinks(rng: np.random.Generator, soft_cap: float, sinks: bool) -> None:
    bands = random_bands(rng, 120, 140, 5)
    check(make_inputs(rng, bands, (1, 120, 4, 16), (1, 140, 2), soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_float64(x64: None, rng: np.random.Generator, soft_cap: float) -> None:
    bands = random_bands(rng, 200, 330, 6)
    inputs = make_inputs(rng, bands, (1, 200, 4, 24), (1, 330, 2), 20, soft_cap=soft_cap, sinks=True)
    check(inputs, jnp.float64, 1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types(rng: np.random.Generator, dtype: DTypeLike) -> None:
    bands = random_bands(rng, 100, 110, 4)
    inputs = make_inputs(rng, bands, (1, 100, 2, 32), (1, 110, 2), 24)
    check(inputs, dtype)
    inputs = cast(inputs, dtype)
    want = reference(inputs)
    halves, singles = run(inputs, want, dtype), run(inputs, want, dtype, jnp.float32)
    for name in ("out", "dq", "dk", "dv"):
        assert halves[name].dtype == dtype
        assert np.array_equal(halves[name], singles[name].astype(dtype))


def test_overlapping_bands_count_once_each(rng: np.random.Generator) -> None:
    whole = [0, 70, 0, 90, -UNBOUNDED, UNBOUNDED]
    bands = [whole, [10, 60, 5, 80, -20, 30], whole]
    check(make_inputs(rng, bands, (1, 70, 2, 16), (1, 90, 1)))


def test_many_small_bands(rng: np.random.Generator) -> None:
    edges = np.unique(rng.integers(0, 700, 300))
    bands = [[a, b, a, b, -UNBOUNDED, 0] for a, b in itertools.pairwise(edges)]
    check(make_inputs(rng, bands, (1, 700, 2, 16), (1, 700, 1)))


def test_bands_beyond_the_operands_are_cut(rng: np.random.Generator) -> None:
    inside = make_inputs(rng, [[0, 40, 0, 50, -60, 60]], (1, 40, 1, 8), (1, 50, 1))
    huge = 2**31 - 1
    bands = np.array([[[-5, huge, -7, huge, -huge - 1, huge], [3, 1, 0, 9, 0, 0], [0] * 6]], np.int32)
    beyond = dataclasses.replace(inside, bands=bands)
    want = reference(inside)
    assert_equal([run(inputs, want) for inputs in (inside, beyond)])


def test_nothing_leaks_from_masked_rows(rng: np.random.Generator) -> None:
    bands = [[10, 75, 20, 90, -8, 25], [80, 150, 200, 330, -UNBOUNDED, 120]]
    inputs = make_inputs(rng, bands, (1, 170, 2, 16), (1, 400, 1))
    want = reference(inputs)
    masked_keys, masked_rows = ~want["dv"].any((0, 2, 3)), np.isneginf(want["lse"]).all((0, 2))
    assert masked_keys.any() and masked_rows.any()
    for poison in (np.nan, np.inf):
        for array in (inputs.k, inputs.v):
            array[:, masked_keys] = poison
        for array in (inputs.q, inputs.dout, want["delta"]):
            array[:, masked_rows] = poison
        assert_close(run(inputs, want), want, FP32_TOLERANCE)


def nan_rows(x: np.ndarray) -> list[int]:
    """Returns the positions on axis 1 that hold NaN."""
    return np.flatnonzero(np.isnan(x).any(axis=tuple(i for i in range(x.ndim) if i != 1))).tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_reach_of_nan_in_a_value(rng: np.random.Generator, poison: float) -> None:
    """It reaches outputs of all rows of the tiles of 64 where a row sees it; gradients only of such rows."""
    inputs = make_inputs(rng, [[0, 100, 0, 100, -UNBOUNDED, 0]], (1, 100, 1, 8), (1, 100, 1))
    want = reference(inputs)
    inputs.v[0, 80] = poison
    inputs.v[0, 80, :, ::2] *= -1  # so that its product with a cotangent is inf - inf
    inputs.dout[:] = 1
    got = run(inputs, want)
    assert max_error(got["lse"], want["lse"]) <= FP32_TOLERANCE
    assert set(range(64, 80)) <= set(nan_rows(got["out"])) <= set(range(64, 100))
    assert nan_rows(got["dq"]) == list(range(80, 100))
    assert nan_rows(got["dk"]) == [80]
    assert nan_rows(got["dv"]) == []


def test_reach_of_nan_in_a_key(rng: np.random.Generator) -> None:
    """It reaches the outputs of the rows that see it, and the gradients of all rows of their tiles of 64."""
    inputs = make_inputs(rng, [[0, 100, 0, 100, -UNBOUNDED, 0]], (1, 100, 1, 8), (1, 100, 1))
    want = reference(inputs)
    inputs.k[0, 80] = np.nan
    got = run(inputs, want)
    assert nan_rows(got["lse"]) == nan_rows(got["out"]) == list(range(80, 100))
    assert nan_rows(got["dq"]) == list(range(64, 100))
    assert nan_rows(got["dk"]) == nan_rows(got["dv"]) == [80]


def check_fully_masked(inputs: Inputs) -> None:
    rows = inputs.q.shape[:3]
    got = run(inputs, {"lse": np.full(rows, -np.inf), "delta": np.zeros(rows)})
    assert np.all(np.isneginf(got.pop("lse")))
    assert not any(np.any(x) for x in got.values())


@pytest.mark.parametrize("capacity", [0, 8])
@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((1, 5, 2, 4), (1, 6, 1)),
        ((1, 5, 2, 4), (1, 0, 1)),
        ((2, 0, 2, 4), (2, 3, 1)),
        ((0, 5, 2, 4), (0, 6, 1)),
    ],
)
def test_no_bands_and_empty_axes(
    q_shape: tuple[int, int, int, int], kv_shape: tuple[int, int, int], capacity: int
) -> None:
    rng = np.random.default_rng(0)
    check_fully_masked(make_inputs(rng, np.zeros((1, capacity, 6)), q_shape, kv_shape))


def test_no_head_dims(rng: np.random.Generator) -> None:
    inputs = make_inputs(rng, [[0, 70, 0, 90, -UNBOUNDED, 9]], (1, 70, 2, 4), (1, 90, 1), 3)
    check(dataclasses.replace(inputs, q=inputs.q[..., :0], k=inputs.k[..., :0]))
    check(dataclasses.replace(inputs, v=inputs.v[..., :0], dout=inputs.dout[..., :0]))


def test_unequal_bands_per_example(rng: np.random.Generator) -> None:
    bands = np.zeros((4, 9, 6), np.int32)
    for example, count in enumerate((9, 0, 1, 4)):
        if count:
            bands[example, :count] = random_bands(rng, 300, 520, count)
    check(make_inputs(rng, bands, (4, 300, 2, 8), (4, 520, 1)))


@pytest.fixture(params=["avx512", "avx2", "generic"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the kernels of each set in turn."""
    if request.param not in _cpu().instruction_sets():
        pytest.skip(f"no {request.param} on this machine")
    _cpu().use_instruction_set(request.param)
    yield request.param
    _cpu().use_instruction_set(_cpu().instruction_sets()[0])


@pytest.mark.usefixtures("instruction_set")
def test_every_instruction_set(x64: None, rng: np.random.Generator) -> None:
    bands = random_bands(rng, 150, 290, 5)
    for dtype, tolerance in ((jnp.float32, FP32_TOLERANCE), (jnp.float64, 1e-13)):
        for dim, v_dim in ((24, 33), (64, 64)):
            inputs = make_inputs(rng, bands, (1, 150, 2, dim), (1, 290, 1), v_dim, 4.0, True)
            check(inputs, dtype, tolerance)
    inputs = make_inputs(rng, bands, (1, 150, 2, 32), (1, 290, 1))
    for dtype in (jnp.bfloat16, jnp.float16):
        check(inputs, dtype)


def mean_of_two_values(
    first: np.ndarray, second: np.ndarray, out_dtype: DTypeLike, sink: float
) -> np.ndarray:
    """Averages halves [n], in rows of 64, by attention with equal scores: exact in float32 without a sink."""
    first, second = (x.reshape(1, -1, 1, 64) for x in (first, second))
    rows = first.shape[1]
    values = np.stack([first, second], axis=2).reshape(1, 2 * rows, 1, 64)
    bands = [[r, r + 1, 2 * r, 2 * r + 2, -UNBOUNDED, UNBOUNDED] for r in range(rows)]
    inputs = make_inputs(np.random.default_rng(0), bands, (1, rows, 1, 1), (1, 2 * rows, 1), 64)
    inputs = dataclasses.replace(inputs, q=0 * inputs.q, v=values, sinks=np.array([sink]))
    return call_forward(inputs, jnp.float16, out_dtype)[0].reshape(-1)


def one_key(value: np.ndarray) -> Inputs:
    """Inputs whose output is ``value``."""
    inputs = make_inputs(np.random.default_rng(0), [[0, 1, 0, 1, 0, 0]], (1, 1, 1, 1), (1, 1, 1))
    return dataclasses.replace(inputs, q=0 * inputs.q, v=value, dout=value)


@pytest.mark.usefixtures("instruction_set")
def test_all_float16_values() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    magnitudes = bits & 0x7FFF
    finite = bits[magnitudes < 0x7C00].view(np.float16)
    above = np.nextafter(finite, np.float16(65504))
    # Read exactly; written to the nearest, with ties between all neighbours, and into the subnormals.
    assert np.array_equal(mean_of_two_values(finite, finite, jnp.float32, -np.inf), finite.astype(np.float32))
    for sink in (-np.inf, 0.0, 5.0, 9.0):
        exact = mean_of_two_values(finite, above, jnp.float32, sink)
        assert np.array_equal(mean_of_two_values(finite, above, jnp.float16, sink), exact.astype(np.float16))
    between = (finite.astype(np.float32) + above.astype(np.float32)) / 2
    assert np.array_equal(mean_of_two_values(finite, above, jnp.float32, -np.inf), between)

    others = bits[magnitudes >= 0x7C00].view(np.float16).reshape(1, 1, 1, -1)
    inputs = one_key(others)
    for dtype in (jnp.float16, jnp.float32):
        out, _ = call_forward(inputs, jnp.float16, dtype)
        assert np.array_equal(out, others.astype(dtype), equal_nan=True)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_float16_overflows_as_in_numpy(factor: float) -> None:
    """dv is dout · exp(-lse), which may exceed 65504."""
    bits = np.arange(2**16, dtype=np.uint16)
    inputs = one_key(bits[(bits & 0x7FFF) < 0x7C00].view(np.float16).reshape(1, 1, 1, -1))
    rows = (np.full((1, 1, 1), -np.log(factor)), np.zeros((1, 1, 1)))
    single = call_backward(inputs, *rows, jnp.float16, jnp.float32)[2]
    with np.errstate(over="ignore"):
        want = single.astype(np.float16)
    assert np.isinf(want).any() == (factor > 1)
    assert np.array_equal(call_backward(inputs, *rows, jnp.float16)[2], want)


def test_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="instruction set mmx"):
        _cpu().use_instruction_set("mmx")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("instruction_set")
def test_scores_of_minus_infinity_are_like_none(rng: np.random.Generator, sinks: bool) -> None:
    inputs = make_inputs(rng, [[0, 4, 0, 5, -UNBOUNDED, 0]], (1, 6, 1, 1), (1, 5, 1), sinks=sinks)
    inputs.q[:], inputs.k[:] = 1.0, -np.inf
    check_fully_masked(inputs)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_reruns_are_bitwise_equal(rng: np.random.Generator, kv_heads: int) -> None:
    """One key head makes the threads take turns on dQ of the same rows; with four they seldom meet."""
    bands = [[0, 900, 0, 1100, -UNBOUNDED, 300], [100, 800, 500, 1100, 301, UNBOUNDED]]
    inputs = make_inputs(rng, bands, (1, 900, 4, 32), (1, 1100, kv_heads))
    want = reference(inputs)
    assert_equal([run(inputs, want) for _ in range(4)])


def test_devices_run_side_by_side(rng: np.random.Generator) -> None:
    """All host devices are in their handlers at once, between collectives: nothing waits for a busy pool."""
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("device")
    bands = jnp.asarray([[[0, 300, 0, 300, -UNBOUNDED, 0]]], jnp.int32)
    rows = jax.ShapeDtypeStruct((1, 300, 4), jnp.float32)
    operand = jax.ShapeDtypeStruct((1, 300, 4, 16), jnp.float32)
    forward = jax.ffi.ffi_call(FORWARD, [operand, rows])
    backward = jax.ffi.ffi_call(BACKWARD, [operand] * 3)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def step(x: jax.Array) -> jax.Array:
        for _ in range(3):
            attributes = {"scale": np.float64(0.25), "soft_cap": np.float64(0.0)}
            out, lse = forward(x, x, x, bands, jnp.full((4,), -jnp.inf), **attributes)
            grads = backward(x, x, x, bands, out, lse, lse, **attributes)
            x = x + jax.lax.pmean(out + sum(grads), "device")
        return x

    x = jnp.asarray(rng.standard_normal((8, 300, 4, 16)), jnp.float32)
    runs = [np.asarray(step(x)) for _ in range(5)]
    assert np.all(np.isfinite(runs[0]))
    assert all(np.array_equal(runs[0], run) for run in runs[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((1, 6, 2, 5))}, r"q and k must agree.*q \[1, 5, 2, 4\], k \[1, 6, 2, 5\]"),
        ({"v": np.zeros((1, 7, 2, 4))}, r"k and v must agree.*v \[1, 7, 2, 4\]"),
        ({"k": np.zeros((1, 6, 3, 4)), "v": np.zeros((1, 6, 3, 4))}, "must be a multiple"),
        ({"bands": np.zeros((2, 1, 6), np.int32)}, r"bands must have shape \[1 or 1, count, 6\], got \[2, "),
        ({"bands": np.zeros((1, 1, 6), np.float32)}, "bands must be s32, got f32"),
        ({"bands": np.zeros((1, 1, 6), np.uint8)}, r"bands must be s32, got XLA type \d+"),
        ({"sinks": np.zeros(3)}, r"sinks must have shape \[2\], got \[3\]"),
        ({"k": np.zeros((1, 6, 0, 4)), "v": np.zeros((1, 6, 0, 4))}, r"must be a multiple.*k \[1, 6, 0, 4\]"),
        ({"soft_cap": -2.0}, "soft_cap must be a positive normal float, or 0 for none, got -2"),
        ({"soft_cap": np.inf}, "soft_cap .* got inf"),
        ({"soft_cap": np.nan}, "soft_cap .* got nan"),
        ({"soft_cap": 1e-50}, "soft_cap .* got 1e-50"),
        ({"soft_cap": 1e39}, r"soft_cap .* got 1e\+39"),
    ],
)
def test_wrong_buffers_are_named(change: dict[str, np.ndarray], message: str) -> None:
    inputs = make_inputs(np.random.default_rng(0), np.zeros((1, 1, 6)), (1, 5, 2, 4), (1, 6, 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_forward(dataclasses.replace(inputs, **change), jnp.float32)


def test_wrong_number_of_buffers() -> None:
    inputs = make_inputs(np.random.default_rng(0), np.zeros((1, 1, 6)), (1, 5, 2, 4), (1, 6, 2))
    rows = jax.ShapeDtypeStruct((1, 5, 2), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention_forward: expected 5 operands, got 4"):
        jax.ffi.ffi_call(FORWARD, [rows, rows])(*operands(inputs, jnp.float32), **attributes(inputs))
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention_forward: expected 2 results, got 1"):
        jax.ffi.ffi_call(FORWARD, [rows])(*operands(inputs, jnp.float32), jnp.zeros(2), **attributes(inputs))
