"""What the collectives on GPUs have for the whole process: a time limit, and memory."""

import math

import jax

from .. import _hopper, _native

_LONGEST = 10**6  # seconds, more than eleven days
_timeout_ms = 300_000


def set_timeout(seconds: float) -> None:
    """Sets how long a collective on GPUs waits for its peers before it reports an error: 300 s by default.

    It holds for what is compiled from now on, and must be the same in all processes. The limit is also for
    ranks that come together for their first transfer, or for a larger one, before the program runs: it should
    be longer than one process may compile while another has begun. A process whose rank waits in NCCL ends.

    Args:
        seconds: from 0.001 to 1,000,000.

    Raises:
        ValueError: the number is out of range.
    """
    global _timeout_ms
    if not 1e-3 <= seconds <= _LONGEST:
        raise ValueError(f"the time limit must be between 0.001 and {_LONGEST} seconds, but it is {seconds}.")
    _timeout_ms = math.ceil(seconds * 1000)


def timeout_ms() -> int:
    """The time limit in milliseconds."""
    return _timeout_ms


def tell_memory_limits() -> None:
    """Tells the compiled collectives how much memory JAX's allocator may take of each GPU of this process.

    By that they know JAX's memory pool, which processes of one host share; where a program was lowered by
    another process (`jax.export`), they do not, and rows are copied. It does nothing in a program of one
    process, and where there are no GPUs: a program may be compiled for others.
    """
    compiled = _native.extension("cuda")
    if compiled is None or jax.process_count() == 1:
        return
    for gpu in _hopper.local_gpus():
        limit = (gpu.memory_stats() or {}).get("bytes_limit", 0)
        compiled.set_memory_limit(gpu.local_hardware_id, limit)


def finalize() -> None:
    """Frees the memory that collectives on GPUs keep between calls, and lets go of other processes' memory.

    Call it on every process, when nothing that uses them runs any more, and before JAX's backends are
    cleared. It does nothing where jaxmagi was built without CUDA.
    """
    compiled = _native.extension("cuda")
    if compiled is not None:
        compiled.finalize_collectives()
