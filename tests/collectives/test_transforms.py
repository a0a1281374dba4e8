"""Derivatives and batching of the collectives, besides those of test_gpu_transforms.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxmagi import GroupCastSpec, group_reduce

from .harness import AXIS, cast_function, normal, reduce_function
from .routes import INPUT_ROWS, random_transfer


def test_transpose_of_reduce_is_cast(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    y, x = normal(rng, 4, transfer.spec.output_rows, 3), normal(rng, 4, INPUT_ROWS, 3)
    start = normal(rng, 4, INPUT_ROWS, 3)

    @jax.jit
    def gradients(y: jax.Array, start: jax.Array, x: jax.Array) -> Any:
        return jax.vjp(lambda y, start: reduce_function(4)(y, transfer.spec, None, start), y, start)[1](x)

    gradient, start_gradient = gradients(y, start, x)
    np.testing.assert_array_equal(gradient, cast_function(4)(x, transfer.spec))
    np.testing.assert_array_equal(start_gradient, x)


def test_derivative_in_some_of_the_operands(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    key, value = normal(rng, 4, INPUT_ROWS, 3), normal(rng, 4, INPUT_ROWS, 3)
    token = rng.integers(0, 9, (4, INPUT_ROWS)).astype(np.int32)

    def loss(value: jax.Array) -> jax.Array:
        out = cast_function(4)({"key": key, "value": value, "token": token}, transfer.spec)
        return (out["key"] * out["value"]).sum()

    gradient = jax.jit(jax.grad(loss))(value)
    np.testing.assert_allclose(gradient, transfer.reduce_sum(transfer.cast(key)), rtol=1e-5)


def test_derivative_of_average(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    y, x = normal(rng, 4, transfer.spec.output_rows, 3), normal(rng, 4, INPUT_ROWS, 3)

    @jax.jit
    def gradients(y: jax.Array, x: jax.Array) -> Any:
        return jax.vjp(lambda y, start: reduce_function(4, "avg")(y, transfer.spec, None, start), y, x)[1](x)

    gradient, start_gradient = gradients(y, x)
    share = x / (transfer.counts()[..., None] + 1)
    np.testing.assert_allclose(gradient, transfer.cast(share), rtol=1e-6)
    np.testing.assert_allclose(start_gradient, share, rtol=1e-6)


def test_derivatives_of_merge(x64: None, rng: np.random.Generator) -> None:
    """Forward and reverse, against finite differences."""
    transfer = random_transfer(rng, 2)
    shapes = [
        (transfer.spec.output_rows, 2, 3),
        (transfer.spec.output_rows, 2),
        (INPUT_ROWS, 2, 3),
        (INPUT_ROWS, 2),
    ]
    operands = [normal(rng, 2, *shape, dtype=np.float64) for shape in shapes]
    masked = rng.random(operands[1].shape) < 0.3

    @jax.jit
    def function(x: jax.Array, lse: jax.Array, out: jax.Array, out_lse: jax.Array) -> Any:
        lse = jnp.where(masked, -np.inf, lse)
        return reduce_function(2, "lse")(x, transfer.spec, lse, (out, out_lse))

    check_grads(function, operands, order=1, modes=("fwd", "rev"))


def test_second_derivative(rng: np.random.Generator) -> None:
    """Forward over reverse: both primitives, each as a tangent of the other's transpose."""
    transfer = random_transfer(rng, 4)
    x, direction = normal(rng, 4, INPUT_ROWS, 3), normal(rng, 4, INPUT_ROWS, 3)

    @jax.jit
    def curvature(x: jax.Array, direction: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda x: (cast_function(4)(x, transfer.spec) ** 3).sum())
        return jax.jvp(gradient, (x,), (direction,))[1]

    expected = transfer.reduce_sum(transfer.cast(6 * x * direction))
    np.testing.assert_allclose(curvature(x, direction), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
def test_heads_sharded_over_an_explicit_axis(op: Any, rng: np.random.Generator) -> None:
    """A shard_map over the ranks alone leaves the heads to the mesh's other axis."""
    transfer = random_transfer(rng, 4)
    x = normal(rng, 4, transfer.spec.output_rows, 2, 3)
    lse = normal(rng, 4, transfer.spec.output_rows, 2) if op == "lse" else None
    expected = reduce_function(4, op)(x, transfer.spec, lse, None)

    def local(x: Any, lse: Any) -> Any:
        x, lse = jax.tree.map(lambda leaf: leaf[0], (x, lse))
        result = group_reduce(x, transfer.spec, axis_name=AXIS, op=op, lse=lse)
        return jax.tree.map(lambda leaf: leaf[None], result)

    mesh = jax.make_mesh((2, 4), ("tensor", AXIS))
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, P(AXIS, None, "tensor"))
        x, lse = jax.tree.map(lambda leaf: jax.device_put(leaf, place), (x, lse))
        mapped = jax.shard_map(local, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS})
        got = jax.jit(mapped)(x, lse)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_nan_of_masked_parts_does_not_reach_gradients(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    x, lse = (normal(rng, 3, transfer.spec.output_rows, *shape) for shape in ((2, 4), (2,)))
    lse[:, ::2] = -np.inf
    x[:, ::2] = np.nan

    def loss(x: jax.Array, lse: jax.Array) -> jax.Array:
        out, total = reduce_function(3, "lse")(x, transfer.spec, lse, None)
        return (out**2).sum() + jnp.where(jnp.isneginf(total), 0, total).sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(x, lse):
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[:, ::2] == 0).all()


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=["x", "spec", "both"])
def test_vmap_over_nothing(in_axes: tuple[int | None, int | None], rng: np.random.Generator) -> None:
    """An axis of size 0."""
    spec = random_transfer(rng, 3).spec
    x = normal(rng, 3, INPUT_ROWS, 2)

    def run(x: Any, spec: GroupCastSpec) -> Any:
        y, vjp = jax.vjp(lambda x: cast_function(3)(x, spec), x)
        return y, vjp(y)[0]

    operands = [
        tree if axis is None else jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), tree)
        for tree, axis in zip((x, spec), in_axes, strict=True)
    ]
    y, z = jax.jit(jax.vmap(run, in_axes))(*operands)
    assert (y.shape, z.shape) == ((0, 3, spec.output_rows, 2), (0, *x.shape))


def test_gradient_under_vmap(rng: np.random.Generator) -> None:
    transfers = [random_transfer(rng, 3) for _ in range(2)]
    specs = jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers))
    x = normal(rng, 2, 3, INPUT_ROWS, 2)

    def loss(x: jax.Array) -> jax.Array:
        return (jax.vmap(cast_function(3))(x, specs) ** 2).sum()

    expected = np.stack([t.reduce_sum(2 * t.cast(one)) for t, one in zip(transfers, x, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), expected)
