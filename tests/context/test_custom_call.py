"""Tests what the custom calls get and return, with models of them in plain JAX in their place.

A model does what the handler of its call does (xla_ffi/context_handler.h): it moves rows by the tables and
the attributes that it is given, and computes attention part by part.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import CollectiveOptions, ContextPlan, _native, masks, plan_context
from jaxmagi.attention import _cuda as attention_cuda, attention_backward, attention_forward
from jaxmagi.collectives import group_cast_p, group_reduce_p, on_this_rank
from jaxmagi.collectives._route import Route
from jaxmagi.context import _custom_call, _primitives
from jaxmagi.context._passes import ContextOptions, _steps

from ..cases import FP32_TOLERANCE
from ..parts import let_parts_receive
from .harness import AXIS, make_mesh

RANKS, LENGTH, HOST, BATCH = 4, 64, 2, 2
MASKS = [masks.causal(LENGTH), masks.documents([30, 20, 14])]
FLOAT = jnp.dtype(jnp.float32)


class Step(NamedTuple):
    """One step of a transfer, from the operands and the attributes of a call."""

    tables: Sequence[jax.Array]
    route: Route

    def cast(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return group_cast_p.bind(*xs, *self.tables, route=self.route)

    def reduce(self, xs: Sequence[jax.Array], wire: jnp.dtype | None) -> list[jax.Array]:
        """Adds up rows in float32, which travel in the dtype ``wire`` if there is one."""
        sent = [x if wire is None else x.astype(wire) for x in xs]
        return group_reduce_p.bind(*sent, *self.tables, route=self.route, out_dtypes=(FLOAT,) * len(xs))


def steps_of(tables: Sequence[jax.Array], given: dict[str, Any]) -> list[Step]:
    """Returns one step or two, of which the last one brings rows to their places behind the rank's own."""
    options = CollectiveOptions(implementation="xla", num_sms=int(given["num_sms"]))

    def step(index: int, *sizes: Any) -> Step:
        input_rows, output_rows, pair_rows, group_size = map(int, sizes)
        route = Route(AXIS, input_rows, output_rows, pair_rows, **vars(options), group_size=group_size)
        return Step(tables[2 * index : 2 * index + 2], route)

    first, middle, last = (given[name] for name in ("input_rows", "middle_rows", "output_rows"))
    if given["inside_group_size"] == 0:
        assert middle == 0 and all(table.shape[1] == 0 for table in tables[2:])
        return [step(0, first, last, given["pair_rows"], given["group_size"])]
    return [
        step(0, first, middle, given["pair_rows"], given["group_size"]),
        step(1, middle, last, given["inside_pair_rows"], given["inside_group_size"]),
    ]


def cut(x: jax.Array, parts: int) -> jax.Array:
    """Cuts heads [G, rows, heads, ...] → [parts, G, rows, heads of a part, ...]."""
    return jnp.stack(jnp.split(x, parts, axis=2))


def join(x: jax.Array) -> jax.Array:
    """Inverts `cut`."""
    return jnp.concatenate(list(x), axis=2)


def join_rows(own: Sequence[jax.Array], received: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.concatenate(both, axis=1) for both in zip(own, received, strict=True)]


def all_keys(own: Sequence[jax.Array], steps: Sequence[Step]) -> list[jax.Array]:
    """Returns the rank's keys and values in front of those that it receives."""
    tokens, xs = own[0].shape[1], own
    for step in steps:
        xs = step.cast(xs)
    return join_rows(own, [x[:, tokens:] for x in xs])


def kernel_options(given: dict[str, Any]) -> dict[str, Any]:
    assert given["scale"] > 0
    return {"scale": given["scale"], "soft_cap": given["soft_cap"], "implementation": "xla"}


def unknown(results: Sequence[Any]) -> list[jax.Array]:
    """Returns what a call leaves in arrays that nobody may read."""
    return [jnp.full(x.shape, -1 if x.dtype == jnp.int32 else jnp.nan, x.dtype) for x in results]


