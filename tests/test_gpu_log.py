"""Logs of GPU tests are written by whole runs or as told, and refused where they do not fit the tree."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks import gpu_log
from jaxmagi import _native

from . import gpu_sharing

TESTS = {"tests/a.py::one": "passed", "tests/a.py::two[x]": "passed"}
PROJECT = {
    "pytest.ini": "[pytest]\ntestpaths = tests\nmarkers = gpu",
    "tests/conftest.py": """
import os
import sys
from pathlib import Path
import jax
from benchmarks import gpu_log
from tests import gpu_sharing
gpu_log.LOG = Path(os.environ["LOG"])
jax.default_backend = lambda: "gpu"
gpu_log.gpu_environment = lambda: {"gpu": "a stand-in"}
gpu_log.built_hash = lambda: os.environ.get("BUILT") or gpu_log.sources_hash()
pytest_addoption = gpu_log.add_option
def pytest_configure(config): gpu_sharing.prepare(config), gpu_log.prepare(config)
if "no:xdist" not in sys.argv:
    pytest_xdist_make_scheduler = gpu_sharing.make_scheduler
""",
    "tests/collectives/test_together.py": """
import os
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("x", [1, 2])
def test_process(x):
    with open("processes", "a") as file: print(os.getpid(), file=file)
""",
    "tests/test_some.py": """
import os
import pytest
pytestmark = pytest.mark.gpu
def test_bad(): assert False
@pytest.mark.parametrize("x", [1, 2])
def test_good(x): pass
def test_shares_the_gpu():
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") != "false"
    assert preallocates == ("PYTEST_XDIST_WORKER" not in os.environ)
