"""Times products with a collective over the GPUs of a host, in comparison with `jax.lax`, in one run.

    python -m benchmarks.overlap [--rows REGEX] [--implementations REGEX] [--repeats 5] [--out FOLDER]

    reduce-scatter  x [rows, inner] · w [inner, columns], and each rank's rows of the sum over ranks
    all-gather      the rows of all ranks, of which each has its part, · w
    both passes     of an MLP, whose first product gathers rows and whose second one scatters them

All in bfloat16, with unit-normal operands. Workloads are seven sizes from NVLink's rate to that of the tensor
cores, and the products of layers of Llama 3 8B and 70B whose weights are cut over the ranks: projections to
queries, keys and values ("qkv") and behind attention ("out"), and of the MLP ("up", "down"). The gradient of
the input of each is the other one with transposed sizes.

Rivals are XLA's sequence of both, and chunks by hand, whose collectives XLA may run beside products. With
`XLA_FLAGS=--xla_gpu_threshold_for_windowed_einsum_mib=0` "XLA's sequence" is its windowed einsum.
The ideal is the longer one of the product by XLA and of the transfer by our group cast, each alone.

Times are those of the device: many calls run in one program, each waiting for the last, again and again
without a pause, in turns of 0.3 s of which the last two thirds are measured. Ours does not round what a rank
adds itself; XLA adds up in bfloat16.

With --out, writes overlap_CARD.json there after each row.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from benchmarks._measure import card, gpu_environment
from benchmarks._overlap_products import OURS, PRODUCT, TRANSFER, XLA, Direction, Way, Workload, ways
from benchmarks._report import Check, Failure, Report, Result, argument_parser, check, in_unit, make_each
from jaxmagi.calibration._chain import chain, mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_sustained

PROGRAM_SECONDS = 20e-3  # of the calls of one program
TURN_SECONDS = 0.3
SIZES = (
    (8192, 2048, 4096),
    (8192, 7168, 4096),
    (16384, 4096, 8192),
    (16384, 14336, 8192),
    (32768, 1024, 4096),
    (4096, 2048, 4096),
    (2048, 4096, 4096),
)
"""Rows, inner numbers and columns."""
LLAMAS = {"8B": (4096, 14336), "70B": (8192, 28672)}
"""The width of the model and of its MLP; keys and values have 1024 numbers each."""
TOKENS = (8192, 32768)
MOST_INNER = 8192  # of workloads that have to reach the ideal


@dataclass(frozen=True)
class Row(Result):
    """The time that one way to compute a product takes.

    of_ideal: the ideal time over this one.
    speedup: how many times as fast ours is.
    """

    rows: int
    inner: int
    columns: int
    median_us: float
    fastest_us: float
    slowest_us: float
    tflops: float
    of_ideal: float | None
    speedup: float | None

    def __str__(self) -> str:
        ideal = "" if self.of_ideal is None else f"  {self.of_ideal:.3f} of ideal"
        return self.describe(f"{self.median_us:9.1f} us {self.tflops:6.1f} TFLOP/s{ideal}", self.speedup)


def workloads(ranks: int) -> Iterator[Workload]:
    """Yields the workloads of so many ranks."""
    for rows, inner, columns in SIZES:
        name = f"{rows} x {inner} x {columns}"
        yield Workload(name, "reduce-scatter", rows, inner, columns)
        yield Workload(name, "all-gather", rows, inner, columns)
    for model, (width, hidden) in LLAMAS.items():
        products: dict[str, tuple[Direction, int, int]] = {
            "qkv": ("all-gather", width, (width + 2 * 1024) // ranks),
            "out": ("reduce-scatter", width // ranks, width),
            "up": ("all-gather", width, 2 * hidden // ranks),
            "down": ("reduce-scatter", hidden // ranks, width),
        }
        for tokens in TOKENS:
            for part, (direction, inner, columns) in products.items():
                name = f"{model} {part} {tokens // 1024}k"
                yield Workload(name, direction, tokens, inner, columns)
                back: Direction = "all-gather" if direction == "reduce-scatter" else "reduce-scatter"
                yield Workload(f"{name}, gradient", back, tokens, columns, inner)
            yield Workload(f"{model} MLP {tokens // 1024}k", "both passes", tokens, width, hidden // ranks)


def make_work(way: Way, mesh: Mesh, seconds: float) -> DeviceWork:
    """Returns the work of a way, run once. A call takes about so many seconds."""
    turns = max(2, math.ceil(PROGRAM_SECONDS / seconds))
    work = chain(way.run, way.operands(mesh), (), mesh, turns)
    work.seconds(1)
    return work


def measure(workload: Workload, mesh: Mesh, chosen: str, repeats: int) -> list[Row | Failure]:
    """Returns the rows of a workload by the ways whose name the pattern finds."""
    makers = {
        name: functools.partial(make_work, way, mesh, workload.flops / 600e12)
        for name, way in ways(workload, mesh.size).items()
        if re.search(chosen, name)
    }
    works, failures = make_each(workload.name, workload.direction, makers)
    return [*to_rows(workload, time_sustained(works, repeats, TURN_SECONDS)), *failures]


def to_rows(workload: Workload, timings: dict[str, Timing]) -> list[Row]:
    """Returns the rows of what was timed; the ideal is known where both parts of it were."""
    alone = [timings[name].median for name in (PRODUCT, TRANSFER) if name in timings]
    ours = timings.get(OURS)

    def to_row(name: str, timing: Timing) -> Row:
        is_part = name in (PRODUCT, TRANSFER)
        return Row(
            workload.name,
            workload.direction,
            name,
            *workload[2:],
            **in_unit(timing, "us"),
            tflops=workload.flops / timing.median / 1e12,
            of_ideal=max(alone) / timing.median if len(alone) == 2 and not is_part else None,
            speedup=timing.median / ours.median if ours and not is_part else None,
        )

    return [to_row(name, timing) for name, timing in timings.items()]


def checks(rows: Sequence[Row | Failure]) -> list[Check]:
    """Returns what is required of ours, of the workloads among the rows."""
    measured = dict.fromkeys((row.workload, row.direction) for row in rows)
    return [each for workload, direction in measured for each in checks_of(workload, direction, rows)]


def checks_of(workload: str, direction: str, rows: Sequence[Row | Failure]) -> Iterator[Check]:
    """Yields what is required of a workload."""
    found = {
        row.implementation: row
        for row in rows
        if isinstance(row, Row) and (row.workload, row.direction) == (workload, direction)
    }
    ours = found.get(OURS)
    speedups = {name: row.speedup for name, row in found.items() if row.speedup and name != OURS}
    if direction == "both passes":
        yield check(workload, direction, XLA, speedups.get(XLA), at_least=1.10)
        return
    of_ideal = ours.of_ideal if ours else None
    if ours is None or ours.inner <= MOST_INNER:
        yield check(workload, direction, "of the ideal", of_ideal, at_least=0.90)
        yield check(workload, direction, "of the ideal", of_ideal, at_least=0.95, kind="goal")
    yield check(workload, direction, XLA, speedups.get(XLA), at_least=0.98)
    yield check(workload, direction, "the best rival", min(speedups.values(), default=None), at_least=1.0)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--implementations", default="", metavar="REGEX", help="only those it finds")
    arguments = parser.parse_args()
    mesh = mesh_of(len(jax.devices()))
    about = gpu_environment() | {"ranks": mesh.size}
    report = Report[Row | Failure](f"overlap_{card()}", arguments.out, about, checks)
    for workload in workloads(mesh.size):
        if re.search(arguments.rows, f"{workload.direction}, {workload.name}"):
            report.add(measure(workload, mesh, arguments.implementations, arguments.repeats))
    report.finish()


if __name__ == "__main__":
    main()
