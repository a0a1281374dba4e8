"""Finds and changes the mesh axes over which a value inside shard_map may differ between devices."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array may differ between devices, if shard_map checks that."""
    return jax.typeof(x).manual_axis_type.varying


def checks_vma(axis_name: str) -> bool:
    """Returns whether the surrounding shard_map over a mesh axis checks which arrays vary over it."""
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def vary_alike[Tree](tree: Tree) -> Tree:
    """Makes all arrays vary over all mesh axes that one of them varies over, as primitives demand.

    The transpose of this is the psum that an operand shared by several devices needs.
    """
    union = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))

    def cast(x: jax.Array) -> jax.Array:
        return jax.lax.pcast(x, tuple(sorted(union - varying_axes(x))), to="varying")

    return jax.tree.map(cast, tree)
