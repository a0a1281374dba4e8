"""Times one pass of attention on a GPU, in comparison with its peers, in one run.

    python -m benchmarks.attention [--pass backward] [--rows REGEX] [--peers REGEX] [--repeats 5]
                                   [--out FOLDER]
    python -m benchmarks.attention --plot RESULTS.json

The peers are cuDNN by PyTorch, FlexAttention and FlashAttention-4, and of the forward pass also cuDNN by
jax.nn and tokamax, each where it can express the mask. All run in bfloat16 with batch 1, 64 query heads, 8
key heads and unit-normal operands. TFLOP/s count two products over exactly the visible cells, of the backward
pass five.

The backward pass is measured alone, from outputs that were made before, and ours also with sums in a fixed
order ("deterministic").

Times are those of the device: several layers, each with its own query, are launched one after another. On
long rows this is done again and again without a pause, in turns of 0.3 s of which the last two thirds are
measured: GPUs at their power limit need a while to find the clock that they can hold. The next layers are in
the queue by then, so that launching and waiting cost nothing; on short rows their cost is subtracted. JAX, so
ours too, runs without CUDA graphs. The layers of PyTorch's short rows are launched as one graph, for Python
would take longer than they do. Ours makes one tile schedule for all layers; on the short rows, where that
counts, it is also measured with a schedule for each layer ("own plans"), and that is what the peers are
compared with. --repeats is the least; short rows are repeated more often.

With --out, writes attention_CARD.json there (attention_backward_CARD.json), where CARD is h200 for instance,
after each row, and at the end the .png beside it, which --plot draws again.
"""

import functools
import gc
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _jax_attention, _torch_attention
from benchmarks._measure import card, gpu_environment
from benchmarks._plot import plot
from benchmarks._report import Failure, Report, Row, argument_parser, in_unit, make_each
from benchmarks._requirements import checks
from benchmarks._workloads import Direction, Workload, held_against, workloads
from jaxmagi.calibration._timing import DeviceWork, Timing, time_on_device, time_sustained

NAMES: dict[Direction, str] = {"forward": "attention", "backward": "attention_backward"}
PLAN = "plan of 4096 bands, 2048 tiles"
# The time that the layers of one program take; its one tile schedule is about 0.2 % of a backward one.
BATCH_SECONDS: dict[Direction, float] = {"forward": 8e-3, "backward": 20e-3}
MAX_LAYERS, MAX_QUERY_BYTES = 32, 4e9  # of the layers: the peers hold as much once more
TURN_SECONDS = 0.3
MEASURED_SECONDS_SHORT = 100e-3  # of short rows, where the host's noise shows
REPEATED_SECONDS = 1.0  # of each implementation in a short row, for the clock wanders by 10 % within a second


@dataclass(frozen=True)
class PlanRow:
    """The time of the kernels that make a tile schedule."""

    workload: str
    median_us: float
    fastest_us: float
    slowest_us: float


def make_works(
    direction: Direction, workload: Workload, layers: int, peers: str
) -> tuple[dict[str, DeviceWork], list[Failure]]:
    """Returns the works of ours and of the peers that match, each run once, and those that failed."""

    def run_once(make: _jax_attention.MakeWork) -> DeviceWork:
        work = make(workload, layers)
        work.seconds(1)
        return work

    candidates = _jax_attention.candidates(workload, direction)
    candidates |= _torch_attention.candidates(workload, direction)
    chosen = {
        name: functools.partial(run_once, make)
        for name, make in candidates.items()
        if name.startswith("ours") or re.search(peers, name)
    }
    return make_each(workload.name, direction, chosen)


def estimated_seconds(direction: Direction, workload: Workload) -> float:
    """Returns how long a layer takes at 600 TFLOP/s."""
    return workload.flops(direction) / 600e12


def num_layers(direction: Direction, workload: Workload) -> int:
    """Returns how many layers one program runs."""
    fitting = max(1, int(MAX_QUERY_BYTES / workload.query_bytes()))
    layers = math.ceil(BATCH_SECONDS[direction] / estimated_seconds(direction, workload))
    return min(MAX_LAYERS, fitting, layers)


