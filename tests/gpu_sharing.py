"""Lets several processes of pytest-xdist (``-m gpu -n 4``) share the GPUs of a machine."""

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
"""Tests that need several GPUs, or idle ones: other work would make GPUs wait for each other."""
LARGE = "tests/attention/test_gpu_large.py"
"""Tests that need most of the memory of a GPU, which their process then keeps."""


def prepare(config: pytest.Config) -> None:
    """Prepares a run of several processes. Call it before JAX initialises the GPUs.

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
    """Returns a scheduler that runs tests of `ALONE` and `LARGE` in one process, one after another.

    It goes by their names, since ``xdist_group`` has no effect with pytest-xdist 3.8 and pytest 9.1 or newer.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "whole GPUs" if nodeid.startswith((*ALONE, LARGE)) else nodeid

    return Scheduling(config, log)


def environment() -> dict[str, str]:
    """Returns the environment for another run of pytest that a test starts, which takes no turns."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def sort(items: list[pytest.Item]) -> None:
    """Moves tests of `LARGE` to the end."""
    items.sort(key=lambda item: item.nodeid.startswith(LARGE))


class Turns:
    """Makes tests of other processes wait while those of `ALONE` run, all of them in one turn.

    It locks two files. A process that wants a turn passes the gate, and one that waits for all others to end
    keeps it closed meanwhile.
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
        """Takes a turn for a test, and for those after it if all of them are to be alone."""
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
    """Returns the turns of this process, if it is one of several."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return Turns(run) if run else None