def tile_schedule(bands: jax.Array, results: Sequence[Any], given: Any) -> list[jax.Array]:
    """Returns bands as they are, in eight columns."""
    return [jnp.pad(bands, ((0, 0), (0, 0), (0, 2))), *unknown(results[1:])]


def forward(*operands: jax.Array, results: Sequence[Any], given: dict[str, Any]) -> list[jax.Array]:
    q, k, v, bands, _, sinks, *tables = operands
    parts, options = int(given["num_parts"]), kernel_options(given) | {"out_dtype": results[0].dtype}
    keys = all_keys((k, v), steps_of(tables, given))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
        return attention_forward(q, k, v, bands[..., :6], sinks, **options)

    q_parts, k_parts, v_parts = (cut(x, parts) for x in (q, *keys))
    found = jax.vmap(attend)(q_parts, k_parts, v_parts, sinks[0].reshape(parts, -1))
    first, last = q.shape[1], q.shape[1] + results[-2].shape[1]
    kept = [x[:, first:last] for x in keys]
    return [*map(join, found), *unknown(results[2:-3]), *kept, *unknown(results[-1:])]


def backward(*operands: jax.Array, results: Sequence[Any], given: dict[str, Any]) -> list[jax.Array]:
    q, k, v, bands, _, dout, lse, delta, *others = operands
    kept, tables = others[:2], others[2:]
    parts, options = int(given["num_parts"]), kernel_options(given) | {"grad_dtype": FLOAT}
    options["deterministic"] = bool(given["deterministic"])
    steps = steps_of(tables, given)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> Any:
        return attention_backward(q, k, v, bands[..., :6], *rows, **options)

    keys = join_rows((k, v), kept) if kept[0].size else all_keys((k, v), steps)
    rows = q, *keys, dout, lse, delta
    dq, *gradients = map(join, jax.vmap(attend)(*(cut(x, parts) for x in rows)))
    wire, sums = results[9].dtype if results[9].size else None, gradients
    for step in reversed(steps):
        sums = step.reduce(sums, wire)
    tokens = q.shape[1]
    total = [x[:, :tokens] + y for x, y in zip(gradients, sums, strict=True)]
    found = [x.astype(like.dtype) for x, like in zip((dq, *total), (q, k, v), strict=True)]
    return [*found, *unknown(results[3:])]


MODELS = {
    attention_cuda.TILE_SCHEDULE: tile_schedule,
    _custom_call.FORWARD: forward,
    _custom_call.BACKWARD: backward,
}


