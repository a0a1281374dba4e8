"""The timeline of context attention: kernels of a profile by call and pass, and their picture."""

import json
import sys
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks import _timeline, timeline
from benchmarks._profile import Event, divide
from tests.collectives.groups import require_hosts

STREAM = "Stream #13(Compute)"
CALL = (
    ("loop_fusion", 0, 1),
    ("void jaxmagi::collectives::(anonymous namespace)::push<2>(jaxmagi::TransferParams)", 1, 3),
    ("void jaxmagi::sm90::(anonymous namespace)::forward_kernel<jaxmagi::A<(int)3>>(int)", 2, 9),
    ("void jaxmagi::sm90::finish<float>(jaxmagi::B)", 9, 10),
    ("void jaxmagi::sm90::backward_kernel<jaxmagi::A<(int)3>>(int)", 12, 30),
    ("jaxmagi::sm90::convert_all(jaxmagi::C)", 30, 32),
)
"""Kernels of one call: names, begins and ends in microseconds."""
EXPECTED = [
    ("forward", "loop_fusion", 0, 1),
    ("forward", "push", 1, 3),
    ("forward", "forward_kernel", 2, 9),
    ("forward", "finish", 9, 10),
    ("backward", "backward_kernel", 0, 18),
    ("backward", "convert_all", 18, 20),
]


def profiled() -> list[Event]:
    """Returns the events of all calls, and one of the profiler's start."""
    calls = [
        Event(1e6 + 1e3 * (begin + 40 * call), 1e6 + 1e3 * (end + 40 * call), name, STREAM)
        for call in range(timeline.CALLS)
        for name, begin, end in CALL
    ]
    return [Event(5e5, 6e5, "Memset", STREAM), *calls]


def test_last_call_by_pass() -> None:
    events = profiled()
    last = timeline.last_call(events)
    assert last == events[-len(CALL) :]
    rows = timeline.to_rows("within a host", 1, last)
    assert [(row.direction, row.name, row.begin_us, row.end_us) for row in rows] == EXPECTED
    assert {(row.transfers, row.device, row.stream) for row in rows} == {("within a host", 1, STREAM)}


def test_names_in_profiles() -> None:
    push = profiled()[2]
    assert push.is_of("push") and not push.is_of("pus") and not push.is_of("TransferParams")
    assert Event(0, 1, "push", "").is_of("push") and not Event(0, 1, "push_rows", "").is_of("push")
    assert Event(0, 1, "void <unnamed>::copy(int)", "").short_name == "copy"


def test_profiles_that_are_not_of_these_calls() -> None:
    with pytest.raises(ValueError, match="no kernels of attention among 1 events"):
        timeline.last_call(profiled()[:1])
    with pytest.raises(ValueError, match="forward_kernel ran 5 times in 3 calls"):
        divide([event for event in profiled() if event.is_of("forward_kernel")][:1] * 5, 3)


def test_exchanges_are_casts_and_then_returns() -> None:
    """In the backward pass half of them; the forward pass has casts alone. Kernels may come in any order."""
    names = [_timeline.EXCHANGE, "compare", _timeline.EXCHANGE, "pull"]
    for direction, second in (("forward", _timeline.CASTS), ("backward", _timeline.RETURNS)):
        kernels = [
            {"direction": direction, "name": name, "begin_us": 10 * i, "end_us": 10 * i + 5}
            for i, name in enumerate(names)
        ]
        found = _timeline.bars(kernels[::-1])
        assert found[_timeline.CASTS][0] == (0, 0.005) and found[_timeline.REST] == [(0.01, 0.015)]
        assert (0.02, 0.025) in found[second] and (0.03, 0.035) in found[_timeline.RETURNS]


def test_bars_that_overlap_are_in_several_lanes() -> None:
    first, beside, after = _timeline.Bar(0, 2), _timeline.Bar(1, 5), _timeline.Bar(2, 3)
    assert _timeline.in_lanes([first, beside, after]) == [[first, after], [beside]]


def run_rank(place: str, tokens: int, folder: Path) -> None:
    """Runs a rank of `timeline` with a profile that CPUs do not have."""

    def profile(function: object, operands: object, where: Path, calls: int) -> dict[str, list[Event]]:
        assert calls == timeline.CALLS and where.parent == folder
        derived = Event(0.0, 1e9, "a module", "XLA Modules")
        return {"/device:GPU:0": [derived, *profiled()], "/device:GPU:1": []}

    timeline.profile = profile
    run_in_rank(place, tokens, folder)


run_in_rank = timeline.run


def test_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ranks of both cases are saved and drawn, and drawn again from what is saved."""
    require_hosts(2, 2)
    for name, value in (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("NCCL_NVLS_ENABLE", "0")):
        monkeypatch.setenv(name, value)  # to be as it was afterwards
    monkeypatch.setattr(timeline, "run", run_rank)
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--out", str(tmp_path), "--tokens", "64"])
    timeline.main()
    results = tmp_path / "timeline_cpu.json"
    saved = json.loads(results.read_text())
    assert saved["environment"]["network"] == "memory" and "sources" in saved["environment"]
    cases = [(place, rank, *kernel) for place in timeline.HOSTS for rank in range(2) for kernel in EXPECTED]
    fields = ("transfers", "device", "direction", "name", "begin_us", "end_us")
    assert [tuple(row[each] for each in fields) for row in saved["rows"]] == cases
    picture = results.with_suffix(".png")
    assert matplotlib.image.imread(picture).shape[1] == 1800
    picture.unlink()
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--from", str(results)])
    timeline.main()
    assert picture.exists()


@pytest.mark.parametrize("options", [[], ["--out", "folder", "--from", "results.json"]])
def test_profiles_or_draws(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["timeline.py", *options])
    with pytest.raises(SystemExit):
        timeline.main()
