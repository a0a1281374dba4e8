"""Ranks that do not play along: an error within the time limit, on GPUs.

In processes of their own, as a GPU is of no use to a process after such an error.
"""

import dataclasses
import time
from typing import Any, Literal

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec, collectives

from ..launcher import Launch, RankFailed
from .groups import Group, Implementation, require_devices, require_processes
from .harness import AXIS
from .memory import pretend_memory_limit
from .routes import INPUT_ROWS, full_exchange, make_transfer, random_transfer

pytestmark = pytest.mark.gpu

type Defect = Literal[
    "send behind the rows",
    "receive behind the rows",
    "unused send first",
    "unused receive first",
    "length < 0",
]

SECONDS = 5.0
"""How long a call waits for the other ranks."""
MARGIN = 10.0
"""How much longer the error may take."""
DISAGREEMENT = r"jaxmagi: the spec of rank \d sends \d+ rows to rank \d, whose spec expects \d+"
BAD_SPEC, MISFIT = r"jaxmagi: rank \d has a spec with", r", which does not fit 2 ranks"
MISFITS: dict[Defect, str] = {
    "send behind the rows": rf"{BAD_SPEC} the entry \(dst_rank .* row {INPUT_ROWS}, .*{MISFIT}",
    "receive behind the rows": rf"{BAD_SPEC} the entry \(src_rank .*{MISFIT}",
    "unused send first": rf"{BAD_SPEC} an entry of length \d+ in place 1: those in use come first",
    "unused receive first": rf"{BAD_SPEC} an entry of length \d+ in place 1: those in use come first",
    "length < 0": rf"{BAD_SPEC} an entry of length -1 in place 0:",
}
ABSENCE = r"jaxmagi: rank \d of 2(?: on \S+)? waited for 5000 ms until"
NOT_TOGETHER = f"{ABSENCE} NCCL had brought the ranks of a group together"
NOTHING = rf"{ABSENCE} NCCL had exchanged the headers of group_cast.*; nothing has come from rank 1 "

implementations = pytest.mark.parametrize("implementation", ["native", "nccl"])


