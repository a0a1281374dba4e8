"""Times both passes of `context_attention` between hosts, in comparison with what bounds them.

    python -m benchmarks.context_hosts [--hosts 2] [--ranks-per-host 1] [--network sockets|memory]
                                       [--tokens 32768] [--rows REGEX] [--repeats 5] [--out FOLDER]

The hosts and the network between them are those of benchmarks/hosts.py. Each rank has --tokens tokens in
bfloat16, with 64 query heads, 8 key heads, head dimension 128 and unit-normal operands. These are timed:

- "ours": the forward pass, and the backward pass alone, from what the forward pass saved.
- "ours, keys kept": the backward pass with ``keep_received``, to which keys are not sent again.
- "kernel alone": both passes of the local kernel on the queries that ours gives to a rank, which has all keys
  already: nothing is sent. The kernel has all multiprocessors.
- "cast": one group cast of keys and values in bfloat16, with exactly the rows that the plan of ours sends.
- "reduce f32": one group reduce of their gradients in float32, by the same plan.

What takes longest bounds a pass, if the rest hides behind it: the kernel alone, or the transfers, which share
one network. The forward pass has a cast. The backward pass has a cast too, as keys are sent again, and then a
reduce; where they are kept it has the reduce alone. "ours / bound" is the ratio of the medians.

In a program each call waits for the last, so that no transfer hides behind another call. Programs run one
behind the other without a pause, in turns of half a second each, of which the last two thirds are measured:
GPUs at their power limit need a while to find the clock that they can hold. Ranks begin each turn together,
and the slowest one counts. Planning is done before.

With --out, writes context_hosts_2x1.json (hosts x ranks of a host), or context_hosts_2x1_memory.json, there
after each mask.
"""

import argparse
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from benchmarks import context
from benchmarks._context_peers import ALONE, OURS, Maker, kernel_alone, ours
from benchmarks._hosts import PATTERNS, begin_report, run_on_hosts, sized, transfer_work
from benchmarks._report import Check, Result, check, in_unit
from benchmarks._workloads import Direction, Workload
from jaxmagi import GroupCastSpec, plan_context
from jaxmagi.calibration._chain import mesh_of
from jaxmagi.calibration._timing import DeviceWork, Timing, time_sustained

CAST, RETURN = "cast", "reduce f32"
KEPT = f"{OURS}, keys kept"
MAKERS: dict[str, Maker] = {
    OURS: ours,
    KEPT: functools.partial(ours, keep_received=True),
    ALONE: kernel_alone,
}
TRANSFERS: dict[str, dict[Direction, tuple[str, ...]]] = {
    OURS: {"forward": (CAST,), "backward": (CAST, RETURN)},
    KEPT: {"backward": (RETURN,)},
    ALONE: {"forward": (), "backward": ()},
}
"""The transfers in each pass that is timed of a method."""
AT_MOST: dict[str, dict[str, float]] = {
    "causal": {"forward": 1.05, "backward": 1.08},
    "documents": {"forward": 1.15, "backward": 1.15},
    "window 4095": {"forward": 1.15, "backward": 1.15},
}
"""The ratios to their bounds that are required, of each mask that is measured."""

type Measured = tuple[str, str]
"""A direction and an implementation, as a row has them."""

MOVES: dict[str, Measured] = {CAST: (CAST, "group_cast"), RETURN: (RETURN, "group_reduce")}


@dataclass(frozen=True)
class Row(Result):
    """The time of a pass or a transfer, of the slowest rank.

    bound_ms: None for what bounds others.
    ratio: of the median to the bound.
    """

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    bound_ms: float | None
    ratio: float | None

    def __str__(self) -> str:
        text = f"{self.median_ms:9.3f} ms ({self.fastest_ms:.3f} to {self.slowest_ms:.3f})"
        if self.bound_ms is None:
            return self.describe(text)
        return self.describe(f"{text}, bound {self.bound_ms:.3f} ms, ratio {self.ratio:.3f}")


def make_works(workload: Workload, mesh: Mesh, arguments: argparse.Namespace) -> dict[Measured, DeviceWork]:
    """Returns the work of all that is compared for a mask, each of which has run."""
    spec = plan_context(workload.pattern.mask(), mesh.size).transfer
    assert isinstance(spec, GroupCastSpec)
    works = {
        (direction, name): context.make_work(MAKERS[name], workload, direction, mesh)
        for name, passes in TRANSFERS.items()
        for direction in passes
    }
    works |= {
        MOVES[CAST]: transfer_work(spec, CAST, mesh, arguments),
        MOVES[RETURN]: transfer_work(spec, RETURN, mesh, arguments),
    }
    return works


def of_slowest(seconds: float) -> float:
    """Returns the time of the slowest rank, when all have one."""
    return float(np.max(process_allgather(np.float64(seconds))))


def measure(workload: Workload, mesh: Mesh, arguments: argparse.Namespace) -> list[Row]:
    works = make_works(workload, mesh, arguments)
    timings = time_sustained(works, arguments.repeats, context.TURN_SECONDS, of_slowest)
    return to_rows(workload.name, timings)


def bound(name: str, direction: Direction, timings: dict[Measured, Timing]) -> float:
    """Returns the seconds that a pass of a method takes at least."""
    moved = sum(timings[MOVES[transfer]].median for transfer in TRANSFERS[name][direction])
    return max(timings[direction, ALONE].median, moved)


def to_rows(workload: str, timings: dict[Measured, Timing]) -> list[Row]:
    bounds = {
        (direction, name): bound(name, direction, timings)
        for name, passes in TRANSFERS.items()
        for direction in passes
        if name != ALONE
    }

    def to_row(measured: Measured, timing: Timing) -> Row:
        least = bounds.get(measured)
        bound_ms, ratio = (None, None) if least is None else (1e3 * least, timing.median / least)
        return Row(workload, *measured, **in_unit(timing, "ms"), bound_ms=bound_ms, ratio=ratio)

    return [to_row(measured, timing) for measured, timing in timings.items()]


def checks(rows: Sequence[Row]) -> list[Check]:
    """Requires that each pass of ours, without options, comes near its bound."""
    made = []
    for row in rows:
        if row.implementation == OURS:
            at_most = AT_MOST[row.workload.partition(",")[0]][row.direction]
            label = f"{row.implementation} / bound"
            made.append(check(row.workload, row.direction, label, row.ratio, at_most=at_most))
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measures what the pattern selects, in each rank."""
    mesh = mesh_of(len(jax.devices()))
    report = begin_report("context_hosts", arguments, checks)
    for tokens in arguments.tokens:
        for name in AT_MOST:
            workload = Workload(sized(name, tokens), PATTERNS[name](mesh.size * tokens))
            if re.search(arguments.rows, workload.name):
                report.add(measure(workload, mesh, arguments))
    report.finish()


def main() -> None:
    run_on_hosts(run, __doc__, tokens=[32_768])


if __name__ == "__main__":
    main()
