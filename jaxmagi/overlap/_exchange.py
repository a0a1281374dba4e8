"""Holds the static parameters of a product with a collective."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


class Exchange(NamedTuple):
    """Says how ranks multiply and exchange rows.

    Attributes:
        axis_name: the mesh axis of the ranks.
        wire_dtype: the dtype in which products travel to be summed.
        precision: of the products, as of ``jax.default_matmul_precision`` where the function was called.
        implementation: "xla" for plain JAX, "native" for kernels; None for kernels where they pay.
        timeout: seconds that kernels wait for other ranks; None: those of `set_timeout`.
    """

    axis_name: str
    wire_dtype: jnp.dtype
    precision: str | None
    implementation: str | None = None
    timeout: float | None = None


class Weights(NamedTuple):
    """Says how weights lie, and how their product is sharded.

    Attributes:
        transposed: whether they are ``[N, K]``, not ``[K, N]``.
        spec: of the product.
    """

    transposed: bool = False
    spec: P | None = None

    def back(self, x: jax.Array) -> "Weights":
        """Returns how they are multiplied with a cotangent, for the gradient of x."""
        return Weights(not self.transposed, explicit_spec(x))


def explicit_spec(x: jax.Array) -> P | None:
    """Returns over which Explicit axes an array is sharded; None if there is no such axis."""
    return jax.typeof(x).sharding.spec if jax.sharding.get_abstract_mesh().explicit_axes else None
