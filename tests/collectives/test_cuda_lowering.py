"""The custom calls of the collectives for GPUs, lowered on a machine that may have none."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, GroupCastSpec, _hopper, _native, group_cast, group_reduce
from jaxmagi.collectives import _cuda, _process, _support

from ..custom_calls import Call, custom_calls, lower
from .harness import AXIS, make_mesh, on_ranks

ROWS, PAIR_ROWS = 5, 8
SPEC = GroupCastSpec.from_splits([[3, 2], [5]], [[[1], [0, 1]], [[0]]], [[2, 5], [5]], [[0, 1], [0]])
OUTPUT_ROWS = SPEC.output_rows
TABLES = ["1x8x5xi32", "1x8x4xi32"]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts something in place of jaxmagi._cuda on a machine without a GPU."""
    stand_in = types.SimpleNamespace(
        registrations=lambda: {_cuda.CAST: {}, _cuda.REDUCE: {}},
        collective_statistics=dict,
        set_memory_limit=lambda ordinal, limit: None,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: ())


def array(rows: int, *row: int, dtype: Any = jnp.float32, ranks: int = 2) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ranks * rows, *row), dtype)


def text_of(function: Any, *args: Any, mesh: Any = None, **options: Any) -> str:
    """The program of a collective with these options, whose arrays lead with the ranks."""
    mapped = jax.shard_map(
        functools.partial(function, axis_name=AXIS, options=CollectiveOptions(**options)),
        mesh=mesh or make_mesh(2),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
    )
    return lower(mapped, *args)


def cast(x: Any, **arguments: Any) -> Any:
    return group_cast(x, SPEC, **arguments)


def reduce(x: Any, *lse: Any, **arguments: Any) -> Any:
    return group_reduce(x, SPEC, lse=lse[0] if lse else None, **arguments)


def the_call(text: str, target: str) -> Call:
    (call,) = custom_calls(text)
    assert call.target == target
    return call


def test_cast() -> None:
    x = (array(ROWS, 2, 4, dtype=jnp.bfloat16), array(ROWS, 16, dtype=jnp.int8))
    text = text_of(cast, x)
    call = the_call(text, _cuda.CAST)
    assert call.operands == [*TABLES, "1x5x8xbf16", "1x5x16xi8"]
    assert call.results == ["1x7x8xbf16", "1x7x16xi8"]
    assert call.arrays == {"groups": [0, 1]}
    assert call.attributes == {
        "group_size": 2,
        "input_rows": ROWS,
        "output_rows": OUTPUT_ROWS,
        "pair_rows": PAIR_ROWS,
        "num_sms": 16,
        "implementation": 0,
        "ranks_per_host": 0,
        "timeout_ms": 300_000,
    }
    assert call.flags == {}
    assert not call.has_side_effect
    assert "all_to_all" not in text


@pytest.mark.parametrize(("implementation", "number"), [("native", 1), ("nccl", 2)])
@pytest.mark.parametrize("target", [_cuda.CAST, _cuda.REDUCE])
def test_options(target: str, implementation: str, number: int) -> None:
    function, rows = (cast, ROWS) if target == _cuda.CAST else (reduce, OUTPUT_ROWS)
    options = {"implementation": implementation, "num_sms": np.int64(24), "ranks_per_host": 4, "timeout": 2.5}
    call = the_call(text_of(function, array(rows, 4), **options), target)
    numbers = {"implementation": number, "num_sms": 24, "ranks_per_host": 4, "timeout_ms": 2500}
    assert numbers.items() <= call.attributes.items()


@pytest.mark.parametrize(
    ("options", "number", "crossing"),
    [
        ({}, 0, "f32"),
        ({"wire_dtype": jnp.bfloat16}, 0, "bf16"),
        ({"implementation": "nccl"}, 2, "f32"),
    ],
)
def test_two_steps(options: dict[str, Any], number: int, crossing: str) -> None:
    """Each step is one call, and takes what the other has brought as it is.

    Here hosts have one rank. In the step across all ranks those of a host reach each other by native kernels,
    unless asked not to, and all others by NCCL.
    """
    relayed = SPEC.by_host(1)

    def both(x: Any, **arguments: Any) -> Any:
        return group_reduce(group_cast(x, relayed, **arguments), relayed, **arguments)

    calls = custom_calls(text_of(both, array(ROWS, 8, dtype=jnp.bfloat16), **options))
    rows = [int(call.operands[2].split("x")[1]) for call in calls]
    brought, output = relayed.inside.input_rows, relayed.output_rows
    assert rows == [ROWS, brought, output, brought] and relayed.across.output_rows == brought
    assert [call.target for call in calls] == [_cuda.CAST, _cuda.CAST, _cuda.REDUCE, _cuda.REDUCE]
    names = ("group_size", "ranks_per_host", "implementation")
    numbers = [tuple(call.attributes[name] for name in names) for call in calls]
    assert numbers == [(2, 1, number), (1, 0, number), (1, 0, number), (2, 1, number)]
    assert [call.arrays for call in calls] == [{"groups": [0, 1]}] * 4
    assert [call.operands[2].split("x")[-1] for call in calls] == ["bf16", "bf16", "bf16", crossing]
    assert [call.results[0].split("x")[-1] for call in calls] == ["bf16", "bf16", "f32", crossing]


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "_timeout_ms", 1500)
    for options, milliseconds in (({}, 1500), ({"timeout": 2}, 2000), ({"timeout": None}, 1500)):
        call = the_call(text_of(cast, array(ROWS, 4), **options), _cuda.CAST)
        assert call.attributes["timeout_ms"] == milliseconds


