"""A CSV file of a workload: its text, its rows, and what is wrong with them."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TextIO

from hermes_ops.errors import ConfigError, Problem, file_error_text

MOST_PROBLEMS = 20


@contextmanager
def opened_csv(path: Path, what: str, fix: str = "correct the path or file") -> Iterator[TextIO]:
    """Open a CSV file (`.gz`: compressed); ConfigError about `what` if it cannot be read."""
    try:
        with _opened(path) as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        problem = Problem(str(path), file_error_text(error), "a readable CSV file", fix)
        raise ConfigError(what, (problem,)) from error


def _opened(path: Path) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


@dataclass(slots=True)
class CsvFile:
    """The rows of one CSV file with these columns, and the problems found in it."""

    path: Path
    columns: tuple[str, ...]
    what: str = "the workload"
    problems: list[Problem] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield each line's number and its cells by column."""
        with opened_csv(self.path, self.what) as file:
            lines = list(csv.reader(file, strict=True))
        header = tuple(cell.strip() for cell in lines[0]) if lines else ()
        if header != self.columns:
            found, allowed = ",".join(header) or "nothing", ",".join(self.columns)
            problem = Problem("line 1", found, allowed, "correct the header")
            raise ConfigError(str(self.path), (problem,))
        for line, cells in enumerate(lines[1:], start=2):
            if len(cells) == len(header):
                yield line, dict(zip(header, map(str.strip, cells), strict=True))
            elif cells:
                self.add(line, f"{len(cells)} cells", f"{len(header)} cells")

    def add(
        self, where: int | str, found: str, allowed: str, fix: str = "correct the line"
    ) -> None:
        """Note a problem of a line, or of a part of the file."""
        place = f"line {where}" if isinstance(where, int) else where
        self.problems.append(Problem(place, found, allowed, fix))

    def number(self, line: int, row: Mapping[str, str], column: str, least: float = 0.0) -> float:
        """Return a finite number of at least `least`; note a problem and return it if it is not."""
        try:
            value = float(row[column])
        except ValueError:
            value = float("nan")
        if isfinite(value) and value >= least:
            return value
        self.add(line, f"{column} {row[column]!r}", f"a number of at least {least:g}")
        return least

    def above_zero(self, line: int, row: Mapping[str, str], column: str) -> float:
        """Return a finite number above 0; note a problem and return 1 for another value."""
        problem_count = len(self.problems)
        value = self.number(line, row, column)
        if value > 0:
            return value
        if len(self.problems) == problem_count:
            self.add(line, f"{column} {row[column]!r}", "a number above 0")
        return 1.0

    def whole(self, line: int, row: Mapping[str, str], column: str, least: int = 1) -> int:
        """Return a whole number of at least `least`; note a problem and return it if it is not."""
        value = self.number(line, row, column, least)
        if value != int(value):
            self.add(line, f"{column} {row[column]!r}", "a whole number")
        return int(value)

    def known(self, line: int, name: str, applications: Iterable[str]) -> bool:
        """Return whether the application is known; note a problem if it is not."""
        if name in applications:
            return True
        self.add(line, f"application {name!r}", ", ".join(sorted(applications)))
        return False

    def close(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(str(self.path), tuple(self.problems[:MOST_PROBLEMS]))
