"""Dense layers of nnx and linen whose weights are spread over a mesh axis, against one device."""

import functools
import re
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions
from jaxmagi.nn import column_parallel_dot_general, row_parallel_dot_general

AXIS, WIDTH, HIDDEN, TOKENS = "tensor", 16, 32, 24
COLUMNS, ROWS = column_parallel_dot_general(AXIS), row_parallel_dot_general(AXIS)


class Block(nnx.Module):
    """A Megatron block: two dense layers, or a projection to heads and back."""

    def __init__(self, spread: bool, *, heads: bool = False) -> None:
        up, down = (COLUMNS, ROWS) if spread else (None, None)
        kwargs: dict[str, Any] = {"rngs": nnx.Rngs(0)}
        if heads:
            self.up = nnx.LinearGeneral(WIDTH, (8, 4), dot_general=up, **kwargs)
            self.down = nnx.LinearGeneral((8, 4), WIDTH, axis=(-2, -1), dot_general=down, **kwargs)
        else:
            options = {} if up is None else {"dot_general": up}, {} if down is None else {"dot_general": down}
            self.up = nnx.Linear(WIDTH, HIDDEN, **options[0], **kwargs)
            self.down = nnx.Linear(HIDDEN, WIDTH, **options[1], **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class LinenBlock(linen.Module):
    spread: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = (COLUMNS, ROWS) if self.spread else (None, None)
        hidden = linen.Dense(HIDDEN, dot_general=up)(x)
        return x + linen.DenseGeneral(WIDTH, dot_general=down)(linen.gelu(hidden))


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, TOKENS, WIDTH))


