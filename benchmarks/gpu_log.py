"""The log of the GPU tests: which of them passed, where, and for which kernels.

    python -m pytest -m gpu [--gpu-log PATH]     # on a machine with a GPU, all of tests/: writes the log
    python -m benchmarks.gpu_log --check         # anywhere: exits 0 where the committed log is still true

The log is true where every GPU test of the tree passed, and the kernels' sources are those that were tested.
Only a whole run writes it: one of a part of the tests (a path, -k, --lf, -x that hit) would hold less.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import backend

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "gpu-tests.json"
SOURCES = ("csrc", "xla_ffi")
_WORSE = ("passed", "skipped", "failed")


def sources_hash(root: Path = ROOT) -> str:
    """Sha256 over the names and contents of all files of `SOURCES`, but for what Python compiles."""
    files = (path for folder in SOURCES for path in (root / folder).rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in sorted(path for path in files if "__pycache__" not in path.parts):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def gpu_environment() -> dict[str, Any]:
    """The GPUs and the software of this process."""
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    installed = {x.metadata["Name"]: x.version for x in importlib.metadata.distributions()}
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": jax.devices()[0].device_kind,
        "gpus": len(jax.devices()),
        "driver": _driver(),
        "platform": " ".join(backend.get_backend().platform_version.split()),
        **{name: installed[name] for name in packages if name in installed},
    }


class Recorder:
    """A plugin of pytest that writes the log at the end of a whole run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Keeps the worst of set-up, call and tear-down."""
        known = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(known, report.outcome, key=_WORSE.index)

    def pytest_sessionfinish(self, session: "pytest.Session") -> None:
        if len(self.outcomes) != len(session.items):
            return  # interrupted
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = {"sources": sources_hash(), **gpu_environment(), "tests": self.outcomes}
        self.path.write_text(json.dumps(log, indent=1) + "\n")


def add_option(parser: "pytest.Parser") -> None:
    """Adds --gpu-log."""
    parser.addoption("--gpu-log", type=Path, default=LOG, metavar="PATH", help="where -m gpu writes its log")


def _is_whole(config: "pytest.Config") -> bool:
    """Whether all the GPU tests are to run: nothing but ``-m gpu`` narrows them down."""
    narrowing = ("keyword", "collectonly", "lf", "deselect", "ignore", "ignore_glob")
    tests = {str(config.rootpath / path) for path in config.getini("testpaths")}
    return (
        config.option.markexpr == "gpu"
        and not any(getattr(config.option, name, None) for name in narrowing)
        and {str(Path(path).absolute()) for path in config.args} == tests
    )


def record(config: "pytest.Config") -> None:
    """Has the run write the log if it is one of all the GPU tests, on a GPU."""
    if _is_whole(config) and jax.default_backend() == "gpu":
        config.pluginmanager.register(Recorder(config.option.gpu_log))


def collect() -> list[str]:
    """The ids of the GPU tests of this tree."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in run.stdout.splitlines() if "::" in line]
    if run.returncode != 0 or not tests:
        raise RuntimeError(f"pytest could not collect the GPU tests:\n{run.stdout}{run.stderr}")
    return tests


def problems(log: dict[str, Any], tests: Iterable[str], sources: str) -> list[str]:
    """Why a log does not show that these tests pass with these sources; empty if it does."""
    found = []
    if log["sources"] != sources:
        found.append(
            f"the log is of sources {log['sources'][:12]}, but {' and '.join(SOURCES)} are {sources[:12]}"
        )
    found += [f"{name}: not in the log" for name in tests if name not in log["tests"]]
    found += [f"{name}: {outcome}" for name, outcome in log["tests"].items() if outcome != "passed"]
    return found


def main() -> None:
    """Says what is wrong with the committed log, and exits with 1 if something is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", required=True, help="check the committed log")
    parser.parse_args()
    if not LOG.exists():
        sys.exit(f"there is no {LOG}")
    log = json.loads(LOG.read_text())
    found = problems(log, collect(), sources_hash())
    if found:
        sys.exit("\n".join(found))
    print(f"{len(log['tests'])} tests passed on {log['gpu']}, {log['date']}")


if __name__ == "__main__":
    main()
