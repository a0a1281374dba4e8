"""Loads the compiled extensions and registers their handlers with XLA."""

import importlib
import os
from types import ModuleType

import jax

# Kernels of two communicators, XLA's and that of the collectives here, may run at the same time only if all
# devices launch them in one order. NCCL reads this when it is loaded, which importing jaxmagi comes before.
os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def _load(name: str, platform: str) -> ModuleType | None:
    """Loads an extension and registers its handlers. Returns None if it is missing; raises if broken."""
    try:
        extension = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    for target, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    return extension


_EXTENSIONS = {"cpu": _load("jaxmagi._cpu", "cpu"), "cuda": _load("jaxmagi._cuda", "CUDA")}


def extension(platform: str) -> ModuleType | None:
    """Returns the compiled extension for a platform, None where it was not built."""
    return _EXTENSIONS.get(platform)


def planner() -> ModuleType:
    """Returns the extension of the CPU, with which plans are made.

    Raises:
        ImportError: it was not built.
    """
    compiled = extension("cpu")
    if compiled is None:
        raise ImportError("planning needs the compiled extension jaxmagi._cpu, which is missing.")
    return compiled


def kernel_sources() -> str | None:
    """Returns the hash of the sources that the CUDA kernels were built from, None without kernels."""
    return getattr(extension("cuda"), "sources", None)


def has_handler(target: str, platform: str) -> bool:
    """Returns whether the custom call ``target`` can run on ``platform``."""
    compiled = extension(platform)
    return compiled is not None and target in compiled.registrations()
