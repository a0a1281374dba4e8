"""Measures plans of masks: time, memory, balance and received rows, compared with chunks assigned by area.

    uv run python -m benchmarks.planning [--repeats 15] [--save]

A plan is all that `plan_context` does, on one thread. Received rows are given as multiples of a rank's own;
"LPT" assigns chunks of 512 largest first, also where the plan has default chunks. The bound holds for plans
with the same number of tokens per rank and the same largest area. Predicted are the forward and the backward
pass together.
"""

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks._measure import save, time_interleaved
from benchmarks._plan_bound import fewest_received_rows
from jaxmagi import AttnMask, masks, plan_context
from jaxmagi._native import planner
from jaxmagi.calibration._timing import Timing
from jaxmagi.masks import geometry
from jaxmagi.planning import ContextPlan, PlanReport
from tests.cases import document_lengths
from tests.planning.lpt import largest_first_owners

CHUNK = 512
LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class Setting:
    mask: Callable[[int], AttnMask]
    length: int
    cp_size: int
    chunk_size: int | None = CHUNK

    def plan(self) -> ContextPlan:
        return plan_context(self.mask(self.length), self.cp_size, chunk_size=self.chunk_size)


@dataclass(frozen=True)
class Row:
    """The results of a setting: rows are received over own rows, imbalances are largest over mean area.

    Imbalances of work count the tiles of the kernels, of the forward and the backward pass.
    """

    name: str
    tokens: int
    cp_size: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    peak_gb: float
    imbalance: float
    work_imbalance: float
    backward_work_imbalance: float
    mean_rows: float
    largest_rows: float
    fewest_rows: float
    lpt_imbalance: float
    lpt_mean_rows: float
    share_of_lpt: float
    predicted_ms: float
    lpt_predicted_ms: float


@functools.cache
def packed_documents(length: int) -> AttnMask:
    return masks.documents(document_lengths(length))


SETTINGS = {
    "documents 128k": Setting(packed_documents, 1 << 17, 8),
    "documents 1M": Setting(packed_documents, 1 << 20, 64),
    "documents 16M": Setting(packed_documents, 1 << 24, 1024),
    "full 128k": Setting(masks.full, 1 << 17, 8),
    "causal 128k": Setting(masks.causal, 1 << 17, 8),
    "causal 1M": Setting(masks.causal, 1 << 20, 64),
    "window 1023 128k": Setting(lambda length: masks.sliding_window(length, 1023), 1 << 17, 8),
    "window 4095 128k": Setting(lambda length: masks.sliding_window(length, 4095), 1 << 17, 8),
    "window 4095 128k, default": Setting(lambda length: masks.sliding_window(length, 4095), 1 << 17, 8, None),
    "window 4095 1M": Setting(lambda length: masks.sliding_window(length, 4095), 1 << 20, 64),
    "video 32 x 4096, 4 seen": Setting(lambda length: masks.video(length // 4096, 4096, 4), 1 << 17, 8),
}


def predicted_ms(report: PlanReport) -> float:
    """Returns the time of both passes of the slowest rank, with hosts of eight ranks."""
    return 1e3 * (report.predicted_seconds + report.predicted_backward_seconds)


def largest_first(setting: Setting) -> tuple[float, float, float]:
    """Returns imbalance, mean received rows over own rows and predicted milliseconds of LPT."""
    bands = np.asarray(setting.mask(setting.length).bands)
    begin = np.arange(setting.length // CHUNK) * CHUNK
    order = np.argsort(bands[:, 0], kind="stable")
    areas = np.zeros(len(begin), np.int64)
    for band in bands[order]:
        met = slice(band[0] // CHUNK, -(-band[1] // CHUNK))
        areas[met] += geometry.area(
            geometry.crop(band, begin[met], begin[met] + CHUNK, 0, geometry.UNBOUNDED)
        )
    owners = largest_first_owners(areas, setting.cp_size)
    loads = np.bincount(owners, weights=areas)
    tokens = planner().token_order(owners.astype(np.int32), setting.length, setting.cp_size, CHUNK)
    plan = plan_context(setting.mask(setting.length), setting.cp_size, layout=tokens)
    report = plan.report()
    rows = report.rows_received.sum() / setting.length
    return float(loads.max() / loads.mean()), float(rows), predicted_ms(report)


def peak_gb(name: str) -> float:
    """Returns the peak memory of a process that only makes this plan, imports included."""
    command = [sys.executable, "-m", "benchmarks.planning", "--peak", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str) -> None:
    SETTINGS[name].plan()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) * 1024 / 1e9)


def time_plans(setting: Setting, repeats: int) -> Timing:
    """Times ``repeats`` plans, or more where these take less than a second."""
    first = time_interleaved({"plan": setting.plan}, 1)["plan"]
    return time_interleaved({"plan": setting.plan}, max(repeats, int(LEAST_SECONDS / first.median)))["plan"]


def measure(name: str, setting: Setting, repeats: int) -> Row:
    timing = time_plans(setting, repeats)
    plan = setting.plan()
    report = plan.report()
    areas, rows = report.area, report.rows_received
    lpt_imbalance, lpt_rows, lpt_ms = largest_first(setting)
    bands = np.asarray(setting.mask(setting.length).bands)
    fewest = fewest_received_rows(bands, setting.length, plan.shard_length, int(areas.max()))
    mean_rows = float(rows.mean() / plan.shard_length)
    return Row(
        name=name,
        tokens=setting.length,
        cp_size=setting.cp_size,
        median_ms=1e3 * timing.median,
        fastest_ms=1e3 * timing.fastest,
        slowest_ms=1e3 * timing.slowest,
        peak_gb=peak_gb(name),
        imbalance=report.imbalance,
        work_imbalance=report.work_imbalance,
        backward_work_imbalance=report.backward_work_imbalance,
        mean_rows=mean_rows,
        largest_rows=float(rows.max() / plan.shard_length),
        fewest_rows=fewest / setting.length,
        lpt_imbalance=lpt_imbalance,
        lpt_mean_rows=lpt_rows,
        share_of_lpt=mean_rows / lpt_rows,
        predicted_ms=predicted_ms(report),
        lpt_predicted_ms=lpt_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/planning.json")
    parser.add_argument("--peak", metavar="SETTING", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.peak:
        return print_peak(arguments.peak)
    rows = []
    for name, setting in SETTINGS.items():
        row = measure(name, setting, arguments.repeats)
        rows.append(row)
        print(
            f"{row.name:24s} {row.cp_size:4d} ranks {row.median_ms:8.2f} ms ({row.fastest_ms:.2f} to "
            f"{row.slowest_ms:.2f}) {row.peak_gb:.2f} GB  imbalance {row.imbalance:.3f} (LPT "
            f"{row.lpt_imbalance:.3f}), of work {row.work_imbalance:.3f}, {row.backward_work_imbalance:.3f}  "
            f"rows {row.mean_rows:.3f} (at least {row.fewest_rows:.3f}, LPT "
            f"{row.lpt_mean_rows:.3f}, {row.share_of_lpt:.3f} of it), largest {row.largest_rows:.2f}  "
            f"predicted {row.predicted_ms:.2f} ms (LPT {row.lpt_predicted_ms:.2f})",
            flush=True,
        )
    if arguments.save:
        print("saved", save("planning", rows, chunk_size=CHUNK, numpy=np.__version__))


if __name__ == "__main__":
    main()
