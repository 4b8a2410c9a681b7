"""What all pictures share: an empty figure in one style, its PNG or SVG, units, plain text."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID, TEXT = "#e3e7ed", "#3a4452"
DARK, RED = "#111111", "#d62728"
TOO_GREAT = 1e100  # matplotlib places no ticks near the largest double; NaN fails the test too
_DPI = 130
_WIDE = 30.0
_METADATA = ("Creator", "Date", "Format", "Type")  # would name addresses, and the time


class NothingToDrawError(Exception):
    """There is no such picture of this sweep; the message says why, in one sentence."""


def figure_of(
    width: float, height: float, columns: int, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure (inches) with its axes side by side, away from any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    found = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axes in found:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=TEXT, labelsize=9)
    return figure, found


def png(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    return _saved(figure, "png")


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG, the same bytes for the same figure.

    Letters stay text, which a browser draws in its own fonts: smaller, and in every script.
    """
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hermes"}):
        return _saved(figure, "svg", metadata=dict.fromkeys(_METADATA))


def _saved(figure: Figure, form: str, **options: Any) -> bytes:  # noqa: ANN401 - savefig's own
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A name may have a letter that the font lacks: a box is drawn for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format=form, **options)
    return out.getvalue()


def plain(text: str, most: int = 60) -> str:
    """Return the text such that matplotlib reads no formula in it, and not too long."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return short.replace("$", r"\$")


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values, none of them 0 or less, are better seen on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _WIDE


def say_empty(axes: Axes, text: str) -> None:
    """Write into axes that hold nothing why that is so."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=TEXT)


def unit_of(span_s: float) -> tuple[str, float]:
    """Return the unit in which a span reads well, and its seconds."""
    if span_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if span_s < 3 * 3_600 else ("hours", 3_600.0)
