"""Writes and checks the logs of the GPU tests: which of them passed, where, and for which kernels.

    python -m pytest -m gpu [-n 4] [--gpu-log PATH]        # on a machine with a GPU: writes a log
    python -m benchmarks.gpu_log --check [--allow-stale]   # anywhere: exits 0 where the logs are still true

Logs are gpu-tests*.json, and true where every GPU test of the tree passed in one of them, with the kernels'
sources as they are; for the tests of the collectives it is enough that the collectives' sources are. A run
writes a log if it comes to its end (-x may hit), with a module that was built from the sources as they are:
the module carries their hash. A run of a part of the tests (a path, -k, --lf) writes only where --gpu-log
says: gpu-tests.json is of whole runs. --allow-stale only warns of logs of other sources or tests, and of
tests that were skipped: the machines may have had too few GPUs.
"""

import argparse
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from benchmarks._measure import built_hash, gpu_environment

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "gpu-tests.json"
COLLECTIVES = "tests/collectives/"  # the tests that need no kernels of attention
_WORSE = ("passed", "skipped", "failed")


def _hash_of(kind: str, root: Path) -> str:
    return runpy.run_path(str(ROOT / "cmake" / "sources_hash.py"))[kind](root)


def sources_hash(root: Path = ROOT) -> str:
    """Returns the hash of a tree's sources, as the build takes it."""
    return _hash_of("sources_hash", root)


def hashes(root: Path = ROOT) -> dict[str, str]:
    """Returns the hashes of a tree that a log has: of all sources, and of those of the collectives."""
    return {"sources": sources_hash(root), "collectives_sources": _hash_of("collectives_hash", root)}


class Recorder:
    """A plugin of pytest that writes a log at the end of a run.

    It finds out about the machine and the sources before the first test: an error there must not cost a
    finished run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.header = gpu_environment() | hashes()
        self.outcomes: dict[str, str] = {}
        self.verdict = ""
        if (built := built_hash()) != (tree := self.header["sources"]):
            sources = f"built from sources {built}, and the tree is {tree}"
            self.verdict = f"no GPU log: jaxmagi._cuda is {sources}; build it again"

    def pytest_report_header(self) -> str:
        """Says at the beginning that a run will write no log."""
        return self.verdict or f"GPU log: {self.path}"

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Keeps the worst of set-up, call and tear-down."""
        known = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(known, report.outcome, key=_WORSE.index)

    def pytest_sessionfinish(self, session: "pytest.Session") -> None:
        """Writes the log, unless the run was interrupted."""
        if self.verdict:
            return
        if len(self.outcomes) != session.testscollected:
            self.verdict = f"no GPU log: {len(self.outcomes)} of {session.testscollected} tests ran"
            return
        tests = dict(sorted(self.outcomes.items()))  # they end in any order where several run at a time
        self.path.write_text(json.dumps(self.header | {"tests": tests}, indent=1) + "\n")
        self.verdict = f"GPU log written to {self.path}"

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Says whether there is a log."""
        terminalreporter.write_line(self.verdict)


def add_option(parser: "pytest.Parser") -> None:
    """Adds --gpu-log."""
    parser.addoption(
        "--gpu-log", type=Path, metavar="PATH", help=f"where -m gpu writes its log; else {LOG.name}"
    )


def _is_whole(config: "pytest.Config") -> bool:
    """Returns whether all GPU tests are to run: nothing but ``-m gpu`` narrows them down."""
    narrowing = ("keyword", "lf", "deselect", "ignore", "ignore_glob")
    tests = {str(config.rootpath / path) for path in config.getini("testpaths")}
    return (
        not any(getattr(config.option, name, None) for name in narrowing)
        and {str(Path(path).absolute()) for path in config.args} == tests
    )


def prepare(config: "pytest.Config") -> None:
    """Has a run of GPU tests on a GPU write a log, if it is of all of them or told where to.

    It does nothing in the processes that pytest-xdist starts, and in the ranks of one program.
    """
    if hasattr(config, "workerinput") or jax.distributed.is_initialized():
        return
    if config.option.markexpr != "gpu" or config.option.collectonly:
        return
    path = config.option.gpu_log or (LOG if _is_whole(config) else None)
    if path and jax.default_backend() == "gpu":
        config.pluginmanager.register(Recorder(path))


def collect() -> list[str]:
    """Returns the ids of the GPU tests of this tree."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in run.stdout.splitlines() if "::" in line]
    if run.returncode != 0 or not tests:
        raise RuntimeError(f"pytest could not collect the GPU tests:\n{run.stdout}{run.stderr}")
    return tests