def model_of(target: str, results: Sequence[Any], **_: Any) -> Callable[..., list[jax.Array]]:
    """Takes the place of `jax.ffi.ffi_call`."""

    def call(*operands: jax.Array, **given: Any) -> list[jax.Array]:
        found = MODELS[target](*operands, results=results, given=given)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results]
        return found

    return call


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(
        forward_tile=lambda dim, v_dim: (128, 128),
        backward_tile=lambda dim, v_dim: (64, 128),
        tile_schedule_workspace_words=lambda *sizes: 1,
        backward_workspace_bytes=lambda *sizes: 16,
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", stand_in)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(jax.ffi, "ffi_call", model_of)
    let_parts_receive(monkeypatch, 1)


class Case(NamedTuple):
    """Sizes and options of a call."""

    kv_heads: int
    dim: int = 8
    v_dim: int = 8
    scale: float = 0.3
    soft_cap: float = 0.0
    wire: Any = None
    plans: int = 1  # one for all sequences, or one for each
    keeps: bool = False  # received rows, which do not come a second time


CASES = {
    "one_part_and_a_negative_scale": Case(1, scale=-0.3),
    "padded_heads_and_f16_on_the_wire": Case(2, dim=5, v_dim=11, wire=jnp.float16, plans=BATCH),
    "no_scale_a_cap_and_f32_on_the_wire": Case(3, scale=0.0, soft_cap=2.0, wire=jnp.float32),
    "bf16_on_the_wire": Case(8, wire=jnp.bfloat16),
    "kept_rows": Case(16, dim=5, v_dim=4, plans=BATCH, keeps=True),
}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Transfer(NamedTuple):
    """A rank's bands of all sequences, and the tables and routes of the steps."""

    bands: jax.Array
    tables: list[jax.Array]
    routes: tuple[Route, ...]

    @classmethod
    def of(cls, plans: Sequence[ContextPlan], case: Case) -> "Transfer":
        collectives = CollectiveOptions(wire_dtype=case.wire)
        options = ContextOptions(AXIS, case.scale, case.soft_cap, True, None, collectives, case.keeps)
        (routes, *_), each = zip(*(_steps(plan.transfer, options) for plan in plans), strict=True)
        bands = jnp.concatenate([on_this_rank(plan.bands, AXIS, "the plan") for plan in plans])
        tables = [jnp.concatenate(same * (BATCH // len(plans))) for same in zip(*each, strict=True)]
        return cls(bands, tables, routes)


def run(case: Case, plans: Sequence[ContextPlan], is_call: bool) -> list[jax.Array]:
    """Returns the results of both passes on all ranks, by the calls or by what these stand for."""
    rng, heads = np.random.default_rng(0), 2 * case.kv_heads
    lead = BATCH, RANKS * plans[0].shard_length
    shapes = [(heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.v_dim)]
    rows = [normal(rng, *lead, *shape) for shape in (*shapes, (heads, case.v_dim), (heads,), (heads,))]
    sinks = normal(rng, heads)
    stacked = ContextPlan.stack(plans)
    given: dict[str, Any] = {"scale": case.scale, "soft_cap": case.soft_cap, "keeps_received": case.keeps}

    def local(function: Callable[..., Any], options: dict[str, Any], stacked: Any, *operands: Any) -> Any:
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(plans))]
        transfer = Transfer.of(each, case)
        steps = [(x, np.arange(RANKS).reshape(-1, x.group_size or RANKS)) for x in transfer.routes]
        static = {"steps": steps} if is_call else {"routes": transfer.routes, "implementation": "xla"}
        keys, others, kept = operands[:3], operands[3:6], operands[6:]
        tables = transfer.tables
        return [*function(*keys, transfer.bands, *others, *tables, *kept, **static, **given, **options)]

    def on_ranks(function: Callable[..., Any], options: dict[str, Any], specs: list[P]) -> Any:
        return jax.shard_map(
            lambda *operands: local(function, options, *operands),
            mesh=make_mesh(RANKS),
            in_specs=(P(), *specs),
            out_specs=P(None, AXIS),
            check_vma=False,
        )

    of_rows, module = P(None, AXIS), _custom_call if is_call else _primitives
    names = ("forward", "backward") if is_call else ("_composed_forward", "_composed_backward")
    passes = [getattr(module, name) for name in names]

    @jax.jit
    def both_passes(stacked: ContextPlan, rows: list[jax.Array], sinks: jax.Array) -> list[jax.Array]:
        attend = on_ranks(passes[0], {"out_dtype": FLOAT}, [of_rows] * 3 + [P()])
        out, lse, *kept = attend(stacked, *rows[:3], sinks)
        gradients = on_ranks(passes[1], {"deterministic": True}, [of_rows] * (6 + len(kept)))
        return [out, lse, *gradients(stacked, *rows, *kept)]

    return both_passes(stacked, rows, sinks)


ONE_LEVEL = ["one_part_and_a_negative_scale", "padded_heads_and_f16_on_the_wire", "kept_rows"]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [*((name, None) for name in ONE_LEVEL), *((name, HOST) for name in CASES)],
)
def test_calls_do_what_they_stand_for(name: str, hosts: int | None) -> None:
    """With one level the dtype on the wire, a scale of 0 and a cap are passed on as with two."""
    case = CASES[name]
    plans = [plan_context(mask, RANKS, chunk_size=4) for mask in MASKS[: case.plans]]
    plans = plans if hosts is None else [plan.by_host(hosts) for plan in plans]
    for given, wanted in zip(*(run(case, plans, is_call) for is_call in (True, False)), strict=True):
        assert given.dtype == wanted.dtype
        np.testing.assert_allclose(given, wanted, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
