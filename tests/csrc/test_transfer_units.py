"""In what order transfers run, and that a process does not wait for others forever; without XLA and NCCL."""

import signal
import subprocess
from pathlib import Path

import pytest

from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return build("transfer_units", ["collectives/transfer_order.cc", "collectives/watchdog.cc"], tmp_path)


def test_units(program: Path) -> None:
    assert_all_ok(succeed(program))
    absent = subprocess.run([program, "a rank is absent"], capture_output=True, text=True, timeout=30)
    assert absent.returncode == -signal.SIGABRT
    assert "jaxmagi: rank 0 of 2 waited for 200 ms until NCCL had come together" in absent.stderr
