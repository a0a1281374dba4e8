"""The kernel of matmul_reduce_scatter, on groups of GPUs; on CPU devices the same checks in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmagi import matmul_reduce_scatter

from ..collectives.conftest import group as group  # noqa: PLC0414 (a fixture)
from ..collectives.groups import Group, assert_same_bits, local_parts, on_groups
from ..collectives.harness import AXIS

GROUPS = on_groups(*[Group("native", size) for size in (2, 4)])
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def operands(group: Group, *batch: int, dtype: Any, rows: int = 300, inner: int = 200, columns: int = 264) -> Any:
    """Whole arrays of the host that lead with the ranks: x [ranks, ..., ranks · rows, inner], w, and cotangents."""
    rng = np.random.default_rng(0)
    shapes = (*batch, group.size * rows, inner), (inner, columns), (*batch, rows, columns)
    return [rng.normal(size=(group.size, *shape)).astype(dtype) for shape in shapes]


def product(group: Group, x: Any, w: Any) -> Any:
    return matmul_reduce_scatter(x, w, AXIS, options=group.options)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def sums_of(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over ranks, [ranks, ..., rows, columns], and those of what each rank adds without its sign."""
    parts = np.stack([wide(a) @ wide(b) for a, b in zip(x, w, strict=True)])
    both = [np.stack(np.split(p.sum(0), len(x), axis=-2)) for p in (parts, abs(parts))]
    return both[0], both[1]


def assert_rounded(got: jax.Array, exact: np.ndarray, magnitude: np.ndarray) -> None:
    """Compares numbers whose parts, and whose sums, are rounded to their dtype; products in float32 are not."""
    bound = 2 * ULP[got.dtype.name] * magnitude + 1e-5
    packed = np.stack([exact, bound], -1)
    for shard in got.addressable_shards:
        found, (wanted, limit) = np.asarray(shard.data), np.moveaxis(packed[shard.index], -1, 0)
        assert (abs(wide(found) - wanted) <= limit).all()


@GROUPS
@DTYPES
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=str)
def test_values(group: Group, batch: tuple[int, ...], dtype: Any) -> None:
    x, w, _ = operands(group, *batch, dtype=dtype)
    run = group.program(lambda x, w: product(group, x[0], w[0])[None], P(AXIS))
    assert_rounded(run(*group.shard((x, w))), *sums_of(x, w))


@GROUPS
def test_gradients_are_those_of_plain_jax(group: Group) -> None:
    """The cotangents of both operands, also where the product is computed again, and in a scan."""
    x, w, dy = operands(group, 2, dtype=jnp.bfloat16)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(x @ w, AXIS, scatter_dimension=1, tiled=True)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        def layer(_: None, x: jax.Array) -> tuple[None, jax.Array]:
            return None, jax.checkpoint(lambda x, w: product(group, x, w))(x, w)

        return lax.scan(layer, None, x)[1]

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        x, w, dy = x[0], w[0], dy[0]
        found = jax.vjp(ours, x, w)[1](dy)
        wanted = jax.vjp(plain, x.astype(jnp.float32), w.astype(jnp.float32))[1](dy.astype(jnp.float32))
        differences = [abs(a.astype(b.dtype) - b).max() / abs(b).max() for a, b in zip(found, wanted, strict=True)]
        return jnp.stack(differences)[None]

    largest = group.program(gradients, P(AXIS))(*group.shard((x, w, dy)))
    for found, _ in local_parts(largest, np.zeros((group.size, 2), np.float32)):
        assert (found < 2 * ULP["bfloat16"]).all()


@GROUPS
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1)], ids=str)
def test_vmap(group: Group, axes: tuple[int | None, int | None]) -> None:
    """Maps over x, w, and both; examples are the calls one by one, to the bit."""
    x, w, _ = operands(group, dtype=jnp.bfloat16)
    stacks = [
        z if axis is None else np.stack([z, 2 * z], axis + 1) for z, axis in zip((x, w), axes, strict=True)
    ]

    def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, w: product(group, x, w), axes)(x[0], w[0])[None]

    def one_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
        def example(z: jax.Array, axis: int | None, i: int) -> jax.Array:
            return z if axis is None else lax.index_in_dim(z, i, axis, keepdims=False)

        both = [[example(z[0], a, i) for z, a in zip((x, w), axes, strict=True)] for i in range(2)]
        return jnp.stack([product(group, *arrays) for arrays in both])[None]

    given = group.shard(tuple(stacks))
    assert_same_bits(group.program(mapped, P(AXIS))(*given), group.program(one_by_one, P(AXIS))(*given))


@GROUPS
def test_many_calls_between_other_collectives(group: Group) -> None:
    """Each call has the bits of the first one, beside sums by XLA of what came before."""
    x, w, _ = operands(group, dtype=jnp.bfloat16, rows=130, columns=64)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        first = product(group, x[0], w[0])

        def again(differing: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            total = lax.psum(first * scale, AXIS)
            same = (product(group, x[0], w[0] + 0 * total[0, 0]) == first).all()
            return differing + (~same).astype(jnp.int32), None

        return lax.scan(again, lax.pcast(jnp.int32(0), AXIS, to="varying"), jnp.ones(200, first.dtype))[0][None]

    counts = group.program(local, P(AXIS))(*group.shard((x, w)))
    for found, _ in local_parts(counts, np.zeros(group.size, np.int32)):
        assert (found == 0).all()
