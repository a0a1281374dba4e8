"""Defines group cast and group reduce as users call them inside ``shard_map``."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Shaped

from .._checks import check_one_of, check_unmasked
from .._dtypes import accumulator_dtype
from .._softmax import Partial
from ..planning import GroupCastSpec, RelayedSpec
from ._arguments import check_rows, make_transfer
from ._options import CollectiveOptions, check_wire_dtype
from ._transfer import Transfer

_OPS = ("sum", "avg", "lse")


def group_cast[Tree](
    x: Tree,
    spec: GroupCastSpec | RelayedSpec,
    *,
    axis_name: str,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> Tree:
    """Sends rows to the ranks that need them. Call it inside ``jax.shard_map``.

    Linear and differentiable (the transpose is `group_reduce` with the same options), also under ``jax.vmap``
    over x, over the spec or over both. The arrays of one pytree travel together.

    Mesh axes that ``shard_map`` leaves out, Auto or Explicit, may shard x along any dimension but its rows:
    each device then exchanges its part of them.

    With a spec by `GroupCastSpec.by_host` rows travel in two steps and cross to another host once. Rows that
    stay in a host move at the same time. Its transpose rounds sums of 16-bit floats twice, to their dtype:
    inside the host, and at the end.

    Args:
        x: pytree of local arrays ``[spec.input_rows, ...]``.
        spec: which rows go where, whole (tables lead with ``cp``) or sharded over ``axis_name``.
        axis_name: mesh axis whose ranks exchange rows.
        options: how rows travel. Static. They travel in their own dtype: ``wire_dtype`` is for the gradients
            that the transpose returns. Arrays without gradients, as of integers, may be there as well.

    Returns:
        Arrays ``[spec.output_rows, ...]``. Rows that nobody sends are zero.

    Raises:
        ValueError: the axis is unknown, the spec is for another number of ranks, x has another number of
            rows, or the options do not fit x or the spec.
        NotImplementedError: when compiled, for an explicit implementation that cannot run; "native" for a
            spec by `GroupCastSpec.by_host`.
    """
    transfer = make_transfer(spec, axis_name, options)
    check_unmasked(x, "x")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    check_rows("x", leaves, transfer.input_rows)
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            check_wire_dtype(options, "the gradient of x is", leaf.dtype)
    if not leaves:
        return x
    return jax.tree.unflatten(structure, transfer.cast(leaves))


def group_reduce(
    x: PyTree[Shaped[Array | np.ndarray, "output_rows ..."]],
    spec: GroupCastSpec | RelayedSpec,
    *,
    axis_name: str,
    op: Literal["sum", "avg", "lse"] = "sum",
    lse: Float[Array | np.ndarray, "output_rows N"] | None = None,
    accumulate: PyTree[Shaped[Array | np.ndarray, "input_rows ..."]] = None,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> PyTree[Shaped[Array, "input_rows ..."]]:
    """Sends rows back along the routes of a `group_cast` and combines what arrives for each row.

    Call it inside ``jax.shard_map``. What arrives is added up in float32 (float64 for float64), rank after
    rank, so that results are bitwise reproducible; on GPU this holds as long as no row is sent twice to one
    rank. Differentiable, also under ``jax.vmap``.

    Rows of x, and the gradients that return to them, travel in the ``wire_dtype`` of the options. With "lse"
    that is for the outputs: log-sum-exps travel in float32 (float64 for float64).

    With a spec by `GroupCastSpec.by_host` what arrives for a row is combined inside each other host first,
    and one row crosses from there. Without a ``wire_dtype`` that is in float32 (float64 for float64) whatever
    the dtype of x, also for rows that stay in a host. These move after what crosses, not beside it. Results
    are then those without such a spec up to the order of additions.

    Args:
        x: pytree of local arrays ``[spec.output_rows, ...]``. For "lse" one array ``[spec.output_rows, N,
            D]``.
        spec: the spec of the group cast, whole or sharded over ``axis_name``. Each slot of a pair of ranks
            feeds at most one output row, as in specs from `GroupCastSpec.from_splits` and in plans.
        axis_name: mesh axis whose ranks exchange rows.
        op: "sum" adds up, "avg" divides by the number of rows that arrived, "lse" merges partial attention
            outputs, weighted by the exponentials of their log-sum-exps.
        lse: for "lse" only, ``[spec.output_rows, N]``. Parts with -inf contribute nothing.
        accumulate: what is there already, as one more contribution (the first): a pytree like x of arrays
            ``[spec.input_rows, ...]``; for "lse" a pair (output, log-sum-exp).
        options: how rows travel. Static. "native" and "nccl" add up bfloat16, float16, float32 and float64.

    Returns:
        Arrays ``[spec.input_rows, ...]``, in the dtypes of ``accumulate`` where given and of x elsewhere; for
        "lse" the pair (output, log-sum-exp). Rows without any contribution are 0, with log-sum-exp -inf.

    Raises:
        ValueError: the axis or the op is unknown, the spec is for another number of ranks, lse is missing or
            superfluous, "avg" or "lse" get anything but floating-point arrays, shapes do not fit, or the
            options do not fit x or the spec.
        NotImplementedError: as in `group_cast`.
    """
    check_one_of("op", op, _OPS)
    for name, tree in (("x", x), ("lse", lse), ("accumulate", accumulate)):
        check_unmasked(tree, name)
    if (lse is None) == (op == "lse"):
        given = "None" if lse is None else f"an array of shape {jnp.shape(lse)}"
        raise ValueError(f"lse goes with op='lse' and only with it, but op={op!r} and lse is {given}.")
    transfer = make_transfer(spec, axis_name, options)
    for leaf in jax.tree.leaves(x):
        check_wire_dtype(options, "x is", jnp.result_type(leaf))
    if lse is not None:
        return _reduce_lse(jnp.asarray(x), jnp.asarray(lse), accumulate, transfer)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    check_rows("x", leaves, transfer.output_rows)
    own = _own_leaves(accumulate, leaves, structure, transfer)
    if not leaves:
        return x
    divisor = jnp.maximum(transfer.counts() + int(accumulate is not None), 1) if op == "avg" else None
    sums = _sum(leaves, own, transfer, divisor)
    return jax.tree.unflatten(structure, sums)


def _own_leaves(
    accumulate: Any, leaves: list[jax.Array], structure: Any, transfer: Transfer
) -> list[jax.Array | None]:
    """Returns the leaves of ``accumulate``, checked; None for each when there is none."""
    if accumulate is None:
        return [None] * len(leaves)
    own, own_structure = jax.tree.flatten(jax.tree.map(jnp.asarray, accumulate))
    if own_structure != structure:
        raise ValueError(f"accumulate must be a pytree like x, {structure}, but it is {own_structure}.")
    for x, y in zip(leaves, own, strict=True):
        _check_accumulate(y, (transfer.input_rows, *x.shape[1:]), x.dtype)
    return own


def _check_accumulate(x: jax.Array, shape: tuple[int, ...], added: jnp.dtype) -> None:
    if x.shape != shape:
        raise ValueError(f"accumulate must have shape {shape}, but has {x.shape}.")
    if jnp.issubdtype(added, jnp.inexact) and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(f"accumulate is {x.dtype.name}, which would cut off the sum of x in {added.name}.")


def _sum(
    leaves: list[jax.Array], own: list[jax.Array | None], transfer: Transfer, divisor: jax.Array | None
) -> list[jax.Array]:
    dtypes = [
        x.dtype if first is None and divisor is None else accumulator_dtype(x.dtype)
        for x, first in zip(leaves, own, strict=True)
    ]
    sums = transfer.reduce(leaves, dtypes)
    return [
        _finish_sum(total, x.dtype, first, divisor) for total, x, first in zip(sums, leaves, own, strict=True)
    ]


def _finish_sum(
    total: jax.Array, dtype: jnp.dtype, first: jax.Array | None, divisor: jax.Array | None
) -> jax.Array:
    if first is not None:
        wide = jnp.promote_types(total.dtype, accumulator_dtype(first.dtype))
        total, dtype = first.astype(wide) + total.astype(wide), first.dtype
    if divisor is not None:
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(f"op='avg' needs floating-point arrays, but has {dtype.name}.")
        total = total / divisor.astype(total.dtype).reshape(-1, *[1] * (total.ndim - 1))
    return total.astype(dtype)


def _reduce_lse(
    x: jax.Array, lse: jax.Array, accumulate: Any, transfer: Transfer
) -> tuple[jax.Array, jax.Array]:
    check_rows("x", [x], transfer.output_rows)
    if x.ndim != 3 or lse.shape != x.shape[:-1]:
        raise ValueError(
            f"op='lse' needs x [rows, N, D] and lse [rows, N], but they are {x.shape} and {lse.shape}."
        )
    for name, dtype in (("x", x.dtype), ("lse", lse.dtype)):
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"op='lse' needs floating-point arrays, but {name} is {dtype.name}.")
    own = None
    if accumulate is not None:
        own = Partial(*map(jnp.asarray, accumulate))
        _check_accumulate(own.out, (transfer.input_rows, *x.shape[1:]), x.dtype)
        _check_accumulate(own.lse, (transfer.input_rows, *lse.shape[1:]), lse.dtype)
    part = Partial(x, lse)
    out, total = transfer.merge(part, own)
    like = part if own is None else own
    return out.astype(like.out.dtype), total.astype(like.lse.dtype)
