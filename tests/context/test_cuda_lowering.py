"""The custom calls of context_attention for GPUs, lowered on a machine that may have none."""

import functools
import types
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import (
    CollectiveOptions,
    ContextPlan,
    PlanCapacity,
    _hopper,
    _native,
    context_attention,
    masks,
    plan_context,
)
from jaxmagi.attention import _cuda as attention_calls
from jaxmagi.collectives._support import CAST, REDUCE
from jaxmagi.context import _custom_call
from jaxmagi.context._custom_call import BACKWARD, FORWARD

from ..custom_calls import Call, custom_calls, lower
from ..parts import let_parts_receive
from .harness import AXIS, make_mesh

RANKS, LENGTH, HOST = 4, 1024, 2
TOKENS = LENGTH // RANKS  # of a rank
ROWS, KEYS, WORKSPACE = 128, 64, 16 * 99  # tiles of queries and keys, bytes
PLAN = plan_context(masks.causal(LENGTH), RANKS, chunk_size=64)
PLANS = {"one_level": PLAN, "two_levels": PLAN.by_host(HOST)}
LEVELS = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
SCHEDULE = attention_calls.TILE_SCHEDULE
ATTENTION = {SCHEDULE: 2, attention_calls.FORWARD: 1, attention_calls.BACKWARD: 1}
TRANSFERS = {CAST: 2, REDUCE: 1}  # where nothing is one call for a pass


class Shape(NamedTuple):
    """The sizes of operands, apart from their tokens."""

    heads: int = 8
    kv_heads: int = 4
    dim: int = 64
    v_dim: int = 32
    examples: int | None = None
    dtype: Any = jnp.bfloat16

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Returns query, key and value of all ranks, and a cotangent of the output."""
        batch = () if self.examples is None else (self.examples,)
        rows = [
            *((self.heads, self.dim), (self.kv_heads, self.dim)),
            *((self.kv_heads, self.v_dim), (self.heads, self.v_dim)),
        ]
        return [jax.ShapeDtypeStruct((*batch, LENGTH, *row), self.dtype) for row in rows]


SHAPE = Shape()


@pytest.fixture(autouse=True)
def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces jaxmagi._cuda by a stand-in. Returns the sizes for which that has told workspaces."""
    asked = []

    def backward_workspace_bytes(*sizes: int) -> int:
        asked.append(sizes)
        return WORKSPACE

    targets = (SCHEDULE, attention_calls.FORWARD, attention_calls.BACKWARD, CAST, REDUCE)
    stand_in = types.SimpleNamespace(
        registrations=lambda: {target: {} for target in targets},
        forward_tile=lambda dim, v_dim: (ROWS, 128),
        backward_tile=lambda dim, v_dim: (64, KEYS),
        tile_schedule_workspace_words=lambda *sizes: 77,
        backward_workspace_bytes=backward_workspace_bytes,
        collective_statistics=dict,
        set_memory_limit=lambda ordinal, limit: None,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: ())
    return asked


