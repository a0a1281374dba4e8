"""Measures the memory that `context_attention` takes of a GPU, where each rank is a process of its own.

    python -m benchmarks.context_memory [--processes 2] [--tokens 65536] [--rows REGEX] [--out FOLDER]
    PYTHONPATH=build/gpu_compiler python -m benchmarks.context_memory --described [...]

Each rank has --tokens tokens in bfloat16, with 64 query heads, 8 key heads and head dimension 128. "forward"
returns the output, "both passes" the gradients of query, key and value for a given cotangent. --rows is
matched with "forward, causal" and the like.

A row says what the compiled program takes for arguments, outputs and temporary arrays, and the most that JAX
has held on the device once the program has run, arguments and outputs included; of all ranks the most. That
also counts what custom calls take from XLA's allocator when they run; memory that others allocate, such as
NCCL's buffers, is in neither. JAX cannot reset this peak, so each row is measured in new processes; nothing
that they run before takes more than the arguments. It is null where JAX does not count, as on CPUs.

Each process takes its part of a GPU's memory in advance, so that others can read there. Where there are fewer
GPUs than processes, these share them. To measure another commit, copy the folders benchmarks and tests of
this one onto it: results name the hash of the sources that were built.

With --described nothing runs, and no GPU is needed: programs are compiled for H200s of one host, in as many
processes as there would be. It takes XLA's compiler for GPUs, which .ci/run installs in build/gpu_compiler.

With --out, writes context_memory_2.json (context_memory_2_described.json) there after each row.
"""

import argparse
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks._measure import gpu_environment
from benchmarks._processes import run_in_processes
from benchmarks._report import Report, Result
from benchmarks._workloads import HEADS, KV_HEADS
from jaxmagi import AttnMask, context_attention, masks, plan_context
from jaxmagi.calibration._chain import AXIS, mesh_of, on_ranks
from tests.cases import document_lengths
from tests.compiling import described
from tests.launcher import leave_memory_to_processes

DIM = 128
POOL = 0.7  # of a GPU's memory, by all processes that share it
MASKS: dict[str, Callable[[int], AttnMask]] = {
    "causal": masks.causal,
    "window 4095": lambda length: masks.sliding_window(length, 4095),
    "documents": lambda length: masks.documents(document_lengths(length)),
}


@dataclass(frozen=True)
class Row(Result):
    """The memory of a rank.

    peak_bytes: the most that JAX has held, arguments and outputs included; None if that is not counted.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int | None

    def __str__(self) -> str:
        text = (
            f"arguments {self.argument_bytes / 1e9:.3f} GB, outputs {self.output_bytes / 1e9:.3f}, "
            f"temporary {self.temporary_bytes / 1e9:.3f}; peak "
        )
        if self.peak_bytes is None:
            return self.describe(text + "not counted")
        beside = self.peak_bytes - self.argument_bytes - self.output_bytes
        return self.describe(text + f"{self.peak_bytes / 1e9:.3f}, {beside / 1e9:.3f} beside both")


def forward(operands: Sequence[jax.Array], plan: Any) -> jax.Array:
    """Returns the output for query, key and value."""
    query, key, value = operands
    return context_attention(query, key, value, plan, axis_name=AXIS)


def both_passes(operands: Sequence[jax.Array], plan: Any) -> Sequence[jax.Array]:
    """Returns the gradients of query, key and value for a cotangent, which comes last."""
    *rows, cotangent = operands
    _, pullback = jax.vjp(lambda *rows: forward(rows, plan), *rows)
    return pullback(cotangent)


ROWS = (HEADS, KV_HEADS, KV_HEADS)
PASSES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "forward": (forward, ROWS),
    "both passes": (both_passes, (*ROWS, HEADS)),
}
"""Pairs of a function and the heads of its operands."""


def measure(workload: str, direction: str, tokens: int, *, only_compile: bool) -> Row:
    """Compiles a program for the ranks of all processes, and runs it, unless it is for described GPUs."""
    processes = jax.process_count()
    mesh = described.h200s((processes,), (AXIS,)) if only_compile else mesh_of(processes)
    plan = plan_context(MASKS[workload](processes * tokens), processes)
    function, heads = PASSES[direction]
    layout = NamedSharding(mesh, P(AXIS))
    operands = [
        jax.ShapeDtypeStruct((len(plan.token_order), each, DIM), jnp.bfloat16, sharding=layout)
        for each in heads
    ]
    program: Any = on_ranks(function, mesh).lower(operands, described.like(plan, mesh, P(AXIS))).compile()
    sizes = program.memory_analysis()
    return Row(
        workload,
        direction,
        "ours",
        argument_bytes=sizes.argument_size_in_bytes,
        output_bytes=sizes.output_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        peak_bytes=None if only_compile else peak_bytes(program, operands, plan),
    )


def peak_bytes(program: Any, operands: Sequence[jax.ShapeDtypeStruct], plan: Any) -> int | None:
    """Returns the most that JAX has held on the device of this process once the program has run."""
    layout = operands[0].sharding
    make = jax.jit(lambda: [jnp.ones(each.shape, each.dtype) for each in operands], out_shardings=layout)
    jax.block_until_ready(program(make(), jax.device_put(plan, layout)))
    statistics = jax.local_devices()[0].memory_stats()
    return statistics and statistics["peak_bytes_in_use"]


def run(workload: str, direction: str, tokens: int, only_compile: bool, folder: Path) -> None:
    """Writes the row of a rank into a folder. If nothing is to run, the first rank compiles for all."""
    rank = jax.process_index()
    if rank == 0 or not only_compile:
        row = measure(workload, direction, tokens, only_compile=only_compile)
        (folder / f"{rank}.json").write_text(json.dumps(asdict(row)))


def in_processes(workload: str, direction: str, arguments: argparse.Namespace) -> Row:
    """Returns the row of the rank that has held most, from new processes."""
    pool = None if arguments.described else POOL / math.ceil(arguments.processes / len(jax.devices()))
    with tempfile.TemporaryDirectory() as folder:
        operands = workload, direction, arguments.tokens, arguments.described, Path(folder)
        run_in_processes(run, *operands, processes=arguments.processes, pool=pool)
        rows = [Row(**json.loads(path.read_text())) for path in Path(folder).iterdir()]
    return max(rows, key=lambda row: row.peak_bytes or 0)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--processes", type=int, default=2, help="as many ranks")
    parser.add_argument("--tokens", type=int, default=65_536, help="of each rank")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only those whose name it finds")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the results there")
    parser.add_argument("--described", action="store_true", help="only compile, for GPUs that are not there")
    arguments = parser.parse_args()
    leave_memory_to_processes()
    name = f"context_memory_{arguments.processes}"
    if arguments.described:
        name += "_described"
        os.environ.update(described.ENVIRONMENT)
    about = gpu_environment() | {"processes": arguments.processes, "tokens_per_rank": arguments.tokens}
    report = Report[Row](name, arguments.out, about, checks=lambda _: [])
    for workload in MASKS:
        for direction in PASSES:
            if re.search(arguments.rows, f"{direction}, {workload}"):
                report.add([in_processes(workload, direction, arguments)])


if __name__ == "__main__":
    main()
