"""Tells host data from traced data."""

from typing import Any

import jax
from jax.core import Tracer


def is_traced(tree: Any) -> bool:
    """Whether a leaf of the pytree is traced, so that it has no values on the host."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))