def received_bytes(plan: ContextPlan, shape: Shape) -> int:
    """Returns the bytes of 16-bit keys and values that a rank receives, of all examples."""
    examples = shape.examples or 1
    return examples * plan.transfer.output_rows * shape.kv_heads * (shape.dim + shape.v_dim) * 2


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the key heads of the operands in two."""
    let_parts_receive(monkeypatch, received_bytes(PLAN, SHAPE) // 2)


def program(
    plan: ContextPlan,
    shape: Shape = SHAPE,
    *,
    mesh: Any = None,
    vmap_axes: Any = None,
    sinks: Any = None,
    **options: Any,
) -> str:
    """Lowers both passes inside of shard_map, in which examples are a batch or vmap maps over them.

    Args:
        plan: the plan, or stacked ones.
        shape: the sizes of operands.
        mesh: by default one axis, over the ranks.
        vmap_axes: what vmap maps over of query, key, value, sinks and plan; None for no vmap.
        sinks: numbers or None.
        options: options of `context_attention`.
    """
    options = {"axis_name": AXIS, "implementation": "ffi", **options}

    def attend(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
        return context_attention(query, key, value, plan, sinks=sinks, **options)

    mapped_attend = jax.vmap(attend, vmap_axes) if vmap_axes else attend
    rows = P(AXIS) if shape.examples is None else P(None, AXIS)
    out_rows = P(None, AXIS) if vmap_axes else rows
    mapped = jax.shard_map(
        lambda query, key, value: mapped_attend(query, key, value, sinks, plan),
        mesh=mesh or make_mesh(RANKS),
        in_specs=(rows, rows, rows),
        out_specs=out_rows,
        axis_names={AXIS},
    )

    def both(*operands: Any) -> Any:
        *rows, dout = operands
        out, vjp = jax.vjp(mapped, *rows)
        return out, vjp(jnp.broadcast_to(dout, out.shape))

    return lower(both, *shape.operands())


class Calls(NamedTuple):
    """The custom calls of a program, if these are one for each pass and its tile schedule."""

    schedule: Call
    forward: Call
    schedule_of_keys: Call
    backward: Call


def calls_of(*args: Any, **options: Any) -> Calls:
    text = program(*args, **options)
    found = Calls(*custom_calls(text))
    assert [call.target for call in found] == [SCHEDULE, FORWARD, SCHEDULE, BACKWARD]
    assert "all_to_all" not in text
    return found


def counts(text: str) -> Counter[str]:
    return Counter(call.target for call in custom_calls(text))


def table_types(plan: ContextPlan, batch: int = 1) -> list[str]:
    """Returns the types of the tables of two steps. Those of a second step are empty where there is none."""
    sizes = plan.capacity
    first, second = (sizes.across.copies, sizes.copies) if sizes.across else (sizes.copies, 0)
    return [f"{batch}x{copies}x{columns}xi32" for copies in (first, second) for columns in (5, 4)]


def key_types(rows: int, dtype: str, parts: int = 2, batch: int = 1) -> list[str]:
    """Returns the types of arrays like keys and values of all parts."""
    lead = f"{parts}x{batch}x{rows}x{SHAPE.kv_heads // parts}"
    return [f"{lead}x{SHAPE.dim}x{dtype}", f"{lead}x{SHAPE.v_dim}x{dtype}"]


def kept_types(rows: int) -> list[str]:
    """Returns the types of so many received rows that have been kept."""
    return [f"1x{rows}x{SHAPE.kv_heads}x{dim}xbf16" for dim in (SHAPE.dim, SHAPE.v_dim)]


def row_counts(plan: ContextPlan) -> tuple[int, int]:
    """Returns how many keys a rank has with those that it receives, and how many rows are on the way."""
    sizes = plan.capacity
    return TOKENS + sizes.output_rows, sizes.across.output_rows if sizes.across else 0


QUERY, OUT = f"1x{TOKENS}x8x64xbf16", f"1x{TOKENS}x8x32xbf16"
OWN_KEYS = [f"1x{TOKENS}x4x64xbf16", f"1x{TOKENS}x4x32xbf16"]
OF_ROWS = f"1x{TOKENS}x8xf32"


@LEVELS
def test_forward(plan: ContextPlan, two_parts: None) -> None:
    schedule, call, _, _ = calls_of(plan)
    rows, middle = row_counts(plan)
    lengths = {"q_len": TOKENS, "kv_len": rows, "own_len": TOKENS}
    assert schedule.attributes == {**lengths, "dim": 64, "v_dim": 32}
    assert schedule.flags == {"by_keys": False}
    tiles = [f"1x{plan.capacity.bands}x8xi32", f"1x{TOKENS // ROWS}x8xi32"]
    assert schedule.results[:2] == tiles
    assert call.operands == [QUERY, *OWN_KEYS, *tiles, "2x8xf32", *table_types(plan)]
    keys = [*key_types(rows, "bf16"), *key_types(middle, "bf16")]
    assert call.results == [OUT, OF_ROWS, *keys, *kept_types(0), "8xi32"]


@LEVELS
@pytest.mark.parametrize(
    ("wire", "rounded"), [(None, None), (jnp.float32, None), (jnp.bfloat16, "bf16"), (jnp.float16, "f16")]
)
def test_backward(
    plan: ContextPlan, wire: Any, rounded: str | None, two_parts: None, workspaces: list[Any]
) -> None:
    """There is room for gradients in float32, and for rounded ones where these travel."""
    _, _, schedule, call = calls_of(plan, collectives=CollectiveOptions(wire_dtype=wire))
    rows, middle = row_counts(plan)
    lengths = {"q_len": TOKENS, "kv_len": rows, "own_len": rows}
    assert schedule.attributes == {**lengths, "dim": 64, "v_dim": 32}
    assert schedule.flags == {"by_keys": True}
    tiles = [f"1x{plan.capacity.bands}x8xi32", f"1x{-(-rows // KEYS)}x8xi32"]
    assert schedule.results[:2] == tiles
    none = kept_types(0)
    assert call.operands == [QUERY, *OWN_KEYS, *tiles, OUT, OF_ROWS, OF_ROWS, *none, *table_types(plan)]
    sums = [OWN_KEYS, *(key_types(count, "f32") for count in (rows, middle, TOKENS))]
    on_the_wire = [key_types(count if rounded else 0, rounded or "bf16") for count in (rows, middle)]
    keys = [key_types(count, "bf16") for count in (rows, middle)]
    arrays = [x for pair in (*sums, *on_the_wire, *keys) for x in pair]
    assert call.results == [QUERY, *arrays, f"{2 * WORKSPACE // 16}x4xi32", "8xi32"]
    sizes = [(1, TOKENS, rows, *heads, 64, 32, -(-rows // KEYS), 1, False) for heads in ((8, 4), (4, 2))]
    assert workspaces == sizes


@LEVELS
def test_kept_keys(plan: ContextPlan, two_parts: None) -> None:
    """They are results of the forward pass, and operands of the backward pass in front of the tables."""
    _, forward, _, backward = calls_of(plan, keep_received=True)
    _, other, _, _ = calls_of(plan)
    received = plan.capacity.output_rows
    assert forward.operands == other.operands
    assert forward.results[-3:-1] == kept_types(received)
    assert [*forward.results[:-3], forward.results[-1]] == [*other.results[:-3], other.results[-1]]
    assert backward.operands[-6:] == [*kept_types(received), *table_types(plan)]


NUMBERS = {
    "num_sms": 16,
    "implementation": 0,
    "timeout_ms": 300_000,
    "num_parts": 2,
    "num_workspaces": 2,
    "scale": 0.125,
    "soft_cap": 0,
}


@LEVELS
def test_attributes(plan: ContextPlan, two_parts: None) -> None:
    _, forward, _, backward = calls_of(plan)
    rows, middle = row_counts(plan)
    sizes = plan.capacity
    wanted = NUMBERS | {
        "group_size": RANKS,
        "inside_group_size": HOST if plan.two_levels else 0,
        "ranks_per_host": HOST if plan.two_levels else 0,
        "input_rows": TOKENS,
        "middle_rows": middle,
        "output_rows": rows,
        "pair_rows": (sizes.across or sizes).pair_rows,
        "inside_pair_rows": sizes.pair_rows if plan.two_levels else 0,
    }
    for call, parts_within_host in ((forward, 2), (backward, 1)):
        assert call.attributes == wanted | {"num_parts_within_host": parts_within_host}
        assert call.arrays["groups"] == [0, 1, 2, 3]
        assert not plan.two_levels or call.arrays["inside_groups"] == [0, 1, 2, 3]
        assert not call.has_side_effect  # so that XLA drops passes that nothing needs, as remat relies on
        assert call.aliases == {} and call.flags == {"deterministic": False}


@LEVELS
def test_options(plan: ContextPlan) -> None:
    collectives = CollectiveOptions(implementation="nccl", num_sms=7, ranks_per_host=HOST, timeout=1.5)
    options = {"scale": -0.25, "logits_soft_cap": 7.5, "deterministic": True}
    _, forward, _, backward = calls_of(plan, collectives=collectives, **options)
    numbers = {
        "implementation": 2,
        "num_sms": 7,
        "ranks_per_host": HOST,
        "timeout_ms": 1500,
        "scale": 0.25,  # the query has the sign
        "soft_cap": 7.5,
    }
    for call, deterministic in ((forward, False), (backward, True)):
        assert numbers.items() <= call.attributes.items()
        assert call.flags == {"deterministic": deterministic}


def test_attention_keeps_most_multiprocessors() -> None:
    """However many are allowed for transfers."""
    _, forward, _, backward = calls_of(PLAN, collectives=CollectiveOptions(num_sms=132))
    for call in (forward, backward):
        assert call.attributes["num_sms"] == 32


def test_native_transfers() -> None:
    _, forward, _, backward = calls_of(PLAN, collectives=CollectiveOptions(implementation="native"))
    assert forward.attributes["implementation"] == backward.attributes["implementation"] == 1


@pytest.mark.parametrize(("axes", "groups"), [(("data", AXIS), [0, 1, 2, 3]), ((AXIS, "data"), [0, 2, 1, 3])])
@pytest.mark.parametrize("hosts", [None, 1, 2])
def test_groups_of_a_mesh(axes: tuple[str, str], groups: list[int], hosts: int | None) -> None:
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    plan = plan_context(masks.causal(LENGTH), 2, chunk_size=64)
    plan = plan if hosts is None else plan.by_host(hosts)
    mapped = jax.shard_map(
        functools.partial(context_attention, plan=plan, axis_name=AXIS),
        mesh=mesh,
        in_specs=P(AXIS, "data"),
        out_specs=P(AXIS, "data"),
    )
    _, call = custom_calls(lower(mapped, *SHAPE.operands()[:3]))
    assert call.arrays["groups"] == groups and call.attributes["group_size"] == 2
    assert call.attributes["inside_group_size"] == (hosts or 0)
    assert hosts is None or call.arrays["inside_groups"] == groups


def test_one_rank_is_no_exception() -> None:
    plan = plan_context(masks.causal(LENGTH), 1)
    _, forward, _, backward = calls_of(plan, mesh=make_mesh(1))
    for call in (forward, backward):
        assert call.attributes["group_size"] == 1 and call.arrays["groups"] == [0]


@pytest.mark.parametrize(
    ("shape", "most", "parts"),
    [
        (Shape(8, 8), 8, 8),
        (Shape(8, 8), 7, 4),  # seven would be large enough, but do not divide the heads
        (Shape(8, 8, examples=3), 2, 2),
        (Shape(12, 6, dim=128), 5, 3),
        (Shape(4, 4, dim=96, v_dim=128, dtype=jnp.float16), 3, 2),
        (Shape(4, 2), 1, 1),
    ],
)
@LEVELS
def test_parts_have_a_least_size(
    plan: ContextPlan, shape: Shape, most: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many as divide the heads and are large enough, by what a rank receives."""
    received = received_bytes(plan, shape)
    for least, wanted in ((received // most, parts), (received + 1, 1)):
        let_parts_receive(monkeypatch, least)
        _, forward, _, backward = calls_of(plan, shape)
        assert forward.attributes["num_parts"] == backward.attributes["num_parts"] == wanted


def test_fewer_parts_within_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which host a rank is on is known when the program runs: a call has both numbers."""
    shape = Shape(8, 8)
    received = received_bytes(PLAN, shape)
    let_parts_receive(monkeypatch, received // 8, within_host=received // 2)
    _, forward, _, backward = calls_of(PLAN, shape)
    assert forward.attributes["num_parts"] == backward.attributes["num_parts"] == 8
    assert forward.attributes["num_parts_within_host"] == 2
    assert backward.attributes["num_parts_within_host"] == 1


@pytest.mark.parametrize(("kv_heads", "parts"), [(1, 1), (2, 2), (3, 3), (8, 8), (16, 8)])
def test_parts_of_calls(
    kv_heads: int, parts: int, monkeypatch: pytest.MonkeyPatch, workspaces: list[Any]
) -> None:
    """Each part has a workspace. Within a host there is one part of the backward pass."""
    let_parts_receive(monkeypatch, 1)
    _, forward, _, backward = calls_of(PLAN, Shape(3 * kv_heads, kv_heads))
    rows, _ = row_counts(PLAN)
    key = f"{parts}x1x{rows}x{kv_heads // parts}x64"
    assert forward.attributes["num_parts"] == backward.attributes["num_parts"] == parts
    assert forward.results[2] == f"{key}xbf16" and forward.results[-1] == f"{2 * (parts + 2)}xi32"
    assert backward.results[3] == f"{key}xf32"
    assert backward.results[-2:] == [f"{parts * WORKSPACE // 16}x4xi32", f"{4 * parts}xi32"]
    tiles = -(-rows // KEYS)
    sizes = [
        (1, TOKENS, rows, 3 * kv_heads // n, kv_heads // n, 64, 32, tiles, 1, False)
        for n in sorted({1, parts})
    ]
    assert workspaces == sizes


@pytest.mark.parametrize(("kv_heads", "most_sums", "count"), [(8, 0, 2), (2, 0, 2), (8, 1e9, 8)])
def test_parts_that_share_workspaces(
    kv_heads: int, most_sums: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts have two for all where their workspaces would take much more memory than the sums of dQ."""
    let_parts_receive(monkeypatch, 1)
    monkeypatch.setattr(_custom_call, "_MOST_SUMS", most_sums)
    _, forward, _, backward = calls_of(PLAN, Shape(3 * kv_heads, kv_heads))
    assert backward.attributes["num_workspaces"] == count
    assert backward.results[-2] == f"{count * WORKSPACE // 16}x4xi32"
    numbers = forward.attributes["num_parts"], backward.attributes["num_parts"]
    assert numbers == (kv_heads, kv_heads) and forward.attributes["num_workspaces"] == kv_heads
    within_host = kv_heads if count < kv_heads else 1
    assert backward.attributes["num_parts_within_host"] == within_host


def test_head_dimensions_become_multiples_of_eight() -> None:
    shape = Shape(dim=100, v_dim=33)
    text = program(PLAN, shape)
    _, forward, _, backward = calls_of(PLAN, shape)
    dims = [x.split("x")[3] for x in (*forward.operands[:3], forward.results[0], backward.operands[5])]
    assert dims == ["104", "104", "40", "40", "40"]
    results = ("8x33", "8x100", "4x100", "4x33")
    assert all(f"tensor<{LENGTH}x{shape}xbf16> {{jax.result_info" in text for shape in results)


@LEVELS
@pytest.mark.parametrize("by", ["vmap", "batch"])
def test_examples_of_one_plan(plan: ContextPlan, by: str, two_parts: None, workspaces: list[Any]) -> None:
    """They share bands and the tile schedule. What all of them receive is enough for four parts."""
    axes = (0, 0, 0, None, None) if by == "vmap" else None
    schedule, forward, _, backward = calls_of(plan, SHAPE._replace(examples=3), vmap_axes=axes)
    rows, _ = row_counts(plan)
    assert schedule.operands == [f"1x{plan.capacity.bands}x6xi32"]
    assert forward.operands[:1] == backward.results[:1] == [f"3x{TOKENS}x8x64xbf16"]
    assert forward.operands[3] == f"1x{plan.capacity.bands}x8xi32"
    assert forward.operands[-4:] == backward.operands[-4:] == table_types(plan, batch=3)
    assert forward.results[2:4] == key_types(rows, "bf16", parts=4, batch=3)
    assert backward.results[3:5] == key_types(rows, "f32", parts=4, batch=3)
    tiles = -(-rows // KEYS)
    assert workspaces == [(3, TOKENS, rows, *heads, 64, 32, tiles, 1, False) for heads in ((8, 4), (2, 1))]


@LEVELS
@pytest.mark.parametrize("by", ["vmap", "batch", "vmap over plans alone"])
def test_examples_with_plans_of_their_own(plan: ContextPlan, by: str, two_parts: None) -> None:
    stacked = ContextPlan.stack([plan] * 3)
    axes = {"vmap": (0, 0, 0, None, 0), "batch": None, "vmap over plans alone": (None, None, None, None, 0)}
    shape = SHAPE if by == "vmap over plans alone" else SHAPE._replace(examples=3)
    schedule, forward, _, backward = calls_of(stacked, shape, vmap_axes=axes[by])
    assert schedule.operands == [f"3x{plan.capacity.bands}x6xi32"]
    assert forward.operands[0] == backward.results[0] == f"3x{TOKENS}x8x64xbf16"
    assert forward.operands[3] == f"3x{plan.capacity.bands}x8xi32"
    assert forward.operands[-4:] == backward.operands[-4:] == table_types(plan, batch=3)


def test_sets_of_sinks() -> None:
    """They share one forward pass, whose output is not rounded yet."""
    sinks = jnp.zeros((3, SHAPE.heads))
    _, forward, _, backward = calls_of(PLAN, vmap_axes=(None, None, None, 0, None), sinks=sinks)
    assert forward.results[0] == f"1x{TOKENS}x8x32xf32"
    assert backward.operands[0] == f"3x{TOKENS}x8x64xbf16"


@LEVELS
def test_axes_that_are_left_to_the_compiler(plan: ContextPlan) -> None:
    """XLA partitions attention and transfers: a cast and a call, then a cast, a call and a sum."""
    mesh = jax.make_mesh((2, RANKS), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    text = program(plan, mesh=mesh)
    steps = 2 if plan.two_levels else 1
    assert text.count("custom_call @CustomSPMDPartitioning") == 2 + 3 * steps
    assert FORWARD not in text and BACKWARD not in text and "has_side_effect = true" not in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"implementation": "xla"}, TRANSFERS),
        ({"collectives": CollectiveOptions(implementation="xla")}, ATTENTION),
        ({"implementation": "xla", "collectives": CollectiveOptions(implementation="xla")}, {}),
    ],
)
def test_plain_jax_that_is_asked_for(options: dict[str, Any], wanted: dict[str, int]) -> None:
    assert counts(program(PLAN, **options)) == wanted
    twice = {name: count * (2 if name in TRANSFERS else 1) for name, count in wanted.items()}
    assert counts(program(PLANS["two_levels"], **options)) == twice


