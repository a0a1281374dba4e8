"""Products with a collective over a mesh axis, and the same by plain lax: functions of whole arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jaxmagi import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter

AXIS = "tensor"

type Function = Callable[..., jax.Array]


def _rows(x: jax.Array) -> int:
    return x.ndim - 2


class Product(NamedTuple):
    """A public function, what it computes, and how its arrays ``[..., M, K]`` and ``[K, N]`` are cut.

    x, w, out: the dimension that ranks share, counted from behind; None where all have the whole array.
    """

    function: Function
    plain: Function
    x: int | None
    w: int | None
    out: int | None


PRODUCTS = {
    "all_gather": Product(
        all_gather_matmul,
        lambda x, w, axis: lax.all_gather(x, axis, axis=_rows(x), tiled=True) @ w,
        x=-2, w=-1, out=-1,
    ),
    "reduce_scatter": Product(
        matmul_reduce_scatter,
        lambda x, w, axis: lax.psum_scatter(x @ w, axis, scatter_dimension=_rows(x), tiled=True),
        x=-1, w=-2, out=-2,
    ),
    "all_reduce": Product(
        matmul_all_reduce,
        lambda x, w, axis: lax.psum(x @ w, axis),
        x=-1, w=-2, out=None,
    ),
    "all_to_all": Product(
        matmul_all_to_all,
        lambda x, w, axis: lax.all_to_all(x @ w, axis, x.ndim - 1, _rows(x), tiled=True),
        x=-2, w=None, out=-1,
    ),
}  # fmt: skip


def mesh_of(size: int) -> Mesh:
    return jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))


def spec(ndim: int, cut: int | None) -> P:
    entries: list[str | None] = [None] * ndim
    if cut is not None:
        entries[cut] = AXIS
    return P(*entries)


def on_mesh(
    product: Product, mesh: Mesh, *, plain: bool = False, check_vma: bool = True, **options: Any
) -> Function:
    """Returns the product as a function of whole arrays."""
    compute = product.plain if plain else product.function

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda x, w: compute(x, w, AXIS, **options),
            mesh=mesh,
            in_specs=(spec(x.ndim, product.x), spec(2, product.w)),
            out_specs=spec(x.ndim, product.out),
            axis_names={AXIS},
            check_vma=check_vma,
        )(x, w)

    return run


def normal(seed: int, *shape: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)
