"""Checks the arguments of collectives, and makes the calling rank's transfer of a spec and options."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import is_traced
from .._varying import checks_vma, varying_axes
from ..planning import GroupCastSpec, RelayedSpec
from ._options import CollectiveOptions, check_options
from ._route import Route
from ._transfer import OneStep, Transfer, TwoSteps


def axis_size(axis_name: str) -> int:
    """Returns the number of ranks along a mesh axis that the surrounding ``shard_map`` maps over.

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
    """Returns the calling rank's part, with leading axis 1, of arrays that lead with ranks or are the part.

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
    """Returns whether a leaf [1, ...] can be one of ``size`` parts: a constant or replicated one cannot."""
    if size == 1:
        return True
    return axis_name in varying_axes(leaf) if checks_vma(axis_name) else is_traced(leaf)


def make_transfer(spec: Any, axis_name: str, options: CollectiveOptions) -> Transfer:
    """Returns the calling rank's transfer by a spec.

    Raises:
        ValueError: it is no spec, or for other ranks, or the options are none or not those of the spec.
        NotImplementedError: the implementation is not for specs by `GroupCastSpec.by_host`.
    """
    check_options("options", options)
    if not isinstance(spec, RelayedSpec):
        _check_hosts(axis_name, options.ranks_per_host)
        return _one_step(spec, "spec", axis_name, options)
    _check_relayed(spec, axis_name, options)
    hosts = spec.ranks_per_host
    across = _one_step(spec.across, "spec.across", axis_name, replace(options, ranks_per_host=hosts))
    of_host = replace(options, ranks_per_host=None)
    inside = _one_step(spec.inside, "spec.inside", axis_name, of_host, group_size=hosts)
    return TwoSteps(across, inside)


def _one_step(
    spec: Any, what: str, axis_name: str, options: CollectiveOptions, *, group_size: int | None = None
) -> OneStep:
    _check_spec(spec, what)
    sends, receives = on_this_rank((spec.sends, spec.receives), axis_name, "the spec")
    if group_size is not None:
        sends, receives = (_number_in_groups(table, group_size) for table in (sends, receives))
    sizes = (spec.input_rows, spec.output_rows, spec.pair_rows)
    return OneStep(sends[0], receives[0], Route(axis_name, *sizes, **vars(options), group_size=group_size))


def _number_in_groups(table: jax.Array, group_size: int) -> jax.Array:
    """Returns a table whose peers are numbered by their places in groups of consecutive ranks."""
    return jnp.concatenate([table[..., :1] % group_size, table[..., 1:]], axis=-1)


def _check_spec(spec: Any, what: str) -> None:
    """Raises ValueError unless ``spec`` is a single `GroupCastSpec`."""
    if not isinstance(spec, GroupCastSpec):
        raise ValueError(f"{what} must be a jaxmagi.GroupCastSpec, but it is {type(spec).__name__}.")
    for name, table, columns in (("sends", spec.sends, 5), ("receives", spec.receives, 4)):
        if table.ndim != 3:
            raise ValueError(
                f"{what}.{name} must be [cp, M, {columns}], but has shape {table.shape}: "
                "use jax.vmap for a batch of specs."
            )
        if table.shape[-1] != columns:
            raise ValueError(f"{what}.{name} must be [cp, M, {columns}], but has shape {table.shape}.")


def _check_hosts(axis_name: str, ranks_per_host: int | None) -> None:
    """Raises ValueError for an axis over several hosts that do not have as many ranks each."""
    size = axis_size(axis_name)
    if ranks_per_host is not None and size > ranks_per_host and size % ranks_per_host:
        raise ValueError(
            f"ranks_per_host={ranks_per_host} must divide the size {size} of mesh axis {axis_name!r}, or be "
            "larger."
        )


def _check_relayed(spec: RelayedSpec, axis_name: str, options: CollectiveOptions) -> None:
    given = options.ranks_per_host
    if given not in (None, spec.ranks_per_host):
        raise ValueError(f"ranks_per_host={given}, but the spec is for hosts of {spec.ranks_per_host} ranks.")
    if axis_size(axis_name) % spec.ranks_per_host:
        raise ValueError(
            f"the spec is for hosts of {spec.ranks_per_host} ranks, but mesh axis {axis_name!r} has size "
            f"{axis_size(axis_name)}."
        )
    if options.implementation == "native":
        raise NotImplementedError(
            'implementation="native" is for ranks of one host, but a spec by by_host brings rows across '
            "hosts: use None, which uses it inside a host."
        )


def check_rows(name: str, leaves: list[Any], rows: int) -> None:
    """Raises ValueError unless each array has ``rows`` rows."""
    for leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"{name} must have {rows} rows on each rank, as its spec, but has shape {leaf.shape}."
            )
