"""The collectives between processes, one GPU each; and on the CPU."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ..launcher import Launch
from .groups import Group, Implementation, assert_equal, require_devices, require_processes
from .harness import AXIS, normal
from .routes import INPUT_ROWS, random_transfer
from .test_gpu_patterns import check_patterns
from .test_gpu_soak import CALLS, check_soak
from .test_gpu_transforms import check_scan_and_remat, check_transposes, check_vmap


def everyone(implementation: Implementation, ranks_per_host: int | None = None) -> Group:
    """A group of all ranks, of which this process has one."""
    assert jax.process_count() == jax.device_count()
    return Group(implementation, jax.device_count(), ranks_per_host=ranks_per_host)


def check_cast(implementation: Implementation) -> None:
    """Against the simulation."""
    group = everyone(implementation)
    rng = np.random.default_rng(0)
    transfer, x = random_transfer(rng, group.size), normal(rng, group.size, INPUT_ROWS, 3)
    run = group.program(lambda x, spec: group.cast(x[0], spec)[None], (P(AXIS), P()))
    assert_equal(run(group.shard(x), group.replicate(transfer.spec)), transfer.cast(x))


def check_all() -> None:
    size = jax.device_count()
    hosts = sorted({size // 2, size - 1})  # equal ones, and with one rank alone
    groups = [everyone("native"), everyone("nccl"), *(everyone(None, ranks_per_host=n) for n in hosts)]
    for group in groups:
        check_patterns(group, rounds=10)
        check_transposes(group)
    for group in groups[:2]:
        check_vmap(group)
        check_scan_and_remat(group)


def soak(implementation: Implementation) -> None:
    check_soak(everyone(implementation), CALLS)


def test_two_processes_on_the_cpu(launch: Launch) -> None:
    launch(check_cast, "xla", processes=2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_processes(size: int, launch: Launch) -> None:
    require_processes(size)
    launch(check_all, processes=size, timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["native", "nccl"])
def test_soak_of_processes(implementation: Implementation, launch: Launch) -> None:
    """Of as many as there are GPUs for, four at most."""
    require_devices(2)
    launch(soak, implementation, processes=4 if len(jax.devices()) >= 4 else 2, timeout=120)
