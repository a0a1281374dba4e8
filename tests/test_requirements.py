"""What is required of the benchmark of attention names what it measures, and is held against it."""

import pytest

from benchmarks import _jax_attention, _requirements, _torch_attention
from benchmarks._requirements import REQUIREMENTS, checks
from benchmarks._rows import Failure, Row
from benchmarks._workloads import Direction, workloads

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def row(workload: str, implementation: str, speedup: float | None) -> Row:
    return Row(workload, "backward", implementation, 1.0, 1.0, 1.0, 1.0, speedup)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_required_rows_are_measured(direction: Direction) -> None:
    rows = {workload.name: workload for workload in workloads(direction)}
    for requirement in REQUIREMENTS[direction]:
        for name in requirement.workloads:
            workload = rows[name]
            measured = _jax_attention.candidates(workload, direction).keys()
            measured |= _torch_attention.candidates(workload, direction).keys()
            assert requirement.implementation in measured


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bounds(direction: Direction) -> None:
    """A requirement has one bound; a goal asks for more than what is required."""
    required = {}
    for requirement in REQUIREMENTS[direction]:
        assert (requirement.at_least is None) != (requirement.at_most is None)
        for name in requirement.workloads:
            key = (name, requirement.implementation)
            if requirement.kind == "required":
                required[key] = requirement.at_least
            elif key in required:
                assert requirement.at_least > required[key]


def test_every_mask_and_short_documents_are_held_against_the_free_order() -> None:
    names = {workload.name for workload in workloads("backward")}
    (deterministic,) = [
        requirement
        for requirement in REQUIREMENTS["backward"]
        if requirement.implementation == _jax_attention.DETERMINISTIC
    ]
    assert deterministic.at_most == 1.4
    unlimited = {name for name in names if name not in deterministic.workloads}
    assert unlimited == {
        *(f"causal {length} D128" for length in ("1k", "2k")),
        *(f"{kind} 16k D{dims}" for kind in ("full", "causal") for dims in ("96", "192", "192/128")),
    }


def test_checks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("full 16k D256", "ours", 1.0),
        row("full 16k D256", "ours, deterministic", 1.5),
        row("full 16k D256", "cuDNN", 1.0),
        row("video 4x21600", "ours", 1.0),
        Failure("video 4x21600", "backward", "FlexAttention", "out of memory"),
    ]
    found = checks("backward", rows)
    verdicts = [(x.workload, x.kind, x.implementation, x.measured, x.met) for x in found]
    assert verdicts == [
        ("full 16k D256", "required", "cuDNN", 1.0, True),
        ("full 16k D256", "goal", "cuDNN", 1.0, False),
        ("video 4x21600", "required", "FlexAttention", None, False),
        ("full 16k D256", "required", "ours, deterministic", 1.5, False),
        ("video 4x21600", "required", "ours, deterministic", None, False),
    ]
    _requirements.show_checks(found)
    lines = capsys.readouterr().out.splitlines()
    assert "1.000" in lines[0] and "at least 0.95" in lines[0] and lines[0].endswith("met")
    assert "not measured" in lines[2] and lines[2].endswith("missed")
    assert "at most 1.40" in lines[3] and lines[3].endswith("missed")
