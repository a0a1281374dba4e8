"""Transfers of keys and values between the GPUs of a machine, beside what `jax.lax` has, in one run.

    python -m benchmarks.collectives [--tokens 65536] [--ranks N] [--processes pools|arenas] [--rows REGEX]
                                     [--implementations REGEX] [--repeats 5] [--out FOLDER]

Each rank owns --tokens tokens (the sequence has as many times --ranks, by default all GPUs), with 8 key heads
of dimension 128: 4096 bytes a token in bfloat16. That is what a rank holds when context parallelism pays.

    all-to-all         each rank sends an equal part of its rows to each other rank, and keeps one
    all-gather         each rank sends all of its rows to all others
    documents causal   what a plan of packed documents sends (lengths from tests/data/document_lengths.csv)
    64 KB              each rank sends 16 rows to all others: the latency

A reduction takes the same way back and adds up what arrives, in rows of bfloat16 or float32. GB/s are bytes
that arrive at a GPU from others, on average, over the time. Time on the device: many calls in one program,
each waiting for the last, which costs a short kernel that is not subtracted; what launching the program and
waiting for it cost is. Operands stay as they are, and each call writes new results. Each implementation is
measured in turns with the others.

One process has all GPUs, unless --processes starts one for each. These share XLA's memory in pools that they
take in advance, or with "arenas" take it as they go, so that rows are copied from and to arenas.

With --out, writes collectives_h200.json (collectives_pools.json, collectives_arenas.json) there after each
row.
"""

import argparse
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import _transfers
from benchmarks._jax_collectives import (
    DTYPES,
    PADDED,
    SMS,
    Direction,
    Implementation,
    implementations,
    native,
)
from benchmarks._measure import gpu_environment, save
from benchmarks._processes import run_in_processes
from benchmarks._requirements import Check, check, show_checks
from benchmarks._rows import Failure
from benchmarks._transfers import DIM, KV_HEADS, Transfer, transfers
from jaxmagi.calibration._chain import AXIS, chain, mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device
from tests.collectives.memory import arena_bytes
from tests.launcher import leave_memory_to_processes

DIRECTIONS: tuple[Direction, ...] = get_args(Direction.__value__)
OURS = native(16)
FEW_SMS = [native(num) for num in SMS if num <= 16]
PROGRAM_SECONDS = 20e-3  # of the calls of one program, if they are fast
MAX_CALLS = 400
SHORT = 50e-6  # seconds of a call, beside which what a turn of the loop takes is not small
SHORT_CALLS = 8  # that make one turn
POOL = 0.3  # of a GPU's memory


@dataclass(frozen=True)
class Row:
    """One way to make a transfer.

    received_bytes: that arrive at a GPU from others, on average; they make GB/s.
    most_received_bytes: that arrive at the GPU that gets most.
    speedup: how many times as fast ours is, with 16 multiprocessors.
    """

    workload: str
    direction: str
    implementation: str
    median_us: float
    fastest_us: float
    slowest_us: float
    received_bytes: float
    most_received_bytes: float
    gb_per_second: float
    speedup: float | None


def received_bytes(transfer: Transfer, direction: Direction) -> np.ndarray:
    """That arrive at each rank from others: float64 [cp]."""
    rows = transfer.received_rows if direction == "cast" else transfer.returned_rows
    return rows * 2.0 * KV_HEADS * DIM * jnp.dtype(DTYPES[direction]).itemsize


def make_work(implementation: Implementation, direction: Direction, mesh: Mesh, seconds: float) -> DeviceWork:
    """Run once. A call takes about so many seconds."""
    calls = SHORT_CALLS if seconds < SHORT else 1
    turns = max(2, math.ceil(min(MAX_CALLS, PROGRAM_SECONDS / seconds) / calls))
    tables = jax.device_put(implementation.tables, NamedSharding(mesh, P(AXIS)))
    work = chain(implementation.run, implementation.operands(direction, mesh), tables, mesh, turns, calls)
    work.seconds(1)
    return work


def measure(
    transfer: Transfer, direction: Direction, mesh: Mesh, chosen: str, repeats: int
) -> list[Row | Failure]:
    """The rows of a transfer by the implementations whose name the pattern finds."""
    estimate = received_bytes(transfer, direction).max() / 300e9 + 10e-6
    works, failures = {}, []
    for name, implementation in implementations(transfer, direction).items():
        if not re.search(chosen, name):
            continue
        try:
            works[name] = make_work(implementation, direction, mesh, estimate)
        except Exception as error:
            if jax.process_count() > 1:
                raise  # or the others would wait
            failures.append(Failure.of(transfer.name, direction, name, error))
    timings = time_on_device(works, repeats, batches=2)
    return [*to_rows(transfer, direction, timings), *failures]


