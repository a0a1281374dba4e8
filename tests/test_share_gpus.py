"""Tests in processes that share GPUs: what runs there, what is a failure, and what is kept of it."""

import json
import re
import tempfile
from pathlib import Path

import jax
import pytest

from . import share_gpus
from .collectives.groups import require_processes
from .launcher import RankFailed, RanksTimedOut, environment_of, launch, own_devices

TESTS = """
import time
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.collectives.groups import Group, require_devices


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_all_ranks(count):
    require_devices(count)
    total = Group("xla", 2).program(lambda x: jax.lax.psum(x, "context"), P("context"))
    result = total(Group("xla", 2).shard(np.arange(2, dtype=np.float32)))
    assert [float(shard.data[0]) for shard in result.addressable_shards] == [1]


def test_of_processes(launch):
    raise AssertionError("not in such a process")


def test_bad_on_rank_1():
    assert jax.process_index() != 1


def test_hanging():
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where pytest cleans up: of a run that failed the output stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def in_ranks(folder: Path, tests: list[str], *options: str) -> None:
    """Two, on the CPU; pytest has a time limit of its own, which is longer."""
    file = folder / "test_two.py"
    file.write_text(TESTS)
    plugins = ("-p", "tests.conftest", "--override-ini=timeout=90")
    share_gpus.main(["2", *plugins, "-m", "not gpu", *options, *(f"{file}::{test}" for test in tests)])


def test_those_that_take_all_ranks_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_ranks(tmp_path, ["test_of_all_ranks", "test_of_processes"])
    output = capsys.readouterr().out
    for outcome in (
        r"test_of_all_ranks\[1\] SKIPPED",
        r"test_of_all_ranks\[2\] PASSED",
        r"test_of_all_ranks\[3\] SKIPPED",
        r"test_of_processes SKIPPED",
    ):
        assert re.search(outcome, output)


def test_failure_on_one_rank_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: exit code 1\n"):
        in_ranks(tmp_path, ["test_bad_on_rank_1", "test_hanging"], "--seconds=60")


def test_nothing_but_skipped_tests_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="no test takes 2 ranks here"):
        in_ranks(tmp_path, ["test_of_processes"])


def test_log_says_where_a_rank_hangs(tmp_path: Path) -> None:
    with pytest.raises(RanksTimedOut, match=r"within 12 s\n(.*\n)*.* in test_hanging\n"):
        in_ranks(tmp_path, ["test_hanging"], "--seconds=12")


def test_collectives_of_three_processes_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Their derivatives, batches and loops."""
    share_gpus.main(["3", "-m", "not gpu", "tests/collectives/test_gpu_transforms.py"])
    assert " 3 passed" in capsys.readouterr().out


def test_log_names_machine_and_ranks(tmp_path: Path) -> None:
    recorded, log = tmp_path / "recorded.json", tmp_path / "new" / "log.json"
    recorded.write_text(json.dumps({"gpus": 4, "sources": "abc", "tests": {"a": "passed", "b": "skipped"}}))
    share_gpus.save(recorded, log, ranks=4, pool=None)
    about = {"gpus": len(jax.devices()), "ranks": 4, "pool": None}
    assert json.loads(log.read_text()) == {"sources": "abc", **about, "tests": {"a": "passed"}}


def test_no_log_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to log"):
        share_gpus.save(tmp_path / "recorded.json", tmp_path / "log.json", ranks=4)
    assert not (tmp_path / "log.json").exists()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process believes to have."""
    two = jax.devices()[:2]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: two)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)


def test_ranks_share_gpus_only_where_they_are_too_few(two_gpus: None, tmp_path: Path) -> None:
    assert [own_devices(rank, 1) for rank in range(4)] == ["0", "1", "0", "1"]
    assert [own_devices(rank, 2) for rank in range(2)] == ["0,1", "0,1"]
    for processes, devices_each, shares in ((2, 1, False), (1, 2, False), (3, 1, True), (2, 2, True)):
        environment = environment_of(processes, devices_each, pool=None)
        assert environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == ("1" if shares else None)
    with pytest.raises(ValueError, match="cannot have 3 GPUs, for there are 2"):
        launch(print, processes=1, devices_each=3, directory=tmp_path)


def test_tests_of_processes_share_gpus_where_they_may(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_processes(2)
    with pytest.raises(pytest.skip.Exception, match="needs 4 devices, and there are 2"):
        require_processes(4)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    require_processes(4)
    require_processes(2, 2)
    with pytest.raises(pytest.skip.Exception, match="needs 3 devices, and there are 2"):
        require_processes(1, 3)
