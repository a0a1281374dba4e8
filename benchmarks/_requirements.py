"""What is required of the benchmark of attention, beside its peers, and what a check of a figure is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks._jax_attention import DETERMINISTIC, ours_on
from benchmarks._rows import Failure, Row
from benchmarks._workloads import HELD_AGAINST, MASKS, SHORT_DOCUMENTS, Direction


@dataclass(frozen=True)
class Requirement:
    """How many times the rate of another implementation ours has to reach on some workloads.

    kind: "required", or "goal" for what is only aimed at.
    """

    kind: str
    implementation: str
    workloads: Sequence[str]
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Check:
    """A requirement and what was measured of it: None for what could not be measured, nor be met."""

    workload: str
    direction: str
    kind: str
    implementation: str
    at_least: float | None
    at_most: float | None
    measured: float | None
    met: bool


_D128 = ("full 8k D128", "causal 8k D128", "full 32k D128", "causal 32k D128")
_D64, _D256 = (tuple(f"{kind} 16k D{dim}" for kind in ("full", "causal")) for dim in (64, 256))
_SEQUENCES = ("documents causal", "documents full", "documents 16x2048 causal", "window 1023")

REQUIREMENTS: dict[Direction, tuple[Requirement, ...]] = {
    "forward": (
        Requirement("required", "cuDNN", _D128, at_least=1.04),
        Requirement("required", "cuDNN", _D64, at_least=1.08),
        Requirement("required", "cuDNN", ("causal 16k D256",), at_least=1.04),
        Requirement("required", "cuDNN", ("causal 1k D128", "causal 2k D128"), at_least=1 / 1.15),
        Requirement("required", "FlexAttention", tuple(MASKS), at_least=1.35),
        *(
            Requirement("required", ours_on(other), (name,), at_least=0.95)
            for name, other in HELD_AGAINST.items()
        ),
        Requirement("goal", "FlashAttention-4", _D128, at_least=1.03),
        Requirement("goal", "FlashAttention-4", (*_D64, "causal 16k D256", *_SEQUENCES), at_least=1.0),
    ),
    "backward": (
        Requirement("required", "cuDNN", (*_D128, *_D64), at_least=1.05),
        Requirement("required", "cuDNN", _D256, at_least=0.95),
        Requirement("goal", "cuDNN", _D256, at_least=1.05),
        Requirement("required", "FlexAttention", tuple(MASKS), at_least=1.3),
        Requirement("goal", "FlashAttention-4", (*_D128, *_D64, *_SEQUENCES), at_least=1.0),
        Requirement("required", DETERMINISTIC, (*_D128, *_D64, *_D256, *MASKS, SHORT_DOCUMENTS), at_most=1.4),
    ),
}


def checks(direction: Direction, rows: Iterable[Row | Failure]) -> list[Check]:
    """Those of the workloads among the rows, in the order of `REQUIREMENTS`."""
    rows = list(rows)
    speedups = {(row.workload, row.implementation): row.speedup for row in rows if isinstance(row, Row)}
    measured_workloads = {row.workload for row in rows}
    return [
        check(
            workload,
            direction,
            requirement.kind,
            requirement.implementation,
            speedups.get((workload, requirement.implementation)),
            at_least=requirement.at_least,
            at_most=requirement.at_most,
        )
        for requirement in REQUIREMENTS[direction]
        for workload in requirement.workloads
        if workload in measured_workloads
    ]


def check(
    workload: str,
    direction: str,
    kind: str,
    implementation: str,
    measured: float | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Check:
    """Whether what was measured keeps its bounds."""
    met = (
        measured is not None
        and (at_least is None or measured >= at_least)
        and (at_most is None or measured <= at_most)
    )
    return Check(workload, direction, kind, implementation, at_least, at_most, measured, met)


def show_checks(checks: Iterable[Check]) -> None:
    for check in checks:
        measured = "not measured" if check.measured is None else f"{check.measured:.3f}"
        if check.at_least is not None:
            bound = f"at least {check.at_least:.2f}"
        else:
            bound = f"at most {check.at_most:.2f}"
        verdict = "met" if check.met else "missed"
        print(
            f"{check.kind:8s} {check.workload:26s} {check.implementation:19s} {measured:>12s}  {bound:13s}  "
            f"{verdict}",
            flush=True,
        )
