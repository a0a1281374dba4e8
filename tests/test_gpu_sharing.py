"""How processes take turns on GPUs."""

import tempfile
import threading
from pathlib import Path

import pytest

from .gpu_sharing import ALONE, Turns

OTHER = "tests/attention/test_gpu_masks.py::test"


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Turns, Turns]:
    """Two that share GPUs: locks of two open files exclude each other in one process, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Turns("run"), Turns("run")


def test_most_tests_run_side_by_side(processes: tuple[Turns, Turns]) -> None:
    first, second = processes
    with first.take(OTHER, OTHER), second.take(OTHER, ""):
        pass


def test_some_run_alone_one_after_another(processes: tuple[Turns, Turns]) -> None:
    first, second = processes
    ended = []

    def run_other() -> None:
        with second.take(OTHER, ""):
            ended.append("other")

    waiting = threading.Thread(target=run_other)
    with first.take(f"{ALONE[0]}a", f"{ALONE[0]}b"):
        waiting.start()
        waiting.join(0.2)
        ended.append("a")
    waiting.join(0.2)
    with first.take(f"{ALONE[0]}b", OTHER):
        ended.append("b")
    waiting.join(10)
    assert ended == ["a", "b", "other"]


def test_nobody_begins_while_one_waits_to_be_alone(processes: tuple[Turns, Turns]) -> None:
    first, second = processes
    third = Turns("run")
    ended = []

    def run(turns: Turns, nodeid: str) -> None:
        with turns.take(nodeid, ""):
            ended.append(nodeid)

    alone = threading.Thread(target=run, args=(second, ALONE[0]))
    late = threading.Thread(target=run, args=(third, OTHER))
    with first.take(OTHER, ""):
        alone.start()
        alone.join(0.2)
        late.start()
        late.join(0.2)
        assert not ended
    alone.join(10)
    late.join(10)
    assert ended == [ALONE[0], OTHER]