def test_skipped(): pytest.skip()
@pytest.fixture
def broken(): yield; raise RuntimeError
def test_broken_tear_down(broken): pass
""",
}
ALL_TESTS = {
    "tests/collectives/test_together.py::test_process[1]": "passed",
    "tests/collectives/test_together.py::test_process[2]": "passed",
    "tests/test_some.py::test_bad": "failed",
    "tests/test_some.py::test_good[1]": "passed",
    "tests/test_some.py::test_good[2]": "passed",
    "tests/test_some.py::test_shares_the_gpu": "passed",
    "tests/test_some.py::test_skipped": "skipped",
    "tests/test_some.py::test_broken_tear_down": "failed",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a few tests, and a stand-in for the GPU."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run_project(project: Path, arguments: str, **environment: str) -> tuple[Path, str]:
    """The path for the log of a whole run, and what was printed."""
    log = project / "out" / "log.json"
    command = [sys.executable, "-m", "pytest", "-q", *arguments.split()]
    environment |= {"PYTHONPATH": str(gpu_log.ROOT), "JAX_PLATFORMS": "cpu", "LOG": str(log)}
    outside = gpu_sharing.environment()
    run = subprocess.run(command, cwd=project, env=outside | environment, capture_output=True, text=True)
    return log, run.stdout + run.stderr


@pytest.mark.parametrize("arguments", ["-m gpu -n 2", "-m gpu -p no:xdist"])
def test_whole_run_writes(project: Path, arguments: str) -> None:
    """The same log, however many processes share the tests."""
    log, printed = run_project(project, arguments)
    assert f"GPU log written to {log}" in printed
    written = json.loads(log.read_text())
    assert list(written["tests"].items()) == sorted(ALL_TESTS.items())
    assert (written["sources"], written["gpu"]) == (gpu_log.sources_hash(), "a stand-in")
    first, second = (project / "processes").read_text().split()
    assert first == second, "tests that need whole GPUs ran in two processes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m gpu -k good", ""),
        ("-m gpu -x", "no GPU log: 3 of 8 tests ran"),
    ],
)
def test_part_of_a_run_does_not_write(project: Path, arguments: str, message: str) -> None:
    log, printed = run_project(project, arguments)
    assert not log.exists()
    assert message in printed


def test_part_of_a_run_writes_as_told(project: Path) -> None:
    log, _ = run_project(project, "-m gpu -k good --gpu-log=some/part.json")
    assert not log.exists()
    written = json.loads((project / "some" / "part.json").read_text())
    assert written["tests"] == {name: ALL_TESTS[name] for name in ALL_TESTS if "good" in name}


def test_ranks_of_one_program_do_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    config: Any = SimpleNamespace()  # of which anything more would be asked before a log is written
    gpu_log.prepare(config)


def test_module_of_other_sources(project: Path) -> None:
    log, printed = run_project(project, "-m gpu", BUILT="0123")
    assert not log.exists()
    assert "no GPU log: jaxmagi._cuda is built from sources 0123" in printed


def test_module_says_what_it_was_built_from() -> None:
    """Not that it is the tree: sources may have changed since."""
    if _native.extension("cuda") is None:
        pytest.skip("jaxmagi was built without CUDA")
    assert re.fullmatch("[0-9a-f]{64}", gpu_log.built_hash() or "")


def check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logs: list[dict[str, object]], *options: str
) -> None:
    """``--check`` with these logs, in a tree with `TESTS`."""
    for i, log in enumerate(logs):
        (tmp_path / f"log-{i}.json").write_text(json.dumps({"gpu": "x", "gpus": 2, "date": "y"} | log))
    monkeypatch.setattr(gpu_log, "LOG", tmp_path / "log.json")
    monkeypatch.setattr(gpu_log, "collect", lambda: list(TESTS))
    monkeypatch.setattr(sys, "argv", ["gpu_log", "--check", *options])
    gpu_log.main()


def fresh(tests: dict[str, str]) -> dict[str, object]:
    return {"sources": gpu_log.sources_hash(), "tests": tests}


OTHER_SOURCES: dict[str, object] = {"sources": "0" * 64, "tests": TESTS}


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        (
            [OTHER_SOURCES],
            r"tests/a.py::one: not in the log\n.*\n(?s:.*)log-0.json is of sources 000000000000",
        ),
        ([fresh(TESTS), OTHER_SOURCES], "log-1.json is of sources 000000000000"),
        ([fresh(TESTS | {"tests/a.py::one": "failed"})], r"tests/a.py::one: failed"),
        ([fresh(TESTS), fresh({"tests/a.py::one": "failed"})], r"tests/a.py::one: failed"),
        (
            [fresh(TESTS | {"tests/a.py::one": "skipped"})],
            r"tests/a.py::one: skipped on machines with \[2\] GPUs",
        ),
        ([fresh(TESTS | {"tests/gone.py::three": "failed"})], r"tests/gone.py::three: failed"),
        ([fresh({"tests/a.py::one": "passed"})], r"tests/a.py::two\[x\]: not in the log"),
        ([], "there is no"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logs: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(SystemExit, match=message) as exit:
        check(monkeypatch, tmp_path, logs)
    assert exit.value.code != 0


def test_uncommitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    with pytest.raises(SystemExit, match="is not committed"):
        check(monkeypatch, tmp_path, [fresh(TESTS)])
    identity = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false"]
    for command in (["add", "log-0.json"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    check(monkeypatch, tmp_path, [fresh(TESTS)])


def test_stale_may_be_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(monkeypatch, tmp_path, [OTHER_SOURCES], "--allow-stale")
    assert "warning: log-0.json is of sources 000000000000" in capsys.readouterr().out
    check(monkeypatch, tmp_path, [fresh({"tests/a.py::one": "skipped"})], "--allow-stale")
    printed = capsys.readouterr().out
    assert "warning: tests/a.py::one: skipped" in printed and "0 tests passed" in printed
    with pytest.raises(SystemExit, match=r"tests/a.py::one: failed"):
        check(
            monkeypatch, tmp_path, [OTHER_SOURCES | {"tests": {"tests/a.py::one": "failed"}}], "--allow-stale"
        )


def test_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where each test passed in one of several runs, and was skipped in another."""
    check(monkeypatch, tmp_path, [fresh(TESTS)])
    assert "log-0.json: 2 tests passed on x, y" in capsys.readouterr().out
    one, two = TESTS
    check(monkeypatch, tmp_path, [fresh({one: "passed", two: "skipped"}), fresh({two: "passed"})])
    assert "log-1.json: 1 tests passed on x, y" in capsys.readouterr().out


def test_hash_covers_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, text in [
        ("CMakeLists.txt", "0"),
        ("cmake/flags.in", "1"),
        ("csrc/a.h", "1"),
        ("csrc/b/c.cu", ""),
        ("xla_ffi/d.cc", "2"),
        ("csrc/b/c.cu", "3"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(gpu_log.sources_hash(tmp_path))
    assert len(set(hashes)) == len(hashes)
    (tmp_path / "csrc" / "__pycache__").mkdir()
    (tmp_path / "csrc" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "README.md").write_text("")
    assert gpu_log.sources_hash(tmp_path) == hashes[-1]


def test_header_is_kept_where_it_is_right(tmp_path: Path) -> None:
    """So that a build without changes compiles nothing."""
    header = tmp_path / "sources.h"
    command = [sys.executable, gpu_log.ROOT / "cmake" / "sources_hash.py", header]
    subprocess.run(command, check=True)
    os.utime(header, (0, 0))
    subprocess.run(command, check=True)
    assert header.stat().st_mtime == 0


def test_collects_this_tree() -> None:
    assert "tests/context/test_gpu.py::test_small_masks[1-1]" in gpu_log.collect()
