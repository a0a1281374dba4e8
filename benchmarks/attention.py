"""One pass on a GPU beside its peers, in one run.

    python -m benchmarks.attention [--pass backward] [--rows REGEX] [--peers REGEX] [--repeats 5]
                                   [--out FOLDER]
    python -m benchmarks.attention [--pass backward] --plot FOLDER

The peers: cuDNN by PyTorch, FlexAttention and FlashAttention-4, and of the forward pass also cuDNN by jax.nn
and tokamax, each where it can express the mask. bfloat16, batch 1, 64 query heads, 8 key heads; unit-normal
operands. TFLOP/s count two products over exactly the visible cells, of the backward pass five.

The backward pass is measured alone, from outputs that were made beforehand, and ours also with sums in a
fixed order ("deterministic").

Time on the device: several layers, each with its own query, are launched one after another, and what
launching and waiting cost is subtracted. JAX, so ours too, runs without CUDA graphs. The layers of PyTorch's
short rows are launched as one graph, for Python would take longer than they do. Ours plans once for all
layers; on the short rows, where that counts, it is also measured with a plan for each layer, and that is what
the peers are held against. --repeats is the least; what takes little time is repeated more often.

With --out, writes attention_h200.json (attention_backward_h200.json) there after each row, and at the end the
.png, which --plot draws anew.
"""

import argparse
import gc
import importlib.util
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from benchmarks import _jax_attention, _torch_attention
from benchmarks._measure import gpu_environment, save
from benchmarks._plot import plot
from benchmarks._requirements import checks, show_checks
from benchmarks._rows import Failure, Row, show
from benchmarks._workloads import Direction, Workload, held_against, workloads
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device

NAMES: dict[Direction, str] = {"forward": "attention_h200", "backward": "attention_backward_h200"}
PLAN = "plan of 4096 bands, 2048 tiles"
# Of the layers that one program runs. Backward, the one plan of a program is then about 0.2 % of its time.
BATCH_SECONDS: dict[Direction, float] = {"forward": 8e-3, "backward": 20e-3}
MAX_LAYERS, MAX_QUERY_BYTES = 32, 4e9  # of the layers: the peers hold as much once more
MEASURED_SECONDS = 20e-3  # at least, so that the clock's errors do not matter
MEASURED_SECONDS_SHORT = 100e-3  # of short rows, where the host's moods show
REPEATED_SECONDS = 1.0  # of each implementation in a row, for the clock wanders by 10 % within a second


def make_works(
    direction: Direction, workload: Workload, layers: int, peers: str
) -> tuple[dict[str, DeviceWork], list[Failure]]:
    """Ours and the peers that match, each run once, and those that failed."""
    works, failures = {}, []
    candidates = _jax_attention.candidates(workload, direction)
    for name, make in (candidates | _torch_attention.candidates(workload, direction)).items():
        if not name.startswith("ours") and not re.search(peers, name):
            continue
        try:
            work = make(workload, layers)
            work.seconds(1)
            works[name] = work
        except ModuleNotFoundError as error:
            failures.append(Failure(workload.name, direction, name, f"not installed: {error.name}"))
        except Exception as error:
            failures.append(Failure.of(workload.name, direction, name, error))
    return works, failures


def num_layers(direction: Direction, workload: Workload, estimate: float) -> int:
    """How many layers one program runs, if each takes so many seconds."""
    fitting = max(1, int(MAX_QUERY_BYTES / workload.query_bytes()))
    return min(MAX_LAYERS, fitting, math.ceil(BATCH_SECONDS[direction] / estimate))


def enough_repeats(least: int, seconds: float) -> int:
    """How often to measure what takes so many seconds, and then twice as many."""
    return max(least, math.ceil(REPEATED_SECONDS / (3 * seconds)))


