"""Attention spread over the GPUs of a machine, one pass beside other ways to spread it, in one run.

    python -m benchmarks.context [--pass backward] [--tokens 16384 65536] [--ranks N] [--rows REGEX]
                                 [--methods REGEX] [--repeats 5] [--out FOLDER]
    python -m benchmarks.context [--pass backward] --plot FOLDER

bfloat16, 64 query heads, 8 key heads, head dimension 128, --tokens tokens on each GPU; unit-normal operands.
TFLOP/s of a GPU count two products over its part of the visible cells, of the backward pass five.

The others (ring, all-gather, Ulysses) run on our own local kernel, so that what differs is how attention is
spread. "kernel alone" is that kernel on the queries that ours gives to a GPU which has all keys already:
nothing is sent. The backward pass is measured alone, from what the forward pass saved.

Time on the device: several layers in one program, each waiting for the last, so that no transfer hides behind
another layer; what launching the program and waiting for it cost is subtracted. Planning is done beforehand.

With --out, writes context_h200.json (context_backward_h200.json) there after each row, and at the end the
.png, which --plot draws anew.
"""

import argparse
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._context_peers import METHODS, OURS, PEERS, Method
from benchmarks._measure import gpu_environment, save
from benchmarks._plot import plot
from benchmarks._requirements import Check, check, show_checks
from benchmarks._rows import Failure, Row, show
from benchmarks._workloads import (
    HEADS,
    KV_HEADS,
    Causal,
    Direction,
    Documents,
    Full,
    Pattern,
    Video,
    Window,
    Workload,
)
from jaxmagi.calibration._chain import AXIS, chain, chain_backward, draw_normal, mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device
from tests.cases import document_lengths

NAMES: dict[Direction, str] = {"forward": "context_h200", "backward": "context_backward_h200"}
DOCUMENTS, WINDOW = "documents causal", "window 1023"
MASKS: dict[str, Callable[[int], Pattern]] = {
    "full": Full,
    "causal": Causal,
    DOCUMENTS: lambda length: Documents(tuple(document_lengths(length)), causal=True),
    WINDOW: lambda length: Window(length, 1023),
    "video": lambda length: Video(4, length // 4),
}
PROGRAM_SECONDS = 30e-3  # of the layers of one program


def workloads(tokens: int, num_ranks: int) -> list[Workload]:
    """All masks over so many tokens of each rank."""
    of_each = f"{tokens // 1024}k a GPU"
    return [Workload(f"{name}, {of_each}", pattern(tokens * num_ranks)) for name, pattern in MASKS.items()]


def operands(workload: Workload, method: Method, mesh: Mesh) -> list[jax.Array]:
    """Unit-normal query, key, value and cotangent, new ones each time."""
    of_queries = (method.tokens.shape[1], (HEADS, workload.dim))
    of_keys = (method.key_rows, (KV_HEADS, workload.dim))
    sizes = (of_queries, of_keys, of_keys, of_queries)
    return [draw_normal(seed, *size, jnp.bfloat16, mesh) for seed, size in enumerate(sizes)]


def forward_work(method: Method, arrays: list[jax.Array], tables: Any, mesh: Mesh, turns: int) -> DeviceWork:
    *rows, _ = arrays
    return chain(lambda rows, tables: method.attend(*rows, tables), rows, tables, mesh, turns)


def backward_work(method: Method, arrays: list[jax.Array], tables: Any, mesh: Mesh, turns: int) -> DeviceWork:
    """What differentiating runs behind the forward pass."""
    *rows, cotangent = arrays
    return chain_backward(
        lambda rows, tables: method.attend(*rows, tables), rows, cotangent, tables, mesh, turns
    )


def make_works(
    workload: Workload, direction: Direction, mesh: Mesh, chosen: str
) -> tuple[dict[str, DeviceWork], list[Failure]]:
    """Those whose name the pattern finds, each run once, and those that failed."""
    estimate = workload.flops(direction) / mesh.size / 500e12
    turns = max(2, math.ceil(PROGRAM_SECONDS / estimate))
    make_work = forward_work if direction == "forward" else backward_work
    mask = workload.pattern.mask()
    works, failures = {}, []
    for name, make in METHODS.items():
        if not re.search(chosen, name):
            continue
        try:
            method = make(mask, mesh.size, "ffi")
            tables = jax.device_put(method.tables, NamedSharding(mesh, P(AXIS)))
            work = make_work(method, operands(workload, method, mesh), tables, mesh, turns)
            work.seconds(1)
            works[name] = work
        except Exception as error:
            failures.append(Failure.of(workload.name, direction, name, error))
    return works, failures


def measure(
    workload: Workload, direction: Direction, mesh: Mesh, chosen: str, repeats: int
) -> list[Row | Failure]:
    """The rows of one workload."""
    works, failures = make_works(workload, direction, mesh, chosen)
    timings = time_on_device(works, repeats, batches=1)
    return [*to_rows(workload, direction, mesh.size, timings), *failures]


def to_rows(
    workload: Workload, direction: Direction, num_ranks: int, timings: dict[str, Timing]
) -> list[Row]:
    flops, ours = workload.flops(direction) / num_ranks, timings.get(OURS)
    return [
        Row.of(
            workload.name,
            direction,
            name,
            timing,
            tflops=flops / timing.median / 1e12,
            speedup=timing.median / ours.median if ours else None,
        )
        for name, timing in timings.items()
    ]


def checks(direction: Direction, rows: Iterable[Row | Failure]) -> list[Check]:
    """On documents and windows, ours has to be as fast as the best of the others."""
    rows = list(rows)
    made = []
    for workload in dict.fromkeys(row.workload for row in rows):
        if not workload.startswith((DOCUMENTS, WINDOW)):
            continue
        speedups = [
            row.speedup
            for row in rows
            if isinstance(row, Row) and row.workload == workload and row.implementation in PEERS
        ]
        measured = min((speedup for speedup in speedups if speedup is not None), default=None)
        made.append(check(workload, direction, "required", "best of the others", measured, at_least=1.0))
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measures what the patterns select; saves after each row, so that a run cut short leaves something."""
    start = time.perf_counter()
    direction: Direction = arguments.direction
    mesh = mesh_of(arguments.ranks or len(jax.devices()))
    about = gpu_environment() | {"ranks": mesh.size}
    results: list[Row | Failure] = []
    for tokens in arguments.tokens:
        for workload in workloads(tokens, mesh.size):
            if not re.search(arguments.rows, workload.name):
                continue
            measured = measure(workload, direction, mesh, arguments.methods, arguments.repeats)
            show(measured)
            results += measured
            print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
            if arguments.out:
                save(NAMES[direction], [*results, *checks(direction, results)], arguments.out, **about)
    show_checks(checks(direction, results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pass", dest="direction", choices=NAMES, default="forward", help="what is measured")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536], help="of each GPU")
    parser.add_argument("--ranks", type=int, help="by default all GPUs")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only workloads whose name it finds")
    parser.add_argument("--methods", default="", metavar="REGEX", help="only those whose name it finds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the plot of the JSON there")
    arguments = parser.parse_args()
    what = f"{arguments.direction}, of each GPU"
    if arguments.plot:
        return plot(arguments.plot, NAMES[arguments.direction], what)
    run(arguments)
    if arguments.out:
        plot(arguments.out, NAMES[arguments.direction], what)


if __name__ == "__main__":
    main()
