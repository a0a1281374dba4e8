"""Times casts and returns of keys and values between hosts, in comparison with the rate of their network.

    python -m benchmarks.hosts [--hosts 2] [--ranks-per-host 1] [--network sockets|memory]
                               [--tokens 16384 65536] [--rows REGEX] [--repeats 5] [--out FOLDER]

The hosts are those of tests/hosts.py, on one machine; it takes the rights of root. Where there are fewer GPUs
than ranks, these share them: the turns of a GPU make all times longer, also those of the network.
What crosses between them goes through NCCL's sockets over the loopback interface, 2 to 6 GB/s each way, which
is a slow network whose rate changes from call to call, or with "memory" through memory of the host. Each rank
has --tokens tokens, with 8 key heads of dimension 128. A plan with one level says which rows its mask needs:
a cast sends them in bfloat16, keys and values in one call, and a return brings their gradients back in
float32.

The rate is that of a plain `lax.ppermute` of 64 MB, by which every rank sends to the next host, in turns with
the call that is compared with it. A rank needs its rows between hosts, those that it sends or those that it
receives, whichever are more; the bound is 1.1 times what the busiest rank needs, at that rate, and 200 us.
What moves is counted by `jaxmagi.collectives.statistics`; it is null where jaxmagi cannot count.

A time is that of two programs in the devices' queues, each with calls of about 50 ms, by the clock of the
host: launching them and waiting for them takes some tenths of a percent. To measure another commit, copy the
folders benchmarks and tests of this one onto it, and if it has no jaxmagi.CollectiveOptions define an empty
class of that name in jaxmagi/__init__.py: results name the hash of the sources that were built.

With --out, writes hosts_2x1.json (hosts x ranks of a host), or hosts_2x1_memory.json, there after each row.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from benchmarks._hosts import (
    ESTIMATED_RATES,
    PATTERNS,
    SECONDS_MORE,
    begin_report,
    make_work,
    of_busiest,
    run_on_hosts,
    seconds_of_call,
    sent_bytes,
    sized,
    transfer_work,
)
from benchmarks._jax_collectives import Direction, shift
from benchmarks._report import Check, Result, check, in_unit
from benchmarks._transfers import Transfer
from jaxmagi import GroupCastSpec, collectives, plan_context
from jaxmagi.calibration._chain import draw_normal, mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_in_turns

DIRECTIONS: tuple[Direction, ...] = ("cast", "reduce f32")
OURS, NETWORK = "ours", "lax.ppermute"
NETWORK_SHAPE = (2**18, (128,))  # of the rows of a rank that are permuted: 64 MB in bfloat16
MARGIN = 1.1


@dataclass(frozen=True)
class Row(Result):
    """The time that a transfer takes between hosts.

    needed_bytes: that the busiest rank sends to other hosts, or receives from them.
    all_needed_bytes: that all ranks send to other hosts.
    moved_bytes: rows that all ranks have sent over NCCL; None if they are not counted.
    control_bytes: that all ranks have sent over NCCL beside rows.
    network_gb_per_second: of a ppermute, each way.
    ratio: of the time to its bound.
    """

    median_us: float
    fastest_us: float
    slowest_us: float
    needed_bytes: int
    all_needed_bytes: int
    moved_bytes: float | None
    control_bytes: float | None
    network_gb_per_second: float
    bound_us: float
    ratio: float

    def __str__(self) -> str:
        spread = f"({self.fastest_us:.1f} to {self.slowest_us:.1f})"
        moved = "not counted" if self.moved_bytes is None else f"{self.moved_bytes / 1e6:.3f} MB"
        return self.describe(
            f"{self.median_us:9.1f} us {spread:22s} bound {self.bound_us:9.1f} us, ratio {self.ratio:5.2f}; "
            f"busiest rank needs {self.needed_bytes / 1e6:.3f} MB, all {self.all_needed_bytes / 1e6:.3f} MB, "
            f"moved {moved}; ppermute {self.network_gb_per_second:.2f} GB/s"
        )


def transfers(cp_size: int, tokens: int) -> list[Transfer]:
    """Returns what plans of all masks send, of so many tokens of each rank."""
    found = []
    for name, pattern in PATTERNS.items():
        spec = plan_context(pattern(cp_size * tokens).mask(), cp_size, two_levels=False).transfer
        assert isinstance(spec, GroupCastSpec)
        found.append(Transfer(sized(name, tokens), spec))
    return found


def permute(mesh: Mesh, ranks_per_host: int, rate: float) -> DeviceWork:
    """Returns the work in which each rank sends 64 MB to the rank in its place of the next host."""
    rows, shape = NETWORK_SHAPE
    block = draw_normal(0, rows, shape, jnp.bfloat16, mesh)
    seconds = block.nbytes / mesh.size / rate
    return make_work(lambda x, _: shift(x, ranks_per_host), block, (), mesh, seconds)


def count_moved(work: DeviceWork) -> tuple[float, float] | tuple[None, None]:
    """Returns the bytes of rows and beside rows that all ranks send in a pass, if jaxmagi counts them."""
    statistics = getattr(collectives, "statistics", None)  # commits before that are measured too
    if statistics is None:
        return None, None
    before = statistics()
    work.seconds(1)
    after = statistics()
    own = [after.nccl_bytes - before.nccl_bytes, after.control_bytes - before.control_bytes]
    rows, control = np.atleast_2d(process_allgather(np.array(own, np.float64))).sum(axis=0) / work.passes
    return float(rows), float(control)


def measure(
    transfer: Transfer, direction: Direction, mesh: Mesh, link: DeviceWork, arguments: argparse.Namespace
) -> Row:
    """Times a transfer in turns with the ppermute."""
    sent = sent_bytes(transfer.spec, direction, arguments.hosts)
    work = transfer_work(transfer.spec, direction, mesh, arguments)
    moved, control = count_moved(work)
    works = {OURS: work, NETWORK: link}
    timings = time_in_turns(works, arguments.repeats, lambda name: seconds_of_call(works[name]))
    return to_row(transfer.name, direction, timings, of_busiest(sent), int(sent.sum()), moved, control)


def to_row(
    workload: str,
    direction: Direction,
    timings: dict[str, Timing],
    needed: int,
    all_needed: int,
    moved: float | None,
    control: float | None,
) -> Row:
    rows, shape = NETWORK_SHAPE
    rate = 2 * rows * math.prod(shape) / timings[NETWORK].median
    bound = MARGIN * needed / rate + SECONDS_MORE
    return Row(
        workload,
        direction,
        OURS,
        **in_unit(timings[OURS], "us"),
        needed_bytes=needed,
        all_needed_bytes=all_needed,
        moved_bytes=moved,
        control_bytes=control,
        network_gb_per_second=rate / 1e9,
        bound_us=1e6 * bound,
        ratio=timings[OURS].median / bound,
    )


def checks(rows: Sequence[Row]) -> list[Check]:
    """Requires that each time keeps its bound, and that no more rows move than are needed."""
    made = []
    for row in rows:
        made.append(check(row.workload, row.direction, "time / bound", row.ratio, at_most=1.0))
        more = None if row.moved_bytes is None else (row.moved_bytes - row.all_needed_bytes) / 1e6
        made.append(check(row.workload, row.direction, "MB moved - needed", more, at_most=0.0))
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measures what the pattern selects, in each rank."""
    mesh = mesh_of(len(jax.devices()))
    report = begin_report("hosts", arguments, checks)
    link = permute(mesh, arguments.ranks_per_host, ESTIMATED_RATES[arguments.network])
    for tokens in arguments.tokens:
        for transfer in transfers(mesh.size, tokens):
            for direction in DIRECTIONS:
                if re.search(arguments.rows, f"{direction}, {transfer.name}"):
                    report.add([measure(transfer, direction, mesh, link, arguments)])
    report.finish()


def main() -> None:
    run_on_hosts(run, __doc__, tokens=[16_384, 65_536])


if __name__ == "__main__":
    main()
