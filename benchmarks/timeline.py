"""Profiles both passes of context attention on two GPUs, and draws which kernels ran when.

    python -m benchmarks.timeline --out FOLDER [--tokens 16384] [--network memory|sockets]
    python -m benchmarks.timeline --from FOLDER/timeline_CARD.json

Each GPU has --tokens tokens under a causal mask over all of them, in bfloat16, with 64 query heads, 8 key
heads and head dimension 128. It is the rank of a process, and both processes profile themselves, first as
ranks of one host, whose transfers are native, then as ranks of two hosts, whose transfers go over NCCL. The
hosts are those of tests/hosts.py; they take the rights of root. By default the network between them is memory
of the host, since the loopback interface is slower than networks of such hosts are.

One program has both passes. The last of its calls counts, before which others are in the queue, so that the
device waits for the host as little as it can. The forward pass ends with its last kernel of attention; what
begins later belongs to the backward pass. Profiling costs some time, so times here are none to compare.

Writes timeline_CARD.json, where CARD is h100 for instance, and the picture timeline_CARD.png beside it. A row
of the JSON has the name of a kernel, its stream and its begin and end in microseconds from the start of its
pass, the begin of the first kernel of that pass on the same device. With --from, draws a picture again.
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import context
from benchmarks._context_peers import METHODS, OURS
from benchmarks._measure import card, gpu_environment, save
from benchmarks._processes import run_in_processes
from benchmarks._profile import Event, divide, profile
from benchmarks._timeline import draw
from benchmarks._workloads import Causal, Direction, Workload
from jaxmagi.calibration._chain import AXIS, mesh_of, on_ranks
from tests.launcher import leave_memory_to_processes

RANKS, CALLS = 2, 3
HOSTS = {"within a host": 1, "between two hosts": 2}
FORWARD, FINISH, BACKWARD = "forward_kernel", "finish", "backward_kernel"
POOL = 0.3  # of a GPU's memory, by each process: where there is one GPU, they share it


@dataclass(frozen=True)
class Row:
    """A kernel of a pass on a device. Times are in microseconds from the start of the pass."""

    transfers: str
    direction: Direction
    device: int
    name: str
    stream: str
    begin_us: float
    end_us: float


def both_passes(tokens: int, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Returns a program that has both passes, and its operands."""
    workload = Workload("causal", Causal(tokens * mesh.size))
    method = METHODS[OURS](workload.pattern.mask(), mesh.size, "ffi")

    def run(rows: list[jax.Array], tables: Any) -> Any:
        *operands, cotangent = rows
        out, pullback = jax.vjp(lambda *operands: method.attend(*operands, tables), *operands)
        return out, pullback(cotangent)

    tables = jax.device_put(method.tables, NamedSharding(mesh, P(AXIS)))
    return on_ranks(run, mesh), (context.operands(workload, method, mesh), tables)


def last_call(events: Sequence[Event]) -> list[Event]:
    """Returns the kernels of the last call. It begins with the first kernel that each call has equally often.

    Raises:
        ValueError: the calls do not divide the kernels of a pass.
    """
    attention = [event for event in events if event.is_of(FORWARD) or event.is_of(BACKWARD)]
    if not attention:
        raise ValueError(f"the profile has no kernels of attention among {len(events)} events.")
    last = divide(attention, CALLS)[-1]
    before = max((event.end for event in attention[: -len(last)]), default=0.0)
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_name[event.name].append(event)
    firsts = [divide(found, CALLS)[-1][0].begin for found in by_name.values() if len(found) % CALLS == 0]
    begin = min(first for first in firsts if first >= before)
    return [event for event in events if event.begin >= begin]


def to_rows(place: str, device: int, events: Sequence[Event]) -> list[Row]:
    """Returns the kernels of a call, by pass, with times from the start of their pass."""
    end = max(event.end for event in events if event.is_of(FORWARD) or event.is_of(FINISH))
    passes: dict[Direction, list[Event]] = {
        "forward": [event for event in events if event.begin < end],
        "backward": [event for event in events if event.begin >= end],
    }
    return [
        Row(
            place,
            direction,
            device,
            event.short_name,
            event.line,
            begin_us=round((event.begin - found[0].begin) / 1e3, 3),
            end_us=round((event.end - found[0].begin) / 1e3, 3),
        )
        for direction, found in passes.items()
        for event in found
    ]


def run(place: str, tokens: int, folder: Path) -> None:
    """Profiles a rank, and writes its rows and environment into a folder."""
    rank, mesh = jax.process_index(), mesh_of(len(jax.devices()))
    profiles = profile(*both_passes(tokens, mesh), folder / f"profile{rank}", CALLS)
    events = max(profiles.values(), key=len, default=[])  # other GPUs that the process sees are idle
    streams = [event for event in events if event.line.startswith("Stream")]
    rows = [asdict(row) for row in to_rows(place, rank, last_call(streams))]
    (folder / f"{rank}.json").write_text(json.dumps({"about": gpu_environment(), "rows": rows}))


def in_processes(place: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the rows of all ranks, and the environment of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        operands = place, arguments.tokens, Path(folder)
        places = {"hosts": HOSTS[place], "network": arguments.network}
        run_in_processes(run, *operands, processes=RANKS, pool=POOL, **places)
        saved = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [row for of_rank in saved for row in of_rank["rows"]], saved[0]["about"]


def measure(arguments: argparse.Namespace) -> Path:
    """Profiles all cases, and returns where the results are."""
    leave_memory_to_processes()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as for tests on GPUs
    rows, about = [], {}
    for place in HOSTS:
        found, about = in_processes(place, arguments)
        rows += found
        print(f"{place}: {len(found)} kernels", flush=True)
    about |= {"network": arguments.network, "tokens_per_rank": arguments.tokens}
    return save(f"timeline_{card()}", rows, arguments.out, **about)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out", type=Path, metavar="FOLDER", help="profile, and write the results there")
    source.add_argument("--from", dest="results", type=Path, metavar="JSON", help="only draw these results")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each rank")
    parser.add_argument("--network", choices=("sockets", "memory"), default="memory")
    arguments = parser.parse_args()
    print(draw(arguments.results or measure(arguments)))


if __name__ == "__main__":
    main()
