"""How several processes of pytest-xdist (``-m gpu -n 4``) share the GPUs of a machine."""

import os
from typing import Any

import jax
import pytest

WHOLE_GPUS = (
    "tests/collectives/",
    "tests/context/",
    "tests/attention/test_gpu_large.py",
    "tests/planning/test_gpu_calibrate.py",
)
"""Where tests need several GPUs, or most of the memory of one, which their process then keeps."""


def prepare(config: pytest.Config) -> None:
    """Has to come before JAX takes hold of the GPUs. Does nothing in a run of one process.

    Each process takes memory as it needs it, not most of it at once, and by default another GPU than the next
    one.
    """
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and jax.default_backend() == "gpu":
        gpus = jax.devices()
        jax.config.update("jax_default_device", gpus[int(worker.removeprefix("gw")) % len(gpus)])


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist: tests of `WHOLE_GPUS` run in one process, one after another.

    By their names, for ``xdist_group`` has no effect with pytest-xdist 3.8 and pytest 9.1 or newer.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "whole GPUs" if nodeid.startswith(WHOLE_GPUS) else nodeid

    return Scheduling(config, log)
