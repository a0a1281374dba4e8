"""Ranks of one machine that believe to be on several hosts, on the CPU."""

import os
import socket
import time
from pathlib import Path

import jax
import pytest

from . import hosts, launcher
from .collectives.groups import Group, require_hosts
from .collectives.test_gpu_hosts import check_bits
from .launcher import Launch, RankFailed


def check_two_hosts(network: hosts.Network) -> None:
    """Each rank is on a host of its own, which NCCL may not know, and rows go from one to the other."""
    assert ("NCCL_HOSTID" in os.environ) == (network == "memory")
    assert hosts.count() == jax.process_count() == 2
    assert socket.gethostname() == hosts.name_of(jax.process_index())
    check_bits(Group("xla", 2), rounds=6)


def end_in_turns() -> None:
    """The last rank fails at once, and all others later."""
    if jax.process_index() < jax.process_count() - 1:
        time.sleep(launcher.GRACE + 1)
    print(f"{socket.gethostname()} fails", flush=True)
    os._exit(3)


@pytest.mark.parametrize("network", ["sockets", "memory"])
def test_two_hosts(network: hosts.Network, launch: Launch) -> None:
    require_hosts(2, 2)
    before = socket.gethostname()
    launch(check_two_hosts, network, processes=2, hosts=2, network=network)
    assert socket.gethostname() == before


def test_all_ranks_may_come_to_their_end(launch: Launch) -> None:
    """Three ranks on three hosts: what they print, and the order in which they end."""
    require_hosts(3, 3)
    with pytest.raises(RankFailed, match="rank 2: exit code 3") as failure:
        launch(end_in_turns, processes=3, hosts=3, grace=30)
    assert f"{hosts.name_of(2)} fails" in failure.value.logs[2]
    first, *_, last = failure.value.ends
    assert first is not None and last is not None and last < first


def test_hosts_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 hosts do not divide 3 processes"):
        launcher.launch(check_two_hosts, "sockets", processes=3, hosts=2, directory=tmp_path)
    monkeypatch.setattr(launcher, "why_not", lambda: "not permitted")
    with pytest.raises(NotImplementedError, match="this machine cannot have 2 hosts: not permitted"):
        launcher.launch(check_two_hosts, "sockets", processes=2, hosts=2, directory=tmp_path)
