"""Finds metrics in a script's output as it passes by."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hermes_ops.trial.lines import Line, LineReader
from hermes_ops.trial.masks import Mask
from hermes_ops.trial.metrics import Metric

TEXT_LIMIT_CHARACTERS = 8192  # of a longer line only the beginning is searched; of JSON, all
MOST_NAMES = 1000  # of metrics other than the objective
_MOST_OBJECTS = 16  # beginnings of JSON objects that are tried in a line

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf|Inf|INF|infinity|Infinity)"
_VALUE = re.compile(_NUMBER)
_PAIR = re.compile(
    r"(?<![\w./-])([A-Za-z_][\w./-]{0,249})\s{0,4}=\s{0,4}(" + _NUMBER + r")(?![\w.])"
)
_ITEM = re.compile(r"'([^'\s]{1,250})'\s{0,4}:\s{0,4}(" + _NUMBER + r")(?![\w.])")
_STEP_NAMES = ("epoch", "step", "iteration", "global_step")


class Found(NamedTuple):
    """A value in the output; `step` as the script says it, None if it does not."""

    name: str
    value: float
    step: float | None


class MetricReader:
    """Finds metrics in lines: pairs, JSON objects, or the groups of a user's regular expression.

    Without a regular expression, a line counts if it holds the objective or says its epoch or step
    (`epoch=3 loss=0.41`): the arguments that a script prints at its start are no metrics. Of any
    other line the metrics that `others` names count; those with a pattern of their own there are
    read by it alone.
    A value without a step is the next one of its name after `first_step`. More than 1,000 names
    are not read; the objective and the others always are.
    """

    def __init__(
        self,
        objective: str | None,
        pattern: str | None,
        first_step: int,
        step_offset: int = 0,
        others: Mapping[str, str | None] | None = None,
    ) -> None:
        self._objective = objective
        self._pattern = re.compile(pattern) if pattern else None
        self._others = frozenset(others or ())
        self._own = {n: re.compile(p) for n, p in (others or {}).items() if p}
        self._first_step = first_step
        self._counts: dict[str, int] = {}
        self._names: set[str] = set()
        self.step_offset = step_offset

    def read(self, line: str) -> list[Metric]:
        """Return the metrics of one line."""
        return [self.metric(found) for found in self.find(line)]

    def find(self, line: str) -> list[Found]:
        """Return the values of one line, their steps not counted yet."""
        if self._pattern is not None:
            found = _by_pattern(self._pattern, line, self._objective)
        else:
            found = self._by_pairs(line) if "=" in line or ":" in line else []
        if self._own:
            found = [f for f in found if f.name not in self._own]
            for name, pattern in self._own.items():
                found += [f for f in _by_pattern(pattern, line, name) if f.name == name]
        return [f for f in found if self._is_known(f.name)]

    def metric(self, found: Found) -> Metric:
        """Return the metric at its step, which is counted if the script has said none."""
        return Metric(found.name, found.value, self._step(found.name, found.step))

    def _by_pairs(self, line: str) -> list[Found]:
        pairs = list(_pairs(line))
        steps = [step for name, value in pairs if _is_step(name) and (step := _whole(value)) >= 0]
        values = [(name, value) for name, value in pairs if not _is_step(name)]
        named = any(name == self._objective for name, _ in values)
        if not named and self._objective is not None and not steps:
            values = [(name, value) for name, value in values if name in self._others]
        return [Found(name, value, steps[0] if steps else None) for name, value in values]

    def _is_known(self, name: str) -> bool:
        if name != self._objective and name not in self._others and name not in self._names:
            if len(self._names) >= MOST_NAMES:
                return False
            self._names.add(name)
        return True

    def _step(self, name: str, step: float | None) -> int:
        number = _whole(step)
        if number < 0:
            self._counts[name] = self._counts.get(name, self._first_step) + 1
            return self._counts[name]
        if number == 0:  # this script counts from 0; completed epochs count from 1
            self.step_offset = 1
        return number + self.step_offset


def _by_pattern(pattern: re.Pattern[str], line: str, default: str | None) -> list[Found]:
    """What the pattern finds; a match without a name is a value of `default`."""
    found = []
    for match in pattern.finditer(line[:TEXT_LIMIT_CHARACTERS]):
        groups = match.groupdict()
        name = groups.get("name") or default
        value, step = _spelled(groups["value"]), _spelled(groups.get("step"))
        if name and value is not None:
            found.append(Found(name, value, step))
    return found


class OutputReader:
    """The metrics in a byte stream, the same however it is cut into pieces, and its last lines.

    Of a progress line, which carriage returns rewrite, the newest state counts, once for each step
    that its states say.
    """

    def __init__(self, metrics: MetricReader, mask: Mask | None = None) -> None:
        self._metrics = metrics
        self._lines = LineReader(mask)
        self._shown: dict[str, Found] = {}  # on the progress line that is being rewritten

    def feed(self, data: bytes) -> list[Metric]:
        """Return the metrics that `data` completes."""
        return [metric for line in self._lines.feed(data) for metric in self._read(line)]

    def close(self) -> list[Metric]:
        """Return what an unfinished last line holds."""
        lines = self._lines.close() or [Line("")]
        return [metric for line in lines for metric in self._read(line)]

    @property
    def tail(self) -> list[str]:
        """The last lines, without secrets and control characters."""
        return self._lines.tail

    @property
    def step_offset(self) -> int:
        """1 if the script counts its steps from 0."""
        return self._metrics.step_offset

    def _read(self, line: Line) -> list[Metric]:
        found = self._metrics.find(line.text)
        if not line.rewritten and not self._shown:
            return [self._metrics.metric(f) for f in found]
        past = []
        for new in found:
            old = self._shown.pop(new.name, None)
            if old is not None and old.step != new.step:
                past.append(old)
            self._shown[new.name] = new
        if not line.rewritten:
            past += self._shown.values()
            self._shown = {}
        return [self._metrics.metric(f) for f in past]


def _pairs(line: str) -> Iterator[tuple[str, float]]:
    """The names and values of JSON objects, of `name=value` and of a printed Python dictionary."""
    for document in _objects(line) if "{" in line else [line]:
        if isinstance(document, dict):
            yield from _items(document, "")
            continue
        text = document[:TEXT_LIMIT_CHARACTERS]
        if "=" in text:
            yield from ((name, float(value)) for name, value in _PAIR.findall(text))
        if "':" in text:
            yield from ((name, float(value)) for name, value in _ITEM.findall(text))


def _objects(line: str) -> Iterator[dict[str, object] | str]:
    """The JSON objects in a line and the text around them, in their order."""
    decoder, rest, at = json.JSONDecoder(), 0, line.find("{")
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            break
        try:
            document, end = decoder.raw_decode(line, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield line[rest:at]
            yield document
            rest = end
        at = line.find("{", end)
    yield line[rest:]


def _items(document: dict[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    """The numbers in an object; those of an object inside it are named `outer/inner`."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if len(name) > 250 or not name.isprintable() or not name.strip():
            continue
        if isinstance(value, dict):
            yield from _items(value, f"{name}/")
        elif (number := _float(value)) is not None:
            yield name, number


def _float(value: object) -> float | None:
    """The number that a value is or spells, None if it does not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and not _VALUE.fullmatch(value.strip()):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if isinstance(value, int) and value > 0 else -math.inf


def _spelled(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _is_step(name: str) -> bool:
    return name.lower() in _STEP_NAMES


def _whole(step: float | None) -> int:
    """The step as a whole number; -1 if it is not one."""
    if step is None or not 0 <= step <= 1e15 or step != int(step):
        return -1
    return int(step)
