"""How the primitives meet meshes: one shard at a time.

Batch and heads are independent. Where an Explicit mesh shards them the primitives are bound inside a
shard_map over those axes, for neither XLA nor a custom call could be partitioned from outside. Inside a
shard_map, of the user or of this module, operands may vary over different mesh axes, which primitives do not
mix by themselves.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, PartitionSpec as P

from .._varying import vary_alike, varying_axes

type MeshAxes = str | tuple[str, ...] | None


def bind_over_shards(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds a primitive whose operands begin with query, key and value on each shard that these have.

    Batch and heads are split as in the first of the three that has them split; the others follow.

    Raises:
        ValueError: for ranks other than 4, for a sharded length or head dimension, and for batches or heads
            sharded in different ways.
        NotImplementedError: for key heads that do not divide.
    """
    named: Mapping[str, jax.Array] = dict(zip(("query", "key", "value"), operands[:3], strict=True))
    for name, x in named.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have rank 4, but has shape {x.shape}.")
        _check_whole(name, _spec(x))
    batch, heads = (_agreed(named, dimension) for dimension in ("batch", "heads"))
    axes = axis_names(batch) + axis_names(heads)
    if not axes:
        return primitive.bind(*vary_alike(operands), **params)
    if len(set(axes)) < len(axes):
        raise ValueError(f"Batch and heads are sharded over the same mesh axis: {batch!r} and {heads!r}.")
    mesh = next(jax.typeof(x).sharding.mesh for x in operands if any(_spec(x)))
    check_key_heads(operands[1].shape[2], heads, mesh)
    return _bind_on_shards(operands, primitive, tuple(sorted(params.items())), mesh, batch, heads)


# Jitted by static arguments, not as a closure made anew, so that calls outside of jit compile only once. And
# without a mesh in context (jax.set_mesh), only jit can find the devices of an abstract mesh.
@functools.partial(jax.jit, static_argnums=range(1, 6))
def _bind_on_shards(
    operands: Sequence[jax.Array],
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    mesh: AbstractMesh,
    batch: MeshAxes,
    heads: MeshAxes,
) -> list[jax.Array]:
    def bind(*shards: jax.Array) -> list[jax.Array]:
        return primitive.bind(*vary_alike(shards), **dict(params))

    specs = tuple(_shard_spec(x, batch, heads) for x in operands)
    results = jax.eval_shape(bind, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    out_specs = [_shard_spec(x, batch, heads) for x in results]
    axes = frozenset(axis_names(batch) + axis_names(heads))
    with jax.sharding.use_abstract_mesh(mesh):
        placed = map(jax.sharding.reshard, operands, specs)
        return jax.shard_map(bind, in_specs=specs, out_specs=out_specs, axis_names=axes)(*placed)


def like_operand(gradient: jax.Array | None, operand: jax.Array | None) -> jax.Array | None:
    """A gradient as the operand lies: summed over the devices that share the operand, sharded like it."""
    if gradient is None or operand is None:
        return None
    shared = tuple(sorted(varying_axes(gradient) - varying_axes(operand)))
    total: jax.Array = jax.lax.psum(gradient, shared) if shared else gradient
    same = _spec(total) == _spec(operand)
    return total if same else jax.sharding.reshard(total, jax.typeof(operand).sharding)


def _spec(x: jax.Array) -> tuple[MeshAxes, ...]:
    """The mesh axes of each dimension, as far as they are Explicit."""
    return tuple(jax.typeof(x).sharding.spec)


def axis_names(axes: MeshAxes) -> tuple[str, ...]:
    """The names of the mesh axes that an entry of a PartitionSpec stands for."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def _shard_spec(x: jax.Array | jax.ShapeDtypeStruct, batch: MeshAxes, heads: MeshAxes) -> P:
    """By what an operand or result is: [B, L, heads, D], bands, [B, T, heads], or [heads]."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return P(batch if x.shape[0] > 1 else None, None, None)
    return {4: P(batch, None, heads, None), 3: P(batch, None, heads), 1: P(heads)}[x.ndim]


def _check_whole(name: str, spec: tuple[MeshAxes, ...]) -> None:
    _, length, _, dim = spec
    if length is not None or dim is not None:
        where = f"length over {length!r}" if length is not None else f"head dimension over {dim!r}"
        raise ValueError(
            f"{name} is sharded in its {where}: attention works on whole sequences and heads. For a sequence "
            "over a mesh axis use jaxmagi.context_attention."
        )


def _agreed(named: Mapping[str, jax.Array], dimension: Literal["batch", "heads"]) -> MeshAxes:
    """The mesh axes of a dimension, None if all have it whole. Raises ValueError where operands disagree."""
    index = {"batch": 0, "heads": 2}[dimension]
    found = [(name, axes) for name, x in named.items() if (axes := _spec(x)[index]) is not None]
    first, agreed = found[0] if found else ("", None)
    for name, axes in found:
        if axes != agreed:
            raise ValueError(
                f"{name} has its {dimension} sharded over {axes!r}, but {first} over {agreed!r}."
            )
    return agreed


def check_key_heads(heads: int, axes: MeshAxes, mesh: AbstractMesh) -> None:
    """Raises NotImplementedError unless key heads can be split over mesh axes as the query heads are."""
    shards = math.prod(mesh.shape[name] for name in axis_names(axes))
    if heads % shards:
        raise NotImplementedError(
            f"The {heads} key heads cannot be split over mesh axis {axes!r} of size {shards}, over which the "
            "query heads are sharded: repeat the key and value heads (jnp.repeat), or do not shard the query "
            "heads."
        )
