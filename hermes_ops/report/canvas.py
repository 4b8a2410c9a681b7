"""The basis of all pictures: empty figures, PNG and SVG, units, plain text, shorter curves."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hermes_ops.core.summary import CurvePoints

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
    """This sweep has no such picture; the message gives the reason in one sentence."""


def figure_of(
    width: float, height: float, columns: int, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure (inches) with its axes side by side, without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    every = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axes in every:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=TEXT, labelsize=9)
    return figure, every


def png(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    return _saved(figure, "png")


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG, the same bytes for the same figure.

    Text stays text, which a browser draws in its own fonts: smaller, and in every script.
    """
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hermes"}):
        return _saved(figure, "svg", metadata=dict.fromkeys(_METADATA))


def _saved(figure: Figure, form: str, **options: Any) -> bytes:  # noqa: ANN401 - savefig's own
    out = io.BytesIO()
    with warnings.catch_warnings():
        # matplotlib draws a box for a letter that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format=form, **options)
    return out.getvalue()


def plain(text: str, most: int = 60) -> str:
    """Return the text cut to `most` characters, without formulas for matplotlib."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return short.replace("$", r"\$")


def is_wide(values: Sequence[float]) -> bool:
    """Return whether positive values need a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _WIDE


def say_empty(axes: Axes, text: str) -> None:
    """Write into empty axes why they are empty."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=TEXT)


def unit_of(span_s: float) -> tuple[str, float]:
    """Return a readable unit for a span of time, and the unit's seconds."""
    if span_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if span_s < 3 * 3_600 else ("hours", 3_600.0)


def downsample(points: CurvePoints, most: int, keep: Collection[int] = ()) -> CurvePoints:
    """Return about `most` points (at least 4) that look like the whole curve, in order.

    The ends, the minimum and the maximum of each stretch, and the points at the steps of `keep`
    stay. A shorter curve is returned unchanged.
    """
    if len(points) <= most:
        return points
    stretch = -(-len(points) // max(1, (most - 2) // 2))
    chosen = {0, len(points) - 1}
    chosen |= {index for index, point in enumerate(points) if point[0] in keep}
    for begin in range(0, len(points), stretch):
        indices = range(begin, min(begin + stretch, len(points)))
        chosen.add(min(indices, key=lambda index: points[index][1]))
        chosen.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(chosen))