@pytest.mark.parametrize("wire", [None, jnp.bfloat16, jnp.float16])
def test_wire_dtype_of_single_transfers(wire: Any) -> None:
    """Keys travel in their dtype, and gradients in the wire dtype, to sums in float32."""
    options = CollectiveOptions(wire_dtype=wire, num_sms=7)
    calls = custom_calls(program(PLAN, implementation="xla", collectives=options))
    sent = {CAST: "bf16", REDUCE: {None: "f32", jnp.bfloat16: "bf16", jnp.float16: "f16"}[wire]}
    for call in calls:
        assert {x.split("x")[-1] for x in call.operands[2:]} == {sent[call.target]}
        assert {x.split("x")[-1] for x in call.results} == {"bf16" if call.target == CAST else "f32"}
        assert call.attributes["num_sms"] == 7


def test_operands_that_the_kernels_do_not_take() -> None:
    shape = SHAPE._replace(dtype=jnp.float32)
    assert counts(program(PLAN, shape, implementation=None)) == TRANSFERS
    message = "jaxmagi_attention_forward cannot run on platform cuda: the operands are float32"
    with pytest.raises(NotImplementedError, match=message):
        program(PLAN, shape)


@LEVELS
def test_no_examples(plan: ContextPlan) -> None:
    axes = (0, 0, 0, None, None)
    assert not counts(program(plan, SHAPE._replace(examples=0), vmap_axes=axes))
    assert counts(program(plan, SHAPE._replace(examples=1), vmap_axes=axes)) == {
        SCHEDULE: 2,
        FORWARD: 1,
        BACKWARD: 1,
    }


def test_plans_in_which_nothing_travels() -> None:
    """There is no transfer then."""
    plan = plan_context(masks.documents([TOKENS] * RANKS), RANKS, layout="contiguous")
    plan = plan.pad_to(PlanCapacity(bands=8, copies=8, pair_rows=0, output_rows=0))
    assert counts(program(plan)) == ATTENTION


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", None)
    assert not counts(program(PLAN, implementation=None))
    with pytest.raises(NotImplementedError, match="jaxmagi_attention_forward cannot run on platform cuda"):
        program(PLAN)
    with pytest.raises(NotImplementedError, match="jaxmagi_group_cast cannot run on platform cuda"):
        program(PLAN, implementation=None, collectives=CollectiveOptions(implementation="nccl"))


def test_an_extension_that_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives are not those of these sources."""
    monkeypatch.delattr(_native.extension("cuda"), "collective_statistics")
    assert counts(program(PLAN, implementation=None)) == ATTENTION
