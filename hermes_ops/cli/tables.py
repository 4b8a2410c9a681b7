"""Tables in a terminal of any width: an id, a head and a number are neither cut nor wrapped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hermes_ops.trial.output.line_reader import plain

_GAP = 2  # between the columns of a table without lines
_LINES = 3  # width of a column's borders in a table with lines
_LEAST_WRAPPED = 24
_WIDEST = 100_000


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: `wraps` for prose, `spare` for what a narrow terminal does without.

    `right`: its cells end at the right, as numbers do.
    """

    head: str
    wraps: bool = False
    spare: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    """The cells of a row, and its style."""

    cells: tuple[str, ...]
    style: str = ""


def without_controls(text: str) -> str:
    """Return the text without ANSI escapes and control characters, which a terminal would obey.

    Values of parameters, reasons and names are other people's. The lines and tabs stay.
    """
    return "\n".join(map(plain, text.split("\n")))


class _PlainConsole(Console):
    """Writes its own escapes alone: none that is in a text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of what is printed."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=without_controls(segment.text))


def output_console(*, stderr: bool = False) -> Console:
    """Return the console for standard output, or for standard error.

    In a pipe or a file lines are not wrapped, unless the variable COLUMNS sets a width.
    """
    console = _PlainConsole(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _PlainConsole(stderr=stderr, width=_WIDEST)


def fit_table(
    title: str, columns: Sequence[TableColumn], rows: Iterable[TableRow], width: int
) -> RenderableType:
    """Return a table that fits: with lines, without, without spare columns, else in parts.

    Each part begins with the first column. A part that is still too wide is not cut.
    """
    rows = list(rows)
    places = list(range(len(columns)))
    head = [Text(title, style="italic")] if title else []
    if _taken(columns, rows, places, _LINES) + 1 <= width:
        return Group(*head, _table(columns, rows, places, lines=True))
    if _taken(columns, rows, places, _GAP) > width:
        places = [n for n in places if not columns[n].spare]
    parts = _parts(columns, rows, places, width)
    return Group(*head, *(_table(columns, rows, part, lines=False) for part in parts))


def is_wide(columns: Sequence[TableColumn], cells: Iterable[tuple[str, ...]], width: int) -> bool:
    """Return whether the table does not fit, not even without lines."""
    return _taken(columns, list(map(TableRow, cells)), range(len(columns)), _GAP) > width


def print_whole(console: Console, what: RenderableType) -> None:
    """Print it without cutting what is wider than the terminal."""
    console.print(_Uncut(what), crop=False, overflow="ignore")


@dataclass(frozen=True, slots=True)
class _Uncut:
    """Renders in the terminal's width, or in a greater one if the content needs it."""

    what: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=_WIDEST)  # a measure is never above max_width
        width = max(console.width, console.measure(self.what, options=unlimited).minimum)
        yield from console.render(self.what, options.update(width=width))


def _parts(
    columns: Sequence[TableColumn], rows: Sequence[TableRow], places: Sequence[int], width: int
) -> list[list[int]]:
    first, *others = places
    parts = [[first]]
    for place in others:
        fits = _taken(columns, rows, [*parts[-1], place], _GAP) <= width
        if fits or len(parts[-1]) == 1:
            parts[-1].append(place)
        else:
            parts.append([first, place])
    return parts


def _taken(
    columns: Sequence[TableColumn], rows: Sequence[TableRow], places: Sequence[int], each: int
) -> int:
    return sum(_least(columns, rows, place) + each for place in places)


def _least(columns: Sequence[TableColumn], rows: Sequence[TableRow], place: int) -> int:
    """Return the least width of a column."""
    head = cell_len(columns[place].head)
    lines = (line for row in rows for line in row.cells[place].splitlines())
    widest = max(map(cell_len, lines), default=0)
    if columns[place].wraps:
        widest = min(widest, _LEAST_WRAPPED)
    return max(head, widest)


def _table(
    columns: Sequence[TableColumn], rows: Sequence[TableRow], places: Sequence[int], *, lines: bool
) -> Table:
    table = Table() if lines else Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for place in places:
        column = columns[place]
        least = _least(columns, rows, place)
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(
            Text(column.head), justify=justify, no_wrap=not column.wraps, min_width=least
        )
    for row in rows:
        table.add_row(*(Text(row.cells[place]) for place in places), style=row.style)
    return table
