"""Draws a mask with matplotlib: one polygon per band, so that a million tokens cost no more than sixteen."""

from typing import TYPE_CHECKING

import numpy as np

from .._drawing import BACKGROUND, MUTED, color, new_axes, style_token_axes
from .geometry import area, columns, tighten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELLS_UP_TO = 64  # largest number of tokens for which single cells are drawn, with a grid between them


def draw_bands(bands: np.ndarray, q_len: int, kv_len: int, ax: "Axes | None" = None) -> "Axes":
    """Draws bands ``[S, 6]``, as in `AttnMask.draw`."""
    if ax is None:
        ratio = np.clip(q_len / max(kv_len, 1), 0.25, 4.0)
        ax = new_axes(figsize=(6.0, 1.2 + 4.8 * ratio), layout="constrained")
    bands = tighten(bands)
    bands = bands[bands.any(axis=-1)]
    cells = max(q_len, kv_len) <= _CELLS_UP_TO
    outlines = [_staircase(band) for band in bands.tolist()] if cells else _outlines(bands)
    _fill(ax, outlines, outlined=not cells)
    _decorate(ax, q_len, kv_len)
    if cells:
        _draw_grid(ax, q_len, kv_len)
    ax.set_title(_summary(bands, q_len, kv_len), loc="left", fontsize=9, color=MUTED, pad=8)
    return ax


def _fill(ax: "Axes", outlines: list[np.ndarray], *, outlined: bool) -> None:
    """Adds the shapes to the axes; their outlines keep shapes thinner than a pixel visible."""
    from matplotlib.collections import PolyCollection

    colors = [color(i) for i in range(len(outlines))]
    edges = colors if outlined else "none"
    ax.add_collection(PolyCollection(outlines, facecolors=colors, edgecolors=edges, linewidths=0.6))


def _staircase(band: list[int]) -> np.ndarray:
    """Returns the exact outline ``(key, query)`` of a band's cells."""
    q0, q1, k0, k1, lo, hi = band
    rows = np.arange(q0, q1)
    edges = np.maximum(k0, rows + lo), np.minimum(k1, rows + hi + 1)
    left, right = (np.repeat(edge, 2) for edge in edges)
    heights = np.column_stack([rows, rows + 1]).ravel()
    down, up = np.column_stack([right, heights]), np.column_stack([left, heights])[::-1]
    return np.concatenate([down, up])


def _outlines(bands: np.ndarray) -> list[np.ndarray]:
    """Returns outlines ``(key, query)`` with straight edges through the middle of the steps."""
    q0, q1, k0, k1, lo, hi = (column.astype(float) for column in columns(bands))
    # Each edge is a slanted line clipped by the key range; it bends where the two meet.
    right_bend, left_bend = np.clip(k1 - hi - 0.5, q0, q1), np.clip(k0 - lo + 0.5, q0, q1)
    heights = np.stack([q0, right_bend, q1, q1, left_bend, q0], axis=-1)
    right = np.clip(heights[:, :3] + hi[:, None] + 0.5, k0[:, None], k1[:, None])
    left = np.clip(heights[:, 3:] + lo[:, None] - 0.5, k0[:, None], k1[:, None])
    return list(np.stack([np.concatenate([right, left], axis=-1), heights], axis=-1))


def _decorate(ax: "Axes", q_len: int, kv_len: int) -> None:
    ax.set(xlim=(0, max(kv_len, 1)), ylim=(max(q_len, 1), 0), facecolor=BACKGROUND)
    if 0.25 <= q_len / max(kv_len, 1) <= 4.0:
        ax.set_aspect("equal")
    style_token_axes(ax, "query (tokens)")


def _draw_grid(ax: "Axes", q_len: int, kv_len: int) -> None:
    ax.hlines(np.arange(1, q_len), 0, kv_len, colors="white", linewidth=0.8)
    ax.vlines(np.arange(1, kv_len), 0, q_len, colors="white", linewidth=0.8)


def _summary(bands: np.ndarray, q_len: int, kv_len: int) -> str:
    cells = sum(area(bands).tolist())
    share = cells / max(1, q_len * kv_len)
    noun = "band" if len(bands) == 1 else "bands"
    return f"{len(bands):,} {noun}, {cells:,} cells visible ({share:.2%})"
