"""The custom calls of products with a collective, lowered on a machine that may have no GPU."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, _hopper, _native

from ..custom_calls import Call, custom_calls, lower
from .harness import AXIS, PRODUCTS, mesh_of, on_mesh, spec

RECEIVED = 4096
NATIVE = CollectiveOptions(implementation="native", timeout=5)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts something in place of jaxmagi._cuda on a machine without a GPU."""
    stand_in = types.SimpleNamespace(
        registrations=lambda: {"jaxmagi_all_gather_matmul": {}, "jaxmagi_matmul_reduce_scatter": {}},
        all_gather_matmul_bytes=lambda *sizes: RECEIVED,
        matmul_reduce_scatter_bytes=lambda *sizes: RECEIVED,
        set_memory_limit=lambda ordinal, limit: None,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: ())


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(name: str, x: Any, w: Any, **options: Any) -> list[Call]:
    return custom_calls(lower(on_mesh(PRODUCTS[name], mesh_of(2), options=NATIVE, **options), x, w))


def test_reduce_scatter() -> None:
    (call,) = calls("reduce_scatter", array(3, 20, 32), array(32, 24))
    assert call.target == "jaxmagi_matmul_reduce_scatter"
    assert call.operands == ["3x2x10x16xbf16", "16x24xbf16"]
    assert call.results == ["3x1x10x24xbf16", f"{RECEIVED}xui8"]
    assert call.attributes == {"group_size": 2, "timeout_ms": 5000}
    assert call.arrays == {"groups": [0, 1]}
    assert call.flags == {"transposed_w": False}


def test_all_gather() -> None:
    (call,) = calls("all_gather", array(20, 16), array(16, 48))
    assert call.target == "jaxmagi_all_gather_matmul"
    assert call.operands == ["1x1x10x16xbf16", "16x24xbf16"]
    assert call.results == ["1x2x10x24xbf16", f"{RECEIVED}xui8"]


def test_all_reduce_pads_rows() -> None:
    (call,) = calls("all_reduce", array(5, 32), array(32, 24))
    assert call.operands[0] == "1x2x3x16xbf16"


@pytest.mark.parametrize(
    ("name", "other"), [("all_gather", "matmul_reduce_scatter"), ("reduce_scatter", "all_gather_matmul")]
)
def test_gradients_are_each_other(name: str, other: str) -> None:
    """The cotangent of x is a custom call with transposed weights; so is its own gradient."""
    run = on_mesh(PRODUCTS[name], mesh_of(2), options=NATIVE)
    gradient = jax.grad(lambda x, w: run(x, w).astype(jnp.float32).sum())
    (call,) = custom_calls(lower(gradient, array(16, 32), array(32, 48)))
    assert call.target == f"jaxmagi_{other}"
    assert call.flags == {"transposed_w": True}


def test_a_loop_and_the_groups_of_a_larger_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    product = functools.partial(PRODUCTS["reduce_scatter"].function, axis_name=AXIS, options=NATIVE)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda x: product(x, w), x)

    specs = P(None, "data", AXIS), spec(2, -2)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, ("data", AXIS)))
    (call,) = custom_calls(lower(run, array(5, 16, 32), array(32, 8)))
    assert call.arrays == {"groups": [0, 1, 2, 3]}
    assert call.operands[0] == "1x2x4x16xbf16"


@pytest.mark.parametrize(
    ("x", "w", "options", "reason"),
    [
        ((8, 16), (16, 8), {"dtype": jnp.float32}, "the operands are float32, and the kernel multiplies"),
        ((8, 24), (24, 8), {}, r"must be multiples of 8, but they are \(12, 8\)"),
        ((8, 16), (16, 12), {}, r"must be multiples of 8, but they are \(8, 12\)"),
        ((8, 16), (16, 8), {"wire_dtype": "float32"}, "wire_dtype=float32, but tiles travel as bfloat16"),
        ((8, 16), (16, 8), {"size": 1}, "has size 1, and the kernel is for 2 to 64"),
    ],
)
def test_what_the_kernel_does_not_fit(x: Any, w: Any, options: dict[str, Any], reason: str) -> None:
    dtype, size, wire = (options.get(name) for name in ("dtype", "size", "wire_dtype"))
    given = CollectiveOptions(implementation="native", wire_dtype=wire)
    run = on_mesh(PRODUCTS["reduce_scatter"], mesh_of(size or 2), options=given)
    with pytest.raises(NotImplementedError, match=reason):
        lower(run, *(array(*shape, dtype=dtype or jnp.bfloat16) for shape in (x, w)))