DTYPES = [
    (jnp.bfloat16, "bf16", "f32"),
    (jnp.float16, "f16", "f32"),
    (jnp.float32, "f32", "f32"),
    (jnp.float64, "f64", "f64"),
]


@pytest.mark.parametrize(("dtype", "wire", "sum_"), DTYPES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce(
    x64: None,
    op: str,
    dtype: Any,
    wire: str,
    sum_: str,
) -> None:
    """Sums leave the kernel as what comes of them, wide only where something is done to them."""
    x = array(OUTPUT_ROWS, 3, 8, dtype=dtype)
    call = the_call(text_of(functools.partial(reduce, op=op), x, implementation="nccl"), _cuda.REDUCE)
    assert call.operands == [*TABLES, f"1x7x24x{wire}"]
    assert call.results == [f"1x5x24x{wire if op == 'sum' else sum_}"]


@pytest.mark.parametrize(
    ("dtype", "row", "padded"),
    [
        (jnp.bfloat16, (3, 5), "16xbf16"),
        (jnp.float32, (), "4xf32"),
        (jnp.bool_, (33,), "48xi1"),
        (jnp.complex64, (3,), "4xcomplex<f32>"),
    ],
)
def test_rows_become_multiples_of_16_bytes(dtype: Any, row: tuple[int, ...], padded: str) -> None:
    text = text_of(cast, array(ROWS, *row, dtype=dtype))
    (line,) = [line for line in text.splitlines() if f"custom_call @{_cuda.CAST}" in line]
    assert line.endswith(f"tensor<1x5x{padded}>) -> tensor<1x7x{padded}>")
    result = "x".join(map(str, (2 * OUTPUT_ROWS, *row)))
    assert f"-> (tensor<{result}x{padded.split('x', 1)[1]}> {{jax.result_info" in text


def test_eight_arrays_a_call() -> None:
    calls = custom_calls(text_of(cast, [array(ROWS, 4 * (i + 1)) for i in range(19)]))
    assert [len(call.operands) - 2 for call in calls] == [8, 8, 3]
    assert [call.operands[2] for call in calls] == ["1x5x4xf32", "1x5x36xf32", "1x5x68xf32"]
    assert [call.results[0] for call in calls] == ["1x7x4xf32", "1x7x36xf32", "1x7x68xf32"]


def test_empty_arrays_stay_out() -> None:
    text = text_of(cast, [array(ROWS, 0), array(ROWS, 4), array(ROWS, 3, 0)])
    assert the_call(text, _cuda.CAST).operands == [*TABLES, "1x5x4xf32"]
    assert "tensor<14x0xf32> {jax" in text and "tensor<14x3x0xf32> {jax" in text


@pytest.mark.parametrize("empty", ["input_rows", "output_rows", "copies", "pair_rows"])
def test_nothing_to_call(empty: str) -> None:
    sizes = {"input_rows": 4, "output_rows": 4, "copies": 8, "pair_rows": 8} | {empty: 0}
    copies = sizes.pop("copies")
    spec = GroupCastSpec(np.zeros((2, copies, 5), np.int32), np.zeros((2, copies, 4), np.int32), **sizes)
    text = text_of(functools.partial(group_cast, spec=spec), array(sizes["input_rows"], 4))
    assert not custom_calls(text) and "all_to_all" not in text


def test_one_rank_is_no_exception() -> None:
    spec = GroupCastSpec.from_splits([[4]], [[[0]]], [[4]], [[0]])
    text = text_of(functools.partial(group_cast, spec=spec), array(4, 4, ranks=1), mesh=make_mesh(1))
    call = the_call(text, _cuda.CAST)
    assert call.attributes["group_size"] == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients(dtype: Any) -> None:
    """The gradient of a cast travels in its own dtype and is added up in float32 on the way."""
    forward, backward = gradient_calls(dtype, CollectiveOptions(implementation="native", timeout=7))
    assert (forward.target, backward.target) == (_cuda.CAST, _cuda.REDUCE)
    assert backward.results[0] == forward.operands[2] and backward.operands[2] == forward.results[0]
    assert backward.attributes == forward.attributes
    assert backward.attributes["implementation"] == 1 and backward.attributes["timeout_ms"] == 7000


def gradient_calls(dtype: Any, options: CollectiveOptions) -> list[Call]:
    """The calls of a cast and of its transpose."""

    def loss(x: jax.Array) -> jax.Array:
        mapped = on_ranks(functools.partial(cast, axis_name=AXIS, options=options), 2)
        return (mapped(x) ** 2).sum()

    return custom_calls(lower(jax.grad(loss), array(ROWS, 8, dtype=dtype)))


WIRES = [
    ("float32", "f32", "bfloat16", "bf16", "f32"),
    ("float32", "f32", "float16", "f16", "f32"),
    ("float64", "f64", "float32", "f32", "f32"),
    ("float64", "f64", "bfloat16", "bf16", "f32"),
    ("bfloat16", "bf16", "bfloat16", "bf16", "bf16"),
]


@pytest.mark.parametrize(("dtype", "own", "wire", "sent", "sums"), WIRES)
def test_wire_dtype(x64: None, dtype: str, own: str, wire: str, sent: str, sums: str) -> None:
    """Summands travel in it, and the kernels can add them up; rows of a cast travel in their own dtype."""
    text = text_of(reduce, array(OUTPUT_ROWS, 8, dtype=dtype), wire_dtype=wire, implementation="nccl")
    forward, backward = gradient_calls(dtype, CollectiveOptions(wire_dtype=wire))
    assert forward.operands[2] == f"1x5x8x{own}"
    for call in (the_call(text, _cuda.REDUCE), backward):
        assert call.operands[2] == f"1x7x8x{sent}"
        assert call.results[0] == f"1x5x8x{sums}"
    assert f"-> (tensor<10x8x{own}> {{jax.result_info" in text


def test_wire_dtype_of_merges() -> None:
    """It is that of the outputs. Gradients of these travel in it too, and those of log-sum-exps do not."""
    merge = functools.partial(reduce, op="lse")
    x, lse = array(OUTPUT_ROWS, 4, 8), array(OUTPUT_ROWS, 4)
    call = the_call(text_of(merge, x, lse, wire_dtype=jnp.bfloat16), _cuda.CAST)
    assert call.operands == [*TABLES, "1x7x32xbf16", "1x7x4xf32"]

    def gradient(x: jax.Array, lse: jax.Array, **arguments: Any) -> Any:
        return jax.grad(lambda *parts: merge(*parts, **arguments)[0].sum(), argnums=(0, 1))(x, lse)

    _, backward = custom_calls(text_of(gradient, x, lse, wire_dtype=jnp.bfloat16))
    assert backward.operands == [*TABLES, "1x16x32xbf16", "1x16x4xf32"]


def test_vmap_becomes_more_columns_or_more_transfers() -> None:
    specs = jax.tree.map(lambda table: np.stack([table] * 3), SPEC)

    def local(x: jax.Array, spec: GroupCastSpec, axis: int | None) -> jax.Array:
        function = functools.partial(group_cast, axis_name=AXIS)
        return jax.vmap(function, in_axes=(0, axis), out_axes=1)(x, spec)

    for spec, axis, operands in (
        (SPEC, None, [*TABLES, "1x5x12xf32"]),
        (specs, 0, ["3x8x5xi32", "3x8x4xi32", "3x5x4xf32"]),
    ):
        mapped = on_ranks(functools.partial(local, spec=spec, axis=axis), 2, in_specs=P(None, AXIS))
        call = the_call(lower(mapped, jax.ShapeDtypeStruct((3, 2 * ROWS, 4), jnp.float32)), _cuda.CAST)
        assert call.operands == operands


def test_merge_is_a_cast_to_slots() -> None:
    x, lse = array(OUTPUT_ROWS, 4, 8, dtype=jnp.bfloat16), array(OUTPUT_ROWS, 4)
    text = text_of(functools.partial(reduce, op="lse"), x, lse, implementation="native")
    call = the_call(text, _cuda.CAST)
    assert call.operands == [*TABLES, "1x7x32xbf16", "1x7x4xf32"]
    assert call.results[:2] == [f"1x{2 * PAIR_ROWS}x32xbf16", f"1x{2 * PAIR_ROWS}x4xf32"]
    sizes = {"input_rows": OUTPUT_ROWS, "output_rows": 2 * PAIR_ROWS, "implementation": 1}
    assert sizes.items() <= call.attributes.items()
    assert "all_to_all" not in text


def test_one_axis_of_a_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    call = the_call(text_of(cast, array(ROWS, 4), mesh=mesh), _cuda.CAST)
    assert call.arrays == {"groups": [0, 1, 2, 3]} and call.attributes["group_size"] == 2
    mesh = jax.make_mesh((2, 2), (AXIS, "data"), axis_types=(AxisType.Auto,) * 2)
    assert the_call(text_of(cast, array(ROWS, 4), mesh=mesh), _cuda.CAST).arrays == {"groups": [0, 2, 1, 3]}


def test_declined() -> None:
    text = text_of(cast, array(ROWS, 4), implementation="xla")
    assert not custom_calls(text) and "all_to_all" in text


UNSUPPORTED = [
    (reduce, array(OUTPUT_ROWS, 4, dtype=jnp.int32), "the array is int32, and the kernels add up bfloat16"),
    (reduce, array(OUTPUT_ROWS, 4, dtype=jnp.complex64), "the array is complex64"),
    (cast, array(ROWS, 4, dtype=jnp.int4), "int4 takes less than a byte"),
]


@pytest.mark.parametrize(("function", "x", "message"), UNSUPPORTED)
def test_unsupported(function: Any, x: Any, message: str) -> None:
    for implementation in ("native", "nccl"):
        error = (
            rf'implementation="{implementation}": jaxmagi_group_\w+ cannot run on platform cuda: {message}'
        )
        with pytest.raises(NotImplementedError, match=error):
            text_of(function, x, implementation=implementation)
    assert not custom_calls(text_of(function, x))


def test_sums_that_the_kernels_do_not_make() -> None:
    """A second derivative has sums in another dtype than that of the parts."""
    bfloat16, half, single, double = map(jnp.dtype, ("bfloat16", "float16", "float32", "float64"))
    for pair in ((bfloat16, half), (single, double), (single, bfloat16), (bfloat16, double)):
        message = _support._sum_reason([single, pair[0]], [single, pair[1]])
        assert message == f"the kernels do not add up {pair[0].name} to {pair[1].name}"
    for pair in ((bfloat16, single), (half, single), (half, half), (double, double)):
        assert _support._sum_reason([pair[0]], [pair[1]]) is None


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {_cuda.CAST: {}, _cuda.REDUCE: {}}
    others = {"jaxmagi_group_cast_start": {}, "jaxmagi_group_reduce_start": {}}
    for extension, message in (
        (None, "jaxmagi was built without CUDA"),
        (
            types.SimpleNamespace(registrations=lambda: others, collective_statistics=dict),
            "older than these sources",
        ),
        (types.SimpleNamespace(registrations=lambda: handlers), "older than these sources"),
    ):
        monkeypatch.setitem(_native._EXTENSIONS, "cuda", extension)  # pyright: ignore[reportArgumentType]
        assert not custom_calls(text_of(cast, array(ROWS, 4)))
        with pytest.raises(NotImplementedError, match=f"cannot run on platform cuda: .*{message}"):
            text_of(cast, array(ROWS, 4), implementation="nccl")


def test_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = types.SimpleNamespace(compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(_hopper, "local_gpus", lambda: [ampere])
    assert not custom_calls(text_of(cast, array(ROWS, 4)))
    with pytest.raises(NotImplementedError, match=r"NVIDIA A100 has compute capability 8\.0"):
        text_of(cast, array(ROWS, 4), implementation="native")


@pytest.mark.parametrize(("processes", "wanted"), [(1, {}), (2, {2: 99, 3: 0, 5: 0})])
def test_memory_limits(processes: int, wanted: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering tells the memory limits where there are several processes."""
    limits: dict[int, int] = {}
    monkeypatch.setattr(_native.extension("cuda"), "set_memory_limit", limits.__setitem__)
    gpus = [
        types.SimpleNamespace(
            compute_capability="9.0", local_hardware_id=number, memory_stats=lambda stats=stats: stats
        )
        for number, stats in ((2, {"bytes_limit": 99}), (3, {}), (5, None))
    ]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: gpus)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    the_call(text_of(reduce, array(OUTPUT_ROWS, 4)), _cuda.REDUCE)
    assert limits == wanted


@pytest.mark.parametrize("implementation", ["native", "nccl"])
def test_on_the_cpu(implementation: Any) -> None:
    options = CollectiveOptions(implementation=implementation)
    mapped = on_ranks(functools.partial(cast, axis_name=AXIS, options=options), 2)
    with pytest.raises(NotImplementedError, match="cannot run on platform cpu: there is no compiled code"):
        jax.jit(mapped).lower(array(ROWS, 4))
