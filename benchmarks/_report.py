"""The report of a benchmark: its rows, what is required of them, and the file that has both."""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks._measure import save
from jaxmagi.calibration._timing import Timing


@dataclass(frozen=True)
class Result:
    """The first fields of a row of each benchmark."""

    workload: str
    direction: str
    implementation: str

    def describe(self, text: str, speedup: float | None = None) -> str:
        """Returns the line that is printed for a row."""
        ratio = "" if speedup is None else f"  ours is {speedup:.3f} x as fast"
        return f"{self.direction:13s} {self.workload:31s} {self.implementation:26s} {text}{ratio}"


@dataclass(frozen=True)
class Row(Result):
    """The time that an implementation of attention takes for a workload.

    speedup: how many times as fast ours is.
    """

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tflops: float
    speedup: float | None

    def __str__(self) -> str:
        spread = f"({self.fastest_ms:.3f} to {self.slowest_ms:.3f})"
        text = f"{self.median_ms:9.3f} ms {spread:22s} {self.tflops:6.1f} TFLOP/s"
        return self.describe(text, self.speedup)


@dataclass(frozen=True)
class Failure(Result):
    """An implementation that could not run a workload."""

    error: str

    def __str__(self) -> str:
        return self.describe(f"failed: {self.error.splitlines()[0]}")


@dataclass(frozen=True)
class Check:
    """A requirement and what was measured, which is None (and does not meet it) if nothing could be.

    kind: "required", or "goal" for what is only aimed at.
    """

    workload: str
    direction: str
    kind: str
    implementation: str
    at_least: float | None
    at_most: float | None
    measured: float | None
    met: bool

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3f}"
        bound = f"at most {self.at_most:.2f}" if self.at_least is None else f"at least {self.at_least:.2f}"
        verdict = "met" if self.met else "missed"
        label = f"{self.kind:8s} {self.workload:31s} {self.implementation:26s}"
        return f"{label} {measured:>12s}  {bound:13s}  {verdict}"


def check(
    workload: str,
    direction: str,
    implementation: str,
    measured: float | None,
    *,
    kind: str = "required",
    at_least: float | None = None,
    at_most: float | None = None,
) -> Check:
    """Returns whether what was measured keeps its bounds."""
    met = (
        measured is not None
        and (at_least is None or measured >= at_least)
        and (at_most is None or measured <= at_most)
    )
    return Check(workload, direction, kind, implementation, at_least, at_most, measured, met)


def in_unit(timing: Timing, unit: str) -> dict[str, float]:
    """Returns the times of a row, as in ``{"median_ms": …, "fastest_ms": …, "slowest_ms": …}``."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    return {f"{name}_{unit}": factor * seconds for name, seconds in vars(timing).items()}


def make_each[T](
    workload: str, direction: str, makers: dict[str, Callable[[], T]]
) -> tuple[dict[str, T], list[Failure]]:
    """Returns what the makers of implementations make, and the failures of those that raise."""
    made, failures = {}, []
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as error:
            if jax.process_count() > 1:
                raise  # or the other processes would wait
            what = f"{type(error).__name__}: {error}"[:300]
            if isinstance(error, ModuleNotFoundError):
                what = f"not installed: {error.name}"
            failures.append(Failure(workload, direction, name, what))
    return made, failures


class Report[R]:
    """Prints rows as they come, and saves them each time, so that a run cut short leaves something."""

    def __init__(
        self,
        name: str,
        folder: Path | None,
        about: dict[str, Any],
        checks: Callable[[list[R]], list[Check]],
    ) -> None:
        """Begins a report that `save` writes to FOLDER/NAME.json, its ``path``, if there is a folder."""
        self._about, self._checks = about, checks
        self.path = folder / f"{name}.json" if folder and jax.process_index() == 0 else None
        self._rows: list[R] = []
        self._start = time.perf_counter()

    def add(self, rows: Iterable[R]) -> None:
        for row in rows:
            print(row, flush=True)
            self._rows.append(row)
        print(f"[{time.perf_counter() - self._start:.0f} s]", flush=True)
        if self.path:
            saved = [*self._rows, *self._checks(self._rows)]
            save(self.path.stem, saved, self.path.parent, **self._about)

    def finish(self) -> None:
        """Prints what is required and whether it is met."""
        for each in self._checks(self._rows):
            print(each, flush=True)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that the benchmarks on GPUs share."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only those whose name it finds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the results there")
    return parser
