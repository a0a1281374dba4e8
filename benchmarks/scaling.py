"""Simulates weak scaling from 8 to 1024 ranks: plans and other schemes under one model of the machine.

    uv run python -m benchmarks.scaling [--most 1024] [--save]

Every rank has 16384 tokens. The share of linear speed-up is the time that one rank would need for its share
of the visible cells, in full tiles and alone, over the predicted time of the slowest rank; both passes
together. Nothing is measured: ``docs/scaling.md`` says what the model is. ``--save`` writes rows and picture.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks import _schemes
from benchmarks._measure import save
from benchmarks._schemes import Prediction
from jaxmagi import AttnMask, CostModel, masks, plan_context
from jaxmagi.planning import LevelChoice
from tests.cases import document_lengths

TOKENS_PER_RANK = 16_384
COST = CostModel()
PICTURE = Path(__file__).parent.parent / "docs" / "scaling.png"
MASKS: dict[str, Callable[[int], AttnMask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "documents": lambda length: masks.documents(document_lengths(length)),
    "window 4095": lambda length: masks.sliding_window(length, 4095),
    "video, 4 chunks seen": lambda length: masks.video(length // 8192, 8192, 4),
}


def planned(mask: AttnMask, cp_size: int, cost: CostModel, two_levels: LevelChoice = "auto") -> Prediction:
    """Returns the prediction for a plan over all GPUs."""
    plan = plan_context(mask, cp_size, cost=cost, two_levels=two_levels)
    report = plan.report(cost)
    within, between = report.within_hosts, report.between_hosts
    return Prediction(
        seconds=report.predicted_seconds + report.predicted_backward_seconds,
        received_bytes=(within.bytes_moved + between.bytes_moved) / cp_size,
        network_bytes=between.bytes_moved / cp_size,
        busiest_network_bytes=between.busiest_bytes,
    )


def planned_over_hosts(mask: AttnMask, cp_size: int, cost: CostModel) -> Prediction:
    """Returns the prediction for a plan over hosts, inside which GPUs share the heads."""
    per_host = min(cost.ranks_per_host, cp_size)
    outer = planned(mask, cp_size // per_host, _schemes.part_of_host(per_host, cost))
    return _schemes.with_heads_in_hosts(outer, mask, cp_size, cost)


type Scheme = Callable[[AttnMask, int, CostModel], Prediction | None]

SCHEMES: dict[str, Scheme] = {
    "jaxmagi": planned,
    "jaxmagi, heads in hosts": planned_over_hosts,
    "ring": _schemes.ring,
    "all-gather": _schemes.all_gather,
    "Ulysses": _schemes.ulysses,
    "2-D": _schemes.two_dimensional,
}
LEVELS: dict[str, Scheme] = {
    "one level": functools.partial(planned, two_levels=False),
    "two levels": functools.partial(planned, two_levels=True),
}


@dataclass(frozen=True)
class Row:
    """The results of a scheme for a mask and a number of ranks; None where it cannot run."""

    mask: str
    cp_size: int
    scheme: str
    share_of_linear: float | None
    milliseconds: float | None
    received_gb: float | None
    network_gb: float | None = None
    busiest_network_gb: float | None = None


def linear_seconds(mask: AttnMask, cp_size: int) -> float:
    """Returns the time of a rank's share of the cells in full tiles."""
    return mask.area() / cp_size * (COST.forward.cell_seconds + COST.backward.cell_seconds)


def measure(name: str, cp_size: int) -> list[Row]:
    mask = MASKS[name](cp_size * TOKENS_PER_RANK)
    best = linear_seconds(mask, cp_size)
    rows = []
    levels = LEVELS if cp_size > COST.ranks_per_host else {}
    for scheme, predict in (SCHEMES | levels).items():
        made = predict(mask, cp_size, COST)
        if made is None:
            rows.append(Row(name, cp_size, scheme, None, None, None))
        else:
            sizes = (made.received_bytes, made.network_bytes, made.busiest_network_bytes)
            gigabytes = [None if size is None else size / 1e9 for size in sizes]
            rows.append(Row(name, cp_size, scheme, best / made.seconds, 1e3 * made.seconds, *gigabytes))
    return rows


def table(rows: list[Row], name: str) -> str:
    """Returns a table in Markdown: share of linear speed-up, and received bytes."""
    lines = ["| ranks | " + " | ".join(SCHEMES) + " |", "|---" * (1 + len(SCHEMES)) + "|"]
    for cp_size in sorted({row.cp_size for row in rows}):
        mine = [row for row in rows if (row.mask, row.cp_size) == (name, cp_size) and row.scheme in SCHEMES]
        lines.append(f"| {cp_size} | " + " | ".join(map(_cell, mine)) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row.share_of_linear is None:
        return "no heads left"
    return f"{row.share_of_linear:.3f}, {row.received_gb:.2f} GB"


def network_table(rows: list[Row], name: str) -> str:
    """Returns a table in Markdown of plans: share, and bytes between hosts, of a rank and of the busiest."""
    schemes = (*LEVELS, "jaxmagi, heads in hosts")
    lines = ["| ranks | " + " | ".join(schemes) + " |", "|---" * (1 + len(schemes)) + "|"]
    for cp_size in sorted({row.cp_size for row in rows if row.scheme in LEVELS}):
        by_scheme = {row.scheme: row for row in rows if (row.mask, row.cp_size) == (name, cp_size)}
        lines.append(
            f"| {cp_size} | " + " | ".join(_network_cell(by_scheme[each]) for each in schemes) + " |"
        )
    return "\n".join(lines)


def _network_cell(row: Row) -> str:
    return f"{row.share_of_linear:.3f}; {row.network_gb:.2f}, {row.busiest_network_gb:.2f} GB"


def draw(rows: list[Row]) -> None:
    """Draws the shares of linear speed-up by ranks, with a panel for each mask."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.2), layout="constrained")
    panels = figure.subplots(1, len(MASKS), sharey=True)
    for axes, name in zip(panels, MASKS, strict=True):
        for scheme in SCHEMES:
            mine = [row for row in rows if (row.mask, row.scheme) == (name, scheme) and row.share_of_linear]
            ranks, shares = [row.cp_size for row in mine], [row.share_of_linear for row in mine]
            width = 2.5 if scheme.startswith("jaxmagi") else 1.2
            axes.plot(ranks, shares, marker=".", linewidth=width, label=scheme)
        axes.set(xscale="log", xlabel="ranks", title=name, ylim=(0, 1.02))
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of linear speed-up (predicted)")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=1024, help="largest number of ranks")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/scaling.json, docs/scaling.png"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows: list[Row] = []
    for name in MASKS:
        for cp_size in 2 ** np.arange(3, 1 + int(np.log2(arguments.most))):
            rows += measure(name, int(cp_size))
        print(f"\n{name}\n\n{table(rows, name)}\n\n{network_table(rows, name)}", flush=True)
    if arguments.save:
        print("saved", save("scaling", rows, tokens_per_rank=TOKENS_PER_RANK, cost=vars(COST)))
        draw(rows)


if __name__ == "__main__":
    main()