def to_rows(transfer: Transfer, direction: Direction, timings: dict[str, Timing]) -> list[Row]:
    arriving = received_bytes(transfer, direction)
    ours = timings.get(OURS)
    return [
        Row(
            workload=transfer.name,
            direction=direction,
            implementation=name,
            median_us=1e6 * timing.median,
            fastest_us=1e6 * timing.fastest,
            slowest_us=1e6 * timing.slowest,
            received_bytes=float(arriving.mean()),
            most_received_bytes=float(arriving.max()),
            gb_per_second=float(arriving.mean()) / timing.median / 1e9,
            speedup=timing.median / ours.median if ours else None,
        )
        for name, timing in timings.items()
    ]


def show(rows: Iterable[Row | Failure]) -> None:
    for row in rows:
        label = f"{row.direction:11s} {row.workload:16s} {row.implementation:26s}"
        if isinstance(row, Failure):
            print(label, "failed:", row.error.splitlines()[0], flush=True)
            continue
        ratio = "" if row.speedup is None else f"ours is {row.speedup:.3f} x as fast"
        spread = f"({row.fastest_us:.1f} to {row.slowest_us:.1f})"
        print(
            f"{label} {row.median_us:9.1f} us {spread:20s} {row.gb_per_second:6.1f} GB/s  {ratio}", flush=True
        )


def checks(rows: Iterable[Row | Failure]) -> list[Check]:
    """What is required of ours, of the workloads among the rows."""
    rows = list(rows)
    found = {(row.workload, row.direction, row.implementation): row for row in rows if isinstance(row, Row)}
    measured = {(row.workload, row.direction) for row in rows}

    def few_sms(workload: str, direction: str) -> list[Row]:
        return [found[key] for name in FEW_SMS if (key := (workload, direction, name)) in found]

    made = []
    for direction, least in (("cast", 330), ("reduce bf16", 280), ("reduce f32", 280)):
        rates = [row.gb_per_second for row in few_sms(_transfers.ALL_TO_ALL, direction)]
        what = "GB/s, at most 16 SMs"
        made.append(
            check(
                _transfers.ALL_TO_ALL, direction, "required", what, max(rates, default=None), at_least=least
            )
        )
    padded = found.get((_transfers.DOCUMENTS, "cast", PADDED))
    ratio = padded.speedup if padded else None
    made.append(check(_transfers.DOCUMENTS, "cast", "required", PADDED, ratio, at_least=1.5))
    times = [row.median_us for row in few_sms(_transfers.LATENCY, "cast")]
    what = "us, at most 16 SMs"
    made.append(check(_transfers.LATENCY, "cast", "required", what, min(times, default=None), at_most=25))
    return [one for one in made if (one.workload, one.direction) in measured]


def check_sharing(processes: str | None, rows: Iterable[Row | Failure]) -> None:
    """Stops the benchmark where our kernels have run in processes, and did not share memory as it says."""
    natives = {native(num) for num in SMS}
    has_run = any(isinstance(row, Row) and row.implementation in natives for row in rows)
    if processes and has_run and (arena_bytes() > 0) != (processes == "arenas"):
        raise SystemExit(f"asked for {processes}, and arenas have {arena_bytes()} bytes")


def run(arguments: argparse.Namespace) -> None:
    """Measures what the patterns select; saves after each row, so that a run cut short leaves something."""
    start = time.perf_counter()
    mesh = mesh_of(arguments.ranks or len(jax.devices()))
    about = gpu_environment() | {
        "ranks": mesh.size,
        "processes": arguments.processes,
        "tokens_per_rank": arguments.tokens,
    }
    name = f"collectives_{arguments.processes or 'h200'}"
    results: list[Row | Failure] = []
    for transfer in transfers(mesh.size, arguments.tokens):
        for direction in DIRECTIONS:
            if not re.search(arguments.rows, f"{direction}, {transfer.name}"):
                continue
            measured = measure(transfer, direction, mesh, arguments.implementations, arguments.repeats)
            check_sharing(arguments.processes, measured)
            show(measured)
            results += measured
            print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
            if arguments.out and jax.process_index() == 0:
                save(name, [*results, *checks(results)], arguments.out, **about)
    show_checks(checks(results))


def run_all(arguments: argparse.Namespace) -> None:
    """`run` in a process for each rank."""
    leave_memory_to_processes()
    devices = len(jax.devices())
    ranks = arguments.ranks or devices
    if ranks > devices:
        raise SystemExit(f"{ranks} ranks need as many devices, and there are {devices}")
    arguments.out = arguments.out and arguments.out.absolute()
    pool = POOL if arguments.processes == "pools" else None
    run_in_processes(run, arguments, processes=ranks, pool=pool)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536, help="of each rank")
    parser.add_argument("--ranks", type=int, help="by default all GPUs")
    parser.add_argument(
        "--processes", choices=("pools", "arenas"), help="one for each rank, by how they share memory"
    )
    parser.add_argument(
        "--rows", default="", metavar="REGEX", help='only those it finds in "cast, 64 KB" ...'
    )
    parser.add_argument(
        "--implementations", default="", metavar="REGEX", help="only those whose name it finds"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON there")
    arguments = parser.parse_args()
    run_all(arguments) if arguments.processes else run(arguments)


if __name__ == "__main__":
    main()
