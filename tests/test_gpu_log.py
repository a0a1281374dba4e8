"""Logs of GPU tests are of whole runs and of the sources as they are, and refused where they are stale."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_log

TESTS = {"tests/a.py::one": "passed", "tests/collectives/b.py::two[x]": "passed"}
STALE: dict[str, Any] = {"sources": "0" * 64, "tests": TESTS}


def fresh(*outcomes: str) -> dict[str, Any]:
    return {**gpu_log.hashes(), "tests": dict(zip(TESTS, outcomes, strict=False))}


@pytest.mark.parametrize(
    ("built", "collected", "verdict"),
    [
        (gpu_log.sources_hash(), 3, "GPU log written to"),
        (gpu_log.sources_hash(), 4, "no GPU log: 3 of 4 tests ran"),
        ("0123", 3, "no GPU log: jaxmagi._cuda is built from sources 0123"),
    ],
)
def test_recorder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: str, collected: int, verdict: str
) -> None:
    """A log has the worst of set-up, call and tear-down of each test."""
    monkeypatch.setattr(gpu_log, "built_hash", lambda: built)
    path = tmp_path / "new" / "log.json"
    recorder = gpu_log.Recorder(path)
    for report in ("b passed", "b passed", "b failed", "a passed", "c skipped", "c passed"):
        name, outcome = report.split()
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=name, outcome=outcome))  # type: ignore[arg-type]
    recorder.pytest_sessionfinish(SimpleNamespace(testscollected=collected))  # type: ignore[arg-type]
    assert recorder.verdict.startswith(verdict) and path.exists() == ("written" in verdict)
    if path.exists():
        written = json.loads(path.read_text())
        assert written["tests"] == {"a": "passed", "b": "failed", "c": "skipped"}
        assert written["sources"] == built


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs ``--check`` with some logs, in a tree with `TESTS`."""

    def check(logs: list[dict[str, Any]], *options: str) -> None:
        for i, log in enumerate(logs):
            (tmp_path / f"log-{i}.json").write_text(json.dumps({"gpu": "x", "gpus": 2, "date": "y"} | log))
        monkeypatch.setattr(gpu_log, "LOG", tmp_path / "log.json")
        monkeypatch.setattr(gpu_log, "collect", lambda: list(TESTS))
        monkeypatch.setattr(sys, "argv", ["gpu_log", "--check", *options])
        gpu_log.main()

    return check


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ([STALE], r"tests/a.py::one: not in the log\n.*\n(?s:.*)log-0.json is of sources 000000000000"),
        ([fresh("passed", "passed") | {"sources": "0" * 64}], r"one: not in the log\n.*: 1 of 2 tests$"),
        ([fresh("passed", "passed"), fresh("failed")], "one: failed"),
        ([fresh("skipped", "passed")], r"one: skipped on machines with \[2\] GPUs"),
        ([fresh("passed")], r"two\[x\]: not in the log"),
        ([], "there is no"),
    ],
)
def test_refused(check: Any, logs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        check(logs)


def test_accepted(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each test may have passed in one of several runs. Stale logs may be allowed, but not failures."""
    check([fresh("passed", "skipped"), fresh("skipped", "passed")])
    assert "log-1.json: 1 tests passed on x, y" in capsys.readouterr().out
    check([STALE], "--allow-stale")
    assert "warning: log-0.json is of sources 000000000000" in capsys.readouterr().out
    check([fresh("passed", "skipped"), fresh("passed", "passed") | {"sources": "0" * 64}], "--allow-stale")
    assert "two[x]" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="one: failed"):
        check([STALE | {"tests": {"tests/a.py::one": "failed"}}], "--allow-stale")


def test_hash_covers_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, text in [("csrc/a.h", "1"), ("csrc/b/c.cu", ""), ("xla_ffi/d.cc", "2"), ("csrc/b/c.cu", "3")]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(gpu_log.sources_hash(tmp_path))
    assert len(set(hashes)) == len(hashes)
    (tmp_path / "csrc/b/c.cu").write_text("// Words.\n\n3")
    assert gpu_log.sources_hash(tmp_path) == hashes[-1]


def test_hash_of_collectives_leaves_out_attention(tmp_path: Path) -> None:
    def hashed(name: str, text: str) -> dict[str, str]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return gpu_log.hashes(tmp_path)

    first = found = hashed("csrc/collectives/a.cu", "1")
    handlers = ("xla_ffi/attention_cuda.h", "xla_ffi/module_cuda.cc")
    for name in ("csrc/attention/b.cu", *handlers, "cmake/sources_hash.py"):
        found = hashed(name, "2")
        assert found["collectives_sources"] == first["collectives_sources"]
        assert found["sources"] != first["sources"]
    for name in ("csrc/common/d.h", "xla_ffi/communicator.cc", "csrc/collectives/a.cu", "cmake/nvcc.cmake"):
        before, found = found, hashed(name, "3")
        assert found["collectives_sources"] != before["collectives_sources"]
