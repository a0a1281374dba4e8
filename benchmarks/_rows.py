"""The rows of the benchmark of attention."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxmagi.calibration._timing import Timing


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

    @staticmethod
    def of(
        workload: str,
        direction: str,
        implementation: str,
        timing: Timing,
        *,
        tflops: float,
        speedup: float | None,
    ) -> "Row":
        """The row of what was timed."""
        median, fastest, slowest = (1e3 * x for x in (timing.median, timing.fastest, timing.slowest))
        return Row(workload, direction, implementation, median, fastest, slowest, tflops, speedup)


@dataclass(frozen=True)
class Failure:
    """An implementation that could not run a workload."""

    workload: str
    direction: str
    implementation: str
    error: str

    @staticmethod
    def of(workload: str, direction: str, implementation: str, error: Exception) -> "Failure":
        """That of an exception, cut short where its message is long."""
        return Failure(workload, direction, implementation, f"{type(error).__name__}: {error}"[:300])


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
