"""The mesh axis, and a rank's part of arrays that lead with the ranks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._varying import varying_axes
from ..masks._validation import integer
from ..planning import GroupCastSpec
from ._route import IMPLEMENTATIONS, MOST_SMS, Route


def axis_size(axis_name: str) -> int:
    """The number of ranks along a mesh axis that the surrounding ``shard_map`` maps over.

    Raises:
        ValueError: there is no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.manual_axes:
        raise ValueError(
            f"axis_name={axis_name!r} is no mesh axis that a surrounding jax.shard_map maps over; "
            f"those are {tuple(mesh.manual_axes)}."
        )
    return mesh.shape[axis_name]


def on_this_rank[Tree](tree: Tree, axis_name: str, what: str) -> Tree:
    """The calling rank's part, with leading axis 1, of arrays that lead with the ranks or are that part.

    Args:
        tree: pytree of arrays, whole ``[cp, ...]`` or sharded over ``axis_name`` to ``[1, ...]``.
        axis_name: the mesh axis.
        what: what the tree is, for messages.

    Raises:
        ValueError: the arrays are for another number of ranks.
    """
    size = axis_size(axis_name)

    def part(leaf: Any) -> jax.Array:
        if leaf.shape[0] == 1 and _may_be_sharded(leaf, axis_name, size):
            return jnp.asarray(leaf)
        if leaf.shape[0] != size:
            raise ValueError(
                f"{what} is for {leaf.shape[0]} ranks, but mesh axis {axis_name!r} has size {size}."
            )
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(leaf), jax.lax.axis_index(axis_name), 1)

    return jax.tree.map(part, tree)


def _may_be_sharded(leaf: Any, axis_name: str, size: int) -> bool:
    """Whether a leaf [1, ...] can be one of ``size`` parts: a constant or replicated one cannot."""
    if size == 1:
        return True
    checked = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    return axis_name in varying_axes(leaf) if checked else isinstance(leaf, Tracer)


def check_spec(spec: Any) -> None:
    """Raises ValueError unless ``spec`` is a single `GroupCastSpec`."""
    if not isinstance(spec, GroupCastSpec):
        raise ValueError(f"spec must be a jaxmagi.GroupCastSpec, but it is {type(spec).__name__}.")
    for name, table, columns in (("sends", spec.sends, 5), ("receives", spec.receives, 4)):
        if table.ndim != 3:
            raise ValueError(
                f"spec.{name} must be [cp, M, {columns}], but has shape {table.shape}: "
                "use jax.vmap for a batch of specs."
            )
        if table.shape[-1] != columns:
            raise ValueError(f"spec.{name} must be [cp, M, {columns}], but has shape {table.shape}.")


def make_route(
    spec: GroupCastSpec, axis_name: str, implementation: Any, num_sms: Any, ranks_per_host: Any
) -> Route:
    """The static side of a spec's transfer. Raises ValueError for options that no collective has."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, but it is {implementation!r}.")
    if ranks_per_host is not None:
        ranks_per_host = integer(ranks_per_host, "ranks_per_host", minimum=1)
    return Route(
        axis_name,
        spec.input_rows,
        spec.output_rows,
        spec.pair_rows,
        implementation=implementation,
        num_sms=integer(num_sms, "num_sms", minimum=1, maximum=MOST_SMS),
        ranks_per_host=ranks_per_host,
    )


def check_rows(name: str, leaves: list[Any], rows: int) -> None:
    """Raises ValueError unless each array has ``rows`` rows."""
    for leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"{name} must have {rows} rows on each rank, as its spec, but has shape {leaf.shape}."
            )
