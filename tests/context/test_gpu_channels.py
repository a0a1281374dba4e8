"""Both passes where NCCL has many more CTAs than attention leaves multiprocessors to it."""

import re
import resource
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import CollectiveOptions, masks, plan_context

from ..collectives.groups import require_hosts, require_processes
from ..launcher import Launch
from . import harness
from .test_gpu import BF16_TOLERANCE

pytestmark = pytest.mark.gpu

LENGTH, HEADS, DIM = 8192, 8, 128
RANKS, CTAS = 2, 32
CALLS = 4
LOG = "nccl.log"
ENVIRONMENT = {
    "NCCL_MIN_CTAS": f"{CTAS}",
    "NCCL_MAX_CTAS": f"{CTAS}",
    "NCCL_NCHANNELS_PER_NET_PEER": f"{CTAS}",
    # NCCL gives a peer the channels of sends over the number of ranks, but for large messages.
    "NCCL_MIN_P2P_NCHANNELS": f"{RANKS * CTAS}",
    "NCCL_MAX_P2P_NCHANNELS": f"{RANKS * CTAS}",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV",
}
"""Settings by which each send and receive has so many CTAs. The log says how many channels there are."""


def allow_many_sockets() -> None:
    """Allows as many open files as there may be: each channel to another host has 32 sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_passes() -> None:
    """Solves a problem over NCCL as one GPU does, in several calls."""
    allow_many_sockets()
    mask = masks.causal(LENGTH)
    rng = np.random.default_rng(0)
    problem = harness.random_problem(
        rng, LENGTH, jnp.bfloat16, heads=HEADS, kv_heads=HEADS, dim=DIM, v_dim=DIM
    )
    plan, collectives = plan_context(mask, RANKS), CollectiveOptions(implementation="nccl")
    expected = harness.solve_alone(problem, mask)
    for _ in range(CALLS):
        solution = harness.solve_distributed(problem, plan, collectives=collectives)
        harness.check_solution(solution, expected, BF16_TOLERANCE)


def channels_of_peers(folder: Path) -> list[int]:
    """Returns how many channels ranks have for each peer, which NCCL tells each time that a rank connects."""
    texts = (path.read_text() for path in folder.glob(f"{LOG}*"))
    return [int(count) for text in texts for count in re.findall(r"(\d+) p2p channels per peer", text)]


@pytest.mark.parametrize("hosts", [1, RANKS])
def test_more_ctas_than_free_multiprocessors(
    hosts: int, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hosts == 1:
        require_processes(RANKS)
    else:
        require_hosts(RANKS, hosts)
    for name, value in (ENVIRONMENT | {"NCCL_DEBUG_FILE": f"{tmp_path / LOG}.%h.%p"}).items():
        monkeypatch.setenv(name, value)
    launch(check_passes, processes=RANKS, hosts=hosts, timeout=240)
    channels = channels_of_peers(tmp_path)
    assert len(channels) >= RANKS and max(channels) >= CTAS, channels
