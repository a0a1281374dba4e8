"""Products of a rank with gathered rows, or summed over ranks, each the gradient of another.

With s ranks on an axis, x ``[..., M, K]`` of a rank and weights w ``[K, N]``:

    product           [..., M, K] · [K, N]      → [..., M, N]     of this rank alone
    all_gathered      [..., M, K] · [K, N]      → [..., sM, N]    of the rows of all ranks
    reduce_scattered  [..., sM, K] · [K, N]     → [..., M, N]     this rank's rows of the sum over ranks
    weight_gradient   [..., M, K], [..., sM, N] → [K, N]          (rows of all ranks)ᵀ · y, summed over "..."
    all_reduced       [..., M, K] · [K, N]      → [..., M, N]     the sum over ranks

Operands have one dtype, in which they are multiplied in both passes, and vary over the same mesh axes.
Products accumulate in float32 (float64 for float64). Sums over ranks do too, rank after rank, so that they
are bitwise reproducible. All is plain JAX, but for the custom calls that users ask for by name or, where
these leave the choice, that pay. Specs say over which Explicit axes a result is sharded; None where there is
only one way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._varying import checks_vma
from . import _plain
from ._choice import is_kernel
from ._exchange import Exchange, Weights, explicit_spec
from ._plain import dot_rows, dot_weights, gather, scatter_sum
from ._primitives import all_gather_matmul_p, matmul_reduce_scatter_p

type Pair = tuple[jax.Array, jax.Array]


def _keeping_operands(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Pair]]:
    """Returns the forward rule of a function of two arrays, which keeps these for the backward rule."""

    def forward(x: jax.Array, y: jax.Array, *static: Any) -> tuple[jax.Array, Pair]:
        return function(x, y, *static), (x, y)

    return forward


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    return dot_weights(x, w, exchange, weights).astype(x.dtype)


def _product_backward(exchange: Exchange, weights: Weights, operands: Pair, cotangent: jax.Array) -> Pair:
    x, w = operands
    left, right = (cotangent, x) if weights.transposed else (x, cotangent)
    dw = dot_rows(left, right, exchange, explicit_spec(w))
    return product(cotangent, w, exchange, weights.back(x)), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def all_gathered(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    if is_kernel(x, w, exchange, weights, scatters=False):
        return all_gather_matmul_p.bind(x, w, exchange=exchange, transposed=weights.transposed)
    return _plain.all_gathered(x, w, exchange, weights)


def _all_gathered_backward(
    exchange: Exchange, weights: Weights, operands: Pair, cotangent: jax.Array
) -> Pair:
    x, w = operands
    dw = weight_gradient(x, cotangent, exchange, Weights(weights.transposed, explicit_spec(w)))
    return reduce_scattered(cotangent, w, exchange, weights.back(x)), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def reduce_scattered(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    if is_kernel(x, w, exchange, weights, scatters=True):
        return matmul_reduce_scatter_p.bind(x, w, exchange=exchange, transposed=weights.transposed)
    return _plain.reduce_scattered(x, w, exchange, weights)


def _reduce_scattered_backward(
    exchange: Exchange, weights: Weights, operands: Pair, cotangent: jax.Array
) -> Pair:
    x, w = operands
    dw = weight_gradient(cotangent, x, exchange, Weights(not weights.transposed, explicit_spec(w)))
    return all_gathered(cotangent, w, exchange, weights.back(x)), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def weight_gradient(x: jax.Array, y: jax.Array, exchange: Exchange, gradient: Weights) -> jax.Array:
    """Returns ``gather(x)ᵀ · y``, ``[K, N]``, or transposed, ``[N, K]``."""
    rows = gather(x, exchange)
    left, right = (y, rows) if gradient.transposed else (rows, y)
    return dot_rows(left, right, exchange, gradient.spec)


def _weight_gradient_backward(
    exchange: Exchange, gradient: Weights, operands: Pair, cotangent: jax.Array
) -> Pair:
    x, y = operands
    dx = reduce_scattered(y, cotangent, exchange, gradient.back(x))
    return dx, all_gathered(x, cotangent, exchange, Weights(gradient.transposed, explicit_spec(y)))


def _pad_rows(x: jax.Array, size: int) -> jax.Array:
    """Returns x with rows of zeros behind its own, so that ``size`` divides their number."""
    missing = -x.shape[-2] % size
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_reduced(x: jax.Array, w: jax.Array, exchange: Exchange) -> jax.Array:
    """Each rank sums some rows, or columns where the axis divides these alone, which all then gather."""
    if exchange.implementation == "native":
        return _all_reduced_by_kernel(x, w, exchange)
    part = dot_weights(x, w, exchange, Weights())
    rows, axis, size = x.shape[-2], x.ndim - 2, jax.lax.axis_size(exchange.axis_name)
    if rows % size and w.shape[-1] % size == 0:
        axis += 1
    else:
        part = _pad_rows(part, size)
    total = scatter_sum(part, axis, exchange, x.dtype)
    whole = jax.lax.all_gather(total, exchange.axis_name, axis=axis, tiled=True, to="invarying")
    return jax.lax.slice_in_dim(whole, 0, rows, axis=x.ndim - 2)


def _all_reduced_by_kernel(x: jax.Array, w: jax.Array, exchange: Exchange) -> jax.Array:
    """Sums the rows of all examples at once, since the kernel computes whole tiles of each example."""
    flat = x.reshape(-1, x.shape[-1])
    padded = _pad_rows(flat, jax.lax.axis_size(exchange.axis_name))
    total = reduce_scattered(padded, w, exchange, Weights())
    whole = jax.lax.all_gather(total, exchange.axis_name, tiled=True, to="invarying")
    return whole[: flat.shape[0]].reshape(*x.shape[:-1], -1)


def _all_reduced_backward(exchange: Exchange, operands: Pair, cotangent: jax.Array) -> Pair:
    of_rank = _of_each_rank(cotangent, exchange.axis_name)
    return _product_backward(exchange, Weights(), operands, of_rank)


def _of_each_rank(cotangent: jax.Array, axis_name: str) -> jax.Array:
    """Returns the cotangent of what a psum adds up, by that of the sum.

    Where shard_map does not check what varies, ranks have parts of the latter.
    """
    if checks_vma(axis_name):
        return jax.lax.pcast(cotangent, axis_name, to="varying")
    return jax.lax.psum(cotangent, axis_name)


product.defvjp(_keeping_operands(product), _product_backward)
all_gathered.defvjp(_keeping_operands(all_gathered), _all_gathered_backward)
reduce_scattered.defvjp(_keeping_operands(reduce_scattered), _reduce_scattered_backward)
weight_gradient.defvjp(_keeping_operands(weight_gradient), _weight_gradient_backward)
all_reduced.defvjp(_keeping_operands(all_reduced), _all_reduced_backward)
