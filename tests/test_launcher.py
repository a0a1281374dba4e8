"""What the launcher of several processes says of failures, and that it leaves nothing running."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from .launcher import Launch, RankFailed, RanksTimedOut, reserved_port


def fail_on_rank_1() -> None:
    if jax.process_index() == 1:
        raise RuntimeError("rank 1 has had enough")
    time.sleep(60)


def hang_with_a_child(pid_file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pid_file.write_text(str(child.pid))
    time.sleep(60)


def is_running(pid: int) -> bool:
    """Also what has been killed is there until its parent reaps it."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_failing_rank_fails_all(launch: Launch) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1: exit code 1\n(.*\n)*RuntimeError: rank 1 has had enough"):
        launch(fail_on_rank_1, processes=2)
    assert time.monotonic() - begin < 30


def test_hanging_rank_is_killed_with_its_children(launch: Launch, tmp_path: Path) -> None:
    begin, pid_file = time.monotonic(), tmp_path / "pid"
    with pytest.raises(RanksTimedOut, match=r"1 ranks ended within 10 s\n(.*\n)*.*hang_with_a_child"):
        launch(hang_with_a_child, pid_file, processes=1, timeout=10)
    assert time.monotonic() - begin < 15
    assert not is_running(int(pid_file.read_text()))


def test_ranks_keep_their_port() -> None:
    with reserved_port() as port, socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", port))
