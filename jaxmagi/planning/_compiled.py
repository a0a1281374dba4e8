"""The planner's compiled extension."""

from types import ModuleType

from .._native import extension


def planner() -> ModuleType:
    """Returns the extension `jaxmagi._cpu`.

    Raises:
        ImportError: it was not built.
    """
    compiled = extension("cpu")
    if compiled is None:
        raise ImportError("planning needs the compiled extension jaxmagi._cpu, which is missing.")
    return compiled
