"""Communication between the processes of a program: the largest of their numbers, and their hosts."""

import socket
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def largest(numbers: np.ndarray) -> np.ndarray:
    """Returns the elementwise maximum over all processes, rounded to float32 if there are several."""
    if jax.process_count() == 1:
        return numbers
    return _gather(numbers.astype(np.float32)).max(axis=0).astype(np.float64)


def hosts() -> np.ndarray:
    """Returns a number for the host of each process, ``[processes]``. All processes must call this.

    A host is identified by its boot and its name, as in the collectives on GPUs: containers with different
    names are different hosts.
    """
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    this_host = zlib.crc32(f"{boot_id} {socket.gethostname()}".encode())
    return _gather(np.array(this_host, np.uint32))


def _gather(numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of all processes: ``[processes, ...]``."""
    gathered = multihost_utils.process_allgather(numbers)
    return np.asarray(gathered).reshape(jax.process_count(), *numbers.shape)
