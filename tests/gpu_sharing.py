"""How several processes of pytest-xdist (``-m gpu -n 4``) share the GPUs of a machine."""

import contextlib
import fcntl
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

ALONE = (
    "tests/attention/test_gpu_sharding.py",
    "tests/calibration/test_gpu_calibrate.py",
    "tests/collectives/",
    "tests/context/",
)
"""Where tests need several GPUs, or quiet ones: other work would have GPUs wait for each other."""
LARGE = "tests/attention/test_gpu_large.py"
"""Where tests need most of the memory of a GPU, which their process then keeps."""


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
    """Of pytest-xdist: tests of `ALONE` and `LARGE` run in one process, one after another.

    By their names, for ``xdist_group`` has no effect with pytest-xdist 3.8 and pytest 9.1 or newer.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "whole GPUs" if nodeid.startswith((*ALONE, LARGE)) else nodeid

    return Scheduling(config, log)


def environment() -> dict[str, str]:
    """For other runs of pytest that a test starts: they are no part of this one and take no turns."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def sort(items: list[pytest.Item]) -> None:
    """What keeps most of a GPU's memory comes last."""
    items.sort(key=lambda item: item.nodeid.startswith(LARGE))


class Turns:
    """Has tests of `ALONE` run while those of other processes wait: all of them in one turn.

    By locks on two files. Whoever wants a turn passes the gate, and who waits for all others to end keeps it
    closed meanwhile.
    """

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir())
        self._gate, self._turn = (
            os.open(folder / f"jaxmagi-{run}-{name}.lock", os.O_CREAT | os.O_RDWR)
            for name in ("gate", "turn")
        )
        self._is_alone = False

    @contextlib.contextmanager
    def take(self, nodeid: str, next_nodeid: str) -> Iterator[None]:
        """For a test, and those after it if all of them are to be alone."""
        if not self._is_alone:
            self._is_alone = nodeid.startswith(ALONE)
            with _locked(self._gate, fcntl.LOCK_EX):
                fcntl.flock(self._turn, fcntl.LOCK_EX if self._is_alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._is_alone = self._is_alone and next_nodeid.startswith(ALONE)
            if not self._is_alone:
                fcntl.flock(self._turn, fcntl.LOCK_UN)


@contextlib.contextmanager
def _locked(file: int, kind: int) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@functools.cache
def turns() -> Turns | None:
    """Of this process, if it is one of several."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return Turns(run) if run else None
