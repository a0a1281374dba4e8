"""The collectives between processes, one GPU each; and on the CPU."""

import jax
import pytest

from ..launcher import Launch
from .conftest import require_devices
from .groups import Group, Implementation
from .test_gpu_patterns import check_patterns
from .test_gpu_soak import CALLS, check_soak
from .test_gpu_transforms import check_scan_and_remat, check_transposes, check_vmap


def everyone(implementation: Implementation, ranks_per_host: int | None = None) -> Group:
    """A group of all ranks, of which this process has one."""
    assert jax.process_count() == jax.device_count()
    return Group(implementation, jax.device_count(), ranks_per_host=ranks_per_host)


def check_one(implementation: Implementation) -> None:
    check_transposes(everyone(implementation))


def check_all() -> None:
    groups = [everyone("native"), everyone("nccl"), everyone(None, ranks_per_host=jax.device_count() // 2)]
    for group in groups:
        check_patterns(group, rounds=10)
        check_transposes(group)
    for group in groups[:2]:
        check_vmap(group)
        check_scan_and_remat(group)


def soak(implementation: Implementation) -> None:
    check_soak(everyone(implementation), CALLS)


def test_two_processes_on_the_cpu(launch: Launch) -> None:
    launch(check_one, "xla", processes=2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_processes(size: int, launch: Launch) -> None:
    require_devices(size)
    launch(check_all, processes=size, timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["native", "nccl"])
def test_soak_of_processes(implementation: Implementation, launch: Launch) -> None:
    """Of as many as there are GPUs for, four at most."""
    require_devices(2)
    launch(soak, implementation, processes=4 if len(jax.devices()) >= 4 else 2, timeout=120)
