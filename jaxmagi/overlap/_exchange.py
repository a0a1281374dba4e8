"""Holds the static parameters of a product with a collective."""

from typing import NamedTuple

import jax.numpy as jnp


class Exchange(NamedTuple):
    """Says how ranks multiply and exchange rows.

    Attributes:
        axis_name: the mesh axis of the ranks.
        wire_dtype: the dtype in which products travel to be summed.
        precision: of the products, as of ``jax.default_matmul_precision`` where the function was called.
        native: whether `all_gathered` and `reduce_scattered` are custom calls.
        timeout: seconds that these wait for other ranks; None: those of `set_timeout`.
    """

    axis_name: str
    wire_dtype: jnp.dtype
    precision: str | None
    native: bool = False
    timeout: float | None = None
