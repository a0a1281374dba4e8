"""The log of the GPU tests is written by whole runs alone, and refused where it does not fit the tree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_log

TESTS = {"tests/a.py::one": "passed", "tests/a.py::two[x]": "passed"}
PROJECT = {
    "pytest.ini": "[pytest]\ntestpaths = tests\nmarkers = gpu",
    "tests/conftest.py": """
import jax
from benchmarks import gpu_log
jax.default_backend = lambda: "gpu"
gpu_log.gpu_environment = lambda: {"gpu": "a stand-in"}
pytest_addoption, pytest_configure = gpu_log.add_option, gpu_log.record
""",
    "tests/test_some.py": """
import pytest
pytestmark = pytest.mark.gpu
def test_bad(): assert False
@pytest.mark.parametrize("x", [1, 2])
def test_good(x): pass
def test_skipped(): pytest.skip()
@pytest.fixture
def broken(): yield; raise RuntimeError
def test_broken_tear_down(broken): pass
""",
}
ALL_TESTS = {
    "test_bad": "failed",
    "test_good[1]": "passed",
    "test_good[2]": "passed",
    "test_skipped": "skipped",
    "test_broken_tear_down": "failed",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a few tests, and a stand-in for the GPU."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "writes"),
    [
        ("-m gpu", True),
        ("-m gpu tests/test_some.py", False),
        ("-m gpu -k good", False),
        ("-m gpu -x", False),
        ("-m gpu --collect-only", False),
        ("", False),
    ],
)
def test_only_whole_runs_write(project: Path, arguments: str, writes: bool) -> None:
    log = project / "out" / "log.json"
    command = [sys.executable, "-m", "pytest", "-q", f"--gpu-log={log}", *arguments.split()]
    environment = os.environ | {"PYTHONPATH": str(gpu_log.ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert log.exists() == writes, run.stdout + run.stderr
    if writes:
        written = json.loads(log.read_text())
        assert written["tests"] == {f"tests/test_some.py::{name}": x for name, x in ALL_TESTS.items()}
        assert (written["sources"], written["gpu"]) == (gpu_log.sources_hash(), "a stand-in")


def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: dict[str, object] | None) -> None:
    """``--check`` with this log committed, in a tree with `TESTS`."""
    if log is not None:
        (tmp_path / "log.json").write_text(json.dumps({"gpu": "x", "date": "y"} | log))
    monkeypatch.setattr(gpu_log, "LOG", tmp_path / "log.json")
    monkeypatch.setattr(gpu_log, "collect", lambda: list(TESTS))
    monkeypatch.setattr(sys, "argv", ["gpu_log", "--check"])
    gpu_log.main()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": "0" * 64}, "the log is of sources 000000000000"),
        ({"tests": TESTS | {"tests/a.py::one": "failed"}}, r"tests/a.py::one: failed"),
        ({"tests": TESTS | {"tests/a.py::one": "skipped"}}, r"tests/a.py::one: skipped"),
        ({"tests": TESTS | {"tests/gone.py::three": "failed"}}, r"tests/gone.py::three: failed"),
        ({"tests": {"tests/a.py::one": "passed"}}, r"tests/a.py::two\[x\]: not in the log"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(SystemExit, match=message) as exit:
        check(monkeypatch, tmp_path, {"sources": gpu_log.sources_hash(), "tests": TESTS} | change)
    assert exit.value.code != 0


def test_no_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no"):
        check(monkeypatch, tmp_path, None)


def test_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(monkeypatch, tmp_path, {"sources": gpu_log.sources_hash(), "tests": TESTS})
    assert "2 tests passed on x, y" in capsys.readouterr().out


def test_hash_covers_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, text in [("csrc/a.h", "1"), ("csrc/b/c.cu", ""), ("xla_ffi/d.cc", "2"), ("csrc/b/c.cu", "3")]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(gpu_log.sources_hash(tmp_path))
    assert len(set(hashes)) == len(hashes)
    (tmp_path / "csrc" / "__pycache__").mkdir()
    (tmp_path / "csrc" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "README.md").write_text("")
    assert gpu_log.sources_hash(tmp_path) == hashes[-1]


def test_collects_this_tree() -> None:
    assert "tests/context/test_gpu.py::test_all_gpus[1]" in gpu_log.collect()
