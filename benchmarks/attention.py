"""The forward pass on a GPU beside cuDNN, FlexAttention and FlashAttention-4, in one run.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.attention [--rows REGEX] [--peers REGEX]
        [--repeats 5] [--out FOLDER]

bfloat16, batch 1, 64 query heads, 8 key heads; unit-normal operands. Time on the device: several layers, each
with its own query, are launched one after another, and what launching and waiting cost is subtracted. TFLOP/s
count two products over exactly the visible cells. With --out, writes attention_h200.json and .png there.
"""

import argparse
import gc
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import _jax_attention, _torch_attention
from benchmarks._measure import DeviceWork, Timing, save, time_on_device
from benchmarks._workloads import Workload, workloads
from benchmarks.gpu_log import gpu_environment

NAME = "attention_h200"
PLAN = "plan of 4096 bands, 2048 tiles"
BATCH_SECONDS, MAX_LAYERS = 8e-3, 32  # of the layers that one program runs
MEASURED_SECONDS = 30e-3  # at least, so that the clock's errors do not matter


@dataclass(frozen=True)
class Row:
    """Milliseconds of one workload by one implementation; speedup: how many times as fast ours is."""

    workload: str
    direction: str
    implementation: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tflops: float
    speedup: float | None


@dataclass(frozen=True)
class Failure:
    """An implementation that could not run a workload."""

    workload: str
    direction: str
    implementation: str
    error: str


def make_works(workload: Workload, layers: int, peers: str) -> tuple[dict[str, DeviceWork], list[Failure]]:
    """Ours and the peers that match, each run once, and those that failed."""
    works, failures = {}, []
    for name, make in (_jax_attention.candidates(workload) | _torch_attention.candidates(workload)).items():
        if not name.startswith("ours") and not re.search(peers, name):
            continue
        try:
            work = make(workload, layers)
            work.seconds(1)
            works[name] = work
        except Exception as error:
            failures.append(Failure(workload.name, "forward", name, f"{type(error).__name__}: {error}"[:300]))
    return works, failures


def measure(workload: Workload, peers: str, repeats: int) -> list[Row | Failure]:
    """The rows of one workload."""
    estimate = workload.flops() / 600e12
    layers = min(MAX_LAYERS, math.ceil(BATCH_SECONDS / estimate))
    works, failures = make_works(workload, layers, peers)
    timings = time_on_device(works, repeats, math.ceil(MEASURED_SECONDS / (layers * estimate)))
    return [*to_rows(workload, timings), *failures]


def to_rows(workload: Workload, timings: dict[str, Timing]) -> list[Row]:
    ours, flops = timings.get("ours"), workload.flops()
    return [
        Row(
            workload=workload.name,
            direction="forward",
            implementation=name,
            median_ms=1e3 * timing.median,
            fastest_ms=1e3 * timing.fastest,
            slowest_ms=1e3 * timing.slowest,
            tflops=flops / timing.median / 1e12,
            speedup=timing.median / ours.median if ours else None,
        )
        for name, timing in timings.items()
    ]


def measure_plan(repeats: int) -> dict[str, Any]:
    """The plan op alone, in microseconds."""
    work = _jax_attention.plan(4096, 2048, passes=64)
    work.seconds(1)
    timing = time_on_device({"plan": work}, repeats, batches=20)["plan"]
    return {"workload": PLAN} | {f"{name}_us": 1e6 * seconds for name, seconds in vars(timing).items()}


def show(rows: list[Row | Failure]) -> None:
    for row in rows:
        if isinstance(row, Failure):
            print(
                f"{row.workload:26s} {row.implementation:16s} failed: {row.error.splitlines()[0]}", flush=True
            )
            continue
        ratio = "" if row.speedup is None else f"ours is {row.speedup:.3f} x as fast"
        spread = f"({row.fastest_ms:.3f} to {row.slowest_ms:.3f})"
        print(
            f"{row.workload:26s} {row.implementation:16s} {row.median_ms:9.3f} ms {spread:22s}"
            f" {row.tflops:6.1f} TFLOP/s  {ratio}",
            flush=True,
        )


def release_memory() -> None:
    """Gives what PyTorch holds back, between workloads, for JAX and it share the GPU."""
    for inputs in (_jax_attention.inputs, _torch_attention.inputs):
        inputs.cache_clear()
    gc.collect()
    if importlib.util.find_spec("torch"):
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help="only workloads whose name it finds")
    parser.add_argument("--peers", default="", metavar="REGEX", help="only peers whose name it finds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    arguments = parser.parse_args()
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") != "false":
        parser.error("set XLA_PYTHON_CLIENT_PREALLOCATE=false: JAX would leave no memory to PyTorch")
    results: list[Any] = []
    for workload in workloads():
        if re.search(arguments.rows, workload.name):
            results += (rows := measure(workload, arguments.peers, arguments.repeats))
            show(rows)
            release_memory()
    if re.search(arguments.rows, PLAN):
        results.append(measure_plan(arguments.repeats))
        print(results[-1])
    if arguments.out:
        print("saved", save(NAME, results, arguments.out, **gpu_environment(), **_torch_attention.versions()))
        plot(results, arguments.out / f"{NAME}.png")


def plot(results: list[Any], path: Path) -> None:
    """Bars of TFLOP/s by workload, if matplotlib is there."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib.pyplot as plt

    rows = [row for row in results if isinstance(row, Row)]
    names = list(dict.fromkeys(row.workload for row in rows))
    implementations = list(dict.fromkeys(row.implementation for row in rows))
    height = 0.85 / len(implementations)
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(names) + 1), layout="constrained")
    for i, implementation in enumerate(implementations):
        chosen = [row for row in rows if row.implementation == implementation]
        places = [names.index(row.workload) + (i - (len(implementations) - 1) / 2) * height for row in chosen]
        axes.barh(places, [row.tflops for row in chosen], height, label=implementation)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"TFLOP/s, forward, {jax.devices()[0].device_kind}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
