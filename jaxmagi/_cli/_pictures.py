"""Draws pictures of a plan: its mask by rank, work and traffic of each rank, and a timeline."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from .._drawing import INK, MUTED, color
from ..planning import ContextPlan, CostModel
from ..planning._report import schedule_pass
from ..planning._schedule import OWN_KEYS

_TRANSFER = "#9ca3af"
_DPI = 150


def write_pictures(plan: ContextPlan, cost: CostModel, folder: Path) -> list[Path]:
    """Writes ``mask.png``, ``ranks.png`` and ``timeline.png`` into a folder, which it makes if necessary.

    Raises:
        OSError: the files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "mask": _draw_mask(plan),
        "ranks": _draw_ranks(plan, cost),
        "timeline": _draw_timeline(plan, cost),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _draw_mask(plan: ContextPlan) -> Figure:
    margins = {"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.88}
    figure = Figure(figsize=(9.6, 5.4))
    plan.draw(figure.subplots(gridspec_kw=margins))
    return figure


def _draw_ranks(plan: ContextPlan, cost: CostModel) -> Figure:
    """Draws bars of each rank's area, and of the bytes of keys and values that it sends and receives."""
    report = plan.report(cost)
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    ranks = np.arange(plan.cp_size)
    top.bar(ranks, report.area, width=0.8, color=[color(rank) for rank in range(plan.cp_size)])
    top.axhline(report.area.mean(), color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    top.set_ylabel("area (cells)", color=INK)
    top.yaxis.set_major_formatter(EngFormatter(sep=""))
    top.set_title(f"largest / mean area {report.imbalance:.4f}", fontsize=9, color=INK, loc="left")
    for rows, shift, label, shade in (
        (report.rows_received, -0.2, "received", INK),
        (report.rows_sent, 0.2, "sent", _TRANSFER),
    ):
        bottom.bar(ranks + shift, rows * cost.row_bytes, width=0.4, color=shade, label=label)
    bottom.set_ylabel("keys and values", color=INK)
    bottom.yaxis.set_major_formatter(EngFormatter("B"))
    bottom.set_xlabel("rank", color=INK)
    bottom.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    _style(top, bottom)
    bottom.set_xlim(-0.6, plan.cp_size - 0.4)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    return figure


def _draw_timeline(plan: ContextPlan, cost: CostModel) -> Figure:
    """Draws each rank's attention in the predicted forward pass, launch by launch, below the transfers."""
    schedule = schedule_pass(np.asarray(plan.bands), plan.transfer, cost, cost.forward)
    fetches, attention = 1e3 * schedule.fetches, 1e3 * schedule.attention
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1, 9))
    lane, colors = np.zeros(len(fetches)), [color(part) for part in range(len(fetches))]
    above.barh(lane, np.diff(fetches)[:, 0], left=fetches[:, 0], color=colors, edgecolor="white")
    above.set(yticks=[0], yticklabels=["link"])
    ranks = np.arange(plan.cp_size)
    for part in (OWN_KEYS, *range(len(fetches))):
        begin, end = np.moveaxis(attention[:, schedule.launched == part], -1, 0)
        label, shade = ("own keys", MUTED) if part == OWN_KEYS else (f"part {part + 1}", colors[part])
        lanes = np.broadcast_to(ranks[:, None], begin.shape)
        below.barh(lanes.ravel(), (end - begin).ravel(), left=begin.ravel(), color=shade, label=label)
    below.set_ylim(plan.cp_size - 0.4, -0.6)
    below.set_ylabel("rank", color=INK)
    below.set_xlabel("predicted forward pass (ms)", color=INK)
    below.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=len(fetches) + 1)
    _style(above, below)
    return figure


def _style(*every: Axes) -> None:
    for axes in every:
        axes.tick_params(colors=MUTED, labelsize=8, length=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=MUTED, linewidth=0.6)
