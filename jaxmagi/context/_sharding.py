"""Maps the distributed op over the mesh axes that the surrounding code has not mapped over yet."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from .._partitioning import axes_of_vmap
from .._varying import checks_vma
from ..attention import MeshAxes, axis_names, reshard
from ..planning import GroupCastSpec, RelayedSpec


class PlannedWork(NamedTuple):
    """Holds what ranks compute and receive: the arrays of a `ContextPlan` that are sent to the devices."""

    bands: Any  # int32 [cp, C, 6]
    transfer: GroupCastSpec | RelayedSpec

    @property
    def stacked(self) -> bool:
        """Returns whether each example of a batch has a plan of its own."""
        return self.bands.ndim == 4


class ContextOperands(NamedTuple):
    """Holds the operands of the distributed op, or their gradients, specs or vmap axes."""

    query: Any  # [T, N, D] or [B, T, N, D]
    key: Any
    value: Any
    work: Any
    sinks: Any  # [N] in accumulator dtype, or None


class OperandSharding(NamedTuple):
    """Holds the mesh axes that shard each dimension of the operands, and those to map over. Static."""

    batch: tuple[MeshAxes, ...]  # one entry with a batch, none without
    tokens: MeshAxes  # None inside a shard_map over the tokens
    heads: MeshAxes
    key_heads: MeshAxes  # same as heads, or None where the axes do not divide the key heads
    mapped: frozenset[str]
    check_vma: bool

    @property
    def row_spec(self) -> P:
        """Returns the spec of the query and the output."""
        return P(*self.batch, self.tokens, self.heads, None)

    @property
    def lse_spec(self) -> P:
        """Returns the spec of the log-sum-exp."""
        return P(*self.batch, self.tokens, self.heads)

    @property
    def shares_key_heads(self) -> bool:
        """Returns whether devices with different query heads each hold all key heads."""
        return self.key_heads != self.heads

    @property
    def sink_axes(self) -> tuple[str, ...]:
        """Returns the axes over which the sinks are replicated, and their gradients summed."""
        return tuple(name for axes in (*self.batch, self.tokens) for name in axis_names(axes))

    def specs(self, operands: ContextOperands) -> ContextOperands:
        """Returns the specs of all operands."""
        keys = P(*self.batch, self.tokens, self.key_heads, None)
        ranks = P(*self.batch, self.tokens) if operands.work.stacked else P(self.tokens)
        work = jax.tree.map(lambda leaf: ranks, operands.work)
        sinks = None if operands.sinks is None else P(self.heads)
        return ContextOperands(self.row_spec, keys, keys, work, sinks)


def find_axis(axis_name: str) -> tuple[int, bool]:
    """Returns the size of a mesh axis, and whether the call is inside a shard_map over it.

    Raises:
        ValueError: there is no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name={axis_name!r} is no axis of the mesh, which has {tuple(mesh.axis_names)}: call "
            "inside jax.shard_map over it, or set the mesh by jax.set_mesh."
        )
    return mesh.shape[axis_name], axis_name in mesh.manual_axes


