"""The forward pass on a GPU beside its peers, in one run.

    python -m benchmarks.attention [--rows REGEX] [--peers REGEX] [--repeats 5] [--out FOLDER]
    python -m benchmarks.attention --plot FOLDER

The peers: cuDNN by PyTorch and by jax.nn, FlexAttention, FlashAttention-4 and tokamax, each where it can
express the mask. bfloat16, batch 1, 64 query heads, 8 key heads; unit-normal operands. TFLOP/s count two
products over exactly the visible cells.

Time on the device: several layers, each with its own query, are launched one after another, and what
launching and waiting cost is subtracted. JAX, so ours too, runs without CUDA graphs. The layers of PyTorch's
short rows are launched as one graph, for Python would take longer than they do. Ours plans once for all
layers; on the short rows, where that counts, it is also measured with a plan for each layer, and that is what
the peers are held against. --repeats is the least; what takes little time is repeated more often.

With --out, writes attention_h200.json there after each row, and at the end the .png, which --plot draws anew.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _jax_attention, _torch_attention
from benchmarks._measure import DeviceWork, Timing, gpu_environment, save, time_on_device
from benchmarks._workloads import Workload, workloads

NAME = "attention_h200"
PLAN = "plan of 4096 bands, 2048 tiles"
BATCH_SECONDS, MAX_LAYERS = 8e-3, 32  # of the layers that one program runs
MEASURED_SECONDS = 20e-3  # at least, so that the clock's errors do not matter
MEASURED_SECONDS_SHORT = 100e-3  # of short rows, where the host's moods show
REPEATED_SECONDS = 1.0  # of each implementation in a row, for the clock wanders by 10 % within a second


@dataclass(frozen=True)
class Row:
    """Milliseconds of one workload by one implementation.

    speedup: how many times as fast ours is; of short workloads, ours with plans of its own for each layer.
    """

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
        except ModuleNotFoundError as error:
            failures.append(Failure(workload.name, "forward", name, f"not installed: {error.name}"))
        except Exception as error:
            failures.append(Failure(workload.name, "forward", name, f"{type(error).__name__}: {error}"[:300]))
    return works, failures


def enough_repeats(least: int, seconds: float) -> int:
    """How often to measure what takes so many seconds, and then twice as many."""
    return max(least, math.ceil(REPEATED_SECONDS / (3 * seconds)))


def measure(workload: Workload, peers: str, repeats: int) -> list[Row | Failure]:
    """The rows of one workload."""
    estimate = workload.flops() / 600e12
    layers = min(MAX_LAYERS, math.ceil(BATCH_SECONDS / estimate))
    works, failures = make_works(workload, layers, peers)
    seconds = MEASURED_SECONDS_SHORT if workload.is_short else MEASURED_SECONDS
    batches = math.ceil(seconds / (layers * estimate))
    timings = time_on_device(works, enough_repeats(repeats, batches * layers * estimate), batches)
    return [*to_rows(workload, timings), *failures]


def to_rows(workload: Workload, timings: dict[str, Timing]) -> list[Row]:
    ours, flops = timings.get("ours, own plans" if workload.is_short else "ours"), workload.flops()
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
    """The plan op alone, in microseconds; the additions between its passes are subtracted."""
    passes, batches, estimate = 64, 20, 20e-6
    works = _jax_attention.plan(num_bands=4096, num_tiles=2048, passes=passes)
    for work in works.values():
        work.seconds(1)
    timings = time_on_device(works, enough_repeats(repeats, passes * batches * estimate), batches)
    additions = timings["additions"].median
    times = {name: seconds - additions for name, seconds in vars(timings["plan"]).items()}
    return {"workload": PLAN} | {f"{name}_us": 1e6 * seconds for name, seconds in times.items()}


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


def run(rows: str, peers: str, repeats: int, out: Path | None) -> None:
    """Measures what the patterns select; saves after each row, so that a run cut short leaves something."""
    start = time.perf_counter()
    about = gpu_environment() | _torch_attention.versions()
    results: list[Any] = []

    def done() -> None:
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
        if out:
            save(NAME, results, out, **about)

    if re.search(rows, PLAN):
        results.append(measure_plan(repeats))
        print(results[-1])
        done()
    for workload in workloads():
        if re.search(rows, workload.name):
            measured = measure(workload, peers, repeats)
            show(measured)
            results += measured
            done()
            release_memory()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help="only workloads whose name it finds")
    parser.add_argument("--peers", default="", metavar="REGEX", help="only peers whose name it finds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the plot of the JSON there")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.plot)
    # Read when JAX first looks for a GPU. Otherwise, it would leave no memory to PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run(arguments.rows, arguments.peers, arguments.repeats, arguments.out)
    if arguments.out:
        plot(arguments.out)


def plot(folder: Path) -> None:
    """Bars of TFLOP/s by workload, if matplotlib is there."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib.pyplot as plt

    saved = json.loads((folder / f"{NAME}.json").read_text())
    rows = [row for row in saved["rows"] if "tflops" in row]
    names = list(dict.fromkeys(row["workload"] for row in rows))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    groups = [[row for row in rows if row["workload"] == name] for name in names]
    height = 0.85 / max(map(len, groups), default=1)
    places = {
        (row["workload"], row["implementation"]): i + (rank - (len(group) - 1) / 2) * height
        for i, group in enumerate(groups)
        for rank, row in enumerate(group)
    }
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(names) + 1), layout="constrained")
    for implementation in implementations:
        chosen = [row for row in rows if row["implementation"] == implementation]
        at = [places[row["workload"], implementation] for row in chosen]
        axes.barh(at, [row["tflops"] for row in chosen], height, label=implementation)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(f"TFLOP/s, forward, {saved['environment']['gpu']}")
    axes.grid(axis="x", alpha=0.3)
    if rows:
        figure.legend(loc="outside upper center", ncols=len(implementations), fontsize="small")
    figure.savefig(folder / f"{NAME}.png", dpi=120)


if __name__ == "__main__":
    main()
