"""Inside shard_map: over which mesh axes a value may differ between devices."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array may differ between devices, as far as shard_map checks that."""
    return jax.typeof(x).manual_axis_type.varying


def vary_alike[Tree](tree: Tree) -> Tree:
    """Lets all arrays vary over all mesh axes that one of them varies over, as primitives demand.

    The transpose of this is the psum that an operand shared by several devices needs.
    """
    union = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))

    def cast(x: jax.Array) -> jax.Array:
        return jax.lax.pcast(x, tuple(sorted(union - varying_axes(x))), to="varying")

    return jax.tree.map(cast, tree)
