"""Draws which kernels of context attention ran when, from the results of the benchmark `timeline`."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ATTENTION, CASTS, RETURNS, REST = "attention", "keys and values\narrive", "gradients\nreturn", "the rest"
COLORS = {ATTENTION: "#4878a8", CASTS: "#e1812c", RETURNS: "#3a923a", REST: "#9a9a9a"}
KINDS = {"forward_kernel": ATTENTION, "backward_kernel": ATTENTION, "push": CASTS, "pull": RETURNS}
EXCHANGE = "ncclDevKernel_SendRecv"
LEAST_WIDTH = 0.0015  # of a bar, as a share of the axis, to be seen


class Bar(NamedTuple):
    """A kernel in milliseconds from the start of its pass."""

    begin: float
    end: float


type Kernel = dict[str, Any]
"""A row of the results."""


def kinds(kernels: Sequence[Kernel]) -> list[str]:
    """Returns what each kernel of a pass is for.

    NCCL has one kernel for casts and returns. In the backward pass all casts are before all returns, and
    there are as many of them.
    """
    exchanges = sum(kernel["name"] == EXCHANGE for kernel in kernels)
    casts = exchanges // 2 if kernels[0]["direction"] == "backward" else exchanges
    number, found = itertools.count(), []
    for kernel in kernels:
        if kernel["name"] == EXCHANGE:
            found.append(CASTS if next(number) < casts else RETURNS)
        else:
            found.append(KINDS.get(kernel["name"], REST))
    return found


def bars(kernels: Sequence[Kernel]) -> dict[str, list[Bar]]:
    """Returns the bars of each kind, in order."""
    ordered = sorted(kernels, key=lambda kernel: kernel["begin_us"])
    made: dict[str, list[Bar]] = {kind: [] for kind in COLORS}
    for kernel, kind in zip(ordered, kinds(ordered), strict=True):
        made[kind].append(Bar(kernel["begin_us"] / 1e3, kernel["end_us"] / 1e3))
    return made


def in_lanes(intervals: Iterable[Bar]) -> list[list[Bar]]:
    """Returns bars in as few lanes as keep them apart, each in the first that is free."""
    lanes: list[list[Bar]] = []
    for bar in intervals:
        free = next((lane for lane in lanes if lane[-1].end <= bar.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(bar)
    return lanes


def draw(results: Path) -> Path:
    """Draws results, NAME.json, to NAME.png beside it, with a panel for each pass and place of transfers.

    It shows the first device. All panels have one scale of time: a pass that takes longer has a wider panel.
    """
    from matplotlib.figure import Figure

    saved = json.loads(results.read_text())
    about, rows = saved["environment"], [row for row in saved["rows"] if row["device"] == 0]
    places = list(dict.fromkeys(row["transfers"] for row in rows))
    lengths = _lengths(rows)
    figure = Figure(figsize=(9, 0.4 + 2.2 * len(places)), layout="constrained")
    title = f"One of {about['gpus']} {about['gpu']}, causal, {about['tokens_per_rank']} tokens on each"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    for place, part in zip(places, figure.subfigures(len(places), squeeze=False)[:, 0], strict=True):
        part.suptitle(f"Transfers {place}", x=0.01, ha="left", fontsize=10, fontweight="bold")
        panels = part.subplots(
            1, len(lengths), sharey=True, squeeze=False, width_ratios=list(lengths.values())
        )[0]
        for axes, (direction, length) in zip(panels, lengths.items(), strict=True):
            mine = [row for row in rows if (row["transfers"], row["direction"]) == (place, direction)]
            _draw_panel(axes, bars(mine), length)
            axes.set_title(f"{direction} pass, {_lengths(mine)[direction]:.1f} ms", loc="left", fontsize=9)
            if place == places[-1]:
                axes.set_xlabel("milliseconds", fontsize=9)
    picture = results.with_suffix(".png")
    figure.savefig(picture, dpi=200, facecolor="white")
    return picture


def _lengths(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Returns the milliseconds that each pass takes, of several the most."""
    lengths: dict[str, float] = {}
    for kernel in kernels:
        direction, end = kernel["direction"], kernel["end_us"] / 1e3
        lengths[direction] = max(end, lengths.get(direction, 0))
    return lengths


def _draw_panel(axes: Any, found: dict[str, list[Bar]], length: float) -> None:
    for y, (kind, color) in enumerate(COLORS.items()):
        lanes = in_lanes(found[kind])
        edge = 0 if kind == REST else 0.3  # between kernels that come one right behind the other
        for i, lane in enumerate(lanes):
            height = 0.76 / len(lanes)
            spans = [(bar.begin, max(bar.end - bar.begin, LEAST_WIDTH * length)) for bar in lane]
            axes.broken_barh(spans, (y - 0.38 + i * height, height), color=color, edgecolor="white", lw=edge)
    axes.set_yticks(range(len(COLORS)), list(COLORS))
    axes.set(ylim=(len(COLORS) - 0.5, -0.5), xlim=(0, length))
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
