"""The kernels of products with a collective, on groups of GPUs, and the same checks in plain JAX on CPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmagi import CollectiveOptions

from ..collectives.conftest import group as group  # a fixture
from ..collectives.groups import Group, assert_same_bits, local_parts, on_groups
from ..collectives.harness import AXIS
from .harness import PRODUCTS

GROUPS = on_groups(*[Group("native", size) for size in (2, 4)])
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
KERNELS = pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
TRANSPOSES = pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
"""Each is the gradient of the other one."""


def operands(
    group: Group, name: str, *batch: int, dtype: Any, rows: int = 300, inner: int = 200, columns: int = 264
) -> tuple[np.ndarray, np.ndarray]:
    """Whole arrays of the host that lead with the ranks, x [ranks, ..., rows of x, inner] and w."""
    rng = np.random.default_rng(0)
    x_rows = group.size * rows if name == "reduce_scatter" else rows
    x, w = (rng.normal(size=(group.size, *shape)) for shape in ((*batch, x_rows, inner), (inner, columns)))
    return x.astype(dtype), w.astype(dtype)


def product(group: Group, name: str, x: Any, w: Any) -> Any:
    return PRODUCTS[name].function(x, w, AXIS, options=group.options)


def results(name: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The results of all ranks in float64, [ranks, ..., rows, columns]."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    if name == "all_gather":
        return np.stack([np.concatenate([*x], axis=-2) @ weights for weights in w])
    total = np.sum([a @ b for a, b in zip(x, w, strict=True)], axis=0)
    return np.stack(np.split(total, len(x), axis=-2) if name == "reduce_scatter" else [total] * len(x))


@GROUPS
@KERNELS
@pytest.mark.parametrize(("batch", "dtype"), [((), jnp.bfloat16), ((2, 1), jnp.float16)], ids=str)
def test_values(group: Group, name: str, batch: tuple[int, ...], dtype: Any) -> None:
    """Parts, and their sums, are rounded to the dtype; products accumulate in float32."""
    x, w = operands(group, name, *batch, dtype=dtype)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        y = product(group, name, x[0], w[0])[None]
        return lax.pcast(y, AXIS, to="varying") if name == "all_reduce" else y

    got = group.program(local, P(AXIS))(*group.shard((x, w)))
    exact = results(name, x, w)
    rounded = abs(exact) if name == "all_gather" else results(name, abs(x), abs(w))
    packed = np.stack([exact, 2 * ULP[got.dtype.name] * rounded + 1e-5], -1)
    for shard in got.addressable_shards:
        wanted, limit = np.moveaxis(packed[shard.index], -1, 0)
        assert (abs(np.asarray(shard.data).astype(np.float64) - wanted) <= limit).all()


@GROUPS
@TRANSPOSES
def test_gradients_are_those_of_plain_jax(group: Group, name: str) -> None:
    """The cotangents of both operands, in a scan whose steps are computed again."""
    x, w = operands(group, name, 2, dtype=jnp.bfloat16)
    dy = np.random.default_rng(1).normal(size=results(name, x, w).shape).astype(jnp.bfloat16)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        def layer(_: None, x: jax.Array) -> tuple[None, jax.Array]:
            return None, jax.checkpoint(lambda x, w: product(group, name, x, w))(x, w)

        return lax.scan(layer, None, x)[1]

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        narrow = x[0], w[0], dy[0]
        found = jax.vjp(ours, *narrow[:2])[1](narrow[2])
        *wide, cotangent = (z.astype(jnp.float32) for z in narrow)
        wanted = jax.vjp(lambda x, w: PRODUCTS[name].plain(x, w, AXIS), *wide)[1](cotangent)
        differences = [
            abs(a.astype(b.dtype) - b).max() / abs(b).max() for a, b in zip(found, wanted, strict=True)
        ]
        return jnp.stack(differences)[None]

    largest = group.program(gradients, P(AXIS))(*group.shard((x, w, dy)))
    for found, _ in local_parts(largest, np.zeros((group.size, 2), np.float32)):
        assert (found < 2 * ULP["bfloat16"]).all()


@GROUPS
@TRANSPOSES
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1)], ids=str)
def test_vmap(group: Group, name: str, axes: tuple[int | None, int | None]) -> None:
    """Maps over x, w, and both; examples are the calls one by one, to the bit."""
    given = operands(group, name, dtype=jnp.bfloat16)
    stacks = [
        z if axis is None else np.stack([z, 2 * z], axis + 1) for z, axis in zip(given, axes, strict=True)
    ]

    def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, w: product(group, name, x, w), axes)(x[0], w[0])[None]

    def one_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
        def example(z: jax.Array, axis: int | None, i: int) -> jax.Array:
            return z if axis is None else lax.index_in_dim(z, i, axis, keepdims=False)

        both = [[example(z[0], a, i) for z, a in zip((x, w), axes, strict=True)] for i in range(2)]
        return jnp.stack([product(group, name, *arrays) for arrays in both])[None]

    arrays = group.shard(tuple(stacks))
    assert_same_bits(group.program(mapped, P(AXIS))(*arrays), group.program(one_by_one, P(AXIS))(*arrays))


@GROUPS
@TRANSPOSES
def test_many_calls_between_other_collectives(group: Group, name: str) -> None:
    """Each call has the bits of the first one, beside sums by XLA of what came before."""
    x, w = operands(group, name, dtype=jnp.bfloat16, rows=130, columns=64)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        first = product(group, name, x[0], w[0])

        def again(differing: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            total = lax.psum(first * scale, AXIS)
            same = (product(group, name, x[0], w[0] + 0 * total[0, 0]) == first).all()
            return differing + (~same).astype(jnp.int32), None

        none = lax.pcast(jnp.int32(0), AXIS, to="varying")
        return lax.scan(again, none, jnp.ones(200, first.dtype))[0][None]

    counts = group.program(local, P(AXIS))(*group.shard((x, w)))
    for found, _ in local_parts(counts, np.zeros(group.size, np.int32)):
        assert (found == 0).all()


@on_groups(Group("native", 2))
@TRANSPOSES
def test_the_default_is_the_kernel_where_it_pays(group: Group, name: str) -> None:
    """The ranks of one process are seen to be connected by NVLink; the results have the kernel's bits."""
    if group.implementation != "native" or jax.process_count() > 1:
        pytest.skip("needs two GPUs of one process")
    given = operands(group, name, dtype=jnp.bfloat16, rows=4096, inner=1024, columns=4096)
    arrays = group.shard(given)

    def program(options: CollectiveOptions) -> Any:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return PRODUCTS[name].function(x[0], w[0], AXIS, options=options)[None]

        return group.program(local, P(AXIS))

    default, native = program(CollectiveOptions()), program(group.options)
    assert "custom_call @jaxmagi" in default.lower(*arrays).as_text()
    assert_same_bits(default(*arrays), native(*arrays))
