"""Lists how fast attention is required to be, in comparison with its peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._jax_attention import DETERMINISTIC, ours_on
from benchmarks._report import Check, Row, check
from benchmarks._workloads import HELD_AGAINST, MASKS, SHORT_DOCUMENTS, Direction


@dataclass(frozen=True)
class Requirement:
    """The number of times that ours has to be as fast as another implementation on some workloads.

    kind: as in `Check`.
    """

    kind: str
    implementation: str
    workloads: Sequence[str]
    at_least: float | None = None
    at_most: float | None = None


_D128 = ("full 8k D128", "causal 8k D128", "full 32k D128", "causal 32k D128")
_D64, _D256 = (tuple(f"{kind} 16k D{dim}" for kind in ("full", "causal")) for dim in (64, 256))
_SEQUENCES = ("documents causal", "documents full", "documents 16x2048 causal", "window 1023")
_SHORT = tuple(f"causal {length} D128" for length in ("1k", "2k", "4k"))
_FLEX = ("FlexAttention", "FlexAttention FLASH")
_ALL_MASKS = (
    *MASKS,
    *(f"{name} D64" for name in MASKS),
    SHORT_DOCUMENTS,
    "causal 8k D128",
    "causal 32k D128",
)
_AS_FAST_BACKWARD = (
    *("full 8k D128", "full 32k D128", "causal 32k D128"),
    *(*_D64, *_D256, *_SEQUENCES, SHORT_DOCUMENTS),
)

REQUIREMENTS: dict[Direction, tuple[Requirement, ...]] = {
    "forward": (
        Requirement("required", "cuDNN", _D128, at_least=1.04),
        Requirement("required", "cuDNN", _D64, at_least=1.08),
        Requirement("required", "cuDNN", ("causal 16k D256",), at_least=1.04),
        Requirement("required", "cuDNN", ("causal 1k D128", "causal 2k D128"), at_least=1 / 1.15),
        Requirement("required", "FlexAttention", tuple(MASKS), at_least=1.35),
        *(Requirement("required", flex, _ALL_MASKS, at_least=1.05) for flex in _FLEX),
        *(Requirement("goal", flex, _ALL_MASKS, at_least=1.2) for flex in _FLEX),
        *(Requirement("required", ours_on(other), (name,), 0.95) for name, other in HELD_AGAINST.items()),
        Requirement("goal", "FlashAttention-4", _D128, at_least=1.03),
        Requirement("goal", "FlashAttention-4", (*_D64, "causal 16k D256", *_SEQUENCES), at_least=1.0),
    ),
    "backward": (
        Requirement("required", "cuDNN", (*_D128, *_D64), at_least=1.05),
        Requirement("required", "cuDNN", _D256, at_least=0.95),
        Requirement("goal", "cuDNN", _D256, at_least=1.05),
        Requirement("required", "cuDNN", _SHORT, at_least=1.0),
        Requirement("required", "FlexAttention", tuple(MASKS), at_least=1.3),
        *(Requirement("required", flex, _ALL_MASKS, at_least=1.05) for flex in _FLEX),
        *(Requirement("goal", flex, _ALL_MASKS, at_least=1.2) for flex in _FLEX),
        Requirement("required", "FlashAttention-4", ("causal 8k D128",), at_least=0.97),
        Requirement("required", "FlashAttention-4", _AS_FAST_BACKWARD, at_least=1.0),
        Requirement("goal", "FlashAttention-4", (*_D128, *_D64, *_D256, *_SEQUENCES), at_least=1.05),
        Requirement(
            "required", DETERMINISTIC, (*_D128, *_D64, *_D256, *MASKS, SHORT_DOCUMENTS), at_most=1.25
        ),
    ),
}


def checks(direction: Direction, rows: Sequence[Any]) -> list[Check]:
    """Returns the checks of the workloads among the rows, in the order of `REQUIREMENTS`."""
    speedups = {(row.workload, row.implementation): row.speedup for row in rows if isinstance(row, Row)}
    measured = {row.workload for row in rows}
    return [
        check(
            workload,
            direction,
            each.implementation,
            speedups.get((workload, each.implementation)),
            kind=each.kind,
            at_least=each.at_least,
            at_most=each.at_most,
        )
        for each in REQUIREMENTS[direction]
        for workload in each.workloads
        if workload in measured
    ]
