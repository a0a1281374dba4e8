"""Compares the attention kernels of two builds of the CUDA module on one GPU, in turns.

    python -m benchmarks.builds OTHER/_cuda.abi3.so [--pass backward] [--rows REGEX] [--repeats 5]
                                [--out FOLDER]

The workloads are those of `benchmarks.attention`; "ours" is the installed build and "other" the given one.
Both modules are loaded into one process, so that the clock and the temperature of the card are the same for
both. Their handlers must take the same operands and attributes.

With --out, writes builds_forward.json (builds_backward.json) there after each workload.
"""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax

from benchmarks import _jax_attention
from benchmarks._measure import gpu_environment
from benchmarks._report import Check, Report, Row, argument_parser, check, in_unit
from benchmarks._workloads import Direction, Workload, workloads
from benchmarks.attention import NAMES, num_layers, time_layers
from jaxmagi.attention import _cuda
from jaxmagi.calibration._timing import DeviceWork

TARGETS = ("TILE_SCHEDULE", "FORWARD", "BACKWARD")  # constants of `jaxmagi.attention._cuda`
SLOWEST = 1 / 1.01  # what the other build may reach of ours in speed, if ours is to be called no slower


def other_target(constant: str) -> str:
    """Returns the name of the other build's custom call."""
    return f"other_{getattr(_cuda, constant)}"


def load(path: Path) -> ModuleType:
    """Returns a CUDA module whose handlers of attention are registered under names of their own."""
    spec = importlib.util.spec_from_file_location("_cuda", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no extension module.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = module.registrations()
    for constant in TARGETS:
        handler = handlers[getattr(_cuda, constant)]
        jax.ffi.register_ffi_target(other_target(constant), handler, platform="CUDA")
    return module


@contextlib.contextmanager
def handlers_of_other() -> Iterator[None]:
    """Lets programs that are compiled meanwhile call the other build's handlers."""
    with contextlib.ExitStack() as stack:
        for constant in TARGETS:
            stack.enter_context(mock.patch.object(_cuda, constant, other_target(constant)))
        yield


def make_work(
    make: _jax_attention.MakeWork, workload: Workload, layers: int, *, is_other: bool
) -> DeviceWork:
    """Returns the work of a build, run once; RuntimeError if its program calls the wrong handlers."""
    with handlers_of_other() if is_other else contextlib.nullcontext():
        work = make(workload, layers)
        work.seconds(1)
        enqueue: Any = work.enqueue  # a functools.partial of a function that is jitted
        program = enqueue.func.lower(*enqueue.args).as_text()
    if ("@other_" in program) != is_other:
        raise RuntimeError(f"the program of {workload.name} calls the handlers of the wrong build")
    return work


def measure(direction: Direction, workload: Workload, repeats: int) -> list[Row]:
    """Returns the rows of one workload.

    Two builds alone take turns, so that each follows the other and itself equally often: what ran before
    changes the speed of a kernel by more than is to be measured.
    """
    flops, layers = workload.flops(direction), num_layers(direction, workload)
    rows = []
    for name, make in _jax_attention.candidates(workload, direction).items():
        if name not in ("ours", _jax_attention.DETERMINISTIC):
            continue
        works = {
            name.replace("ours", build): make_work(make, workload, layers, is_other=build == "other")
            for build in ("ours", "other")
        }
        timings = time_layers(direction, workload, works, repeats)
        for build, timing in timings.items():
            rate, speedup = flops / timing.median / 1e12, timing.median / timings[name].median
            times = in_unit(timing, "ms")
            rows.append(Row(workload.name, direction, build, **times, tflops=rate, speedup=speedup))
    return rows


def checks(direction: Direction, rows: list[Row]) -> list[Check]:
    """Returns for each workload whether ours is at most 1 % slower than the other build."""
    return [
        check(row.workload, direction, row.implementation, row.speedup, at_least=SLOWEST)
        for row in rows
        if row.implementation.startswith("other")
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("module", type=Path, help="the other build's _cuda.abi3.so")
    parser.add_argument("--pass", dest="direction", choices=NAMES, default="forward", help="what is measured")
    arguments = parser.parse_args()
    other = load(arguments.module)
    about = gpu_environment() | {"other_sources": other.sources}
    report = Report(
        f"builds_{arguments.direction}", arguments.out, about, functools.partial(checks, arguments.direction)
    )
    for workload in workloads():
        if re.search(arguments.rows, workload.name):
            report.add(measure(arguments.direction, workload, arguments.repeats))
            for cached in (_jax_attention.inputs, _jax_attention.operands):
                cached.cache_clear()
    report.finish()


if __name__ == "__main__":
    main()
