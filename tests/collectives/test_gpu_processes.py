"""The collectives between processes, one GPU each; and on the CPU."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmagi
from jaxmagi import _native

from ..launcher import Launch
from .groups import Group, Implementation, assert_equal, require_devices, require_processes
from .harness import AXIS, normal
from .memory import pretend_memory_limit, staging_bytes
from .routes import INPUT_ROWS, random_transfer
from .test_gpu_constants import check_constants
from .test_gpu_patterns import check_patterns
from .test_gpu_soak import CALLS, check_soak
from .test_gpu_transforms import check_scan_and_remat, check_transposes, check_vmap

POOLS = (None, 0.05)  # memory as it goes, through staging buffers; and in advance, which processes share


def everyone(implementation: Implementation, ranks_per_host: int | None = None) -> Group:
    """A group of all ranks, of which this process has some."""
    assert jax.process_count() > 1
    return Group(implementation, jax.device_count(), ranks_per_host=ranks_per_host)


def check_first_cast(implementation: Implementation, without_pool: int | None) -> None:
    """Against the simulation; one process, if any, does not know the memory of its GPU as a pool."""
    group = everyone(implementation)
    rng = np.random.default_rng(0)
    transfer, x = random_transfer(rng, group.size), normal(rng, group.size, INPUT_ROWS, 3)
    operands = group.shard(x), group.replicate(transfer.spec)
    run = group.program(lambda x, spec: group.cast(x[0], spec)[None], (P(AXIS), P()))
    run = run.lower(*operands).compile()  # which tells the limits of memory; the call does no more
    if jax.process_index() == without_pool:
        pretend_memory_limit(0)
    assert_equal(run(*operands), transfer.cast(x))


def check_sharing(has_pool: bool) -> None:
    """Checks that no row is copied through a staging buffer where pools are shared."""
    about = jax.__version__, [device.memory_stats() for device in jax.local_devices()]
    assert _native.extension("cuda")
    assert (staging_bytes() == 0) == has_pool, about


def check_cast_and_sharing(has_pool: bool) -> None:
    check_first_cast("native", without_pool=None)
    check_sharing(has_pool)


def check_constants_and_sharing(has_pool: bool) -> None:
    """Constants are the first arrays for which the ranks share memory."""
    check_constants(everyone("native"))
    check_sharing(has_pool)


def check_mixed() -> None:
    """All use staging buffers if one process has no pool."""
    check_first_cast("native", without_pool=1)
    check_sharing(has_pool=False)


def check_all(has_pool: bool) -> None:
    """Runs every kind of group, and again after `finalize`."""
    size = jax.device_count()
    hosts = sorted({1, size // 2})  # each rank alone, and two hosts
    groups = [everyone("native"), everyone("nccl"), *(everyone(None, ranks_per_host=n) for n in hosts)]
    for group in groups:
        check_patterns(group, rounds=10)
        check_transposes(group)
    for group in groups[:2]:
        check_vmap(group)
        check_scan_and_remat(group)
    check_sharing(has_pool)
    jaxmagi.finalize()
    assert staging_bytes() == 0
    check_cast_and_sharing(has_pool)


def soak(implementation: Implementation) -> None:
    check_soak(everyone(implementation), CALLS)


def test_two_processes_on_the_cpu(launch: Launch) -> None:
    launch(check_first_cast, "xla", None, processes=2, devices_each=2)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("processes", "devices_each"), [(2, 1), (4, 1), (2, 2)])
def test_processes(processes: int, devices_each: int, pool: float | None, launch: Launch) -> None:
    require_processes(processes, devices_each)
    options = {"processes": processes, "devices_each": devices_each, "pool": pool}
    launch(check_all, pool is not None, **options, timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
def test_processes_that_see_their_own_gpus_only(pool: float | None, launch: Launch) -> None:
    require_processes(2)
    launch(check_cast_and_sharing, pool is not None, processes=2, pool=pool, sees_all=False, timeout=90)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
def test_constants(pool: float | None, launch: Launch) -> None:
    require_processes(2)
    launch(check_constants_and_sharing, pool is not None, processes=2, pool=pool, timeout=90)


@pytest.mark.gpu
def test_process_without_a_pool(launch: Launch) -> None:
    require_processes(2)
    log, _ = launch(check_mixed, processes=2, pool=POOLS[1], timeout=90)
    assert "jaxmagi: rank 1 has no memory pool of JAX's that others can use, so that the 2 ranks" in log


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "pool"), [("native", POOLS[0]), ("native", POOLS[1]), ("nccl", POOLS[0])]
)
def test_soak_of_processes(implementation: Implementation, pool: float | None, launch: Launch) -> None:
    """There are as many processes as GPUs, four at most."""
    require_devices(2)
    launch(soak, implementation, processes=4 if len(jax.devices()) >= 4 else 2, pool=pool, timeout=120)
