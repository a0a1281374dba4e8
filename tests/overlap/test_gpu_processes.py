"""Products with a collective between processes, one GPU each, and a rank that never comes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import all_gather_matmul, collectives

from ..collectives.groups import Group, require_processes
from ..collectives.harness import AXIS
from ..collectives.test_gpu_errors import ABSENCE, SECONDS, run_in_time
from ..launcher import Launch, RankFailed
from .test_gpu_soak import check_soak

pytestmark = pytest.mark.gpu


def soak(calls: int) -> None:
    check_soak(Group("native", jax.device_count()), calls)


def stay_away() -> None:
    """Runs a product twice. The last rank does not come to the second call."""
    collectives.set_timeout(SECONDS)
    group = Group("native", jax.device_count())
    operands = group.shard((np.ones((group.size, 130, 64)), np.ones((group.size, 64, 64))))

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        narrow = x[0].astype(jnp.bfloat16), w[0].astype(jnp.bfloat16)
        return all_gather_matmul(*narrow, AXIS, options=group.options)[None]

    run = group.program(local, P(AXIS))
    jax.block_until_ready(run(*operands))
    if jax.process_index() == group.size - 1:
        time.sleep(600)
    run_in_time(run, *operands)


@pytest.mark.parametrize("pool", [None, 0.05])
def test_processes(pool: float | None, launch: Launch) -> None:
    """Rows and tiles go through staging buffers, or into memory that processes share."""
    require_processes(2)
    launch(soak, 2000, processes=2, pool=pool, timeout=120)


def test_rank_that_never_comes(launch: Launch) -> None:
    require_processes(2)
    with pytest.raises(RankFailed, match=ABSENCE):
        launch(stay_away, processes=2, timeout=90)
