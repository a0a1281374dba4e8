"""Starts JAX's backends, with an error that can be shown."""

from typing import Any

import jax
import jax.extend.backend


def backends() -> dict[str, Any]:
    """Returns the backends of JAX, by XLA's name of the platform.

    Raises:
        RuntimeError: JAX cannot start one that ``JAX_PLATFORMS`` names, or has none.
    """
    try:
        return jax.extend.backend.backends()
    except AssertionError as error:  # JAX passes over "cuda" where there is no GPU, and expects another one
        platforms = jax.config.jax_platforms
        raise RuntimeError(
            f"JAX finds no device on the platforms of JAX_PLATFORMS={platforms}: it sees no GPU"
        ) from error
