"""dispatch and undispatch."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, dispatch, masks, plan_context, undispatch

from .harness import AXIS

LENGTH, CP_SIZE = 30, 4
PLAN = plan_context(masks.causal(LENGTH), CP_SIZE, chunk_size=4)
PADDED = PLAN.token_order.shape[0]


def test_numpy_stays_numpy() -> None:
    x = np.arange(2 * LENGTH).reshape(2, LENGTH)
    out = dispatch(x, PLAN, axis=1, pad_value=-100)
    assert isinstance(out, np.ndarray) and out.shape == (2, PADDED) and out.dtype == x.dtype
    np.testing.assert_array_equal(out[0], np.where(PLAN.token_order < 0, -100, PLAN.token_order))
    back = undispatch(out, PLAN, axis=-1)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, x)


def test_position_ids_are_dispatched_positions() -> None:
    np.testing.assert_array_equal(dispatch(np.arange(LENGTH), PLAN), PLAN.position_ids)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(
    ("dtype", "pad_value"),
    [
        (np.int32, 1.5),
        (np.int32, np.nan),
        (np.int32, 2**40),
        (np.uint8, -1),
        (np.bool_, 2),
        (np.float32, 1j),
        (jnp.bfloat16, None),
        (np.float32, "1"),
        (np.int32, "1"),
        (np.float32, [0, None]),
    ],
)
def test_values_that_padding_cannot_have(xp: Any, dtype: Any, pad_value: Any) -> None:
    message = f"pad_value must be a number that {np.dtype(dtype)} has, but it is {pad_value!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        dispatch(xp.zeros(LENGTH, dtype), PLAN, pad_value=pad_value)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(
    ("dtype", "pad_value"),
    [(np.int32, 3.0), (np.int32, True), (np.bool_, 1), (jnp.bfloat16, 3), (np.float16, -np.inf)],
)
def test_values_that_padding_can_have(xp: Any, dtype: Any, pad_value: Any) -> None:
    out = dispatch(xp.zeros(LENGTH, dtype), PLAN, pad_value=pad_value)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.where(PLAN.token_order < 0, np.asarray(pad_value, dtype), 0))


@pytest.mark.parametrize("function", [dispatch, undispatch])
@pytest.mark.parametrize("axis", ["0", None, 0.0])
def test_axes_that_are_none(function: Any, axis: Any) -> None:
    with pytest.raises(ValueError, match=f"axis must be an integer, but it is {axis!r}"):
        function(np.zeros(LENGTH), PLAN, axis=axis)


def test_masked_arrays() -> None:
    for function, length in ((dispatch, LENGTH), (undispatch, PADDED)):
        with pytest.raises(ValueError, match="x must not be a masked array, whose mask would be lost"):
            function(np.ma.zeros(length), PLAN)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_jax_under_jit(axis: int, rng: np.random.Generator) -> None:
    x = np.moveaxis(rng.normal(size=(LENGTH, 3, 2)).astype(np.float32), 0, axis)
    out = jax.jit(lambda x, plan: dispatch(x, plan, axis=axis, pad_value=7))(x, PLAN)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, dispatch(x, PLAN, axis=axis, pad_value=7))
    back = jax.jit(lambda x, plan: undispatch(x, plan, axis=axis))(out, PLAN)
    np.testing.assert_array_equal(back, x)


def test_gradients_are_the_inverse(rng: np.random.Generator) -> None:
    x, y = (rng.normal(size=(n, 2)).astype(np.float32) for n in (LENGTH, PADDED))
    _, vjp = jax.vjp(lambda x: dispatch(x, PLAN), jnp.asarray(x))
    np.testing.assert_array_equal(vjp(y)[0], undispatch(y, PLAN))
    _, vjp = jax.vjp(lambda y: undispatch(y, PLAN), jnp.asarray(y))
    np.testing.assert_array_equal(vjp(x)[0], dispatch(x, PLAN))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays(kind: AxisType, rng: np.random.Generator) -> None:
    """The padded length divides by the axis, the length does not: there the result is replicated."""
    mesh = jax.make_mesh((2, CP_SIZE), ("data", AXIS), axis_types=(kind, kind))
    x = rng.normal(size=(2, PADDED)).astype(np.float32)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data", AXIS)))
        back = jax.jit(lambda x, plan: undispatch(x, plan, axis=1))(sharded, PLAN)
        np.testing.assert_array_equal(back, undispatch(x, PLAN, axis=1))
        again = jax.jit(lambda x, plan: dispatch(x, plan, axis=1))(back, PLAN)
        np.testing.assert_array_equal(again, dispatch(np.asarray(back), PLAN, axis=1))
        if kind == AxisType.Explicit:
            assert jax.typeof(back).sharding.spec == P("data", None)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded_plan(kind: AxisType, rng: np.random.Generator) -> None:
    """A plan placed by P(axis_name), as it is for `context_attention`, works here too."""
    mesh = jax.make_mesh((CP_SIZE,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:CP_SIZE])
    x = rng.normal(size=(LENGTH, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(PLAN, jax.NamedSharding(mesh, P(AXIS)))
        out = jax.jit(dispatch)(jnp.asarray(x), placed)
        np.testing.assert_array_equal(out, dispatch(x, PLAN))
        back = jax.jit(undispatch)(jax.device_put(out, jax.NamedSharding(mesh, P(AXIS))), placed)
        np.testing.assert_array_equal(back, x)
        stacked = jax.device_put(ContextPlan.stack([PLAN, PLAN]), jax.NamedSharding(mesh, P(None, AXIS)))
        both = jax.jit(jax.vmap(undispatch))(jnp.stack([out, out]), stacked)
        np.testing.assert_array_equal(both, np.stack([x, x]))


def test_explicit_sharding_of_the_tokens_stays(rng: np.random.Generator) -> None:
    plan = plan_context(masks.causal(32), CP_SIZE, chunk_size=4)
    mesh = jax.make_mesh(
        (CP_SIZE,), (AXIS,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:CP_SIZE]
    )
    x = rng.normal(size=(32, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        out = dispatch(jax.device_put(x, jax.NamedSharding(mesh, P(AXIS))), plan)
        assert jax.typeof(out).sharding.spec == P(AXIS, None)
        np.testing.assert_array_equal(out, dispatch(x, plan))
        gradient = jax.grad(lambda x: (dispatch(x, plan) ** 2).sum())(jax.reshard(x, P(AXIS)))
        np.testing.assert_array_equal(gradient, 2 * x)


def test_vmap_over_stacked_plans(rng: np.random.Generator) -> None:
    other = plan_context(masks.sliding_window(LENGTH, 3), CP_SIZE, chunk_size=4, layout="balanced")
    reverse = dataclasses.replace(other, token_order=other.token_order[::-1].copy())
    x = rng.normal(size=(2, LENGTH)).astype(np.float32)
    out = jax.vmap(dispatch)(x, ContextPlan.stack([PLAN, reverse]))
    np.testing.assert_array_equal(out, np.stack([dispatch(x[0], PLAN), dispatch(x[1], reverse)]))


@pytest.mark.parametrize(
    ("function", "shape", "axis", "plan", "message"),
    [
        (dispatch, (2, 31), 1, PLAN, "x has 31 tokens at axis 1, but plan.length is 30 (x is (2, 31))"),
        (undispatch, (31,), 0, PLAN, "x has 31 tokens at axis 0, but the padded length is 32 (x is (31,))"),
        (dispatch, (30, 1), 2, PLAN, "dispatch: axis 2 is out of bounds for shape (30, 1)"),
        (
            dispatch,
            (2, 30),
            1,
            ContextPlan.stack([PLAN, PLAN]),
            "(token_order (2, 32)): use jax.vmap(dispatch)",
        ),
        (undispatch, (32,), 0, masks.causal(30), "plan must be a jaxmagi.ContextPlan, but it is AttnMask"),
        (dispatch, (30,), 0, jax.tree.map(lambda x: x[: len(x) // CP_SIZE], PLAN), "is one rank's part"),
    ],
)
def test_errors(function: Any, shape: tuple[int, ...], axis: int, plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        function(np.zeros(shape), plan, axis=axis)
