"""Times transfers of keys and values between the GPUs of a machine, in comparison with `jax.lax`, in one run.

    python -m benchmarks.collectives [--tokens 65536] [--ranks N] [--processes pools|staging] [--rows REGEX]
                                     [--implementations REGEX] [--repeats 5] [--out FOLDER]

Each rank owns --tokens tokens (the sequence has as many times --ranks, by default all GPUs), with 8 key heads
of dimension 128: 4096 bytes a token in bfloat16. That is what a rank holds when context parallelism pays.

    all-to-all         each rank sends an equal part of its rows to each other rank, and keeps one
    all-gather         each rank sends all of its rows to all others
    documents causal   what a plan of packed documents sends (lengths from tests/data/document_lengths.csv)
    64 KB              each rank sends 16 rows to all others: the latency

A reduction takes the same way back and adds up what arrives, in rows of bfloat16 or float32. GB/s are bytes
that arrive at a GPU from others, on average, over the time. Times are those of the device: many calls run in
one program, each waiting for the last, which costs a short kernel that is not subtracted; what launching the
program and waiting for it cost is. Operands stay as they are, and each call writes new results. Each
implementation is measured in turns with the others.

One process has all GPUs, unless --processes starts one for each. These share XLA's memory in pools that they
take in advance, or with "staging" take it as they go, so that rows are copied by staging buffers. --rows is
matched with "cast, 64 KB" and the like.

With --out, writes collectives_CARD.json (collectives_pools.json, collectives_staging.json) there after each
row.
"""

import argparse
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import _transfers
from benchmarks._jax_collectives import DTYPES, PADDED, Direction, Implementation, implementations, native
from benchmarks._measure import card, gpu_environment
from benchmarks._processes import run_in_processes
from benchmarks._report import Check, Failure, Report, Result, argument_parser, check, in_unit, make_each
from benchmarks._transfers import DIM, KV_HEADS, Transfer, transfers
from jaxmagi.calibration._chain import AXIS, chain, mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device
from tests.collectives.memory import staging_bytes
from tests.launcher import leave_memory_to_processes

DIRECTIONS: tuple[Direction, ...] = get_args(Direction.__value__)
OURS = native(16)
FEW_SMS = [native(num) for num in (4, 8, 12, 16)]
PROGRAM_SECONDS = 20e-3  # of the calls of one program, if they are fast
MAX_CALLS = 400
SHORT = 50e-6  # seconds of a call, compared with which a turn of the loop is not negligible
SHORT_CALLS = 8  # that make one turn
POOL = 0.3  # of a GPU's memory


@dataclass(frozen=True)
class Row(Result):
    """The time that one way to make a transfer takes.

    received_bytes: that arrive at a GPU from others, on average; they make GB/s.
    most_received_bytes: that arrive at the GPU that gets most.
    speedup: how many times as fast ours is, with 16 multiprocessors.
    """

    median_us: float
    fastest_us: float
    slowest_us: float
    received_bytes: float
    most_received_bytes: float
    gb_per_second: float
    speedup: float | None

    def __str__(self) -> str:
        spread = f"({self.fastest_us:.1f} to {self.slowest_us:.1f})"
        text = f"{self.median_us:9.1f} us {spread:20s} {self.gb_per_second:6.1f} GB/s"
        return self.describe(text, self.speedup)


def received_bytes(transfer: Transfer, direction: Direction) -> np.ndarray:
    """Returns the bytes that arrive at each rank from others, float64 [cp]."""
    rows = transfer.received_rows if direction == "cast" else transfer.returned_rows
    return rows * 2.0 * KV_HEADS * DIM * jnp.dtype(DTYPES[direction]).itemsize


def make_work(implementation: Implementation, direction: Direction, mesh: Mesh, seconds: float) -> DeviceWork:
    """Returns the work of an implementation, run once. A call takes about so many seconds."""
    calls = SHORT_CALLS if seconds < SHORT else 1
    turns = max(2, math.ceil(min(MAX_CALLS, PROGRAM_SECONDS / seconds) / calls))
    tables = jax.device_put(implementation.tables, NamedSharding(mesh, P(AXIS)))
    work = chain(implementation.run, implementation.operands(direction, mesh), tables, mesh, turns, calls)
    work.seconds(1)
    return work


