"""The example's loss on one device, with the compiled kernels and with plain XLA.

    python -m benchmarks.train_curve [--steps 200] [--out FOLDER]
    python -m benchmarks.train_curve --plot FOLDER

examples/train_lm.py from the same parameters over the same batches, once with each implementation of
attention, which is in bfloat16 for both: GPUs have no kernels for float32. Required is that the losses of
every step agree to 1 %. With --out, writes train_curve_h200.json and .png there; --plot draws the .png anew.
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

import numpy as np

from benchmarks._measure import gpu_environment, save

NAME = "train_curve_h200"
IMPLEMENTATIONS = ("ffi", "xla")
AT_MOST = 0.01
CAPACITY = 64  # documents: more than the example packs into a sequence


@dataclass(frozen=True)
class Curve:
    """The loss of every step in nats per byte; seconds include compilation."""

    implementation: str
    seconds: float
    losses: list[float]


@dataclass(frozen=True)
class Comparison:
    """The largest difference of two losses at one step, as a part of the second."""

    implementations: tuple[str, str]
    largest_relative_difference: float
    step: int
    at_most: float
    met: bool


def example() -> ModuleType:
    """examples/train_lm.py, which imports its neighbours."""
    folder = str(Path(__file__).parent.parent / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("train_lm")


def train(implementation: str, arguments: argparse.Namespace) -> Curve:
    """One run of the example, one sequence a batch.

    Args:
        implementation: of attention.
        arguments: the example's.
    """
    train_lm = example()
    config = dataclasses.replace(train_lm.to_config(arguments), implementation=implementation)
    sequences = train_lm.packed_batches(arguments.seq_len, 1)
    batches = (padded(train_lm.local_batch(each, arguments.window)) for each in sequences)
    start = time.perf_counter()
    losses = train_lm.train(config, batches, arguments, implementation)
    return Curve(implementation, time.perf_counter() - start, losses)


def padded(batch: Any) -> Any:
    """The same batch with masks of one capacity, so that the training step compiles once."""
    window, full = (mask.pad_to(CAPACITY) for mask in (batch.window, batch.full))
    return batch._replace(window=window, full=full)


def compare(first: Curve, second: Curve) -> Comparison:
    """Losses that are no numbers count as differing without limit."""
    expected = np.array(second.losses)
    differences = np.abs(np.array(first.losses) - expected) / expected
    differences = np.where(np.isnan(differences), np.inf, differences)
    step = int(differences.argmax())
    largest = float(differences[step])
    names = (first.implementation, second.implementation)
    return Comparison(names, largest, step, AT_MOST, largest <= AT_MOST)


def run(given: list[str], out: Path | None) -> None:
    """Both curves and their difference, printed and saved; ``given`` are arguments of the example."""
    arguments = example().parse_arguments(given)
    curves = [train(implementation, arguments) for implementation in IMPLEMENTATIONS]
    comparison = compare(*curves)
    for curve in curves:
        print(
            f"{curve.implementation}: loss {curve.losses[0]:.3f} -> {curve.losses[-1]:.3f} nats per byte, "
            f"{curve.seconds:.0f} s"
        )
    print(
        f"largest relative difference {comparison.largest_relative_difference:.2e} "
        f"at step {comparison.step}, required at most {AT_MOST}: {'met' if comparison.met else 'missed'}"
    )
    if out:
        print("saved", save(NAME, [*curves, comparison], out, **gpu_environment(), example=" ".join(given)))
        plot(out)


def plot(folder: Path) -> None:
    """The curves over their relative difference, if matplotlib is there."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib.pyplot as plt

    saved = json.loads((folder / f"{NAME}.json").read_text())
    first, second, comparison = saved["rows"]
    figure, (losses, differences) = plt.subplots(
        2, sharex=True, figsize=(9, 6), height_ratios=(2, 1), layout="constrained"
    )
    for curve, style in ((first, "-"), (second, ":")):
        losses.plot(curve["losses"], style, label=f'implementation="{curve["implementation"]}"', linewidth=2)
    losses.set(ylabel="loss (nats per byte)", title=f"examples/train_lm.py, {saved['environment']['gpu']}")
    losses.legend()
    expected = np.array(second["losses"])
    differences.plot(100 * np.abs(np.array(first["losses"]) - expected) / expected)
    differences.axhline(100 * comparison["at_most"], color="gray", linestyle="--")
    differences.set(xlabel="step", ylabel="difference (%)")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(folder / f"{NAME}.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plot there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the plot of the JSON there")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.plot)
    run([f"--steps={arguments.steps}", "--attention-dtype=bfloat16"], arguments.out)


if __name__ == "__main__":
    main()
