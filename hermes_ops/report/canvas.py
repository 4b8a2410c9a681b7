"""What all pictures share: an empty figure in one style, its PNG, the unit of a time axis."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID, TEXT = "#e3e7ed", "#3a4452"
_DPI = 130


def figure_of(width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    """Return an empty figure (inches) with its axes side by side, away from any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    found = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axes in found:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=TEXT, labelsize=9)
    return figure, found


def png(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A name may have a letter that the font lacks: a box is drawn for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format="png")
    return out.getvalue()


def unit_of(span_s: float) -> tuple[str, float]:
    """Return the unit in which a span reads well, and its seconds."""
    if span_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if span_s < 3 * 3_600 else ("hours", 3_600.0)
