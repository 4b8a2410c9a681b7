"""Reads a script's output as it passes by: its last lines, and the metrics in them."""

from __future__ import annotations

import re
from collections import deque

from hermes_ops.trial.metrics import Metric

LINE_LIMIT_BYTES = 8192  # of a longer line only the beginning is read
TAIL_LINES = 50
TAIL_LINE_CHARACTERS = 2000

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf|Inf|INF|infinity|Infinity)"
_PAIR = re.compile(
    r"(?<![\w./-])([A-Za-z_][\w./-]{0,249})\s{0,4}=\s{0,4}(" + _NUMBER + r")(?![\w.])"
)
_STEP_NAMES = ("epoch", "step", "iteration")


class LineReader:
    """Cuts a byte stream into lines, at line feeds and carriage returns, in bounded memory."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rewrite = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        lines = []
        for piece in re.split(rb"(\r\n|\n|\r)", data):
            if piece in (b"\n", b"\r\n", b"\r"):
                lines.append(self._end_line(rewrite=piece == b"\r"))
            else:
                room = LINE_LIMIT_BYTES - len(self._line)
                self._line += piece[: max(0, room)]
        return lines

    def close(self) -> list[str]:
        """Return the unfinished last line, if any."""
        return [self._end_line(rewrite=False)] if self._line else []

    @property
    def tail(self) -> list[str]:
        """The last lines; of a line that was rewritten by carriage returns, the last state."""
        return list(self._tail)

    def _end_line(self, rewrite: bool) -> str:
        line = self._line.decode("utf-8", errors="replace")
        self._line.clear()
        if self._rewrite and self._tail:
            self._tail[-1] = line[:TAIL_LINE_CHARACTERS] or self._tail[-1]
        else:
            self._tail.append(line[:TAIL_LINE_CHARACTERS])
        self._rewrite = rewrite
        return line


class MetricReader:
    """Finds metrics in lines: `name=value` pairs, or the groups of a user's regular expression.

    Without a regular expression, a line counts if it holds the objective or says its epoch or step
    (`epoch=3 loss=0.41`): the arguments that a script prints at its start are no metrics.
    A value without a step is the next one of its name after `first_step`.
    """

    def __init__(
        self, objective: str | None, pattern: str | None, first_step: int, step_offset: int = 0
    ) -> None:
        self._objective = objective
        self._pattern = re.compile(pattern) if pattern else None
        self._first_step = first_step
        self._counts: dict[str, int] = {}
        self.step_offset = step_offset

    def read(self, line: str) -> list[Metric]:
        """Return the metrics of one line."""
        if "=" not in line and self._pattern is None:
            return []
        return self._by_pattern(line) if self._pattern else self._by_pairs(line)

    def _by_pairs(self, line: str) -> list[Metric]:
        pairs = _PAIR.findall(line)
        steps = [value for name, value in pairs if name.lower() in _STEP_NAMES]
        values = [(name, value) for name, value in pairs if name.lower() not in _STEP_NAMES]
        named = any(name == self._objective for name, _ in values)
        if not named and self._objective is not None and not steps:
            return []
        return [self._metric(n, v, steps[0] if steps else None) for n, v in values]

    def _by_pattern(self, line: str) -> list[Metric]:
        found = []
        assert self._pattern is not None
        for match in self._pattern.finditer(line):
            groups = match.groupdict()
            name = groups.get("name") or self._objective
            try:
                float(groups["value"])
            except (TypeError, ValueError):
                continue
            if name:
                found.append(self._metric(name, groups["value"], groups.get("step")))
        return found

    def _metric(self, name: str, value: str, step: str | None) -> Metric:
        return Metric(name, float(value), self._step(name, step))

    def _step(self, name: str, step: str | None) -> int:
        number = _whole(step)
        if number is None:
            self._counts[name] = self._counts.get(name, self._first_step) + 1
            return self._counts[name]
        if number == 0:  # this script counts from 0; completed epochs count from 1
            self.step_offset = 1
        return number + self.step_offset


def _whole(step: str | None) -> int | None:
    try:
        number = float(step) if step is not None else -1.0
    except ValueError:
        return None
    return int(number) if number >= 0 and number == int(min(number, 1e15)) else None
