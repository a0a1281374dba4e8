"""Benchmarks in several processes, as the ranks of one JAX program."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.hosts import Network
from tests.launcher import importable, launch

MOST_SECONDS = 3600  # until all are killed


def run_in_processes(
    function: Callable[..., None],
    *arguments: object,
    processes: int,
    pool: float | None = None,
    hosts: int = 1,
    network: Network = "sockets",
) -> None:
    """Calls ``function(*arguments)`` in processes, and prints what the first one has printed.

    The function is at the top level of a benchmark. Where there are fewer GPUs than processes, they share
    these. ``pool`` is the part of a GPU's memory that each takes in advance; by default they take it as they
    go. ``hosts`` is how many they believe to be on, with a ``network`` between them (see
    tests/hosts.py).
    """
    operands = importable(function), sys.argv, arguments
    with tempfile.TemporaryDirectory() as folder:
        options = {"processes": processes, "pool": pool, "hosts": hosts, "network": network}
        print(launch(_run, *operands, directory=Path(folder), timeout=MOST_SECONDS, **options)[0])


def _run(function: Callable[..., None], command: list[str], arguments: tuple[object, ...]) -> None:
    """Calls the function in one process, with the command that results name."""
    sys.argv = command
    function(*arguments)
