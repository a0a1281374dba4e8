"""The dtypes that the package computes in."""

import jax
import jax.numpy as jnp

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes of attention's operands."""


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype in which numbers are added up: float32 for smaller floats, otherwise their own."""
    dtype = jnp.dtype(dtype)
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_small else dtype


def is_positive_normal(value: float) -> bool:
    """Returns whether a number is positive and normal in float32, in which the kernels compute with it."""
    limits = jnp.finfo(jnp.float32)
    return float(limits.tiny) <= value <= float(limits.max)
