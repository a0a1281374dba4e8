"""How processes take turns on GPUs."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from . import gpu_sharing
from .gpu_sharing import ALONE, Turns

OTHER = "tests/attention/test_gpu_masks.py::test"


@pytest.fixture
def make_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Turns]:
    """Makes one more that shares GPUs: locks of several open files exclude each other in one process, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: Turns("run")


class Running(threading.Thread):
    """Runs in its turn, until it is told to end; does not keep the session from ending."""

    def __init__(self, turns: Turns, nodeid: str, next_nodeid: str = "") -> None:
        super().__init__(daemon=True)
        self._take = lambda: turns.take(nodeid, next_nodeid)
        self._runs, self._may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._take():
            self._runs.set()
            self._may_end.wait()

    def runs(self, seconds: float = 10) -> bool:
        """Whether its turn comes soon."""
        return self._runs.wait(seconds)

    def end(self) -> None:
        self._may_end.set()
        self.join(10)
        assert not self.is_alive()


def test_most_tests_run_side_by_side(make_process: Callable[[], Turns]) -> None:
    tests = [Running(make_process(), OTHER) for _ in range(2)]
    assert all(test.runs() for test in tests)
    for test in tests:
        test.end()


def test_some_run_alone_one_after_another(make_process: Callable[[], Turns]) -> None:
    turns = make_process()
    first = Running(turns, f"{ALONE[0]}a", f"{ALONE[0]}b")
    assert first.runs()
    other = Running(make_process(), OTHER)
    first.end()
    second = Running(turns, f"{ALONE[0]}b", OTHER)
    assert second.runs()
    assert not other.runs(0.2)
    second.end()
    assert other.runs()
    other.end()


def test_nobody_begins_while_one_waits_to_be_alone(make_process: Callable[[], Turns]) -> None:
    first = Running(make_process(), OTHER)
    assert first.runs()
    alone = Running(make_process(), ALONE[0])
    assert not alone.runs(0.2)
    late = Running(make_process(), OTHER)
    assert not late.runs(0.2)
    first.end()
    assert alone.runs()
    assert not late.runs(0.2)
    alone.end()
    assert late.runs()
    late.end()


def test_other_runs_take_no_turns_with_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "run")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    inside = gpu_sharing.environment()
    assert inside["PATH"] == os.environ["PATH"]
    assert not [name for name in inside if "XDIST" in name]
