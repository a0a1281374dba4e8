"""Manages what the collectives on GPUs have per process: a time limit, and memory."""

import math
from typing import Any

import jax

from .. import _hopper, _native
from .._checks import is_number

_LONGEST = 10**6  # seconds, more than eleven days
_timeout_ms = 300_000


def set_timeout(seconds: float) -> None:
    """Sets how long a collective on GPUs waits for its peers before it reports an error: 300 s by default.

    The limit becomes part of a program when that is lowered: programs that are lowered already keep theirs,
    ``jax.jit`` does not lower them again, and a saved program (`jax.export`) keeps the limit of the process
    that exported it. So call this first, and with the same number in all processes.

    The limit also holds where ranks come together before their first transfer, or a larger one: it should be
    longer than one process may compile while another has begun. A process whose rank waits in NCCL ends.

    Calls with a `CollectiveOptions.timeout` have that instead.

    Args:
        seconds: from 0.001 to 1,000,000.

    Raises:
        ValueError: the number is out of range.
    """
    global _timeout_ms
    _timeout_ms = timeout_ms(check_seconds(seconds, "seconds"))


def check_seconds(seconds: Any, name: str) -> float:
    """Returns a time limit as a float; ValueError unless it is a number in range."""
    if not is_number(seconds) or not 1e-3 <= seconds <= _LONGEST:
        raise ValueError(f"{name} must be between 0.001 and {_LONGEST} seconds, but it is {seconds!r}.")
    return float(seconds)


def timeout_ms(seconds: float | None) -> int:
    """Returns a time limit in milliseconds; for None, that of `set_timeout`."""
    return _timeout_ms if seconds is None else math.ceil(seconds * 1000)


def set_memory_limits() -> None:
    """Tells the compiled collectives how much memory JAX's allocator may take of each GPU of this process.

    By its size they recognise JAX's memory pool, whose rows processes of one host read directly. Lowering a
    collective calls this, since JAX's backends are up then, and this process is likely to run the program.
    A process that runs a program which another one lowered (`jax.export`) has not called it, and copies rows.
    It does nothing in a program of one process, and where there are no GPUs.
    """
    compiled = _native.extension("cuda")
    if compiled is None or jax.process_count() == 1:
        return
    for gpu in _hopper.local_gpus():
        limit = (gpu.memory_stats() or {}).get("bytes_limit", 0)
        compiled.set_memory_limit(gpu.local_hardware_id, limit)


def finalize() -> None:
    """Frees the memory that collectives on GPUs keep between calls, and closes that of other processes.

    Call it on every process, when no program with collectives runs any more, and before JAX's backends are
    cleared. It does nothing where jaxmagi was built without CUDA.
    """
    compiled = _native.extension("cuda")
    if compiled is not None:
        compiled.finalize_collectives()
