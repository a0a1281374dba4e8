"""Ranks end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .launcher import ROOT, launch

SECONDS = 60.0  # for a rank to start, or to end


def say_who_and_wait(path: Path) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)


def launch_one(folder: str) -> None:
    launch(say_who_and_wait, Path(folder) / "rank", processes=1, directory=Path(folder))


def has_ended(pid: int) -> bool:
    """Returns whether a process is gone, or nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    program = "import sys; from tests.test_launcher import launch_one; launch_one(sys.argv[1])"
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    try:
        wait_until((tmp_path / "rank").exists, "the rank has not started")
    finally:
        launcher.kill()
        launcher.wait()
    pid = int((tmp_path / "rank").read_text())
    try:
        wait_until(lambda: has_ended(pid), f"rank {pid} is still there")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
