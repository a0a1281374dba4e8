"""Runs the tests of groups of ranks in several processes, which share the GPUs that there are.

    python -m tests.share_gpus RANKS [--each 1] [--hosts 1] [--pool PART] [--seconds 1800] [--log PATH]
                               [arguments of pytest]

It is for machines with fewer GPUs than ranks, and shows that results are right, not that they are fast, for a
GPU turns from one process to the next every few milliseconds (10,000 calls of four ranks take four minutes).
NCCL allows it from version 2.30 on. By default the tests of sharded attention, of the collectives and of
context_attention run that take all of the ranks. The first failure ends the run: the ranks would no longer be
at the same place.

Each process has one rank, or --each of them, on as many GPUs. With --hosts the ranks believe to be on so many
hosts (see tests/hosts.py, which needs the rights of root): 2 --hosts 2, 4 --hosts 2 and 4 --hosts 4 are 2
hosts of one rank, 2 of two and 4 of one. Tests of what takes one host are skipped then.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import gpu_log

from .collectives.memory import staging_bytes
from .launcher import launch, leave_memory_to_processes

PLACES = "tests/attention/test_gpu_sharding.py tests/collectives tests/context"
OPTIONS = (
    *("-m", "gpu", "-v", "-x", "--durations=10", f"--override-ini=testpaths={PLACES}"),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-p", "no:faulthandler"),  # which would stop the one that says where a rank hangs
)


class Passed:
    """A plugin of pytest that counts the tests that passed, and notes the most bytes of staging buffers."""

    def __init__(self) -> None:
        self.count = self.staging_bytes = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed
        self.staging_bytes = max(self.staging_bytes, staging_bytes())


def run_tests(arguments: Sequence[str], log: Path) -> None:
    """Runs tests in one rank; the first one writes the log."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of another run that this may be part of
    passed = Passed()
    recorder = [gpu_log.Recorder(log)] if jax.process_index() == 0 else []
    failed = pytest.main([*OPTIONS, *arguments], plugins=[passed, *recorder])
    if failed or passed.count == 0:
        raise SystemExit(failed or f"no test takes {jax.device_count()} ranks here")
    if recorder and log.exists():
        log.write_text(json.dumps({"staging_bytes": passed.staging_bytes} | json.loads(log.read_text())))


def save(recorded: Path, log: Path, **about: Any) -> None:
    """Writes a log without the tests that were skipped, which are for other numbers of ranks."""
    if not recorded.exists():
        raise SystemExit("there is nothing to log, for the reason printed above")
    saved = json.loads(recorded.read_text())
    tests = {name: outcome for name, outcome in saved.pop("tests").items() if outcome != "skipped"}
    saved |= {"gpus": len(jax.devices())} | about | {"tests": tests}
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(json.dumps(saved, indent=1) + "\n")


def main(given: Sequence[str] | None = None) -> None:
    """Runs the tests. Fails, and leaves the output of all ranks, if one failed anywhere or none passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--each", type=int, default=1, metavar="RANKS", help="that a process has")
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks believe to be on")
    parser.add_argument("--pool", type=float, help="part of a GPU's memory that a rank takes in advance")
    parser.add_argument("--seconds", type=float, default=1800, help="until all are killed")
    parser.add_argument("--log", type=Path, metavar="PATH", help="where to write which tests passed")
    arguments, others = parser.parse_known_args(given)
    if arguments.each < 1 or arguments.ranks % arguments.each:
        parser.error(f"processes of {arguments.each} ranks do not divide {arguments.ranks} ranks")
    folder = Path(tempfile.mkdtemp(prefix="jaxmagi-ranks-"))
    recorded = folder / "log.json"
    about = {"hosts": arguments.hosts, "pool": arguments.pool}
    options = {"processes": arguments.ranks // arguments.each, "devices_each": arguments.each, **about}
    logs = launch(run_tests, others, recorded, directory=folder, timeout=arguments.seconds, **options)
    print(logs[0])
    if arguments.log:
        save(recorded, arguments.log, ranks=arguments.ranks, each=arguments.each, **about)
    shutil.rmtree(folder)


if __name__ == "__main__":
    leave_memory_to_processes()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as for other tests on GPUs
    main()