def measure(direction: Direction, workload: Workload, peers: str, repeats: int) -> list[Row | Failure]:
    """The rows of one workload."""
    estimate = workload.flops(direction) / 600e12
    layers = num_layers(direction, workload, estimate)
    works, failures = make_works(direction, workload, layers, peers)
    seconds = MEASURED_SECONDS_SHORT if workload.is_short else MEASURED_SECONDS
    batches = math.ceil(seconds / (layers * estimate))
    timings = time_on_device(works, enough_repeats(repeats, batches * layers * estimate), batches)
    return [*to_rows(direction, workload, timings), *failures]


def to_rows(direction: Direction, workload: Workload, timings: dict[str, Timing]) -> list[Row]:
    other = held_against(workload, direction)
    elsewhere = {_jax_attention.ours_on(other.name): other.flops(direction)} if other else {}
    flops = workload.flops(direction)
    # Ours in a fixed order shares its plan, so it is held against what does too.
    shared, ours = timings.get("ours"), timings.get("ours, own plans" if workload.is_short else "ours")

    def rate(name: str, timing: Timing) -> float:
        return elsewhere.get(name, flops) / timing.median

    def speedup(name: str, timing: Timing) -> float | None:
        against = shared if name == _jax_attention.DETERMINISTIC else ours
        return flops / against.median / rate(name, timing) if against else None

    return [
        Row.of(
            workload.name,
            direction,
            name,
            timing,
            tflops=rate(name, timing) / 1e12,
            speedup=speedup(name, timing),
        )
        for name, timing in timings.items()
    ]


def measure_plan(direction: Direction, repeats: int) -> dict[str, Any]:
    """The plan op alone, in microseconds; the additions between its passes are subtracted."""
    passes, batches, estimate = 64, 20, 20e-6
    works = _jax_attention.plan(num_bands=4096, num_tiles=2048, passes=passes, direction=direction)
    repeats = enough_repeats(repeats, passes * batches * estimate)
    timings = time_on_device(works, repeats, batches)
    additions = timings["additions"].median
    times = {name: seconds - additions for name, seconds in vars(timings["plan"]).items()}
    return {"workload": PLAN} | {f"{name}_us": 1e6 * seconds for name, seconds in times.items()}


def release_memory() -> None:
    """Gives what PyTorch holds back, between workloads, for JAX and it share the GPU."""
    for held in (_jax_attention.inputs, _jax_attention.operands, _torch_attention.inputs):
        held.cache_clear()
    gc.collect()
    if importlib.util.find_spec("torch"):
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.empty_cache()


def run(direction: Direction, rows: str, peers: str, repeats: int, out: Path | None) -> None:
    """Measures what the patterns select; saves after each row, so that a run cut short leaves something."""
    start = time.perf_counter()
    about = gpu_environment() | _torch_attention.versions()
    plans: list[dict[str, Any]] = []
    results: list[Row | Failure] = []

    def done() -> None:
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
        if out:
            save(NAMES[direction], [*plans, *results, *checks(direction, results)], out, **about)

    if re.search(rows, PLAN):
        plans.append(measure_plan(direction, repeats))
        print(plans[-1])
        done()
    for workload in workloads(direction):
        if re.search(rows, workload.name):
            measured = measure(direction, workload, peers, repeats)
            show(measured)
            results += measured
            done()
            release_memory()
    show_checks(checks(direction, results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pass", dest="direction", choices=NAMES, default="forward", help="what is measured")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only workloads whose name it finds")
    parser.add_argument("--peers", default="", metavar="REGEX", help="only peers whose name it finds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the plot of the JSON there")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.plot, NAMES[arguments.direction], arguments.direction)
    # Read when JAX first looks for a GPU. Otherwise, it would leave no memory to PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run(arguments.direction, arguments.rows, arguments.peers, arguments.repeats, arguments.out)
    if arguments.out:
        plot(arguments.out, NAMES[arguments.direction], arguments.direction)


if __name__ == "__main__":
    main()
