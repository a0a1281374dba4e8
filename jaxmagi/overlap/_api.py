"""Defines products with a collective as users call them inside ``shard_map``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._checks import jax_array, require_type
from .._dtypes import DTYPES, accumulator_dtype
from .._varying import vary_alike
from ..collectives import CollectiveOptions, axis_size, check_options, check_wire_dtype
from ._exchange import Exchange, Weights
from ._products import all_gathered, all_reduced, product, reduce_scattered


def all_gather_matmul(
    x: Float[Array | np.ndarray, "*batch M K"],
    w: Float[Array | np.ndarray, "K N"],
    axis_name: str,
    *,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> Float[Array, "*batch sM N"]:
    """Multiplies the rows of all ranks with this rank's weights. Call it inside ``jax.shard_map``.

    The value of ``jax.lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ w``: the first product of
    a Megatron block with sequence parallelism (Korthikanti et al., 2022, "Reducing Activation Recomputation
    in Large Transformer Models"), whose weights are cut by columns. The gradient of x is a
    `matmul_reduce_scatter`. That of w gathers x again, so that no gathered rows are kept.

    Args:
        x: rows of this rank, bfloat16, float16, float32 or float64, M of them.
        w: weights of this rank, of the same dtype.
        axis_name: mesh axis of s ranks, whose rows are gathered in their order.
        options: its ``wire_dtype`` is the dtype in which parts of the gradient of x travel before they are
            summed, up to that of accumulators; None: that of x. Its ``implementation`` is "xla" for plain
            JAX, or "native" for a kernel that multiplies while rows travel: for bfloat16 and float16, K and N
            that 8 divides, and ranks on one host with Hopper GPUs. None: the kernel in programs of one
            process on a mesh of two GPUs with NVLink, between the sizes at which it was measured to be
            faster, or at most 1 % slower: K from 1024, N from 2048 to 5120, and at least 128 tiles of 256
            rows of a rank times 256 columns, 0.95 of them filled. The product for the gradient of w does not
            overlap yet. Its ``timeout`` is that of the kernel, which takes all multiprocessors: ``num_sms``
            and ``ranks_per_host`` do not count. Static.

    Returns:
        All rows times w, accumulated in float32 (float64 for float64), in the dtype of x.

    Raises:
        ValueError: the axis is no mesh axis that a surrounding ``shard_map`` maps over, or shapes, dtypes or
            options do not fit.
        NotImplementedError: the options ask for "nccl", or for "native" where it does not fit.
    """
    x, w, exchange = _operands(x, w, axis_name, options, has_kernel=True)
    return all_gathered(x, w, exchange, Weights())


def matmul_reduce_scatter(
    x: Float[Array | np.ndarray, "*batch sM K"],
    w: Float[Array | np.ndarray, "K N"],
    axis_name: str,
    *,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> Float[Array, "*batch M N"]:
    """Multiplies, and returns this rank's rows of the sum over ranks. Call it inside ``jax.shard_map``.

    The value of ``jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=x.ndim - 2, tiled=True)``: the
    second product of a Megatron block with sequence parallelism, whose weights are cut by rows (see
    `all_gather_matmul`, which is the gradient of x). The gradient of w gathers cotangents.

    Args:
        x: bfloat16, float16, float32 or float64. The axis divides its rows.
        w: weights of this rank, of the same dtype.
        axis_name: mesh axis of s ranks. Rank r gets the r-th of s parts of the rows.
        options: as in `all_gather_matmul`, but by default there is a kernel for K from 1024 to 5120 and N
            from 2048; ``wire_dtype`` is the dtype in which products travel before they are summed, and by the
            kernel they do in that of x. Static.

    Returns:
        The sum of the products of all ranks, added up in float32 (float64 for float64) rank after rank, so
        that it is bitwise reproducible, in the dtype of x. The kernel does not round what the rank itself
        adds.

    Raises:
        ValueError: as in `all_gather_matmul`, or the axis does not divide the rows.
        NotImplementedError: as there.
    """
    x, w, exchange = _operands(x, w, axis_name, options, has_kernel=True)
    _check_parts("x must have rows", x.shape[-2], axis_name, x.shape)
    return reduce_scattered(x, w, exchange, Weights())


def matmul_all_reduce(
    x: Float[Array | np.ndarray, "*batch M K"],
    w: Float[Array | np.ndarray, "K N"],
    axis_name: str,
    *,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> Float[Array, "*batch M N"]:
    """Multiplies, and returns the sum over ranks. Call it inside ``jax.shard_map``.

    The value of ``jax.lax.psum(x @ w, axis_name)``, and its gradients: the second product of a Megatron block
    without sequence parallelism (Shoeybi et al., 2019, "Megatron-LM"). Each rank sums some rows, or some
    columns where the axis divides these alone, which all then gather.

    Args:
        x: bfloat16, float16, float32 or float64. The axis need not divide its rows.
        w: weights of this rank, of the same dtype.
        axis_name: mesh axis of the ranks.
        options: as in `matmul_reduce_scatter`, for sums of rows, which then travel in the dtype of x to all
            ranks, behind the kernel if there is one. None is plain JAX. Static.

    Returns:
        As of `matmul_reduce_scatter`, but all rows, which do not vary over the axis.

    Raises:
        ValueError: as in `all_gather_matmul`.
        NotImplementedError: as there.
    """
    x, w, exchange = _operands(x, w, axis_name, options, has_kernel=True)
    return all_reduced(x, w, exchange)


def matmul_all_to_all(
    x: Float[Array | np.ndarray, "*batch M K"],
    w: Float[Array | np.ndarray, "K sN"],
    axis_name: str,
    *,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> Float[Array, "*batch sM N"]:
    """Multiplies, and exchanges columns for rows. Call it inside ``jax.shard_map``.

    The value of ``jax.lax.all_to_all(x @ w, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)``: a projection
    to heads, of which each rank then has some for all tokens (Jacobs et al., 2023, "DeepSpeed Ulysses").

    Args:
        x: rows of this rank, bfloat16, float16, float32 or float64.
        w: weights for the columns of all ranks, of the same dtype. The axis divides their number.
        axis_name: mesh axis of s ranks. Rank r gets the r-th of s parts of the columns.
        options: how products travel. Without a ``wire_dtype``, since nothing is summed; there is no kernel.
            Static.

    Returns:
        The rows of all ranks, in their order, in the dtype of x.

    Raises:
        ValueError: as in `all_gather_matmul`, or the axis does not divide the columns, or there is a
            ``wire_dtype``.
        NotImplementedError: as there.
    """
    x, w, exchange = _operands(x, w, axis_name, options)
    if options.wire_dtype is not None:
        raise ValueError(f"wire_dtype={options.wire_dtype}, but matmul_all_to_all sums nothing.")
    _check_parts("w must have columns", w.shape[-1], axis_name, w.shape)
    columns = product(x, w, exchange, Weights())
    return jax.lax.all_to_all(columns, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)


def _operands(
    x: Any, w: Any, axis_name: str, options: CollectiveOptions, has_kernel: bool = False
) -> tuple[jax.Array, jax.Array, Exchange]:
    """Returns both operands, which vary over the same axes, and how ranks exchange rows."""
    require_type(axis_name, str, "axis_name")
    axis_size(axis_name)
    x, w = jax_array(x, "x"), jax_array(w, "w")
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x must be [..., M, K] and w [K, N], but they have shapes {x.shape} and {w.shape}.")
    if 0 in (*x.shape, *w.shape):
        raise ValueError(f"x and w must not be empty, but they have shapes {x.shape} and {w.shape}.")
    if x.dtype != w.dtype or x.dtype.name not in DTYPES:
        raise ValueError(
            f"x and w must have the same dtype of {DTYPES}, but have {x.dtype.name} and {w.dtype.name}."
        )
    x, w, _ = vary_alike((x, w, jax.lax.axis_index(axis_name)))  # which varies over the axis
    return x, w, _exchange(options, axis_name, x.dtype, has_kernel)


def _exchange(options: CollectiveOptions, axis_name: str, dtype: jnp.dtype, has_kernel: bool) -> Exchange:
    """Returns how ranks multiply operands of a dtype."""
    check_options("options", options)
    _check_implementation(options, has_kernel)
    check_wire_dtype(options, "products accumulate in", accumulator_dtype(dtype))
    return Exchange(
        axis_name,
        wire_dtype=dtype if options.wire_dtype is None else jnp.dtype(options.wire_dtype),
        precision=jax.config.jax_default_matmul_precision,
        implementation=options.implementation,
        timeout=options.timeout,
    )


def _check_implementation(options: CollectiveOptions, has_kernel: bool) -> None:
    if options.implementation in (None, "xla"):
        return
    if options.implementation != "native" or not has_kernel:
        raise NotImplementedError(
            f'implementation="{options.implementation}": products with a collective are plain JAX or, but '
            'for matmul_all_to_all, "native". Use implementation="xla", or None.'
        )
    if jax.sharding.get_abstract_mesh().explicit_axes:
        raise NotImplementedError(
            'implementation="native" with Explicit mesh axes that no shard_map maps over: '
            f'{jax.sharding.get_abstract_mesh()}. Use implementation="xla", or None.'
        )


def _check_parts(what: str, count: int, axis_name: str, shape: tuple[int, ...]) -> None:
    size = axis_size(axis_name)
    if count % size:
        raise ValueError(
            f"{what} that the size {size} of mesh axis {axis_name!r} divides, but has shape {shape}."
        )
