"""Times one pass of attention that is spread over the GPUs of a machine, in several ways, in one run.

    python -m benchmarks.context [--pass backward] [--tokens 16384 65536] [--ranks N] [--rows REGEX]
                                 [--methods REGEX] [--repeats 5] [--out FOLDER]
    python -m benchmarks.context --plot RESULTS.json

All run in bfloat16 with 64 query heads, 8 key heads, head dimension 128, --tokens tokens on each GPU and
unit-normal operands. TFLOP/s of a GPU count two products over its part of the visible cells, of the backward
pass five.

The peers (ring, all-gather, Ulysses) run on our own local kernel, so that what differs is how attention is
spread. "kernel alone" is that kernel on the queries that ours gives to a GPU which has all keys already:
nothing is sent. "kernel alone, links awake" sends 1 MiB behind each pass, by which GPUs at their power limit
lose the clock that they lose in any program that sends something. The backward pass is measured alone, from
what the forward pass saved.

Times are those of the device: several layers run in one program, each waiting for the last, so that no
transfer hides behind another layer. Programs run one behind the other without a pause, in turns of half a
second each, of which the last two thirds are measured: GPUs at their power limit need a while to find the
clock that they can hold. Planning is done before.

With --out, writes context_CARD.json there (context_backward_CARD.json), where CARD is h200 for instance,
after each row, and at the end the .png beside it, which --plot draws again.
"""

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._context_peers import METHODS, OURS, PEERS, Maker, Method
from benchmarks._measure import card, gpu_environment
from benchmarks._plot import plot
from benchmarks._report import Check, Failure, Report, Row, argument_parser, check, in_unit, make_each
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
from jaxmagi.calibration._timing import DeviceWork, Timing, time_sustained
from tests.cases import document_lengths

NAMES: dict[Direction, str] = {"forward": "context", "backward": "context_backward"}
DOCUMENTS, WINDOW = "documents causal", "window 1023"
MASKS: dict[str, Callable[[int], Pattern]] = {
    "full": Full,
    "causal": Causal,
    DOCUMENTS: lambda length: Documents(tuple(document_lengths(length)), causal=True),
    WINDOW: lambda length: Window(length, 1023),
    "video": lambda length: Video(4, length // 4),
}
PROGRAM_SECONDS = 30e-3  # of the layers of one program
TURN_SECONDS = 0.5  # in which such programs run one behind the other


def workloads(tokens: int, num_ranks: int) -> list[Workload]:
    """Returns all masks over so many tokens of each rank."""
    of_each = f"{tokens // 1024}k a GPU"
    return [Workload(f"{name}, {of_each}", pattern(tokens * num_ranks)) for name, pattern in MASKS.items()]


def operands(workload: Workload, method: Method, mesh: Mesh) -> list[jax.Array]:
    """Draws unit-normal query, key, value and cotangent, new ones each time."""
    of_queries = (method.tokens.shape[1], (HEADS, workload.dim))
    of_keys = (method.key_rows, (KV_HEADS, workload.dim))
    sizes = (of_queries, of_keys, of_keys, of_queries)
    return [draw_normal(seed, *size, jnp.bfloat16, mesh) for seed, size in enumerate(sizes)]


def make_work(make: Maker, workload: Workload, direction: Direction, mesh: Mesh) -> DeviceWork:
    """Returns the work of one method, which has run once."""
    estimate = workload.flops(direction) / mesh.size / 500e12
    turns = max(2, math.ceil(PROGRAM_SECONDS / estimate))
    method = make(workload.pattern.mask(), mesh.size, "ffi")
    tables = jax.device_put(method.tables, NamedSharding(mesh, P(AXIS)))
    *rows, cotangent = operands(workload, method, mesh)

    def attend(rows: list[jax.Array], tables: object) -> jax.Array:
        return method.attend(*rows, tables)

    if direction == "forward":
        work = chain(attend, rows, tables, mesh, turns)
    else:
        work = chain_backward(attend, rows, cotangent, tables, mesh, turns)
    work.seconds(1)
    return work


def measure(
    workload: Workload, direction: Direction, mesh: Mesh, chosen: str, repeats: int
) -> list[Row | Failure]:
    """Returns the rows of one workload by the methods whose name the pattern finds."""
    makers = {
        name: functools.partial(make_work, make, workload, direction, mesh)
        for name, make in METHODS.items()
        if re.search(chosen, name)
    }
    works, failures = make_each(workload.name, direction, makers)
    timings = time_sustained(works, repeats, TURN_SECONDS)
    return [*to_rows(workload, direction, mesh.size, timings), *failures]


def to_rows(
    workload: Workload, direction: Direction, num_ranks: int, timings: dict[str, Timing]
) -> list[Row]:
    flops, ours = workload.flops(direction) / num_ranks, timings.get(OURS)

    def to_row(name: str, timing: Timing) -> Row:
        speedup = timing.median / ours.median if ours else None
        times = in_unit(timing, "ms")
        return Row(
            workload.name, direction, name, **times, tflops=flops / timing.median / 1e12, speedup=speedup
        )

    return [to_row(name, timing) for name, timing in timings.items()]


def checks(direction: Direction, rows: Sequence[Row | Failure]) -> list[Check]:
    """Requires that on documents and windows ours is as fast as the best of the peers."""
    made = []
    for workload in dict.fromkeys(row.workload for row in rows):
        if workload.startswith((DOCUMENTS, WINDOW)):
            peers = [row for row in rows if row.workload == workload and row.implementation in PEERS]
            speedups = [row.speedup for row in peers if isinstance(row, Row) and row.speedup is not None]
            best = min(speedups, default=None)
            made.append(check(workload, direction, "best of the others", best, at_least=1.0))
    return made


def run(arguments: argparse.Namespace) -> Path | None:
    """Measures what the patterns select, and returns where the results are, if they were saved."""
    direction: Direction = arguments.direction
    mesh = mesh_of(arguments.ranks or len(jax.devices()))
    about = gpu_environment() | {"ranks": mesh.size}
    name = f"{NAMES[direction]}_{card()}"
    report = Report[Row | Failure](name, arguments.out, about, lambda rows: checks(direction, rows))
    for tokens in arguments.tokens:
        for workload in workloads(tokens, mesh.size):
            if re.search(arguments.rows, workload.name):
                report.add(measure(workload, direction, mesh, arguments.methods, arguments.repeats))
    report.finish()
    return report.path


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pass", dest="direction", choices=NAMES, default="forward", help="what is measured")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536], help="of each GPU")
    parser.add_argument("--ranks", type=int, help="by default all GPUs")
    parser.add_argument("--methods", default="", metavar="REGEX", help="only those whose name it finds")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="only draw the plot of these results")
    arguments = parser.parse_args()
    if results := arguments.plot or run(arguments):
        plot(results, ", of each GPU")


if __name__ == "__main__":
    main()
