"""Products of a rank with gathered rows, or summed over ranks, each the gradient of another, in plain JAX.

With s ranks on an axis, x ``[..., M, K]`` of a rank and weights w ``[K, N]``:

    all_gathered      [..., M, K] · [K, N]      → [..., sM, N]    the rows of all ranks
    reduce_scattered  [..., sM, K] · [K, N]     → [..., M, N]     this rank's rows of the sum over ranks
    weight_gradient   [..., M, K], [..., sM, N] → [K, N]          (rows of all ranks)ᵀ · y, summed over "..."
    all_reduced       [..., M, K] · [K, N]      → [..., M, N]     the sum over ranks

Operands have one dtype, and vary over the same mesh axes. Products accumulate in float32 (float64 for
float64). Sums over ranks do too, rank after rank, so that they are bitwise reproducible.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._dtypes import accumulator_dtype
from .._varying import checks_vma

type Pair = tuple[jax.Array, jax.Array]


class Exchange(NamedTuple):
    """Says how ranks exchange rows.

    Attributes:
        axis_name: the mesh axis of the ranks.
        wire_dtype: the dtype in which products travel to be summed.
    """

    axis_name: str
    wire_dtype: jnp.dtype


def dot(x: jax.Array, w: jax.Array, transposed: bool = False) -> jax.Array:
    """Returns ``x @ w`` in the dtype of accumulators; with ``transposed`` w is ``[N, K]``."""
    contracted = (x.ndim - 1,), (int(transposed),)
    return jax.lax.dot_general(
        x, w, (contracted, ((), ())), preferred_element_type=accumulator_dtype(x.dtype)
    )


def _explicit_spec(w: jax.Array) -> P | None:
    """Returns over which Explicit axes weights are sharded; None if there is no such axis."""
    return jax.typeof(w).sharding.spec if jax.sharding.get_abstract_mesh().explicit_axes else None


def scatter_sum(x: jax.Array, exchange: Exchange, dtype: jnp.dtype) -> jax.Array:
    """Returns this rank's rows of the sum over ranks: ``[..., sM, N]`` → ``[..., M, N]``."""
    size, axis = jax.lax.axis_size(exchange.axis_name), x.ndim - 2
    by_rank = x.astype(exchange.wire_dtype).reshape(*x.shape[:-2], size, x.shape[-2] // size, x.shape[-1])
    parts = jax.lax.all_to_all(by_rank, exchange.axis_name, axis, axis, tiled=True)
    wide = (jax.lax.index_in_dim(parts, rank, axis, keepdims=False).astype(x.dtype) for rank in range(size))
    return functools.reduce(jnp.add, wide).astype(dtype)


def gather(x: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns the rows of all ranks: ``[..., M, K]`` → ``[..., sM, K]``."""
    return jax.lax.all_gather(x, exchange.axis_name, axis=x.ndim - 2, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def all_gathered(x: jax.Array, w: jax.Array, exchange: Exchange, transposed: bool) -> jax.Array:
    return dot(gather(x, exchange), w, transposed).astype(x.dtype)


def _all_gathered_forward(
    x: jax.Array, w: jax.Array, exchange: Exchange, transposed: bool
) -> tuple[jax.Array, Pair]:
    return all_gathered(x, w, exchange, transposed), (x, w)


def _all_gathered_backward(
    exchange: Exchange, transposed: bool, operands: Pair, cotangent: jax.Array
) -> Pair:
    x, w = operands
    dw = weight_gradient(x, cotangent, exchange, transposed, _explicit_spec(w))
    return reduce_scattered(cotangent, w, exchange, not transposed), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def reduce_scattered(x: jax.Array, w: jax.Array, exchange: Exchange, transposed: bool) -> jax.Array:
    return scatter_sum(dot(x, w, transposed), exchange, x.dtype)


def _reduce_scattered_forward(
    x: jax.Array, w: jax.Array, exchange: Exchange, transposed: bool
) -> tuple[jax.Array, Pair]:
    return reduce_scattered(x, w, exchange, transposed), (x, w)


def _reduce_scattered_backward(
    exchange: Exchange, transposed: bool, operands: Pair, cotangent: jax.Array
) -> Pair:
    x, w = operands
    dw = weight_gradient(cotangent, x, exchange, not transposed, _explicit_spec(w))
    return all_gathered(cotangent, w, exchange, not transposed), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def weight_gradient(
    x: jax.Array, y: jax.Array, exchange: Exchange, transposed: bool, spec: P | None
) -> jax.Array:
    """Returns ``gather(x)ᵀ · y``, ``[K, N]``, or with ``transposed`` its transpose, ``[N, K]``.

    ``spec`` says over which Explicit axes the weights are sharded.
    """
    rows = gather(x, exchange)
    left, right = (y, rows) if transposed else (rows, y)
    summed = tuple(range(x.ndim - 1))
    product = jax.lax.dot_general(
        left,
        right,
        ((summed, summed), ((), ())),
        preferred_element_type=accumulator_dtype(x.dtype),
        out_sharding=spec,
    )
    return product.astype(x.dtype)


def _weight_gradient_forward(
    x: jax.Array, y: jax.Array, exchange: Exchange, transposed: bool, spec: P | None
) -> tuple[jax.Array, Pair]:
    return weight_gradient(x, y, exchange, transposed, spec), (x, y)


def _weight_gradient_backward(
    exchange: Exchange, transposed: bool, spec: P | None, operands: Pair, cotangent: jax.Array
) -> Pair:
    del spec
    x, y = operands
    dx = reduce_scattered(y, cotangent, exchange, not transposed)
    return dx, all_gathered(x, cotangent, exchange, transposed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_reduced(x: jax.Array, w: jax.Array, exchange: Exchange) -> jax.Array:
    rows, size = x.shape[-2], jax.lax.axis_size(exchange.axis_name)
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % size), (0, 0)]
    part = scatter_sum(jnp.pad(dot(x, w), padding), exchange, x.dtype)
    axis = x.ndim - 2
    whole = jax.lax.all_gather(part, exchange.axis_name, axis=axis, tiled=True, to="invarying")
    return jax.lax.slice_in_dim(whole, 0, rows, axis=axis)


def _all_reduced_forward(x: jax.Array, w: jax.Array, exchange: Exchange) -> tuple[jax.Array, Pair]:
    return all_reduced(x, w, exchange), (x, w)


def _all_reduced_backward(exchange: Exchange, operands: Pair, cotangent: jax.Array) -> Pair:
    _, pullback = jax.vjp(lambda x, w: dot(x, w).astype(x.dtype), *operands)
    return pullback(_of_each_rank(cotangent, exchange.axis_name))


def _of_each_rank(cotangent: jax.Array, axis_name: str) -> jax.Array:
    """Returns the cotangent of what a psum adds up, by that of the sum.

    Where shard_map does not check what varies, ranks have parts of the latter.
    """
    if checks_vma(axis_name):
        return jax.lax.pcast(cotangent, axis_name, to="varying")
    return jax.lax.psum(cotangent, axis_name)


all_gathered.defvjp(_all_gathered_forward, _all_gathered_backward)
reduce_scattered.defvjp(_reduce_scattered_forward, _reduce_scattered_backward)
weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)
all_reduced.defvjp(_all_reduced_forward, _all_reduced_backward)
