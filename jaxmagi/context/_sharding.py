"""Maps the distributed op over what the surrounding code has left to the compiler of the mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..attention import MeshAxes, axis_names
from ..planning import GroupCastSpec, RelayedSpec


class Stages(NamedTuple):
    """What ranks compute and fetch: the arrays of a `ContextPlan` that travel to the devices."""

    bands: Any  # int32 [cp, num_stages, C, 6]
    transfers: tuple[GroupCastSpec | RelayedSpec, ...]
    backward: "Stages | None" = None  # the same for the backward pass, where that has its own

    @property
    def stacked(self) -> bool:
        """Whether there is one for each example."""
        return self.bands.ndim == 5


class Operands(NamedTuple):
    """The operands of the distributed op, or something for each of them."""

    query: Any  # [T, N, D] or [B, T, N, D]
    key: Any
    value: Any
    stages: Any
    sinks: Any  # [N] in accumulator dtype, or None


class Layout(NamedTuple):
    """The mesh axes over which the dimensions of query are sharded, and those to map over. Static."""

    batch: tuple[MeshAxes, ...]  # of length 0 or 1
    tokens: MeshAxes  # None inside a shard_map over the tokens
    heads: MeshAxes
    mapped: frozenset[str]
    check_vma: bool

    @property
    def rows(self) -> P:
        """Of query, key, value and output."""
        return P(*self.batch, self.tokens, self.heads, None)

    @property
    def row_numbers(self) -> P:
        """Of a number per row and head."""
        return P(*self.batch, self.tokens, self.heads)

    @property
    def sharers(self) -> tuple[str, ...]:
        """The axes whose devices share the sinks of a head."""
        return tuple(name for axes in (*self.batch, self.tokens) for name in axis_names(axes))

    def specs(self, operands: Operands) -> Operands:
        """Of all operands."""
        ranks = P(*self.batch, self.tokens) if operands.stages.stacked else P(self.tokens)
        stages = jax.tree.map(lambda leaf: ranks, operands.stages)
        sinks = None if operands.sinks is None else P(self.heads)
        return Operands(self.rows, self.rows, self.rows, stages, sinks)


def find_axis(axis_name: str) -> tuple[int, bool]:
    """The size of a mesh axis, and whether the call stands inside a shard_map over it.

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


def find_layout(query: jax.Array, axis_name: str) -> Layout:
    """How query is sharded over Explicit axes, its tokens over ``axis_name``, and what is left to map over.

    Inside a shard_map over ``axis_name`` there is nothing to map over, unless heads or batch are sharded over
    Explicit axes. Outside, all Auto axes are: XLA would gather the operands of custom calls over any that are
    not.

    Raises:
        ValueError: shardings that cannot work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    inside = axis_name in mesh.manual_axes
    spec = tuple(jax.typeof(query).sharding.spec)
    *batch, tokens, heads, dim = spec
    allowed = (None,) if inside else (None, axis_name, (axis_name,))
    if tokens not in allowed or dim is not None:
        raise ValueError(
            f"query {query.shape} is sharded over {spec}: only its tokens may be, over {axis_name!r}, and "
            "its heads and batch, over other axes."
        )
    mapped = {name for axes in (*batch, heads) for name in axis_names(axes)}
    if axis_name in mapped:
        raise ValueError(f"query has its batch or heads sharded over {axis_name!r}, which is for the tokens.")
    if not inside:
        mapped |= {axis_name, *mesh.auto_axes}
    return Layout(tuple(batch), None if inside else axis_name, heads, frozenset(mapped), _checks_vma())


def _checks_vma() -> bool:
    """Whether the surrounding shard_map checks what varies over its axes, as one inside of it then has to.

    Without a surrounding one there is no need, and jax.vmap with a spmd_axis_name fails with it (jax 0.11.2).
    """
    names = jax.sharding.get_abstract_mesh().manual_axes
    return any(name in jax.typeof(jax.lax.axis_index(name)).manual_axis_type.varying for name in names)


def place(operands: Operands, layout: Layout) -> Operands:
    """The operands sharded by the layout over Explicit axes. Auto axes are left to the compiler."""
    explicit = set(jax.sharding.get_abstract_mesh().explicit_axes)

    def put(x: Any, spec: P) -> jax.Array:
        if not explicit:
            return jnp.asarray(x)
        kept = P(*(axes if set(axis_names(axes)) <= explicit else None for axes in spec))
        return jax.sharding.reshard(jnp.asarray(x), kept)

    return jax.tree.map(put, operands, layout.specs(operands))


def map_over_mesh[**Args, Result](
    function: Callable[Args, Result], layout: Layout, in_specs: Any, out_specs: Any
) -> Callable[Args, Result]:
    """``function`` on every device's part, over the axes that the surroundings have not mapped over yet."""
    if not layout.mapped:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=layout.mapped, check_vma=layout.check_vma
    )
