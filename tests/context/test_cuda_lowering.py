"""Data dependencies let transfers overlap with attention on GPUs, in programs lowered without a GPU."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, _hopper, _native, context_attention, masks, plan_context
from jaxmagi.attention import _cuda as attention_calls
from jaxmagi.collectives import _cuda as collective_calls

from ..custom_calls import custom_calls, lower
from ..program_order import Order
from .harness import AXIS, make_mesh

RANKS, LENGTH = 2, 1024
FORWARD, BACKWARD = attention_calls.FORWARD, attention_calls.BACKWARD
CAST, REDUCE, DONE = collective_calls.CAST, collective_calls.REDUCE, collective_calls.DONE


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces jaxmagi._cuda by a stand-in, on a machine without GPUs."""
    targets = (attention_calls.TILE_SCHEDULE, FORWARD, BACKWARD, CAST, REDUCE, DONE)
    stand_in = types.SimpleNamespace(
        registrations=lambda: {target: {} for target in targets},
        forward_tile=lambda dim, v_dim: (128, 128),
        backward_tile=lambda dim, v_dim: (64, 128),
        tile_schedule_workspace_words=lambda *sizes: 77,
        backward_workspace_bytes=lambda *sizes: 16 * 99,
        collective_statistics=dict,
        set_memory_limit=lambda ordinal, limit: None,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(_hopper, "local_gpus", lambda: ())


def program(num_stages: int, *, mesh: Any = None, examples: int | None = None, **options: Any) -> str:
    """Lowers attention and its gradients over a mesh, under vmap if there are examples."""
    plan = plan_context(masks.causal(LENGTH), RANKS, num_stages=num_stages, chunk_size=64)
    options = {"axis_name": AXIS, "implementation": "ffi", **options}
    local = functools.partial(context_attention, plan=plan, **options)
    mapped = jax.shard_map(
        local if examples is None else jax.vmap(local, 1, 1),
        mesh=mesh or make_mesh(RANKS),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        axis_names={AXIS},
    )

    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, vjp = jax.vjp(mapped, query, key, value)
        return out, vjp(dout)

    batch = () if examples is None else (examples,)
    return lower(both, *[jax.ShapeDtypeStruct((LENGTH, *batch, 4, 64), jnp.bfloat16)] * 4)


def check_pair(order: Order, start: str, done: str) -> None:
    """Checks that the second call holds all buffers of the first and returns its results in place.

    Neither call can be removed, and a barrier keeps XLA from copying the results.
    """
    first, second = order.operations[start], order.operations[done]
    results = len(order.call(start).results)
    assert set(first.values) | {f"%{start}#{i}" for i in range(results - 1)} <= set(second.values)
    workspace = second.operands[results - 1]  # passes through the barriers of the overlapping computation
    assert workspace != start and order.has_order(start, workspace)
    assert order.call(done).aliases == {0: 0, 1: 1}
    assert order.call(done).results == order.call(start).results[:-1]
    for name in (start, done):
        assert order.call(name).has_side_effect
    assert [user.kind for user in order.users(done)] == ["stablehlo.optimization_barrier"]
    assert order.call(start).attributes["transfer_id"] == order.call(done).attributes["transfer_id"]


def end_of(order: Order, start: str) -> str:
    """Returns the call that ends an asynchronous transfer, which it checks."""
    (done,) = (name for name in order.calls(DONE) if start in order.operations[name].operands)
    check_pair(order, start, done)
    return done


def check_casts(order: Order, stages: list[str]) -> None:
    """Checks that each cast overlaps with exactly the stage before the one that needs its rows."""
    starts = order.calls(CAST)
    assert len(starts) == len(stages) - 1
    for i, start in enumerate(starts):
        assert order.has_order(start, stages[i], end_of(order, start), stages[i + 1])
        assert i == 0 or order.has_order(stages[i - 1], start)
        assert order.call(start).flags == {"is_async": True, "goes_first": True}


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_forward(num_stages: int) -> None:
    order = Order(program(num_stages), FORWARD)
    stages = order.calls(FORWARD)
    assert len(stages) == num_stages
    check_casts(order, stages)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_backward(num_stages: int) -> None:
    """Gradients of a stage return during the next stage, behind the cast for the one after."""
    order = Order(program(num_stages), BACKWARD)
    stages, casts, returns = (order.calls(target) for target in (BACKWARD, CAST, REDUCE))
    assert (len(stages), len(returns)) == (num_stages, num_stages - 1)
    check_casts(order, stages)
    for i, start in enumerate(returns, start=1):
        done = end_of(order, start)
        assert order.has_order(stages[i], start) and done in order.before("return")
        if i + 1 < num_stages:
            assert order.has_order(start, stages[i + 1], done)
        if i + 1 < len(casts):
            assert order.has_order(casts[i + 1], start)
        is_first = i + 1 == num_stages - 1
        assert order.call(start).flags == {"is_async": True, "goes_first": is_first}


def test_concurrent_transfers_have_different_ids() -> None:
    order = Order(program(4), BACKWARD)
    starts = order.calls(CAST) + order.calls(REDUCE)
    assert len({order.call(name).attributes["transfer_id"] for name in starts}) == len(starts) == 6


def test_started_transfers_always_end() -> None:
    """They end even if only the gradients of the queries are used, the first result."""
    order = Order(program(3), BACKWARD)
    first = order.operations["return"].operands[0]
    assert set(order.calls(DONE)) <= order.before(first)


def check_whole(order: Order, starts: int) -> None:
    """Checks that each transfer is one synchronous call."""
    calls = [order.call(name) for target in (CAST, REDUCE) for name in order.calls(target)]
    assert len(calls) == starts and not order.calls(DONE)
    for call in calls:
        assert call.flags == {"is_async": False, "goes_first": False} and not call.has_side_effect


def test_one_stage_has_synchronous_transfers() -> None:
    text = program(1)
    check_whole(Order(text, FORWARD), 1)
    check_whole(Order(text, BACKWARD), 2)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("wire", ["bf16", "f16", "f32"])
def test_options_reach_all_transfers(num_stages: int, wire: str) -> None:
    """Keys travel in their dtype, and gradients in the wire dtype, to sums in float32."""
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": None}[wire]
    collectives = CollectiveOptions(
        implementation="nccl", num_sms=7, ranks_per_host=1, wire_dtype=dtype, timeout=1.5
    )
    text = program(num_stages, collectives=collectives)
    calls = [call for call in custom_calls(text) if call.target in (CAST, REDUCE)]
    moves = max(num_stages - 1, 1)
    assert [call.target for call in calls].count(CAST) == 2 * moves
    assert [call.target for call in calls].count(REDUCE) == moves
    numbers = {"implementation": 2, "num_sms": 7, "ranks_per_host": 1, "timeout_ms": 1500}
    for call in calls:
        assert numbers.items() <= call.attributes.items()
        sent, sums = ("bf16", "bf16") if call.target == CAST else (wire, "f32")
        assert {x.split("x")[-1] for x in call.operands[2:]} == {sent}
        assert {x.split("x")[-1] for x in call.results[:2]} == {sums}


def test_axes_that_are_left_to_the_compiler() -> None:
    """Transfers are synchronous, as XLA cannot partition side effects: 2 casts, then 2 casts and 2 sums."""
    mesh = jax.make_mesh((2, RANKS), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    text = program(3, mesh=mesh)
    assert "has_side_effect = true" not in text
    attention = 3 + 3
    assert text.count("custom_call @CustomSPMDPartitioning") == attention + 2 + 2 + 2


def test_no_examples() -> None:
    """Without examples there are no transfers."""
    none, one = program(3, examples=0), program(3, examples=1)
    assert all(target in one and target not in none for target in (CAST, REDUCE, DONE))
