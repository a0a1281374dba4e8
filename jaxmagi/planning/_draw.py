"""Draws a plan with matplotlib: the mask coloured by rank, and what each rank computes and receives."""

from typing import TYPE_CHECKING

import numpy as np

from .._drawing import BACKGROUND, INK, MUTED, color, new_axes, style_token_axes
from ..masks.geometry import columns
from ._ranges import TokenRuns, key_runs, meet, own_runs
from ._report import PlanReport
from ._spec import GroupCastSpec, RelayedSpec, steps_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PIXELS = 512
_RECEIVED = "#9ca3af"


def draw_plan(
    token_order: np.ndarray,
    length: int,
    bands: np.ndarray,
    transfer: GroupCastSpec | RelayedSpec,
    report: PlanReport,
    ax: "Axes | None",
) -> "Axes":
    """Draws a plan with host arrays, as in `ContextPlan.draw`."""
    if ax is None:
        margins = {"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.88}
        ax = new_axes(figsize=(9.6, 5.4), gridspec_kw=margins)
    keys = key_runs(steps_of(transfer), own_runs(token_order, len(bands)), transfer.input_rows)
    _draw_mask(token_order, length, bands, keys, ax)
    _draw_bars(report, token_order.size // len(bands), ax)
    return ax


def _draw_mask(token_order: np.ndarray, length: int, bands: np.ndarray, keys: TokenRuns, ax: "Axes") -> None:
    from matplotlib.colors import to_rgb

    owner, shade = _rasterise(token_order, length, bands, keys)
    rgb = np.array([to_rgb(color(rank)) for rank in range(len(bands))])
    background = np.array(to_rgb(BACKGROUND))
    image = background + shade[..., None] * (rgb[owner][:, None] - background)
    extent = (0, max(length, 1), max(length, 1), 0)
    ax.imshow(image, extent=extent, interpolation="nearest", aspect="equal")
    style_token_axes(ax, "query (tokens), coloured by rank")


def _draw_bars(report: PlanReport, shard_length: int, ax: "Axes") -> None:
    """Draws, to the right of the mask, each rank's area and its received rows as a share of its shard."""
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    cp_size = len(report.area)
    divider = make_axes_locatable(ax)
    bars = [divider.append_axes("right", size="30%", pad=0.4) for _ in range(2)]
    ranks = np.arange(cp_size)
    colors = [color(rank) for rank in range(cp_size)]
    mean = max(report.area.mean(), 1)
    bars[0].barh(ranks, report.area / mean, color=colors)
    bars[0].axvline(1, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    bars[0].set_title(f"area / mean\nlargest {report.imbalance:.3f}", fontsize=9, color=INK)
    share = report.rows_received / shard_length
    bars[1].barh(ranks, share, color=_RECEIVED)
    bars[1].set_title(f"received / own rows\nmean {share.mean():.2f}", fontsize=9, color=INK)
    for bar in bars:
        bar.set(ylim=(cp_size - 0.4, -0.6), facecolor="none")
        bar.set_yticks(ranks[:: -(-cp_size // 16)])
        bar.tick_params(colors=MUTED, labelsize=8, length=2)
        bar.spines[["top", "right"]].set_visible(False)
        bar.spines[["left", "bottom"]].set(color=MUTED, linewidth=0.6)
    bars[0].set_ylabel("rank", color=MUTED, fontsize=8, labelpad=3)


def _rasterise(
    token_order: np.ndarray, length: int, bands: np.ndarray, keys: TokenRuns
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rank of each row of pixels and the visible share of each pixel ``[rows, columns]``.

    A row of pixels shows the token in its middle.
    """
    cp_size = len(bands)
    size = min(_PIXELS, max(length, 1))
    sampled = (np.arange(size) * 2 + 1) * length // (2 * size)
    position = np.full(max(length, 1), 0)
    position[token_order[token_order >= 0]] = np.flatnonzero(token_order >= 0)
    owner, row = np.divmod(position[sampled], token_order.size // cp_size)
    edges = np.arange(size + 1) * length // size
    covered = np.zeros((size, size + 1), np.int64)
    for rank in np.unique(owner):
        runs = keys.of_rank(rank)
        for pixel in np.flatnonzero(owner == rank):
            covered[pixel] = _visible_before(edges, bands[rank], int(row[pixel]), runs)
    shade = np.diff(covered, axis=1) / np.maximum(np.diff(edges), 1)
    return owner, np.minimum(shade, 1)


def _visible_before(edges: np.ndarray, bands: np.ndarray, row: int, keys: TokenRuns) -> np.ndarray:
    """Returns how many tokens before each edge a row of the shard sees in a key buffer: int64 ``[E]``."""
    q0, q1, k0, k1, lo, hi = columns(bands)
    begin, end = np.maximum(k0, row + lo), np.minimum(k1, row + hi + 1)
    begin, end = (edge[(q0 <= row) & (row < q1)] for edge in (begin, end))
    _, run, first, last = meet(begin, end, keys.row, keys.row + keys.length)
    tokens = keys.token[run] + first - keys.row[run]
    before = np.clip(edges[:, None] - tokens, 0, last - first)
    return before.sum(axis=1)
