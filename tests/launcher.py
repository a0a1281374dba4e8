"""Runs a function in several processes at once, as the ranks of one JAX program.

Each rank logs to a separate file. When one fails or the time is up, all of them are killed, with the
processes that they started, and the error shows the ends of all logs.
"""

import contextlib
import functools
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

import jax

from .hosts import Network, command_on, host_environment, why_not

ROOT = Path(__file__).parent.parent
GRACE = 2.0
"""Seconds that the other ranks have to end by themselves after one has failed: their logs may say more."""
TAIL_LINES = 100

type Launch = Callable[..., list[str]]
"""`launch` with a directory for the logs, as the fixture of that name gives it."""


class RankFailed(Exception):
    """A rank ended with an error.

    Attributes:
        logs: what each rank has printed.
        ends: when each rank ended, by `time.monotonic`; None for a rank that was killed here.
    """

    def __init__(self, message: str, logs: Sequence[str], ends: Sequence[float | None]) -> None:
        super().__init__(message)
        self.logs, self.ends = logs, ends


class RanksTimedOut(Exception):
    """Not all ranks had ended when the time was up."""


def launch(
    function: Callable[..., None],
    *arguments: object,
    processes: int,
    directory: Path,
    devices_each: int = 1,
    pool: float | None = None,
    sees_all: bool = True,
    hosts: int = 1,
    network: Network = "sockets",
    timeout: float = 120,
    grace: float = GRACE,
) -> list[str]:
    """Calls ``function(*arguments)`` in new processes of one JAX program, and returns their logs.

    Where there are fewer GPUs than ranks, processes share them, if NCCL is of version 2.30 or newer.

    Args:
        function: at the top level of a module that a new process can import.
        arguments: can be pickled.
        processes: how many.
        directory: for the logs.
        devices_each: devices of a process, on the platform of the caller.
        pool: the part of a GPU's memory that each takes in advance; by default they take it as they go.
        sees_all: whether each process sees the GPUs of all.
        hosts: that the processes believe to be on, the first ones on the first host and so on.
        network: by which rows go between hosts.
        timeout: seconds until all are killed.
        grace: seconds that the other ranks have to end by themselves after one has failed.

    Raises:
        ValueError: a process would need more GPUs than there are, or hosts do not divide the processes.
        NotImplementedError: this machine cannot have several hosts.
        RankFailed: a rank ended with an error.
        RanksTimedOut: some rank ran too long.
    """
    there = len(jax.local_devices())
    if jax.default_backend() == "gpu" and devices_each > there:
        raise ValueError(f"a process cannot have {devices_each} GPUs, for there are {there}.")
    _check_hosts(hosts, processes)
    call = directory / "call.pickle"
    call.write_bytes(pickle.dumps((importable(function), arguments)))
    logs = [directory / f"rank{rank}.log" for rank in range(processes)]
    deadline = time.monotonic() + timeout
    ranks: list[subprocess.Popen[bytes]] = []
    with reserved_port() as port:
        command = [sys.executable, "-u", "-m", "tests.rank", str(os.getpid()), str(call)]
        command += [f"127.0.0.1:{port}", str(processes), str(deadline - 1)]
        environment = environment_of(processes, devices_each, pool) | host_environment(hosts, network)
        try:
            for rank, log in enumerate(logs):
                devices, sight = devices_of(rank, devices_each), {}
                if not sees_all:
                    devices, sight = devices_of(0, devices_each), _visible(devices)
                of_rank = [*command, str(rank), devices]
                if hosts > 1:
                    of_rank = command_on(rank * hosts // processes, of_rank)
                ranks.append(_start(of_rank, log, environment | sight))
            ends = _wait(ranks, deadline, grace)
        finally:
            _kill(ranks)
    codes = [rank.returncode for rank in ranks]
    failed = [
        f"rank {i}: exit code {code}" for i, code in enumerate(codes) if code not in (0, -signal.SIGKILL)
    ]
    if failed:
        texts = [log.read_text(errors="replace") for log in logs]
        raise RankFailed(_report(", ".join(failed), logs), texts, ends)
    if None in ends:
        raise RanksTimedOut(_report(f"not all of {processes} ranks ended within {timeout:g} s", logs))
    return [log.read_text() for log in logs]


def _check_hosts(hosts: int, processes: int) -> None:
    if hosts < 1 or processes % hosts:
        raise ValueError(f"{hosts} hosts do not divide {processes} processes.")
    if hosts > 1 and (reason := why_not()):
        raise NotImplementedError(f"this machine cannot have {hosts} hosts: {reason}.")


def importable(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function as other processes find it, for they do not know this one's ``__main__``."""
    spec = sys.modules["__main__"].__spec__
    if function.__module__ != "__main__" or spec is None:
        return function
    return getattr(importlib.import_module(spec.name), function.__name__)


def leave_memory_to_processes() -> None:
    """Has this process, where nothing is to run, take no GPU memory in advance, if JAX is not in use yet."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def can_share() -> bool:
    """Returns whether tests may have processes share GPUs, for want of more: as NCCL's own switch says."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a free port that other processes do not get; gRPC does, as it shares its ports too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def devices_of(rank: int, devices_each: int) -> str:
    """Returns a rank's devices among those of the machine; where it has too few, they come again."""
    numbers = range(rank * devices_each, (rank + 1) * devices_each)
    return ",".join(str(i % len(jax.local_devices())) for i in numbers)


def _visible(gpus: str) -> dict[str, str]:
    """Returns the variable by which a process sees these of the caller's GPUs alone."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(outer[int(i)] if any(outer) else i for i in gpus.split(","))}


def environment_of(processes: int, devices_each: int, pool: float | None) -> dict[str, str]:
    """Returns the environment of each rank. Without a pool most of the GPUs' memory is the caller's."""
    shares = processes * devices_each > len(jax.local_devices())
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu" if jax.default_backend() == "gpu" else "cpu",
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
    """Starts a process in a separate process group."""
    start = functools.partial(subprocess.Popen[bytes], cwd=ROOT, env=environment, start_new_session=True)
    with log.open("wb") as output:
        return start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, grace: float) -> list[float | None]:
    """Waits until all have ended, one has failed or the time is up; returns when each ended, if so."""
    ends: list[float | None] = [None] * len(ranks)
    while None in ends and time.monotonic() < deadline:
        for i, rank in enumerate(ranks):
            if ends[i] is not None:
                continue
            # Not reaped before its group is killed: so long the group's number is not given to another.
            end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                ends[i] = time.monotonic()
                if end.si_status != 0:
                    deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.02)
    return ends


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills ranks with the processes that they started; those that have ended keep their exit codes."""
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _report(what: str, logs: Sequence[Path]) -> str:
    tails = (log.read_text(errors="replace").splitlines()[-TAIL_LINES:] for log in logs)
    return "\n".join(
        [what, *("\n".join([f"--- {log}", *tail]) for log, tail in zip(logs, tails, strict=True))]
    )
