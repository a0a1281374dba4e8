"""Runs one rank, as `tests.launcher` starts it: calls the function that is pickled in a file."""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path

import jax

PR_SET_PDEATHSIG = 1  # of prctl


def die_with(launcher: int) -> None:
    """Has the kernel kill this process when the one that started it ends, which may be killed itself.

    The thread that started it counts, and stays in `launch` until all ranks have ended.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != launcher:  # it has ended before
        sys.exit(f"process {launcher}, which has started this one, is gone")


def main(
    launcher: str, call: str, coordinator: str, processes: str, deadline: str, rank: str, devices: str
) -> None:
    """Calls the function. Ends the process at once on an error: at exit JAX would wait for other ranks."""
    die_with(int(launcher))
    # At the deadline, by the clock that all processes share, it prints where it hangs. The file is a copy of
    # standard error, which pytest replaces.
    seconds = max(0.1, float(deadline) - time.monotonic())
    faulthandler.dump_traceback_later(seconds, file=os.dup(sys.stderr.fileno()))
    on_gpus = jax.config.jax_platforms.startswith("cuda")
    jax.distributed.initialize(
        coordinator,
        int(processes),
        int(rank),
        local_device_ids=[int(device) for device in devices.split(",")] if on_gpus else None,
    )
    try:
        function, arguments = pickle.loads(Path(call).read_bytes())
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
