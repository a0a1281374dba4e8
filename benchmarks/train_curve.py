"""Compares the example's loss with the kernels and with plain XLA, or on one device and on several.

    python -m benchmarks.train_curve [--context RANKS [--processes]] [--steps 200] [--out FOLDER]
    python -m benchmarks.train_curve --plot RESULTS.json

examples/train_lm.py runs twice from the same parameters over the same batches, with attention in bfloat16,
for GPUs have no kernels for float32. Without --context it runs once with each implementation of attention.
With it, it runs both times with the kernels, and once spread over so many devices, with --processes each of a
separate process; where there are too few GPUs, processes share them, which NCCL allows from version 2.30 on.
Required is that the losses of every step agree to 1 %. With --out, writes a .json and a .png of the name that
`name_of` tells; --plot draws the .png of such results again.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from benchmarks._measure import card, gpu_environment, save
from benchmarks._processes import run_in_processes
from tests.launcher import leave_memory_to_processes

IMPLEMENTATIONS = ("ffi", "xla")
OPTIONS = ["--attention-dtype=bfloat16"]
"""Further arguments of the example."""
AT_MOST = 0.01
CAPACITY = 64  # documents: more than the example packs into a sequence


@dataclass(frozen=True)
class Curve:
    """The loss of every step in nats per byte; seconds include compilation."""

    label: str
    seconds: float
    losses: list[float]

    def __str__(self) -> str:
        first, last = self.losses[0], self.losses[-1]
        return f"{self.label}: loss {first:.3f} -> {last:.3f} nats per byte, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Comparison:
    """The largest difference of two losses at one step, relative to the second."""

    curves: tuple[str, str]
    largest_relative_difference: float
    step: int
    at_most: float
    met: bool

    def __str__(self) -> str:
        verdict = f"required at most {self.at_most}: {'met' if self.met else 'missed'}"
        largest = self.largest_relative_difference
        return f"largest relative difference {largest:.2e} at step {self.step}, {verdict}"


def example() -> ModuleType:
    """Imports examples/train_lm.py, which imports its neighbours."""
    folder = str(Path(__file__).parent.parent / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("train_lm")


def train(implementation: str, arguments: argparse.Namespace) -> Curve:
    """Runs the example with an implementation of attention, one sequence a batch."""
    train_lm = example()
    config = dataclasses.replace(train_lm.to_config(arguments), implementation=implementation)
    sequences = train_lm.packed_batches(arguments.seq_len, 1)
    batches = (padded(train_lm.local_batch(each, arguments.window)) for each in sequences)
    start = time.perf_counter()
    losses = train_lm.train(config, batches, arguments, implementation)
    return Curve(implementation, time.perf_counter() - start, losses)


def train_spread(ranks: int, where: str, arguments: argparse.Namespace) -> Curve:
    """Runs the example with the kernels, each sequence spread over the devices of all processes.

    ``where`` describes these in the label.
    """
    train_lm = example()
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, ranks), ("data", "context"), kinds, devices=jax.devices()[:ranks])
    config = train_lm.to_config(arguments)
    config = dataclasses.replace(config, implementation=IMPLEMENTATIONS[0], batch_axis_name="data")
    first, *_ = next(train_lm.packed_batches(arguments.seq_len, 1))
    to_batch = train_lm.ContextBatches(mesh, arguments.window, example=first)
    sequences = train_lm.packed_batches(arguments.seq_len, 1)
    batches = (to_batch(each, list(map(to_batch.plan, each))) for each in sequences)
    start, label = time.perf_counter(), f"{IMPLEMENTATIONS[0]}, {ranks} {where}"
    with jax.set_mesh(mesh):
        losses = train_lm.train(config, batches, arguments, label)
    return Curve(label, time.perf_counter() - start, losses)


def padded(batch: Any) -> Any:
    """Returns the batch with masks of one capacity, so that the training step compiles once."""
    return batch._replace(window=batch.window.pad_to(CAPACITY), full=batch.full.pad_to(CAPACITY))


def relative_differences(first: list[float], second: list[float]) -> np.ndarray:
    expected = np.array(second)
    return np.abs(np.array(first) - expected) / expected


def compare(first: Curve, second: Curve) -> Comparison:
    """Compares losses; those that are no numbers count as differing without limit."""
    differences = relative_differences(first.losses, second.losses)
    differences = np.where(np.isnan(differences), np.inf, differences)
    step = int(differences.argmax())
    largest = float(differences[step])
    names = (first.label, second.label)
    return Comparison(names, largest, step, AT_MOST, largest <= AT_MOST)


def run(given: list[str], ranks: int | None, out: Path | None, devices: int | None = None) -> None:
    """Prints and saves both curves and their difference.

    Args:
        given: arguments of the example.
        ranks: devices to spread sequences over; None for one device and both implementations.
        out: folder to write to, of one process.
        devices: of the machine, where each rank is a process.
    """
    arguments = example().parse_arguments(given)
    if ranks is None:
        curves = [train(implementation, arguments) for implementation in IMPLEMENTATIONS]
    else:
        where = "devices" if devices is None else f"processes on {devices} device(s)"
        curves = [train_spread(ranks, where, arguments), train(IMPLEMENTATIONS[0], arguments)]
    comparison = compare(*curves)
    print(*curves, comparison, sep="\n")
    if out and jax.process_index() == 0:
        about = gpu_environment() | ({} if devices is None else {"gpus": devices, "processes": ranks})
        name = name_of(ranks, devices is not None)
        results = save(name, [*curves, comparison], out, **about, example=" ".join(given))
        print("saved", results)
        plot(results)


def name_of(ranks: int | None, processes: bool) -> str:
    """Returns the name of the files of a run."""
    if ranks is None:
        return f"train_curve_{card()}"
    return "train_curve_processes" if processes else f"train_curve_context_{card()}"


def plot(results: Path) -> None:
    """Plots the curves over their relative difference, if matplotlib is there."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib.pyplot as plt

    saved = json.loads(results.read_text())
    first, second, comparison = saved["rows"]
    figure, (losses, differences) = plt.subplots(
        2, sharex=True, figsize=(9, 6), height_ratios=(2, 1), layout="constrained"
    )
    for curve, style in ((first, "-"), (second, ":")):
        losses.plot(curve["losses"], style, label=curve["label"], linewidth=2)
    losses.set(ylabel="loss (nats per byte)", title=f"examples/train_lm.py, {saved['environment']['gpu']}")
    losses.legend()
    differences.plot(100 * relative_differences(first["losses"], second["losses"]))
    differences.axhline(100 * comparison["at_most"], color="gray", linestyle="--")
    differences.set(xlabel="step", ylabel="difference (%)")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(results.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, metavar="RANKS", help="devices to spread a sequence over")
    parser.add_argument("--processes", action="store_true", help="each device of a separate process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="only draw the plot of these results")
    arguments = parser.parse_args()
    if arguments.processes and not arguments.context:
        parser.error("--processes needs --context, which says how many")
    if arguments.plot:
        return plot(arguments.plot)
    given, ranks, out = [f"--steps={arguments.steps}", *OPTIONS], arguments.context, arguments.out
    if not arguments.processes:
        return run(given, ranks, out)
    leave_memory_to_processes()
    run_in_processes(run, given, ranks, out and out.absolute(), len(jax.devices()), processes=ranks)


if __name__ == "__main__":
    main()
