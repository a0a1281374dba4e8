"""Runs benchmarks between hosts: has their options and report, and casts and returns as work to be timed.

The hosts are those of tests/hosts.py, on one machine.
"""

import argparse
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._jax_collectives import DTYPES, Direction
from benchmarks._measure import gpu_environment
from benchmarks._processes import run_in_processes
from benchmarks._report import Check, Report, argument_parser
from benchmarks._transfers import DIM, KV_HEADS
from benchmarks._workloads import Causal, Documents, Pattern, Video, Window
from jaxmagi import GroupCastSpec, group_cast, group_reduce
from jaxmagi.calibration._chain import AXIS, chain, draw_normal
from jaxmagi.calibration._timing import DeviceWork
from tests.cases import document_lengths
from tests.hosts import Network
from tests.launcher import leave_memory_to_processes

PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "documents": lambda length: Documents(tuple(document_lengths(length)), causal=True),
    "window 4095": lambda length: Window(length, 4095),
    "video": lambda length: Video(4, length // 4),
    "causal": Causal,
}
PROGRAM_SECONDS = 50e-3  # of the calls of one program, if they are fast
MAX_CALLS = 1000
BATCHES = 2  # programs in the queues at once
ESTIMATED_RATES: dict[Network, float] = {"sockets": 5e9, "memory": 25e9}  # bytes a second
SECONDS_MORE = 200e-6  # of a transfer, beside those that its bytes take
POOL = 0.7  # of a GPU's memory, by all ranks, which may share one


def sized(name: str, tokens: int) -> str:
    """Returns the name of a workload with so many tokens of each rank."""
    size = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return f"{name}, {size} a rank"


def sent_bytes(spec: GroupCastSpec, direction: Direction, hosts: int) -> np.ndarray:
    """Returns the bytes that each rank has for each rank of another host, or gets back: int64 [cp, cp]."""
    sends = np.asarray(spec.sends)
    cp_size = len(sends)
    rows = np.zeros((cp_size, cp_size), np.int64)
    for rank, table in enumerate(sends):
        np.add.at(rows[rank], table[:, 0], table[:, 3])
    host = np.arange(cp_size) * hosts // cp_size
    row_bytes = 2 * KV_HEADS * DIM * np.dtype(DTYPES[direction]).itemsize
    return np.where(host[:, None] == host, 0, row_bytes * rows)


def of_busiest(sent: np.ndarray) -> int:
    """Returns the bytes that one rank sends to other hosts or receives from them, whichever are more."""
    return int(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


def make_work(
    run: Callable[[Any, Any], Any], operands: Any, tables: Any, mesh: Mesh, seconds: float
) -> DeviceWork:
    """Returns the work of calls that take about so many seconds each, run once."""
    turns = max(2, math.ceil(min(MAX_CALLS, PROGRAM_SECONDS / seconds)))
    tables = jax.device_put(tables, NamedSharding(mesh, P(AXIS)))
    work = chain(run, operands, tables, mesh, turns)
    work.seconds(BATCHES)
    return work


def transfer_work(
    spec: GroupCastSpec, direction: Direction, mesh: Mesh, arguments: argparse.Namespace
) -> DeviceWork:
    """Returns the work of a cast of keys and values in one call, or of the return of their gradients."""
    is_cast = direction == "cast"
    rows = spec.input_rows if is_cast else spec.output_rows
    move = functools.partial(group_cast if is_cast else group_reduce, axis_name=AXIS)
    operands = [draw_normal(seed, rows, (KV_HEADS, DIM), DTYPES[direction], mesh) for seed in range(2)]
    needed = of_busiest(sent_bytes(spec, direction, arguments.hosts))
    seconds = needed / ESTIMATED_RATES[arguments.network] + SECONDS_MORE
    return make_work(move, operands, spec, mesh, seconds)


def seconds_of_call(work: DeviceWork) -> float:
    return work.seconds(BATCHES) / (BATCHES * work.passes)


def begin_report[R](
    name: str, arguments: argparse.Namespace, checks: Callable[[list[R]], list[Check]]
) -> Report[R]:
    """Begins the report of a rank, which NAME_2x1.json has for two hosts of one rank each."""
    hosts, per_host, network = arguments.hosts, arguments.ranks_per_host, arguments.network
    about = gpu_environment() | {"hosts": hosts, "ranks_per_host": per_host, "network": network}
    print(f"sources {about['sources']}", flush=True)
    name = f"{name}_{hosts}x{per_host}" + ("_memory" if network == "memory" else "")
    return Report[R](name, arguments.out, about, checks)


def run_on_hosts(
    run: Callable[[argparse.Namespace], None], description: str | None, tokens: list[int]
) -> None:
    """Calls ``run``, which is at the top level of a benchmark, in each rank with what its command line says.

    Args:
        description: says what the benchmark measures.
        tokens: of each rank, by default.
    """
    parser = argument_parser(description)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help="of each rank")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--network", choices=("sockets", "memory"), default="sockets")
    arguments = parser.parse_args()
    if arguments.hosts < 2:
        parser.error(f"it takes two hosts or more, but --hosts is {arguments.hosts}")
    leave_memory_to_processes()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as for tests on GPUs
    ranks = arguments.hosts * arguments.ranks_per_host
    arguments.out = arguments.out and arguments.out.absolute()
    places = {"hosts": arguments.hosts, "network": arguments.network}
    run_in_processes(run, arguments, processes=ranks, pool=POOL / ranks, **places)
