"""Tests in processes that share GPUs fail where one of them fails or hangs, or where nothing has run."""

import tempfile
from pathlib import Path

import pytest

from . import share_gpus
from .launcher import RankFailed, RanksTimedOut

TESTS = """
import time
import jax
from tests.collectives.groups import require_devices

def test_of_three(): require_devices(3)
def test_bad_on_rank_1(): assert jax.process_index() != 1
def test_hanging(): time.sleep(100)
"""


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Has the output of a run that failed lie where pytest cleans up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("test", "seconds", "error", "message"),
    [
        ("test_bad_on_rank_1", 60, RankFailed, r"rank 1: exit code 1\n"),
        ("test_of_three", 60, RankFailed, "no test takes 2 ranks here"),
        ("test_hanging", 12, RanksTimedOut, r"within 12 s\n(.*\n)*.* in test_hanging\n"),
    ],
)
def test_failures(tmp_path: Path, test: str, seconds: int, error: type[Exception], message: str) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TESTS)
    options = ("-p", "tests.conftest", "--override-ini=timeout=90", "-m", "not gpu", f"--seconds={seconds}")
    with pytest.raises(error, match=message):
        share_gpus.main(["2", *options, f"{file}::{test}"])


def test_collectives_of_three_processes_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Their derivatives, batches and loops."""
    share_gpus.main(["3", "-m", "not gpu", "tests/collectives/test_gpu_transforms.py"])
    assert " 3 passed" in capsys.readouterr().out


def test_ranks_of_one_process_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    share_gpus.main(["3", "--each", "3", "-m", "not gpu", "tests/collectives/test_gpu_hosts.py"])
    assert " 2 passed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        share_gpus.main(["3", "--each", "2"])
    assert "processes of 2 ranks do not divide 3 ranks" in capsys.readouterr().err
