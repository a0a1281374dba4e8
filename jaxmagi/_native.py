"""Loads the compiled extension and registers its handlers with XLA."""

import importlib

import jax


def _register_cpu() -> frozenset[str]:
    """Registers the CPU handlers; a missing extension registers nothing, a broken one raises."""
    try:
        extension = importlib.import_module("jaxmagi._cpu")
    except ModuleNotFoundError as error:
        if error.name != "jaxmagi._cpu":
            raise
        return frozenset()
    handlers = extension.registrations()
    for target, capsule in handlers.items():
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return frozenset(handlers)


_TARGETS = {"cpu": _register_cpu()}


def has_handler(target: str, platform: str) -> bool:
    """Whether the custom call ``target`` can run on ``platform``."""
    return target in _TARGETS.get(platform, frozenset())
