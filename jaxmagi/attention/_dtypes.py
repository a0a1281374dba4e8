"""Which dtypes and numbers the op takes."""

import jax
import jax.numpy as jnp

DTYPES = ("float64", "float32", "bfloat16", "float16")


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float64 for float64 operands, float32 for all others."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def is_positive_normal(value: float) -> bool:
    """Whether float32 has it as a positive normal number: the kernels compute with it there."""
    limits = jnp.finfo(jnp.float32)
    return float(limits.tiny) <= value <= float(limits.max)