def cast_program(group: Group) -> Any:
    """Compiled: x, spec, both sharded → what arrives."""

    def local(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return group.cast(x[0], spec)[None]

    return group.program(local, P(AXIS))


def specs_that_disagree(size: int) -> tuple[GroupCastSpec, GroupCastSpec]:
    """A good one, and the tables that the ranks have if every other one thinks of another transfer.

    All ranks expect rows of all others: over NCCL, a rank hears from those alone.
    """
    one, other = (full_exchange(size, rows) for rows in (2, 3))
    odd = (np.arange(size) % 2 == 1)[:, None, None]
    return one, jax.tree.map(lambda a, b: np.where(odd, b, a), one, other)


def spec_with(defect: Defect, size: int) -> GroupCastSpec:
    """One on which all ranks agree, and which makes no sense."""
    spec = random_transfer(np.random.default_rng(0), size).spec
    sends, receives = np.array(spec.sends), np.array(spec.receives)
    assert sends[..., 3].any() and receives[..., 3].any()
    if defect == "send behind the rows":
        sends[..., 2] = INPUT_ROWS
    elif defect == "receive behind the rows":
        receives[..., 2] = spec.output_rows
    elif defect == "unused send first":
        sends = np.roll(sends, 1, axis=1)
    elif defect == "unused receive first":
        receives = np.roll(receives, 1, axis=1)
    else:
        sends[:, 0, 3] = -1
    return dataclasses.replace(spec, sends=sends, receives=receives)


def run_in_time(run: Any, *operands: Any) -> None:
    """Runs a program, and checks that it ends in time, whatever comes of it."""
    begin = time.monotonic()
    try:
        jax.block_until_ready(run(*operands))
    finally:
        assert time.monotonic() - begin < SECONDS + MARGIN


def disagree(implementation: Implementation) -> None:
    """A transfer on which all agree, then one on which they do not."""
    collectives.set_timeout(SECONDS)
    group = Group(implementation, jax.device_count())
    run = cast_program(group)
    x = group.shard(np.ones((group.size, INPUT_ROWS, 8), np.float32))
    good, bad = specs_that_disagree(group.size)
    jax.block_until_ready(run(x, group.shard(good)))
    run_in_time(run, x, group.shard(bad))


def reduce_program(group: Group) -> Any:
    """Compiled: y, spec, both sharded → sums."""

    def local(y: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return group.reduce(y[0], spec)[None]

    return group.program(local, P(AXIS))


def run_with(defect: Defect, implementation: Implementation, kind: str) -> None:
    collectives.set_timeout(SECONDS)
    group = Group(implementation, jax.device_count())
    spec = spec_with(defect, group.size)
    rows = INPUT_ROWS if kind == "cast" else spec.output_rows
    program = cast_program(group) if kind == "cast" else reduce_program(group)
    run_in_time(program, group.shard(np.ones((group.size, rows, 8), np.float32)), group.shard(spec))


def stay_away(implementation: Implementation, width: int) -> None:
    """The last rank does not come to the second transfer, of so wide rows, from which all expect some."""
    collectives.set_timeout(SECONDS)
    group = Group(implementation, jax.device_count())
    run = cast_program(group)
    first, second = (np.ones((group.size, INPUT_ROWS, n), np.float32) for n in (8, width))
    spec = group.shard(full_exchange(group.size, rows=2))
    jax.block_until_ready(run(group.shard(first), spec))
    if jax.process_index() == group.size - 1:
        time.sleep(600)
    run_in_time(run, group.shard(second), spec)


def outgrow_the_pool() -> None:
    """XLA's memory, of which it takes more as it goes, is taken for one pool of a gigabyte."""
    collectives.set_timeout(SECONDS)
    group = Group("native", jax.device_count())
    rows, width = 2**18, 1024
    spec = make_transfer(np.random.default_rng(0), [[rows]] * 2, [[[1]], [[0]]]).spec
    run, x = cast_program(group), group.shard(np.ones((2, rows, width), np.float32))
    spec = group.shard(spec)
    run = run.lower(x, spec).compile()
    pretend_memory_limit(2**30)
    kept = [jax.block_until_ready(run(x, spec)) for _ in range(4)]
    assert all(array.shape == x.shape for array in kept)


def reach_beyond_the_host() -> None:
    group = Group("native", jax.device_count(), ranks_per_host=1)
    x = group.shard(np.ones((group.size, INPUT_ROWS, 8), np.float32))
    spec = random_transfer(np.random.default_rng(0), group.size).spec
    jax.block_until_ready(cast_program(group)(x, group.shard(spec)))


@pytest.mark.parametrize("processes", [1, 2])
@implementations
def test_specs_that_disagree(implementation: Implementation, processes: int, launch: Launch) -> None:
    require_processes(processes, 2 // processes)
    with pytest.raises(RankFailed, match=DISAGREEMENT):
        launch(disagree, implementation, processes=processes, devices_each=2 // processes, timeout=90)


@pytest.mark.parametrize("kind", ["cast", "reduce"])
@pytest.mark.parametrize("defect", MISFITS)
@implementations
def test_specs_without_sense(
    implementation: Implementation, defect: Defect, kind: str, launch: Launch
) -> None:
    require_devices(2)
    with pytest.raises(RankFailed, match=MISFITS[defect]):
        launch(run_with, defect, implementation, kind, processes=1, devices_each=2, timeout=90)


@pytest.mark.parametrize(
    ("implementation", "width", "match"),
    [("native", 8, ABSENCE), ("native", 64, NOT_TOGETHER), ("nccl", 8, NOTHING)],
    ids=["native", "native, not together", "nccl"],
)
def test_rank_that_never_comes(
    implementation: Implementation, width: int, match: str, launch: Launch
) -> None:
    """Wider rows take a larger staging buffer, for which ranks come together before the transfer."""
    require_processes(2)
    with pytest.raises(RankFailed, match=match):
        launch(stay_away, implementation, width, processes=2, timeout=90)


def test_memory_outside_of_the_pool(launch: Launch) -> None:
    require_processes(2)
    with pytest.raises(RankFailed, match=r"not in the \d+ bytes of memory that XLA took in advance"):
        launch(outgrow_the_pool, processes=2, timeout=90)


def test_native_across_hosts(launch: Launch) -> None:
    require_devices(2)
    with pytest.raises(RankFailed, match=r"(NotImplementedError|JaxRuntimeError): .*native"):
        launch(reach_beyond_the_host, processes=1, devices_each=2, timeout=90)
