"""The custom calls of products with a collective, lowered on a machine that may have no GPU."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, _hopper, _native
from jaxmagi.overlap import _choice

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


def default_targets(name: str, x: Any, w: Any, size: int = 2, **options: Any) -> list[str]:
    """The custom calls of a product of which the user has not said how it runs."""
    run = on_mesh(PRODUCTS[name], mesh_of(size), options=CollectiveOptions(**options))
    return [call.target for call in custom_calls(lower(run, x, w))]


@pytest.mark.usefixtures("two_gpus")
def test_products_that_pay_are_kernels_by_default() -> None:
    assert default_targets("all_gather", array(8192, 4096), array(4096, 2 * 5120)) == [
        "jaxmagi_all_gather_matmul"
    ]
    assert default_targets("reduce_scatter", array(8192, 2 * 5120), array(2 * 5120, 4096)) == [
        "jaxmagi_matmul_reduce_scatter"
    ]
    assert default_targets("all_reduce", array(8192, 4096), array(4096, 4096)) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((8192, 2 * 5128), (2 * 5128, 4096), {}),  # the transfer is short beside the product
        ((1024, 2 * 4096), (2 * 4096, 4096), {}),  # 64 tiles
        ((64, 130, 2 * 4096), (2 * 4096, 4096), {}),  # tiles of 65 rows each
        ((8192, 4 * 4096), (4 * 4096, 4096), {"size": 4}),  # more ranks than measured
        ((8192, 2 * 4096), (2 * 4096, 4100), {}),
        ((8192, 2 * 4096), (2 * 4096, 4096), {"wire_dtype": "float32"}),
        ((8192, 2 * 4096), (2 * 4096, 4096), {"implementation": "xla"}),
    ],
)
def test_other_products_are_plain_by_default(x: Any, w: Any, options: dict[str, Any]) -> None:
    assert default_targets("reduce_scatter", array(*x), array(*w), **options) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("lack", ["NVLink", "one process", "two GPUs"])
def test_devices_decide_too(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = array(8192, 2 * 4096), array(2 * 4096, 4096)
    assert len(default_targets("reduce_scatter", x, w)) == 1
    if lack == "NVLink":
        monkeypatch.setattr(_native.extension("cuda"), "have_nvlink", lambda a, b: False)
    elif lack == "one process":
        monkeypatch.setattr(_choice.jax, "process_count", lambda: 2)
    else:
        gpus = [types.SimpleNamespace(compute_capability="9.0", local_hardware_id=0)]
        monkeypatch.setattr(_hopper, "local_gpus", lambda: gpus)
    assert default_targets("reduce_scatter", x, w) == []


def test_without_a_gpu_and_all_to_all() -> None:
    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="cannot run on platform cpu: there is no compiled code for it"
    ):
        on_mesh(PRODUCTS["reduce_scatter"], mesh_of(2), options=NATIVE)(x, w)
    with pytest.raises(NotImplementedError, match='but for matmul_all_to_all, "native"'):
        on_mesh(PRODUCTS["all_to_all"], mesh_of(2), options=NATIVE)(x, w)