def enough_repeats(least: int, seconds: float) -> int:
    """Returns how often to measure what takes so many seconds, and then twice as many."""
    return max(least, math.ceil(REPEATED_SECONDS / (3 * seconds)))


def time_layers(
    direction: Direction, workload: Workload, works: dict[str, DeviceWork], repeats: int
) -> dict[str, Timing]:
    """Times works of `num_layers` layers, in turns and for long enough."""
    if not workload.is_short:
        return time_sustained(works, repeats, TURN_SECONDS)
    program = num_layers(direction, workload) * estimated_seconds(direction, workload)
    batches = math.ceil(MEASURED_SECONDS_SHORT / program)
    return time_on_device(works, enough_repeats(repeats, batches * program), batches)


def measure(direction: Direction, workload: Workload, peers: str, repeats: int) -> list[Row | Failure]:
    """Returns the rows of one workload."""
    works, failures = make_works(direction, workload, num_layers(direction, workload), peers)
    timings = time_layers(direction, workload, works, repeats)
    return [*to_rows(direction, workload, timings), *failures]


def to_rows(direction: Direction, workload: Workload, timings: dict[str, Timing]) -> list[Row]:
    """Returns the rows of one workload; peers of short ones are compared with "ours, own plans"."""
    other = held_against(workload, direction)
    elsewhere = {_jax_attention.ours_on(other.name): other.flops(direction)} if other else {}
    flops = workload.flops(direction)
    # Ours in a fixed order shares its tile schedule, so it is compared with what does too.
    shared, ours = timings.get("ours"), timings.get("ours, own plans" if workload.is_short else "ours")

    def to_row(name: str, timing: Timing) -> Row:
        rate = elsewhere.get(name, flops) / timing.median
        against = shared if name == _jax_attention.DETERMINISTIC else ours
        speedup = flops / against.median / rate if against else None
        times = in_unit(timing, "ms")
        return Row(workload.name, direction, name, **times, tflops=rate / 1e12, speedup=speedup)

    return [to_row(name, timing) for name, timing in timings.items()]


def measure_plan(direction: Direction, repeats: int) -> PlanRow:
    """Times the kernels that make a tile schedule; the additions between its passes are subtracted."""
    passes, batches, estimate = 64, 20, 20e-6
    works = _jax_attention.plan(num_bands=4096, num_tiles=2048, passes=passes, direction=direction)
    repeats = enough_repeats(repeats, passes * batches * estimate)
    timings = time_on_device(works, repeats, batches)
    additions = timings["additions"].median
    alone = Timing(*(seconds - additions for seconds in vars(timings["plan"]).values()))
    return PlanRow(PLAN, **in_unit(alone, "us"))


def release_memory() -> None:
    """Frees what PyTorch holds, between workloads, for JAX and it share the GPU."""
    for held in (_jax_attention.inputs, _jax_attention.operands, _torch_attention.inputs):
        held.cache_clear()
    gc.collect()
    if importlib.util.find_spec("torch"):
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.empty_cache()


def run(direction: Direction, rows: str, peers: str, repeats: int, out: Path | None) -> Path | None:
    """Measures what the patterns select, and returns where the results are, if they were saved."""
    about = gpu_environment() | _torch_attention.versions()
    name = f"{NAMES[direction]}_{card()}"
    report = Report[Row | Failure | PlanRow](name, out, about, lambda rows: checks(direction, rows))
    if re.search(rows, PLAN):
        report.add([measure_plan(direction, repeats)])
    for workload in workloads():
        if re.search(rows, workload.name):
            report.add(measure(direction, workload, peers, repeats))
            release_memory()
    report.finish()
    return report.path


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pass", dest="direction", choices=NAMES, default="forward", help="what is measured")
    parser.add_argument("--peers", default="", metavar="REGEX", help="only peers whose name it finds")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="only draw the plot of these results")
    arguments = parser.parse_args()
    # Read when JAX first looks for a GPU. Otherwise, it would leave no memory to PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = arguments.direction, arguments.rows, arguments.peers, arguments.repeats, arguments.out
    if results := arguments.plot or run(*options):
        plot(results)


if __name__ == "__main__":
    main()
