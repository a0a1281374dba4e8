"""Draws a plan with matplotlib: the mask coloured by rank, and what each rank computes and receives."""

from typing import TYPE_CHECKING

import numpy as np

from .._drawing import BACKGROUND, INK, MUTED, color, new_axes, style_token_axes
from ..masks.geometry import columns
from ._ranges import meet
from ._received import TokenRuns, own_runs
from ._report import key_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ._plan import ContextPlan

_PIXELS = 512
_RECEIVED = "#9ca3af"


def draw_plan(plan: "ContextPlan", ax: "Axes | None" = None) -> "Axes":
    """Draws a plan with host arrays; see `ContextPlan.draw`."""
    if ax is None:
        margins = {"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.88}
        ax = new_axes(figsize=(9.6, 5.4), gridspec_kw=margins)
    _draw_mask(plan, ax)
    _draw_bars(plan, ax)
    return ax


def _draw_mask(plan: "ContextPlan", ax: "Axes") -> None:
    from matplotlib.colors import to_rgb

    owner, shade = _rasterise(plan)
    rgb = np.array([to_rgb(color(rank)) for rank in range(plan.cp_size)])
    background = np.array(to_rgb(BACKGROUND))
    image = background + shade[..., None] * (rgb[owner][:, None] - background)
    extent = (0, max(plan.length, 1), max(plan.length, 1), 0)
    ax.imshow(image, extent=extent, interpolation="nearest", aspect="equal")
    style_token_axes(ax, "query (tokens), coloured by rank")


def _draw_bars(plan: "ContextPlan", ax: "Axes") -> None:
    """Beside the mask: each rank's area, and its received rows as a share of its shard."""
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    report = plan.report()
    divider = make_axes_locatable(ax)
    bars = [divider.append_axes("right", size="30%", pad=0.4) for _ in range(2)]
    ranks = np.arange(plan.cp_size)
    colors = [color(rank) for rank in range(plan.cp_size)]
    mean = max(report.area.mean(), 1)
    bars[0].barh(ranks, report.area / mean, color=colors)
    bars[0].axvline(1, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    bars[0].set_title(f"area / mean\nlargest {report.imbalance:.3f}", fontsize=9, color=INK)
    share = report.rows_received / plan.shard_length
    bars[1].barh(ranks, share, color=_RECEIVED)
    bars[1].set_title(f"received / own rows\nmean {share.mean():.2f}", fontsize=9, color=INK)
    for bar in bars:
        bar.set(ylim=(plan.cp_size - 0.4, -0.6), facecolor="none")
        bar.set_yticks(ranks[:: -(-plan.cp_size // 16)])
        bar.tick_params(colors=MUTED, labelsize=8, length=2)
        bar.spines[["top", "right"]].set_visible(False)
        bar.spines[["left", "bottom"]].set(color=MUTED, linewidth=0.6)
    bars[0].set_ylabel("rank", color=MUTED, fontsize=8, labelpad=3)


def _rasterise(plan: "ContextPlan") -> tuple[np.ndarray, np.ndarray]:
    """The mask in pixels: the rank of each row of pixels and the visible share ``[rows, columns]``.

    A row of pixels shows the token in its middle.
    """
    size = min(_PIXELS, max(plan.length, 1))
    sampled = (np.arange(size) * 2 + 1) * plan.length // (2 * size)
    position = np.full(max(plan.length, 1), 0)
    position[plan.token_order[plan.token_order >= 0]] = np.flatnonzero(plan.token_order >= 0)
    owner, row = np.divmod(position[sampled], plan.shard_length)
    edges = np.arange(size + 1) * plan.length // size
    covered = np.zeros((size, size + 1), np.int64)
    own = own_runs(plan.token_order, plan.cp_size)
    for stage, keys in enumerate(key_runs(plan.forward_stages, own)):
        bands = np.asarray(plan.bands)[:, stage]
        for rank in np.unique(owner):
            runs = keys.of_rank(rank)
            for pixel in np.flatnonzero(owner == rank):
                covered[pixel] += _visible_before(edges, bands[rank], int(row[pixel]), runs)
    shade = np.diff(covered, axis=1) / np.maximum(np.diff(edges), 1)
    return owner, np.minimum(shade, 1)


def _visible_before(edges: np.ndarray, bands: np.ndarray, row: int, keys: TokenRuns) -> np.ndarray:
    """How many tokens before each of the edges a row of the shard sees in a key buffer: int64 ``[E]``."""
    q0, q1, k0, k1, lo, hi = columns(bands)
    begin, end = np.maximum(k0, row + lo), np.minimum(k1, row + hi + 1)
    begin, end = (edge[(q0 <= row) & (row < q1)] for edge in (begin, end))
    _, run, first, last = meet(begin, end, keys.row, keys.row + keys.length)
    tokens = keys.token[run] + first - keys.row[run]
    # A token before an edge is there, one at it is not.
    before = np.clip(edges[:, None] - tokens, 0, last - first)
    return before.sum(axis=1)
