"""Products with a collective in plain JAX, without rules for gradients (see `_products`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._dtypes import accumulator_dtype
from ._exchange import Exchange, Weights


def all_gathered(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    return dot_weights(gather(x, exchange), w, exchange, weights).astype(x.dtype)


def reduce_scattered(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    return scatter_sum(dot_weights(x, w, exchange, weights), x.ndim - 2, exchange, x.dtype)


def _dot(
    x: jax.Array, y: jax.Array, contracted: tuple[Any, Any], exchange: Exchange, spec: P | None
) -> jax.Array:
    """Multiplies in the dtype of accumulators."""
    return jax.lax.dot_general(
        x,
        y,
        (contracted, ((), ())),
        precision=exchange.precision,
        preferred_element_type=accumulator_dtype(x.dtype),
        out_sharding=spec,
    )


def dot_weights(x: jax.Array, w: jax.Array, exchange: Exchange, weights: Weights) -> jax.Array:
    """Returns x times the weights, in the dtype of accumulators."""
    return _dot(x, w, ((x.ndim - 1,), (int(weights.transposed),)), exchange, weights.spec)


def dot_rows(x: jax.Array, y: jax.Array, exchange: Exchange, spec: P | None) -> jax.Array:
    """Returns ``xᵀ · y`` over all rows, in the dtype of x."""
    rows = tuple(range(x.ndim - 1))
    return _dot(x, y, (rows, rows), exchange, spec).astype(x.dtype)


def scatter_sum(x: jax.Array, axis: int, exchange: Exchange, dtype: jnp.dtype) -> jax.Array:
    """Returns this rank's part of the sum over ranks, of s parts along an axis of the array."""
    size = jax.lax.axis_size(exchange.axis_name)
    shape = *x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]
    by_rank = x.astype(exchange.wire_dtype).reshape(shape)
    parts = jax.lax.all_to_all(by_rank, exchange.axis_name, axis, axis, tiled=True)
    wide = (jax.lax.index_in_dim(parts, rank, axis, keepdims=False).astype(x.dtype) for rank in range(size))
    return functools.reduce(jnp.add, wide).astype(dtype)


def gather(x: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns the rows of all ranks: ``[..., M, K]`` → ``[..., sM, K]``."""
    return jax.lax.all_gather(x, exchange.axis_name, axis=x.ndim - 2, tiled=True)
