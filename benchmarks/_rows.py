"""The rows of the benchmark of attention."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Milliseconds of one workload by one implementation.

    speedup: how many times its rate ours has; of short workloads, ours with plans of its own for each layer,
        save beside ours in a fixed order.
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


def show(rows: Iterable[Row | Failure]) -> None:
    for row in rows:
        if isinstance(row, Failure):
            print(
                f"{row.workload:26s} {row.implementation:19s} failed: {row.error.splitlines()[0]}", flush=True
            )
            continue
        ratio = "" if row.speedup is None else f"ours is {row.speedup:.3f} x as fast"
        spread = f"({row.fastest_ms:.3f} to {row.slowest_ms:.3f})"
        print(
            f"{row.workload:26s} {row.implementation:19s} {row.median_ms:9.3f} ms {spread:22s}"
            f" {row.tflops:6.1f} TFLOP/s  {ratio}",
            flush=True,
        )
