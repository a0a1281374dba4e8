"""Ranks on other hosts that die, stay away or differ: an error on every living rank, which says with whom.

Each test starts its ranks, as a GPU is of no use to a process after such an error.
"""

import os
import re
import time
import traceback
from typing import Literal

import jax
import numpy as np
import pytest

from jaxmagi import collectives

from .. import hosts
from ..launcher import Launch, RankFailed
from .groups import Group, Implementation, require_hosts
from .routes import INPUT_ROWS, full_exchange
from .test_gpu_errors import cast_program, reduce_program

pytestmark = pytest.mark.gpu

type Defect = Literal["dies", "sleeps", "has other rows", "makes another call"]
"""Says how the last rank spoils the second call."""
type Kind = Literal["cast", "reduce"]

SECONDS = 5.0
"""How long a call waits for the other ranks."""
MARGIN = 20.0
"""How much longer an error may take."""
LINGER = 4.0
"""Seconds that a rank stays after its error: where the first one ends, JAX ends all others."""
BEGIN = "the second call begins at "


def play(defect: Defect, kind: Kind, implementation: Implementation) -> None:
    """A call of each kind on which all agree, then one in which the last rank does not play along."""
    collectives.set_timeout(SECONDS)
    size = jax.device_count()
    group = Group(implementation, size)
    programs = {"cast": cast_program(group), "reduce": reduce_program(group)}
    rows = {"cast": INPUT_ROWS, "reduce": size * INPUT_ROWS}
    operands = {name: group.shard(np.ones((size, n, 8), np.float32)) for name, n in rows.items()}
    spec, other_spec = (group.shard(full_exchange(size, n)) for n in (2, 3))
    for name in ("cast", "reduce"):
        jax.block_until_ready(programs[name](operands[name], spec))
    if jax.process_index() == size - 1:
        if defect == "has other rows":
            spec = other_spec
        elif defect == "makes another call":
            kind = "reduce" if kind == "cast" else "cast"
    print(f"{BEGIN}{time.monotonic()}", flush=True)
    if jax.process_index() == size - 1:
        if defect == "dies":
            os._exit(7)
        elif defect == "sleeps":
            time.sleep(600)
    try:
        jax.block_until_ready(programs[kind](operands[kind], spec))
    except jax.errors.JaxRuntimeError:
        traceback.print_exc()
        time.sleep(LINGER)
        raise
    raise AssertionError("the call has come to its end")


def says_with_whom(log: str, rank: int, peers: list[int], num_hosts: int, size: int, call: str) -> bool:
    """Returns whether a line names the rank and one of the peers, with their hosts, and the call."""

    def names(line: str, *ranks: int) -> bool:
        numbers = {
            int(number)
            for found in re.findall(r"ranks? (\d+)(?: and (\d+))?", line)
            for number in found
            if number
        }
        places = {hosts.name_of(each * num_hosts // size) for each in ranks}
        return numbers >= set(ranks) and all(place in line for place in places) and call in line

    lines = [line for line in log.splitlines() if "jaxmagi: " in line]
    return any(names(line, rank, peer) for line in lines for peer in peers)


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (2, 4)], ids=["2x1", "2x2"])
@pytest.mark.parametrize("kind", ["cast", "reduce"])
@pytest.mark.parametrize("defect", ["dies", "sleeps", "has other rows", "makes another call"])
@pytest.mark.parametrize("implementation", [None, "nccl"])
def test_last_rank_does_not_play_along(
    implementation: Implementation, defect: Defect, kind: Kind, num_hosts: int, size: int, launch: Launch
) -> None:
    require_hosts(size, num_hosts)
    ranks = {"processes": size, "hosts": num_hosts}
    with pytest.raises(RankFailed) as failure:
        launch(play, defect, kind, implementation, **ranks, timeout=120, grace=SECONDS + MARGIN)
    last, host = size - 1, num_hosts - 1
    for rank, (log, end) in enumerate(zip(failure.value.logs, failure.value.ends, strict=True)):
        if rank == last and defect in ("dies", "sleeps"):
            continue
        begin = float(re.findall(rf"{BEGIN}(\S+)", log)[0])
        assert end is not None and end - begin < SECONDS + MARGIN, f"rank {rank}:\n{log}"
        is_other_call = rank == last and defect == "makes another call"
        call = f"group_{kind}" if not is_other_call else f"group_{'reduce' if kind == 'cast' else 'cast'}"
        # A rank of the last one's host may wait for others first, which have found out about that one.
        is_neighbour = implementation is None and rank * num_hosts // size == host
        knows_last = rank != last and not is_neighbour
        peers = [last] if knows_last else [each for each in range(size) if each != rank]
        assert says_with_whom(log, rank, peers, num_hosts, size, call), f"rank {rank}:\n{log}"
        if defect in ("dies", "sleeps") and not is_neighbour:
            name = re.escape(f"rank {last} ({hosts.name_of(host)})")
            assert re.search(rf"nothing has come from [^;]*{name}", log), f"rank {rank}:\n{log}"