def mesh_of(size: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((8 // size, size), ("data", AXIS), axis_types=(kind, kind))


def loss_and_gradients(block: nnx.Module, x: jax.Array) -> Any:
    graph, state = nnx.split(block)
    loss = jax.jit(lambda state, x: jnp.sin(nnx.merge(graph, state)(x)).sum())
    return jax.value_and_grad(loss, argnums=(0, 1))(state, x)


def assert_alike(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "size", "kind"),
    [
        (False, 1, AxisType.Auto),
        (False, 8, AxisType.Auto),
        (False, 4, AxisType.Explicit),
        (True, 4, AxisType.Auto),
        (True, 8, AxisType.Explicit),
    ],
)
def test_on_a_mesh(heads: bool, size: int, kind: AxisType) -> None:
    """Outside of shard_map layers take whole arrays, with examples over another axis."""
    wanted = loss_and_gradients(Block(False, heads=heads), batch())
    with jax.set_mesh(mesh_of(size, kind)):
        x = jax.device_put(batch(), P("data" if size >= 4 else None, AXIS))
        assert_alike(loss_and_gradients(Block(True, heads=heads), x), wanted)


def test_inside_shard_map() -> None:
    """Layers have the weights of their rank. Biases are of columns, or added once to a rank's tokens."""
    block = Block(True)
    graph, state = nnx.split(block)
    cuts = nnx.to_pure_dict(jax.tree.map(lambda _: P(), state))
    cuts["up"] = {"kernel": P(None, AXIS), "bias": P(AXIS)}
    cuts["down"]["kernel"] = P(AXIS)
    plain = nnx.to_pure_dict(state)

    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, nnx.State(state))(x)

    spread = jax.shard_map(run, mesh=mesh_of(8), in_specs=(cuts, P(None, AXIS)), out_specs=P(None, AXIS))
    np.testing.assert_allclose(jax.jit(spread)(plain, batch()), Block(False)(batch()), rtol=1e-4, atol=1e-4)


def test_linen() -> None:
    parameters = LinenBlock(False).init(jax.random.key(0), batch())
    with jax.set_mesh(mesh_of(8)):
        found = jax.jit(LinenBlock(True).apply)(parameters, batch())
    wanted = LinenBlock(False).apply(parameters, batch())
    assert_alike(found, wanted)


def test_what_travels() -> None:
    """Tokens are gathered before the first layer, and sums scattered behind the second."""
    with jax.set_mesh(mesh_of(8)):
        graph, state = nnx.split(Block(True))
        text = str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, batch()))
    found = re.findall(r"= (all_gather\w*|all_to_all|reduce_scatter|psum\w*)\[", text)
    assert sorted(found) == ["all_gather", "all_to_all"]  # functions are printed behind their callers


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batches_stay_sharded(kind: AxisType) -> None:
    """Collectives are in groups along the axis of the weights, and carry a device's own examples."""
    batch_axes = "data" if kind == AxisType.Auto else None
    multiply = column_parallel_dot_general(AXIS, batch_axis_name=batch_axes)
    with jax.set_mesh(mesh_of(4, kind)):
        x = jax.device_put(batch(), P("data", AXIS))
        w = jax.device_put(jnp.ones((WIDTH, HIDDEN)), P(None, AXIS))
        text = jax.jit(lambda x, w: multiply(x, w, DENSE)).lower(x, w).compile().as_text()
    (gathered,) = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text or "")
    assert gathered == f"1,{TOKENS},{WIDTH}"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_over_another_axis(kind: AxisType, check_vma: bool) -> None:
    x, w = batch(), jax.random.normal(jax.random.key(2), (WIDTH, HIDDEN))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        def of_examples(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sin(COLUMNS(x, w, DENSE))

        specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
        return jax.shard_map(of_examples, check_vma=check_vma, **specs)(x, w).sum()

    wanted = jax.grad(lambda x, w: jnp.sin(x @ w).sum(), argnums=(0, 1))(x, w)
    with jax.set_mesh(mesh_of(4, kind)):
        examples = jax.device_put(x, P("data"))
        assert_alike(jax.jit(jax.grad(loss, argnums=(0, 1)))(examples, w), wanted)


def test_equal_ones_are_equal() -> None:
    """So a model that is made again is compiled once."""
    assert column_parallel_dot_general(AXIS) == COLUMNS != ROWS
    wide = CollectiveOptions(wire_dtype="float32")
    assert hash(row_parallel_dot_general(AXIS, options=wide)) == hash(
        row_parallel_dot_general(AXIS, options=wide)
    )


DENSE = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("shapes", "dimension_numbers", "options", "error", "message"),
    [
        (((2, 24, 16), (16, 30)), DENSE, {}, ValueError, "does not divide the first output dimension, 30"),
        (
            ((2, 20, 16), (16, 32)),
            DENSE,
            {},
            ValueError,
            "The size 8 of mesh axis 'tensor' does not divide the tokens, 20",
        ),
        (((16,), (16, 32)), (((0,), (0,)), ((), ())), {}, ValueError, "lhs must be [..., tokens, features]"),
        (((2, 24, 12), (16, 32)), DENSE, {}, ValueError, "have shapes (2, 24, 12) and (16, 32)"),
        (
            ((2, 8, 16, 8), (8, 16, 32)),
            (((2, 3), (0, 1)), ((), ())),
            {},
            ValueError,
            "lhs must end with the dimensions that rhs begins with, 2 of them, but they have shapes (2, 8",
        ),
        (((2, 24, 16), (32, 16)), (((2,), (1,)), ((), ())), {}, NotImplementedError, "dimension_numbers="),
        (
            ((2, 24, 16), (2, 16, 32)),
            (((2,), (1,)), ((0,), (0,))),
            {},
            NotImplementedError,
            "dimension_numbers=",
        ),
        (
            ((2, 24, 16), (16, 32)),
            DENSE,
            {"precision": "highest"},
            NotImplementedError,
            "precision='highest'",
        ),
    ],
)
def test_products_that_do_not_fit(
    shapes: Any, dimension_numbers: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays = map(functools.partial(jnp.ones, dtype=jnp.float32), shapes)
    with jax.set_mesh(mesh_of(8)), pytest.raises(error, match=re.escape(message)):
        COLUMNS(next(arrays), next(arrays), dimension_numbers, **options)


def test_an_axis_that_is_none() -> None:
    x, w = jnp.ones((2, 24, 16)), jnp.ones((16, 32))
    with pytest.raises(ValueError, match="'tensor' is no axis of the mesh, which has"):
        ROWS(x, w, DENSE)
    with pytest.raises(ValueError, match="axis_name must be a str, but it is None"):
        row_parallel_dot_general(None)  # pyright: ignore[reportArgumentType]
