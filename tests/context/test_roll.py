"""roll: against a roll of the global array on the host."""

import doctest
import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmagi
from jaxmagi import ContextPlan, dispatch, masks, plan_context, roll, undispatch

from . import harness
from .harness import AXIS, make_mesh, make_plan

LENGTH = 61
DOCUMENTS = [7, 20, 1, 1, 32]
IDS = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS).astype(np.int32)
MASK = masks.sliding_window(LENGTH, 0)
ROWS = P(AXIS)


def scattered(cp_size: int) -> np.ndarray:
    """Returns a layout in no order, with padding anywhere."""
    rng = np.random.default_rng(cp_size)
    return rng.permutation(np.concatenate([np.arange(LENGTH), np.full(3, -1)])).astype(np.int32)


def plan_of(layout: str, cp_size: int) -> ContextPlan:
    if layout == "scattered":
        return make_plan(MASK, cp_size, scattered(cp_size))
    options = {"chunk_size": 4} if layout == "balanced" else {}
    return make_plan(MASK, cp_size, layout, **options)


def rolled(x: np.ndarray, shift: int, fill: Any = 0, ids: np.ndarray | None = None) -> np.ndarray:
    """Rolls a global array, value by value; the id 0 is that of padding."""
    out = np.full_like(x, fill)
    for source in range(len(x)):
        place = source + shift
        if 0 <= place < len(x) and (ids is None or ids[source] == ids[place] != 0):
            out[place] = x[source]
    return out


@functools.cache
def compiled(cp_size: int, shift: int, fill: Any = 0, *, plan_sharded: bool = True) -> Any:
    """Compiles a function of dispatched rows, a plan and dispatched ids or None."""

    def local(x: Any, plan: ContextPlan, ids: Any) -> jax.Array:
        return roll(x, plan, shift, axis_name=AXIS, segment_ids=ids, fill=fill)

    specs = (ROWS, ROWS if plan_sharded else P(), ROWS)
    return jax.jit(jax.shard_map(local, mesh=make_mesh(cp_size), in_specs=specs, out_specs=ROWS))


@pytest.mark.parametrize("cp_size", [1, 8], indirect=True)
@pytest.mark.parametrize("layout", ["balanced", "zigzag", "contiguous", "scattered"])
@pytest.mark.parametrize("shift", [-1, 5, -30, 0, 2**30])
def test_against_the_host(cp_size: int, layout: str, shift: int) -> None:
    """The ids are those of documents, or of none."""
    plan = plan_of(layout, cp_size)
    tokens = np.arange(100, 100 + LENGTH, dtype=np.int32)
    for ids in (None, IDS):
        dispatched = None if ids is None else dispatch(ids, plan, pad_value=3)
        out = compiled(cp_size, shift, -100)(dispatch(tokens, plan), plan, dispatched)
        expected = dispatch(rolled(tokens, shift, -100, ids), plan, pad_value=-100)
        np.testing.assert_array_equal(out, expected)
        assert out.dtype == tokens.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("layout", ["balanced", "contiguous", "scattered"])