def is_uncommitted(path: Path) -> bool:
    """Returns whether git knows of changes to a file; False where there is no git."""
    if not shutil.which("git"):
        return False
    command = ["git", "status", "--porcelain", "--", str(path)]
    return bool(subprocess.run(command, cwd=path.parent, capture_output=True, text=True).stdout)


def read_logs() -> dict[Path, dict[str, Any]]:
    """Returns all logs by their paths."""
    return {path: json.loads(path.read_text()) for path in sorted(LOG.parent.glob(f"{LOG.stem}*.json"))}


def failures(logs: dict[Path, dict[str, Any]]) -> list[str]:
    """Returns the tests that failed in any of the logs."""
    outcomes = [outcome for log in logs.values() for outcome in log["tests"].items()]
    return [f"{name}: failed" for name, outcome in outcomes if outcome == "failed"]


def is_fresh(log: dict[str, Any], test: str, tree: dict[str, str]) -> bool:
    """Returns whether a log tells of a test with a tree's sources, given by their hashes."""
    same_collectives = log.get("collectives_sources") == tree["collectives_sources"]
    return log["sources"] == tree["sources"] or (test.startswith(COLLECTIVES) and same_collectives)


def staleness(logs: dict[Path, dict[str, Any]], tests: Iterable[str], tree: dict[str, str]) -> list[str]:
    """Returns why logs are not of all these tests, of a tree's sources, and committed; empty if they are."""

    def outcomes(name: str) -> dict[str | None, set[int]]:
        """Returns the numbers of GPUs of the machines with each outcome of a test."""
        found: dict[str | None, set[int]] = {}
        for log in logs.values():
            if is_fresh(log, name, tree):
                found.setdefault(log["tests"].get(name), set()).add(log["gpus"])
        return found

    found = []
    for name in tests:
        if "passed" not in (gpus := outcomes(name)):
            skipped = f"skipped on machines with {sorted(gpus.get('skipped', ()))} GPUs"
            found.append(f"{name}: {skipped if 'skipped' in gpus else 'not in the log'}")
    for path, log in logs.items():
        if old := [name for name in log["tests"] if not is_fresh(log, name, tree)]:
            sources = f"sources {log['sources'][:12]}, and the tree is {tree['sources'][:12]}"
            found.append(f"{path.name} is of {sources}: {len(old)} of {len(log['tests'])} tests")
        if is_uncommitted(path):
            found.append(f"{path} is not committed")
    return found


def main() -> None:
    """Says what is wrong with the committed logs, and exits with 1 if something is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", required=True, help="check the committed logs")
    parser.add_argument(
        "--allow-stale", action="store_true", help="only warn of other sources or tests, and of skipped ones"
    )
    arguments = parser.parse_args()
    logs = read_logs()
    if not logs:
        sys.exit(f"there is no {LOG}")
    failed, stale = failures(logs), staleness(logs, collect(), hashes())
    if failed or (stale and not arguments.allow_stale):
        sys.exit("\n".join(failed + stale))
    for line in stale:
        print(f"warning: {line}")
    for path, log in logs.items():
        passed = sum(outcome == "passed" for outcome in log["tests"].values())
        print(f"{path.name}: {passed} tests passed on {log['gpu']}, {log['date']}")


if __name__ == "__main__":
    main()