def test_axes_that_are_left_to_the_partitioner() -> None:
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    run = on_mesh(PRODUCTS["all_gather"], mesh, options=NATIVE)
    with pytest.raises(NotImplementedError, match="XLA's partitioner splits the program"):
        lower(run, array(8, 16), array(16, 16))


def test_explicit_axes_that_nothing_maps_over() -> None:
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=kinds, devices=jax.devices()[:4])
    run = on_mesh(PRODUCTS["all_gather"], mesh, options=NATIVE)
    with (
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match="with Explicit mesh axes that no shard_map"),
    ):
        lower(run, array(8, 16), array(16, 16))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [types.SimpleNamespace(compute_capability="9.0", local_hardware_id=i) for i in range(2)]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: gpus)
    monkeypatch.setattr(_native.extension("cuda"), "have_nvlink", lambda a, b: a != b, raising=False)


def is_kernel_by_default(
    name: str, rows: int, inner: int, columns: int, size: int = 2, **options: Any
) -> bool:
    """Returns whether a product is a custom call if the user does not say how it runs.

    Sizes are those of a rank, rows those before a gather or after a reduce-scatter.
    """
    scatters = name != "all_gather"
    x, w = (rows * size, inner * size if scatters else inner), (inner * size, columns)
    run = on_mesh(PRODUCTS[name], mesh_of(size), options=CollectiveOptions(**options))
    w = w if scatters else (inner, columns * size)
    calls = custom_calls(lower(run, array(*x), array(*w)))
    assert len(calls) <= 1
    return bool(calls)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "rows", "inner", "columns", "is_kernel"),
    [
        ("all_gather", 4096, 8192, 5120, True),
        ("all_gather", 4096, 8192, 5128, False),  # the transfer is short beside the product
        ("all_gather", 4096, 1024, 2048, True),
        ("all_gather", 4096, 1016, 2048, False),  # fewer than were measured
        ("all_gather", 4096, 1024, 2040, False),
        ("reduce_scatter", 4096, 5120, 8192, True),
        ("reduce_scatter", 4096, 5128, 8192, False),
        ("reduce_scatter", 4096, 1024, 2048, True),
        ("reduce_scatter", 1024, 4096, 4096, True),  # 128 tiles
        ("reduce_scatter", 768, 4096, 4096, False),
        ("reduce_scatter", 2192, 4096, 4096, True),  # 0.951 of its tiles filled
        ("reduce_scatter", 2160, 4096, 4096, False),
        ("all_reduce", 4096, 4096, 4096, False),
    ],
)
def test_which_products_are_kernels_by_default(
    name: str, rows: int, inner: int, columns: int, is_kernel: bool
) -> None:
    assert is_kernel_by_default(name, rows, inner, columns) == is_kernel


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "options", [{"size": 4}, {"wire_dtype": "float32"}, {"implementation": "xla"}], ids=str
)
def test_other_products_are_plain_by_default(name: str, options: dict[str, Any]) -> None:
    assert not is_kernel_by_default(name, 4096, 4096, 4096, **options)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_groups_beside_them_are_plain_by_default(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(kind, AxisType.Auto), devices=jax.devices()[:4])
    product = functools.partial(PRODUCTS["reduce_scatter"].function, axis_name=AXIS)
    axes = {AXIS} if kind == AxisType.Explicit else {"data", AXIS}
    run = jax.shard_map(
        product, mesh=mesh, in_specs=(P(None, AXIS), spec(2, -2)), out_specs=P(AXIS), axis_names=axes
    )
    with jax.set_mesh(mesh):
        assert custom_calls(lower(run, array(8192, 8192), array(8192, 4096))) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("lack", ["NVLink", "one process", "two GPUs", "the allocator", "the function"])
def test_devices_decide_too(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = _native.extension("cuda")
    assert is_kernel_by_default("reduce_scatter", 4096, 4096, 4096)
    if lack == "NVLink":
        monkeypatch.setattr(extension, "have_nvlink", lambda a, b: False)
    elif lack == "the function":
        monkeypatch.delattr(extension, "have_nvlink")
    elif lack == "one process":
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    elif lack == "the allocator":
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    else:
        gpus = _hopper.local_gpus()[:1]
        monkeypatch.setattr(_hopper, "local_gpus", lambda: gpus)
    assert not is_kernel_by_default("reduce_scatter", 4096, 4096, 4096)


def test_without_a_gpu_and_all_to_all() -> None:
    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="cannot run on platform cpu: there is no compiled code for it"
    ):
        on_mesh(PRODUCTS["reduce_scatter"], mesh_of(2), options=NATIVE)(x, w)
    with pytest.raises(NotImplementedError, match='but for matmul_all_to_all, "native"'):
        on_mesh(PRODUCTS["all_to_all"], mesh_of(2), options=NATIVE)(x, w)