def test_on_gpus(cp_size: int, layout: str, rng: np.random.Generator) -> None:
    """Two features in bfloat16, and the gradient of them, for shifts of one round and of several."""
    plan = plan_of(layout, cp_size)
    ids = dispatch(IDS, plan)
    x, weights = (rng.normal(size=(LENGTH, 2)).astype(jnp.bfloat16) for _ in range(2))

    def both(mapped: Any, x: jax.Array, weights: jax.Array, plan: ContextPlan, ids: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: mapped(x, plan, ids), x)
        return out, *pull(weights)

    for shift in (-1, 3, -40):
        run = jax.jit(functools.partial(both, compiled(cp_size, shift, 7)))
        out, gradient = map(harness.whole, run(dispatch(x, plan), dispatch(weights, plan), plan, ids))
        np.testing.assert_array_equal(out, dispatch(rolled(x, shift, 7, IDS), plan, pad_value=7))
        np.testing.assert_array_equal(gradient, dispatch(rolled(weights, -shift, 0, IDS), plan))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", ()), ("float32", (2, 0)), ("bfloat16", (2, 3)), ("bool", (3,)), ("uint8", ())],
)
def test_dtypes_and_shapes(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    plan = plan_of("balanced", 8)
    x = (3 * rng.normal(size=(LENGTH, *shape))).astype(np.int8).astype(jnp.dtype(dtype))
    out = compiled(8, -2, 1, plan_sharded=False)(dispatch(x, plan), plan, None)
    np.testing.assert_array_equal(out, dispatch(rolled(x, -2, 1), plan, pad_value=1))
    assert out.dtype == x.dtype


def test_equals_the_roll_of_the_global_array(rng: np.random.Generator) -> None:
    plan, x = plan_of("balanced", 8), rng.normal(size=(LENGTH, 2)).astype(np.float32)
    out = undispatch(compiled(8, 3)(dispatch(x, plan), plan, None), plan)
    np.testing.assert_array_equal(out[3:], jnp.roll(x, 3, axis=0)[3:])
    assert not np.asarray(out[:3]).any()


@pytest.mark.parametrize(("layout", "shift"), [("balanced", -1), ("scattered", 9)])
def test_gradients(layout: str, shift: int, rng: np.random.Generator) -> None:
    """The gradient is that of a sum over the positions that are reached, and itself differentiable."""
    plan = plan_of(layout, 4)
    x, weights = (rng.normal(size=(LENGTH, 2)).astype(np.float32) for _ in range(2))
    padded = dispatch(x, plan, pad_value=5), dispatch(weights, plan, pad_value=np.nan)
    ids = dispatch(IDS, plan)

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        out = compiled(4, shift, 7)(x, plan, ids)
        return (jnp.where(plan.token_order[:, None] < 0, 0, out**2 * weights)).sum()

    gradient = jax.jit(jax.grad(loss))(*map(jnp.asarray, padded))
    weights_back = rolled(weights, -shift, 0, IDS)
    np.testing.assert_allclose(undispatch(gradient, plan), 2 * x * weights_back, rtol=1e-6)
    assert not np.asarray(gradient)[plan.token_order < 0].any()
    twice = jax.jit(jax.grad(lambda x: jax.grad(loss)(x, jnp.asarray(padded[1])).sum()))
    second = twice(jnp.asarray(padded[0]))
    np.testing.assert_allclose(undispatch(second, plan), 2 * weights_back, rtol=1e-6)


def test_gradients_inside_of_shard_map(rng: np.random.Generator) -> None:
    """x is the same on all ranks, so that check_vma sums its gradient over them."""
    plan = plan_of("balanced", 4)
    x = rng.normal(size=plan.shard_length).astype(np.float32)

    def local(x: jax.Array, plan: ContextPlan) -> jax.Array:
        return jax.grad(lambda x: roll(x, plan, -1, axis_name=AXIS).sum())(x)

    mapped = jax.shard_map(local, mesh=make_mesh(4), in_specs=(P(), ROWS), out_specs=P())
    moves = dispatch(np.arange(LENGTH) > 0, plan).reshape(4, -1)
    np.testing.assert_array_equal(jax.jit(mapped)(x, plan), moves.sum(0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_other_mesh_axes(kind: AxisType, check_vma: bool, rng: np.random.Generator) -> None:
    """The second axis shards features, and shard_map leaves it out; or a batch, each with its plan."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    plans = [plan_of("balanced", 4), plan_of("contiguous", 4)]
    x = rng.normal(size=(LENGTH, 6)).astype(np.float32)
    expected = rolled(x, -1)

    def local(x: jax.Array, plan: ContextPlan) -> jax.Array:
        return roll(x, plan, -1, axis_name=AXIS)

    def local_batch(x: jax.Array, plan: ContextPlan) -> jax.Array:
        return jax.vmap(jax.grad(lambda x, plan: (local(x, plan) ** 2).sum() / 2))(x, plan)

    def place(tree: Any, spec: P) -> Any:
        return jax.device_put(tree, jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        mapped: Any = functools.partial(jax.shard_map, check_vma=check_vma)
        features = mapped(local, in_specs=(ROWS, ROWS), out_specs=ROWS, axis_names={AXIS})
        out = jax.jit(features)(place(dispatch(x, plans[0]), P(AXIS, "data")), place(plans[0], ROWS))
        np.testing.assert_array_equal(out, dispatch(expected, plans[0]))
        if kind == AxisType.Explicit:
            assert jax.typeof(out).sharding.spec == P(AXIS, "data")
        batch = P("data", AXIS)
        both = np.stack([dispatch(x, plan) for plan in plans])
        stacked = ContextPlan.stack(plans)
        mapped_batch = mapped(local_batch, in_specs=(batch, batch), out_specs=batch)
        out = jax.jit(mapped_batch)(place(both, batch), place(stacked, batch))
    wanted = np.where(np.arange(LENGTH)[:, None] > 0, x, 0)
    np.testing.assert_allclose(out, [dispatch(wanted, plan) for plan in plans])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["x", "plan", "both"])
def test_vmap(axes: tuple[int | None, int | None], rng: np.random.Generator) -> None:
    """The plans need different numbers of rounds."""
    orders = [scattered(8), np.concatenate([np.arange(LENGTH), np.full(3, -1)])]
    plans = [make_plan(MASK, 8, order) for order in orders]
    x = rng.normal(size=(2, 64)).astype(np.float32)
    rows = [x[0 if axes[0] is None else i] for i in range(2)]
    used = [plans[0 if axes[1] is None else i] for i in range(2)]
    function = jax.vmap(functools.partial(roll, shift=2, axis_name=AXIS), in_axes=axes)
    specs = tuple(ROWS if axis is None else P(None, AXIS) for axis in axes)
    mapped = jax.shard_map(function, mesh=make_mesh(8), in_specs=specs, out_specs=P(None, AXIS))
    out = jax.jit(mapped)(
        x[0] if axes[0] is None else x, plans[0] if axes[1] is None else ContextPlan.stack(plans)
    )
    for given, plan, result in zip(rows, used, out, strict=True):
        np.testing.assert_array_equal(result, dispatch(rolled(undispatch(given, plan), 2), plan))


def test_plans_share_a_compilation(compilations: list[str]) -> None:
    """They need no round, one round or several."""
    chunks = [np.arange(128).reshape(-1, size)[::2] for size in (32, 8, 1)]
    others = [np.arange(128).reshape(-1, size)[1::2] for size in (32, 8, 1)]
    orders = [np.concatenate([a, b]).reshape(-1) for a, b in zip(chunks, others, strict=True)]
    mask = masks.sliding_window(128, 3)
    plans = [make_plan(mask, 4, order) for order in (np.arange(128), *orders)]
    x = np.arange(128, dtype=np.int32)
    run = compiled(4, -1)
    run(dispatch(x, plans[0]), plans[0], None)
    compilations.clear()
    for plan in plans:
        out = run(dispatch(x, plan), plan, None)
        np.testing.assert_array_equal(undispatch(np.asarray(out), plan), [*range(1, 128), 0])
    assert not compilations


@pytest.mark.parametrize(("shift", "rows"), [(-1, 16), (2, 32), (-1000, 512)])
def test_few_rows_are_sent(shift: int, rows: int) -> None:
    """A round gathers ``rows`` of each rank; a long shift gathers no more at once than a rank has."""
    plan = plan_context(masks.causal(2**15), 8)
    x = jax.ShapeDtypeStruct((2**15, 5), jnp.float32)
    program = str(jax.make_jaxpr(compiled(8, shift))(x, plan, None))
    gathered = re.findall(r":(\w+)\[([\d,]+)\]\S* = all_gather", program)
    assert sorted(shape for _, shape in gathered) == sorted([f"{8 * rows}", f"{8 * rows},5"])
    runs = (np.diff(plan.token_order.reshape(8, -1)) != 1).sum(axis=1) + 1
    assert runs.max() <= 16  # so that one round is enough for short shifts


NO_PLAN: Any = masks.causal(LENGTH)
PLAN = plan_of("balanced", 4)


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (np.zeros(15), {}, "x must have the 16 tokens of a rank along its first axis, but has shape (15,)"),
        (np.zeros(()), {}, "but has shape ()"),
        (np.zeros(16), {"plan": NO_PLAN}, "plan must be a jaxmagi.ContextPlan, but it is AttnMask"),
        (np.zeros(16), {"plan": plan_of("balanced", 8)}, "cp_size=8, but mesh axis 'context' has size 4"),
        (np.zeros(16), {"plan": ContextPlan.stack([PLAN, PLAN])}, "(token_order (2, 64)): use jax.vmap"),
        (np.zeros(16), {"shift": 1.5}, "shift must be an integer, but it is 1.5"),
        (np.zeros(16), {"shift": 2**30 + 1}, "shift must be between -1073741824 and 1073741824"),
        (np.zeros(16), {"shift": jnp.int32}, "shift is traced"),
        (np.zeros(16), {"fill": np.zeros(3)}, "fill must be a scalar, but it has shape (3,)"),
        (np.zeros(16, int), {"fill": 1.5}, "fill must be a number that int32 has, but it is 1.5"),
        (np.zeros(16, np.int8), {"fill": 300}, "fill must be a number that int8 has, but it is 300"),
        (np.zeros(16), {"fill": None}, "fill must be a number that float32 has, but it is None"),
        (np.ma.zeros(16), {}, "x must not be a masked array"),
        (np.zeros(16), {"padding_id": 2**31}, "padding_id must be between -2147483648 and 2147483647"),
        (np.zeros(16), {"segment_ids": np.zeros(15, int)}, "segment_ids must have the 16 tokens of a rank"),
        (np.zeros(16), {"segment_ids": np.zeros(16)}, "segment_ids must be integers [16], but are float32"),
        (np.zeros(16), {"segment_ids": np.zeros((16, 2), int)}, "but are int32 (16, 2)"),
        (np.zeros(16), {"axis_name": "data"}, "axis_name='data' is no mesh axis that a surrounding"),
    ],
)
def test_errors(x: Any, arguments: dict[str, Any], message: str) -> None:
    def local(number: jax.Array) -> jax.Array:
        options = {"plan": PLAN, "shift": -1, "axis_name": AXIS, **arguments}
        if options["shift"] is jnp.int32:
            options["shift"] = number[0]
        return roll(x, **options)

    mapped = jax.shard_map(local, mesh=make_mesh(4), in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(mapped, np.arange(4, dtype=np.int32))


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match="no mesh axis that a surrounding"):
        roll(np.zeros(64), PLAN, -1, axis_name=AXIS)


def test_example_of_the_docstring() -> None:
    names = {**vars(jaxmagi), "jax": jax, "jnp": jnp}
    result = doctest.testmod(sys.modules[roll.__module__], extraglobs=names)
    assert result.attempted > 1 and result.failed == 0
