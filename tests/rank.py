"""What `tests.launcher` starts: one rank, which calls the function that is pickled in a file."""

import faulthandler
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import jax


def main(call: str, coordinator: str, processes: str, deadline: str, rank: str, devices: str) -> None:
    """Ends the process at once on an error: at exit JAX would wait for the other ranks."""
    # At the deadline, by the clock that all processes share, it says where it hangs, also under pytest, which
    # has its own standard error.
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
