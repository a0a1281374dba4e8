"""Defines what the pictures of masks and of plans share: colours, figures and axes in tokens."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3b6fb6", "#e2803a", "#3f9c78", "#b8496b", "#7a64b0", "#c9a227", "#4aa3b8", "#8a5a44")
BACKGROUND, INK, MUTED = "#f3f4f6", "#374151", "#6b7280"


def color(index: int) -> str:
    """Returns the colour of the band or rank ``index``; colours repeat."""
    return COLORS[index % len(COLORS)]


def new_axes(**options: Any) -> "Axes":
    """Makes a figure with the options of ``plt.subplots``, and returns its axes. Needs matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("draw() needs matplotlib: pip install jaxmagi[plot]") from error
    _, ax = plt.subplots(**options)
    return ax


def style_token_axes(ax: "Axes", query_label: str) -> None:
    """Labels the axes: keys at the top, queries downwards, and ticks in tokens."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("key (tokens)", color=INK)
    ax.set_ylabel(query_label, color=INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        axis.set_major_formatter(FuncFormatter(_tokens))
    ax.tick_params(colors=MUTED, labelsize=8, length=3)
    ax.spines[:].set(color=MUTED, linewidth=0.6)


def _tokens(value: float, position: int | None = None) -> str:
    """Formats a number of tokens in powers of 1000: 512, 4k, 1.5M."""
    del position
    for unit, suffix in ((10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
