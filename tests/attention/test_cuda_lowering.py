"""The custom calls of attention for GPUs, lowered on a machine that may have none."""

import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import _hopper, _native, masks
from jaxmagi.attention import Partial, _cuda, attention
from jaxmagi.masks import AttnMask

from ..custom_calls import Call, custom_calls, lower
from .helpers import backward, forward

ROWS, WORDS = 128, 77
BACKWARD_TILE, WORKSPACE = (64, 128), 16 * 99
SCHEDULE_OF_KEYS = f"{_cuda.TILE_SCHEDULE} by keys"


class Gpu(types.SimpleNamespace):
    """The properties of a device that jaxmagi reads."""

    compute_capability: str
    device_kind: str


HOPPER = Gpu(compute_capability="9.0", device_kind="NVIDIA H200")


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something in place of jaxmagi._cuda, and a machine without a GPU."""
    stand_in = types.SimpleNamespace(
        registrations=lambda: {_cuda.TILE_SCHEDULE: {}, _cuda.FORWARD: {}, _cuda.BACKWARD: {}},
        forward_tile=lambda dim, v_dim: (ROWS, 128) if max(dim, v_dim) <= 256 else None,
        backward_tile=lambda dim, v_dim: BACKWARD_TILE,
        tile_schedule_workspace_words=lambda num_masks, capacity, num_tiles: WORDS,
        backward_workspace_bytes=lambda *sizes: WORKSPACE,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: ())


def _with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> Iterator[None]:
    monkeypatch.setattr(_hopper, "local_gpus", lambda: gpus)
    _cuda._warn_once.cache_clear()
    yield
    _cuda._warn_once.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU that the kernels are for."""
    yield from _with_gpus(monkeypatch, HOPPER)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU that the kernels are for, and one that they are not for."""
    yield from _with_gpus(monkeypatch, HOPPER, Gpu(compute_capability="8.0", device_kind="NVIDIA A100"))


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(
    dim: int = 128, v_dim: int = 128, *, q_len: int = 300, kv_len: int = 400, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    return {
        "q": array(2, q_len, 8, dim, dtype=dtype),
        "k": array(2, kv_len, 2, dim, dtype=dtype),
        "v": array(2, kv_len, 2, v_dim, dtype=dtype),
        "bands": array(1, 5, 6, dtype=jnp.int32),
        "sinks": array(8, dtype=jnp.float32),
    }


def calls_in(text: str) -> dict[str, Call]:
    """The custom calls of a program, at most one for each target, and one schedule of either kind."""
    found = {}
    for call in custom_calls(text):
        name = SCHEDULE_OF_KEYS if call.flags.get("by_keys") else call.target
        assert name not in found
        found[name] = call
    return found


def forward_text(arrays: dict[str, Any], **options: Any) -> str:
    previous = arrays.get("previous")
    static = {"scale": 0.125} | options
    tensors = [x for name, x in arrays.items() if name != "previous"]
    return lower(lambda x, previous: forward(x, previous=previous, **static), tensors, previous)


def backward_text(arrays: dict[str, Any], **options: Any) -> str:
    """A program with `attention_backward` of the operands of `attention_forward`."""
    q, k, v, bands, _ = arrays.values()
    rows = array(*q.shape[:3], dtype=jnp.float32)
    tensors = [q, k, v, bands, array(*q.shape[:3], v.shape[3], dtype=q.dtype), rows, rows]
    static = {"scale": 0.125} | options
    return lower(lambda x: backward(x, **static), tensors)


BOTH = pytest.mark.parametrize("text_of", [forward_text, backward_text])


def forward_calls(arrays: dict[str, Any], **options: Any) -> tuple[Call, Call]:
    """The two calls of `attention_forward`: the tile schedule and the kernel."""
    calls = calls_in(forward_text(arrays, **options))
    assert calls.keys() == {_cuda.TILE_SCHEDULE, _cuda.FORWARD}
    return calls[_cuda.TILE_SCHEDULE], calls[_cuda.FORWARD]


@pytest.mark.parametrize("implementation", ["ffi", None])
@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16")])
def test_schedule_and_kernel(implementation: str | None, dtype: Any, name: str) -> None:
    schedule, kernel = forward_calls(
        operands(192, 128, dtype=dtype), implementation=implementation, soft_cap=7.5
    )
    assert schedule.operands == ["1x5x6xi32"]
    assert schedule.results == ["1x5x8xi32", "1x3x8xi32", f"{WORDS}x2xi32"]
    assert schedule.attributes == {"q_len": 300, "kv_len": 400, "own_len": 400, "dim": 192, "v_dim": 128}
    tensors = [f"2x300x8x192x{name}", f"2x400x2x192x{name}", f"2x400x2x128x{name}"]
    assert kernel.operands == [*tensors, "1x5x8xi32", "1x3x8xi32", "8xf32"]
    assert kernel.results == [f"2x300x8x128x{name}", "2x300x8xf32", "1xi32"]
    assert kernel.attributes == {"scale": 0.125, "soft_cap": 7.5, "sm_margin": 0}
    assert kernel.aliases == {}


def test_masks_of_their_own() -> None:
    schedule, kernel = forward_calls(operands() | {"bands": array(2, 5, 6, dtype=jnp.int32)})
    assert schedule.results[:2] == kernel.operands[3:5] == ["2x5x8xi32", "2x3x8xi32"]


def test_head_dimensions_become_multiples_of_eight() -> None:
    text = forward_text(operands(100, 33))
    calls = calls_in(text)
    schedule, kernel = calls[_cuda.TILE_SCHEDULE], calls[_cuda.FORWARD]
    assert (schedule.attributes["dim"], schedule.attributes["v_dim"]) == (104, 40)
    assert kernel.operands[:3] == ["2x300x8x104xbf16", "2x400x2x104xbf16", "2x400x2x40xbf16"]
    assert kernel.results[0] == "2x300x8x40xbf16"
    assert text.splitlines()[1].endswith(
        '-> (tensor<2x300x8x33xbf16> {jax.result_info = "result[0]"}, '
        'tensor<2x300x8xf32> {jax.result_info = "result[1]"}) {'
    )


@pytest.mark.parametrize(("scale", "given"), [(-0.25, 0.25), (0.0, 1.0)])
@pytest.mark.parametrize(
    ("text_of", "target", "factors"), [(forward_text, _cuda.FORWARD, 1), (backward_text, _cuda.BACKWARD, 2)]
)
def test_scale_is_positive(scale: float, given: float, text_of: Any, target: str, factors: int) -> None:
    """The query, and its gradient, get the sign."""
    text = text_of(operands(), scale=scale)
    assert calls_in(text)[target].attributes["scale"] == given
    assert text.count("stablehlo.multiply") == factors
    assert "stablehlo.multiply" not in text_of(operands())


@pytest.mark.parametrize(("out_dtype", "name"), [(jnp.float32, "f32"), (jnp.bfloat16, "bf16")])
def test_accumulate(out_dtype: Any, name: str) -> None:
    previous = Partial(array(2, 300, 8, 128, dtype=out_dtype), array(2, 300, 8, dtype=jnp.float32))
    _, kernel = forward_calls(operands() | {"previous": previous}, out_dtype=out_dtype, sm_margin=9)
    assert kernel.operands[6:] == kernel.results[:2] == [f"2x300x8x128x{name}", "2x300x8xf32"]
    assert kernel.aliases == {6: 0, 7: 1}
    assert kernel.attributes["sm_margin"] == 9


def test_accumulate_is_padded_too() -> None:
    previous = Partial(array(2, 300, 8, 33), array(2, 300, 8, dtype=jnp.float32))
    _, kernel = forward_calls(operands(100, 33) | {"previous": previous})
    assert kernel.operands[6] == kernel.results[0] == "2x300x8x40xbf16"


UNSUPPORTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dtype": jnp.float32}, {}, r"the operands are float32, and the kernels are for bfloat16 and float16"),
    ({"dim": 300}, {}, r"head dimensions 300 \(query, key\) and 128 \(value\)"),
    ({"v_dim": 257}, {}, r"head dimensions 128 \(query, key\) and 257 \(value\)"),
    ({}, {"scale": 1e-50}, r"scale 1e-50"),
    ({}, {"scale": 1e30, "soft_cap": 1e-30}, r"scale 1e\+30 and soft cap 1e-30"),
]


@BOTH
@pytest.mark.parametrize(("shape", "options", "message"), UNSUPPORTED)
def test_unsupported(text_of: Any, shape: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"jaxmagi_attention_\w+ cannot run on platform cuda: .*{message}"
    ):
        text_of(operands(**shape), **options)
    assert not calls_in(text_of(operands(**shape), **options, implementation=None))


@BOTH
def test_declined(text_of: Any) -> None:
    assert not calls_in(text_of(operands(), implementation="xla"))


def test_built_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", None)
    with pytest.raises(
        NotImplementedError, match=r"built without CUDA .*jaxmagi\._cuda.*nvcc >= 12\.8.*JAXMAGI_CUDA=ON"
    ):
        forward_text(operands())
    assert not calls_in(forward_text(operands(), implementation=None))


def test_built_without_cuda_on_a_gpu(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", None)
    with pytest.warns(RuntimeWarning, match=r"plain XLA .*built without CUDA"):
        assert not calls_in(forward_text(operands(), implementation=None))


@BOTH
def test_other_gpu(text_of: Any, ampere: None) -> None:
    with pytest.raises(NotImplementedError, match=r"NVIDIA A100 has compute capability 8\.0.* for 9\.0"):
        text_of(operands())
    with pytest.warns(RuntimeWarning, match=r"plain XLA .*NVIDIA A100 has compute capability 8\.0"):
        assert not calls_in(text_of(operands(), implementation=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for implementation in (None, "xla"):
            text_of(operands(), implementation=implementation)


@BOTH
@pytest.mark.parametrize("empty", [{"q_len": 0}, {"kv_len": 0}])
def test_nothing_to_launch(text_of: Any, empty: dict[str, Any]) -> None:
    assert not calls_in(text_of(operands(**empty)))


def loss(implementation: str | None, **options: Any) -> Any:
    options = {"implementation": implementation, **options}

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, masks.causal(300, 400), **options).sum()

    return jax.grad(total, argnums=(0, 1, 2))


@pytest.mark.parametrize("implementation", ["ffi", None])
def test_gradients(implementation: str | None) -> None:
    q, k, v, *_ = operands().values()
    calls = calls_in(lower(loss(implementation), q, k, v))
    assert calls.keys() == {_cuda.TILE_SCHEDULE, _cuda.FORWARD, SCHEDULE_OF_KEYS, _cuda.BACKWARD}
    assert not calls_in(lower(loss("xla"), q, k, v))


def test_margin_of_both_passes() -> None:
    q, k, v, *_ = operands().values()
    calls = calls_in(lower(loss(None, sm_margin=24), q, k, v))
    assert [calls[name].attributes["sm_margin"] for name in (_cuda.FORWARD, _cuda.BACKWARD)] == [24, 24]


@BOTH
def test_margin_where_no_kernel_runs(text_of: Any) -> None:
    for arrays, implementation in ((operands(), "xla"), (operands(dtype=jnp.float32), None)):
        with pytest.raises(NotImplementedError, match=r"sm_margin=9: only the kernels .* platform cuda, jax"):
            text_of(arrays, implementation=implementation, sm_margin=9)
    assert not calls_in(text_of(operands(q_len=0), sm_margin=9))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("grad_dtype", "name"), [(jnp.float32, "f32"), (jnp.float16, "f16")])
def test_backward_schedule_and_kernel(deterministic: bool, grad_dtype: Any, name: str) -> None:
    calls = calls_in(
        backward_text(
            operands(192, 128, dtype=jnp.float16),
            soft_cap=7.5,
            deterministic=deterministic,
            grad_dtype=grad_dtype,
            sm_margin=9,
        )
    )
    schedule, kernel = calls[SCHEDULE_OF_KEYS], calls[_cuda.BACKWARD]
    assert schedule.operands == ["1x5x6xi32"]
    assert schedule.results == ["1x5x8xi32", "1x4x8xi32", f"{WORDS}x2xi32"]
    assert schedule.attributes == {"q_len": 300, "kv_len": 400, "own_len": 400, "dim": 192, "v_dim": 128}
    shapes = ["2x300x8x192", "2x400x2x192", "2x400x2x128"]
    rows = ["2x300x8x128xf16", "2x300x8xf32", "2x300x8xf32"]
    assert kernel.operands == [*(f"{shape}xf16" for shape in shapes), "1x5x8xi32", "1x4x8xi32", *rows]
    assert kernel.results == [*(f"{shape}x{name}" for shape in shapes), f"{WORKSPACE // 16}x4xi32"]
    assert kernel.attributes == {"scale": 0.125, "soft_cap": 7.5, "sm_margin": 9}
    assert kernel.flags == {"deterministic": deterministic}


def test_backward_is_padded_too() -> None:
    text = backward_text(operands(100, 33))
    kernel = calls_in(text)[_cuda.BACKWARD]
    assert kernel.operands[5] == "2x300x8x40xbf16"
    assert kernel.results[:3] == ["2x300x8x104xbf16", "2x400x2x104xbf16", "2x400x2x40xbf16"]
    results = ("2x300x8x100", "2x400x2x100", "2x400x2x33")
    assert all(f"tensor<{shape}xbf16> {{jax.result_info" in text for shape in results)


def test_vmap_becomes_batch() -> None:
    q, k, v, *_ = (array(3, *x.shape, dtype=x.dtype) for x in operands().values())
    mask = AttnMask.stack([masks.causal(300, 400), masks.full(300, 400)])
    text = lower(jax.vmap(lambda q, k, v: attention(q, k, v, mask, implementation="ffi")), q, k, v)
    calls = calls_in(text)
    assert calls[_cuda.TILE_SCHEDULE].operands == [f"6x{mask.bands.shape[1]}x6xi32"]
    assert calls[_cuda.FORWARD].results[0] == "6x300x8x128xbf16"


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_shards(axis_type: AxisType) -> None:
    """Each device has its examples and heads. Outside of shard_map tests/compiling checks that."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    spec = P("data", None, "tensor")
    mask = masks.causal(300, 400)

    def op(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, mask, implementation="ffi")

    op = jax.shard_map(op, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    q, k, v, *_ = operands().values()
    sharding = jax.sharding.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        placed = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in (q, k, v))
        calls = calls_in(lower(op, *placed))
    assert calls[_cuda.TILE_SCHEDULE].operands == [f"1x{mask.bands.shape[0]}x6xi32"]
    assert calls[_cuda.FORWARD].operands[:2] == ["1x300x4x128xbf16", "1x400x1x128xbf16"]
    assert calls[_cuda.FORWARD].operands[5] == "4xf32"


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_of_long_documents(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed order of sums has none beside those at multiples of their length."""
    asked = []
    stand_in = _native._EXTENSIONS["cuda"]
    monkeypatch.setattr(stand_in, "backward_workspace_bytes", lambda *sizes: asked.append(sizes) or WORKSPACE)
    calls = calls_in(backward_text(operands(kv_len=9000), deterministic=deterministic))
    tiles = -(-9000 // BACKWARD_TILE[1]) + (0 if deterministic else 4)
    assert calls[SCHEDULE_OF_KEYS].results[1] == calls[_cuda.BACKWARD].operands[4] == f"1x{tiles}x8xi32"
    assert asked == [(2, 300, 9000, 8, 2, 128, 128, tiles, 1, deterministic)]


@pytest.mark.parametrize(
    ("length", "capacity", "more"),
    [(8191, 9, 0), (8192, 0, 0), (8192, 1, 0), (8192, 4, 3), (8192, 100, 8), (32_768, 23, 22)],
)
def test_room_for_tiles_that_begin_with_documents(length: int, capacity: int, more: int) -> None:
    """One for each long document behind the first, but none where sequences are short."""
    bands = jax.ShapeDtypeStruct((2, capacity, 6), jnp.int32)
    schedule = jax.jit(_cuda.tile_schedule, static_argnums=(1, 2, 3, 4, 5, 6))
    for aligns in (False, True):
        _, tiles = jax.eval_shape(schedule, bands, 70, length, (128, 128), True, None, aligns)
        assert tiles.shape == (2, -(-length // BACKWARD_TILE[1]) + more * aligns, 8)


@pytest.mark.parametrize("sm_margin", [-1, 0.5])
def test_margins_that_are_none(sm_margin: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"-1|float"):
        forward_text(operands(), sm_margin=sm_margin)


def test_the_extension_knows_its_tiles() -> None:
    compiled = pytest.importorskip("jaxmagi._cuda")
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 256)):
        rows, keys = compiled.forward_tile(*dims)
        assert rows % 64 == 0 and keys > 0
        num_tiles = -(-5000 // rows)
        keys_and_tiles = 4 * 1000 + (4 + 32) * num_tiles  # bytes of a schedule
        assert 8 * compiled.tile_schedule_workspace_words(3, 1000, num_tiles) >= 3 * keys_and_tiles
        rows, keys = compiled.backward_tile(*dims)
        assert rows % 16 == 0 and keys % 32 == 0
        sums = 3 * 8 * 5000 * dims[0] * 4
        for deterministic in (False, True):
            tiles = -(-7000 // keys)
            size = compiled.backward_workspace_bytes(3, 5000, 7000, 8, 8, *dims, tiles, 1, deterministic)
            assert size % 16 == 0 and size >= sums
    for dims in ((264, 64), (64, 264), (100, 100), (0, 64)):
        assert compiled.forward_tile(*dims) is None and compiled.backward_tile(*dims) is None
        with pytest.raises(ValueError, match=f"no kernel for the head dimensions {dims[0]} and {dims[1]}"):
            compiled.backward_workspace_bytes(3, 5000, 7000, 8, 8, *dims, 110, 1, False)
    ours = sorted(name for name in compiled.registrations() if name.startswith("jaxmagi_attention"))
    assert ours == [_cuda.BACKWARD, _cuda.FORWARD, _cuda.TILE_SCHEDULE]


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_of_key_gradients_take_memory(dims: tuple[int, int], deterministic: bool) -> None:
    """A group of four heads has two head sets, which add their gradients up in fp32, but for D 192."""
    compiled = pytest.importorskip("jaxmagi._cuda")
    tiles = 7040 // compiled.backward_tile(*dims)[1]
    size_of = compiled.backward_workspace_bytes
    alone, shared = (size_of(3, 5000, 7040, 8, heads, *dims, tiles, 1, deterministic) for heads in (8, 2))
    sums = 0 if dims[0] == 192 else 3 * 2 * 7040 * sum(dims) * 4
    counters = 3 * 2 * 110 * 4  # of additions, for each tile
    assert sums <= shared - alone <= sums + counters + 16
