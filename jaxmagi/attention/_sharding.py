"""Finds how results and gradients are sharded over Explicit mesh axes, and what they vary over.

Batch and heads are independent, so results and gradients are sharded like operands. `_partitioning` decides
what each device then runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._varying import varying_axes

type MeshAxes = str | tuple[str, ...] | None


def result_sharding(query: Any, key: Any, value: Any) -> NamedSharding:
    """Returns the sharding of the output over Explicit axes, from the types of query, key and value.

    The length is sharded like the query's. Batch and heads are sharded as in the first of the three that has
    them sharded; the others have them whole, or over the same axes, or the first of these.

    Raises:
        ValueError: for a sharded head dimension, and for shardings that exclude each other.
    """
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if (axes := x.sharding.spec[-1]) is not None:
            raise ValueError(
                f"{name} is sharded in its head dimension over {axes!r}: attention works on whole heads."
            )
    batch = [_agreed(named, dimension, "batch") for dimension in range(query.ndim - 3)]
    spec = (*batch, query.sharding.spec[-3], _agreed(named, -2, "heads"), None)
    names = [name for axes in spec for name in axis_names(axes)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"The output would be sharded over a mesh axis twice, {P(*spec)}: by query, key or value."
        )
    mesh = next((x.sharding.mesh for x in named.values() if any(x.sharding.spec)), query.sharding.mesh)
    return NamedSharding(mesh, P(*spec))


def _agreed(named: Mapping[str, Any], dimension: int, what: str) -> MeshAxes:
    """Returns the mesh axes of a dimension, None if no operand has it sharded.

    Raises:
        ValueError: operands disagree.
    """
    found = [(name, axes) for name, x in named.items() if (axes := x.sharding.spec[dimension]) is not None]
    first, agreed = found[0] if found else ("", None)
    for name, axes in found:
        if axis_names(axes) != axis_names(agreed)[: len(axis_names(axes))]:
            raise ValueError(f"{name} has its {what} sharded over {axes!r}, but {first} over {agreed!r}.")
    return agreed


def like_operand(gradient: jax.Array | None, operand: jax.Array | None) -> jax.Array | None:
    """Returns a gradient that lies like its operand: summed over devices that share it, sharded like it."""
    if gradient is None or operand is None:
        return None
    shared = tuple(sorted(varying_axes(gradient) - varying_axes(operand)))
    gradient = jax.lax.psum(gradient, shared) if shared else gradient
    wanted = jax.typeof(operand).sharding
    same = jax.typeof(gradient).sharding.spec == wanted.spec
    return gradient if same else jax.sharding.reshard(gradient, wanted)


def axis_names(axes: MeshAxes | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the mesh axes that an entry of a PartitionSpec stands for."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def reshard(x: Any, spec: P) -> jax.Array:
    """Reshards an array over the Explicit axes of a spec; over Auto axes shard_map does so."""
    explicit = set(jax.sharding.get_abstract_mesh().explicit_axes)
    if not explicit:
        return jnp.asarray(x)
    kept = P(*(tuple(name for name in axis_names(axes) if name in explicit) or None for axes in spec))
    return jax.sharding.reshard(jnp.asarray(x), kept)