def find_sharding(
    query: jax.Array, key: jax.Array, axis_name: str, batch_axis_name: Any, head_axis_name: Any
) -> OperandSharding:
    """Returns how the operands are sharded: as the caller says, or as query is over Explicit axes.

    The op is mapped over these axes and, outside a shard_map over it, over ``axis_name``. Other axes are left
    to XLA's partitioner, which splits attention over them.

    Raises:
        ValueError: the shardings contradict each other or do not divide the operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    inside = axis_name in mesh.manual_axes
    batch, heads = _explicit_axes(query, axis_name, inside)
    if batch_axis_name is not None:
        if query.ndim != 4:
            raise ValueError(f"{batch_axis_name=} needs query [B, T, N, D], but it has shape {query.shape}.")
        batch = (_given_axes("batch_axis_name", batch_axis_name, axis_name),)
    if head_axis_name is not None:
        heads = _given_axes("head_axis_name", head_axis_name, axis_name)
    batch, heads = tuple(map(_drop_manual, batch)), _drop_manual(heads)
    names = [name for axes in (*batch, heads) for name in axis_names(axes)]
    _check_axes(query, batch, heads, names)
    # Transfers overlap with attention only where no axis is left to the partitioner: map axes of size 1 too.
    mapped = names if inside else [*names, axis_name, *(name for name, n in mesh.shape.items() if n == 1)]
    return OperandSharding(
        batch=batch,
        tokens=None if inside else axis_name,
        heads=heads,
        key_heads=None if key.shape[-2] % _size(heads) else heads,
        mapped=frozenset([*mapped, *axes_of_vmap()] if mapped else []),
        check_vma=_checks_vma(),
    )


def _explicit_axes(query: jax.Array, axis_name: str, inside: bool) -> tuple[tuple[MeshAxes, ...], MeshAxes]:
    """Returns the Explicit axes that batch and heads are sharded over."""
    spec = tuple(jax.typeof(query).sharding.spec)
    *batch, tokens, heads, dim = spec
    allowed = (None,) if inside else (None, axis_name, (axis_name,))
    if tokens not in allowed or dim is not None:
        raise ValueError(
            f"query {query.shape} is sharded over {spec}: only its tokens may be, over {axis_name!r}, and "
            "its heads and batch, over other axes."
        )
    if axis_name in {name for axes in (*batch, heads) for name in axis_names(axes)}:
        raise ValueError(f"query has its batch or heads sharded over {axis_name!r}, which is for the tokens.")
    return tuple(batch), heads


def _given_axes(argument: str, given: Any, axis_name: str) -> tuple[str, ...]:
    """Returns the mesh axes that the caller names; raises ValueError for unknown ones and ``axis_name``."""
    mesh, names = jax.sharding.get_abstract_mesh(), axis_names(given)
    for name in names:
        if name == axis_name or name not in mesh.axis_names:
            raise ValueError(
                f"{argument}={given!r} must be mesh axes other than {axis_name!r}, which is for the tokens; "
                f"the mesh has {tuple(mesh.axis_names)}."
            )
    return names


def _check_axes(query: jax.Array, batch: tuple[MeshAxes, ...], heads: MeshAxes, names: Sequence[str]) -> None:
    """Raises ValueError unless each mesh axis is named once and all divide what they shard."""
    if len(set(names)) < len(names):
        over = "".join(f"batch is over {axes!r} and " for axes in batch)
        raise ValueError(f"A mesh axis can shard one dimension, and once: {over}heads are over {heads!r}.")
    for axes in batch:
        _check_divides("batch", query.shape[0], axes)
    _check_divides("number of query heads", query.shape[-2], heads)


def _drop_manual(axes: MeshAxes) -> MeshAxes:
    """Returns mesh axes without the manual ones, over which a surrounding shard_map has split the arrays."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    left = tuple(name for name in axis_names(axes) if name not in manual)
    return left if len(left) > 1 else left[0] if left else None


def _size(axes: MeshAxes) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axis_names(axes))


def _check_divides(what: str, count: int, axes: MeshAxes) -> None:
    if count % _size(axes):
        raise ValueError(
            f"The {what} {count} cannot be sharded over mesh axis {axes!r} of size {_size(axes)}."
        )


def _checks_vma() -> bool:
    """Returns whether the surrounding shard_map has check_vma on, so that a nested one needs it too.

    Without a surrounding one it stays off, as jax.vmap with a spmd_axis_name fails with it (jax 0.11.2).
    """
    return any(map(checks_vma, jax.sharding.get_abstract_mesh().manual_axes))


def shard_operands(operands: ContextOperands, sharding: OperandSharding) -> ContextOperands:
    """Reshards the operands over Explicit axes; over Auto axes shard_map does so."""
    return jax.tree.map(reshard, operands, sharding.specs(operands))


def map_over_mesh[**Args, Result](
    function: Callable[Args, Result], sharding: OperandSharding, in_specs: Any, out_specs: Any
) -> Callable[Args, Result]:
    """Maps a function over the mesh axes of a sharding that no surrounding shard_map has mapped over."""
    if not sharding.mapped:
        return function
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=sharding.mapped,
        check_vma=sharding.check_vma,
    )
