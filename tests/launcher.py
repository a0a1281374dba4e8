"""Runs a function in several processes at once, as the ranks of one JAX program.

Each rank logs to a file of its own. When one fails or the time is up, all of them are killed, with the
processes that they started, and the error shows the ends of all logs.
"""

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import jax

ROOT = Path(__file__).parent.parent
GRACE = 2.0
"""Seconds that the others have to end by themselves after a rank has failed: their logs may say more."""
TAIL_LINES = 100


class RankFailed(Exception):
    """A rank ended with an error."""


class RanksTimedOut(Exception):
    """Not all ranks had ended when the time was up."""


class Launch(Protocol):
    """`launch` with a directory for the logs, as the fixture of that name gives it."""

    def __call__(
        self,
        function: Callable[..., None],
        *arguments: object,
        processes: int,
        devices_each: int = 1,
        pool: float | None = None,
        sees_all: bool = True,
        timeout: float = 120,
    ) -> list[str]: ...


def launch(
    function: Callable[..., None],
    *arguments: object,
    processes: int,
    directory: Path,
    devices_each: int = 1,
    pool: float | None = None,
    sees_all: bool = True,
    timeout: float = 120,
) -> list[str]:
    """Calls ``function(*arguments)`` in new processes, which see each other's devices.

    Where there are fewer GPUs than ranks, processes share them, if NCCL is of version 2.30 or newer.

    Args:
        function: at the top level of a module that a new process can import.
        arguments: what can be pickled.
        processes: how many.
        directory: for the logs.
        devices_each: devices of a process, on the platform of the caller.
        pool: the part of a GPU's memory that each takes in advance; by default they take it as they go.
        sees_all: whether each process sees the GPUs of the others too.
        timeout: seconds until all are killed.

    Returns:
        The logs of the ranks.

    Raises:
        ValueError: a process would need more GPUs than there are.
        RankFailed: a rank ended with an error.
        RanksTimedOut: some rank ran too long.
    """
    _check_gpus(devices_each)
    call = directory / "call.pickle"
    call.write_bytes(pickle.dumps((importable(function), arguments)))
    logs = [directory / f"rank{rank}.log" for rank in range(processes)]
    deadline = time.monotonic() + timeout
    numbers = [str(processes), str(deadline - 1)]
    ranks: list[subprocess.Popen[bytes]] = []
    with reserved_port() as port:
        command = [sys.executable, "-u", "-m", "tests.rank", str(call), f"127.0.0.1:{port}", *numbers]
        try:
            environment = environment_of(processes, devices_each, pool)
            for rank, log in enumerate(logs):
                own, sight = own_devices(rank, devices_each), {}
                if not sees_all:
                    own, sight = own_devices(0, devices_each), _visible(own)
                ranks.append(_start([*command, str(rank), own], log, environment | sight))
            timed_out = not _wait(ranks, deadline)
        finally:
            _kill(ranks)
    codes = [rank.returncode for rank in ranks]
    failed = [
        f"rank {i}: exit code {code}" for i, code in enumerate(codes) if code not in (0, -signal.SIGKILL)
    ]
    if failed:
        raise RankFailed(_report(", ".join(failed), logs))
    if timed_out:
        raise RanksTimedOut(_report(f"not all of {processes} ranks ended within {timeout:g} s", logs))
    return [log.read_text() for log in logs]


def importable(function: Callable[..., None]) -> Callable[..., None]:
    """The function as other processes find it: what is ``__main__`` here has another name there."""
    spec = sys.modules["__main__"].__spec__
    if function.__module__ != "__main__" or spec is None:
        return function
    return getattr(importlib.import_module(spec.name), function.__name__)


def leave_memory_to_processes() -> None:
    """Has this process, where nothing is to run, take no GPU memory in advance. Before JAX is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def can_share() -> bool:
    """Whether tests may have processes share GPUs, for want of more: as NCCL's own switch says."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that other processes do not get meanwhile; gRPC does, as it shares its ports too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _check_gpus(devices_each: int) -> None:
    there = len(jax.local_devices())
    if jax.default_backend() == "gpu" and devices_each > there:
        raise ValueError(f"a process cannot have {devices_each} GPUs, for there are {there}.")


def own_devices(rank: int, devices_each: int) -> str:
    """The numbers of a rank's devices among those of the machine; where it has too few, they come again."""
    own = range(rank * devices_each, (rank + 1) * devices_each)
    return ",".join(str(i % len(jax.local_devices())) for i in own)


def _visible(gpus: str) -> dict[str, str]:
    """What has a process see these of the caller's alone."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[int(i)] if any(seen) else i for i in gpus.split(","))}


def environment_of(processes: int, devices_each: int, pool: float | None) -> dict[str, str]:
    """Of each rank. Without a pool most of the GPUs' memory is the caller's."""
    platform = "cuda,cpu" if jax.default_backend() == "gpu" else "cpu"
    shares = processes * devices_each > len(jax.local_devices())
    environment = os.environ | {
        "JAX_PLATFORMS": platform,
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if pool is None else "true",
        **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if shares else {}),
    }
    if pool is not None:
        environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the former name
        environment["XLA_CLIENT_MEM_FRACTION"] = str(pool)
    return environment


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a process group of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended, one has failed or the time is up; whether all have ended."""
    running = list(ranks)
    while running and time.monotonic() < deadline:
        for rank in running.copy():
            # Not reaped before its group is killed: so long the number of the group is not given to another.
            end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                running.remove(rank)
                if end.si_status != 0:
                    deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    return not running


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """With the processes that they started; what they have ended with stays as it is."""
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _report(what: str, logs: Sequence[Path]) -> str:
    tails = [
        "\n".join([f"--- {log}", *log.read_text(errors="replace").splitlines()[-TAIL_LINES:]]) for log in logs
    ]
    return "\n".join([what, *tails])