def measure(
    transfer: Transfer, direction: Direction, mesh: Mesh, chosen: str, repeats: int
) -> list[Row | Failure]:
    """Returns the rows of a transfer by the implementations whose name the pattern finds."""
    estimate = received_bytes(transfer, direction).max() / 300e9 + 10e-6
    makers = {
        name: functools.partial(make_work, implementation, direction, mesh, estimate)
        for name, implementation in implementations(transfer, direction).items()
        if re.search(chosen, name)
    }
    works, failures = make_each(transfer.name, direction, makers)
    timings = time_on_device(works, repeats, batches=2)
    return [*to_rows(transfer, direction, timings), *failures]


def to_rows(transfer: Transfer, direction: Direction, timings: dict[str, Timing]) -> list[Row]:
    arriving, ours = received_bytes(transfer, direction), timings.get(OURS)
    return [
        Row(
            transfer.name,
            direction,
            name,
            **in_unit(timing, "us"),
            received_bytes=float(arriving.mean()),
            most_received_bytes=float(arriving.max()),
            gb_per_second=float(arriving.mean()) / timing.median / 1e9,
            speedup=timing.median / ours.median if ours else None,
        )
        for name, timing in timings.items()
    ]


def checks(rows: Sequence[Row | Failure]) -> list[Check]:
    """Returns what is required of ours, of the workloads among the rows."""
    found = {(row.workload, row.direction, row.implementation): row for row in rows if isinstance(row, Row)}
    measured = {(row.workload, row.direction) for row in rows}

    def few_sms(workload: str, direction: str) -> list[Row]:
        return [found[key] for name in FEW_SMS if (key := (workload, direction, name)) in found]

    all_to_all, documents, latency = _transfers.ALL_TO_ALL, _transfers.DOCUMENTS, _transfers.LATENCY
    made = []
    for direction, least in (("cast", 330), ("reduce bf16", 280), ("reduce f32", 280)):
        rate = max((row.gb_per_second for row in few_sms(all_to_all, direction)), default=None)
        made.append(check(all_to_all, direction, "GB/s, at most 16 SMs", rate, at_least=least))
    padded = found.get((documents, "cast", PADDED))
    made.append(check(documents, "cast", PADDED, padded.speedup if padded else None, at_least=1.5))
    fastest = min((row.median_us for row in few_sms(latency, "cast")), default=None)
    made.append(check(latency, "cast", "us, at most 16 SMs", fastest, at_most=25))
    return [each for each in made if (each.workload, each.direction) in measured]


def check_sharing(processes: str | None, rows: Sequence[Row | Failure]) -> None:
    """Exits if our kernels have run in processes, and did not share memory as they were asked to."""
    has_run = any(isinstance(row, Row) and row.implementation.startswith("native") for row in rows)
    if processes and has_run and (staging_bytes() > 0) != (processes == "staging"):
        raise SystemExit(f"asked for {processes}, and staging buffers have {staging_bytes()} bytes")


def run(arguments: argparse.Namespace) -> None:
    """Measures what the patterns select."""
    mesh = mesh_of(arguments.ranks or len(jax.devices()))
    about = gpu_environment() | {
        "ranks": mesh.size,
        "processes": arguments.processes,
        "tokens_per_rank": arguments.tokens,
    }
    report = Report[Row | Failure](
        f"collectives_{arguments.processes or card()}", arguments.out, about, checks
    )
    for transfer in transfers(mesh.size, arguments.tokens):
        for direction in DIRECTIONS:
            if re.search(arguments.rows, f"{direction}, {transfer.name}"):
                rows = measure(transfer, direction, mesh, arguments.implementations, arguments.repeats)
                check_sharing(arguments.processes, rows)
                report.add(rows)
    report.finish()


def run_all(arguments: argparse.Namespace) -> None:
    """Calls `run` in a process for each rank."""
    leave_memory_to_processes()
    devices = len(jax.devices())
    ranks = arguments.ranks or devices
    if ranks > devices:
        raise SystemExit(f"{ranks} ranks need as many devices, and there are {devices}")
    arguments.out = arguments.out and arguments.out.absolute()
    pool = POOL if arguments.processes == "pools" else None
    run_in_processes(run, arguments, processes=ranks, pool=pool)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="of each rank")
    parser.add_argument("--ranks", type=int, help="by default all GPUs")
    parser.add_argument("--processes", choices=("pools", "staging"), help="one for each rank")
    parser.add_argument("--implementations", default="", metavar="REGEX", help="only those it finds")
    arguments = parser.parse_args()
    run_all(arguments) if arguments.processes else run(arguments)


if __name__ == "__main__":
    main()
