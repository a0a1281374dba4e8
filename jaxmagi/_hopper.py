"""Tells whether the compiled CUDA code, which is for Hopper GPUs, can run here."""

from collections.abc import Sequence
from typing import Any

import jax

from . import _native

_CAPABILITY = "9.0"

MAX_SMS = 132
"""The most multiprocessors that a GPU of this compute capability has."""


def unsupported_reason() -> str | None:
    """Returns why compiled CUDA code cannot run here, whatever the operands; None if it can."""
    return build_unsupported_reason() or device_unsupported_reason()


def build_unsupported_reason() -> str | None:
    """Returns why there is no compiled CUDA code; None if there is."""
    if _native.extension("cuda") is not None:
        return None
    return (
        "jaxmagi was built without CUDA (the compiled extension jaxmagi._cuda is missing): install it where "
        "there is nvcc >= 12.8, with JAXMAGI_CUDA=ON in the environment to learn what the build lacks"
    )


def device_unsupported_reason() -> str | None:
    """Returns why a GPU of this machine cannot run the kernels; None if all can.

    It is None on a machine without GPUs, which may compile for others: handlers check the device they run on.
    """
    for gpu in local_gpus():
        if gpu.compute_capability != _CAPABILITY:
            return (
                f"{gpu.device_kind} has compute capability {gpu.compute_capability}, and the kernels are for "
                f"{_CAPABILITY} (H100, H200)"
            )
    return None


def local_gpus() -> Sequence[Any]:
    """Returns the GPUs that JAX sees."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
