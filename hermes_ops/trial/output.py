"""Finds metrics in a script's output as it passes by."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hermes_ops.trial.arguments import Arguments
from hermes_ops.trial.lines import Line, LineReader
from hermes_ops.trial.masks import Mask
from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.numerals import whole_numeral
from hermes_ops.trial.pairs import TEXT_LIMIT_CHARACTERS, Pair, PairFinder, Step

MOST_NAMES = 1000  # of metrics other than the objective
EXCERPT_CHARACTERS = 160  # of a line that is cited
COUNTED, BY_EPOCH, BY_STEP = "counted", "epoch", "step"


class Source(NamedTuple):
    """The line of a value: its beginning, the names on it, and whether it holds the objective."""

    text: str
    names: frozenset[str]
    has_objective: bool


class Found(NamedTuple):
    """A value in the output; `step` as the script says it, None if it does not."""

    name: str
    value: float
    step: Step | None
    source: Source


class MetricReader:
    """Finds metrics in lines: pairs, JSON objects, or the groups of a user's regular expression.

    Without a regular expression, a line with the objective counts. The metrics that `others` names
    count on any line; those with a pattern of their own there are read by it alone. Any other line
    counts if it says its epoch or step, and if it is no list of the script's arguments (see
    `Arguments`). More than 1,000 names are not read; the objective and the others always are.

    A value without a step is the next one of its name after `first_step`, as long as the objective
    has not come with a step. Of several steps on a line the epoch counts. What is not read although
    the sweep file asks for it is in `notes`: a text for each kind of trouble, the first time.
    """

    def __init__(
        self,
        objective: str | None,
        pattern: str | None,
        first_step: int,
        step_offset: int = 0,
        others: Mapping[str, str | None] | None = None,
        *,
        max_epochs: int | None = None,
        reached: int | None = None,
        steps_by: str = "",
        parameters: Collection[str] = (),
    ) -> None:
        self._objective = objective
        self._pattern = re.compile(pattern) if pattern else None
        self._others = frozenset(others or ())
        self._own = {n: re.compile(p) for n, p in (others or {}).items() if p}
        names = [n for n in (objective, *(others or ())) if n is not None and n not in self._own]
        self._finder = PairFinder(names)
        self._first_step = first_step
        self._counts: dict[str, int] = {}
        self._names: set[str] = set()
        self._arguments = Arguments(parameters, self._others)
        self._max_epochs = max_epochs
        self._reached = reached  # the highest step of the objective so far
        self.step_offset = step_offset  # of a trial that an earlier version has begun
        self.steps_by = steps_by  # COUNTED, BY_EPOCH or BY_STEP, once the objective has come
        self.beyond: int | None = None  # a step of the objective after its last epoch
        self.notes: dict[str, str] = {}

    def read(self, line: str) -> list[Metric]:
        """Return the metrics of one line."""
        return self.metrics(self.find(line))

    def find(self, line: str) -> list[Found]:
        """Return the values of one line, their steps not counted yet."""
        if self._pattern is not None:
            found = self._by_pattern(self._pattern, line, self._objective)
        else:
            found = self._by_pairs(line) if "=" in line or ":" in line else []
        if self._own:
            found = [f for f in found if f.name not in self._own]
            for name, pattern in self._own.items():
                found += [f for f in self._by_pattern(pattern, line, name) if f.name == name]
        return [f for f in found if self._is_known(f.name)]

    def metrics(self, found: list[Found]) -> list[Metric]:
        """Return the metrics of a line's values at their steps, counted if the script has said
        none."""
        is_free = self._objective is not None and self._pattern is None
        kept = self._arguments.pass_on(found) if is_free else found
        for text in self._arguments.dropped:
            self._note("arguments", text, "it looks like a list of the script's arguments")
        self._arguments.dropped.clear()
        metrics: list[Metric] = []
        for value in kept:
            step = self._step(value)
            if step is not None:
                metrics.append(Metric(value.name, value.value, step))
        return metrics

    def close(self) -> None:
        """Note what was held back to the end."""
        self._arguments.close()
        self.metrics([])

    # -- what a line holds ---------------------------------------------------------------------

    def _by_pairs(self, line: str) -> list[Found]:
        if self._objective is not None and not self._finder.may_count(line):
            return []
        reading = self._finder.read(line)
        mine = [p for p in reading.pairs if self._is_asked(p.name)]
        named = any(p.name == self._objective for p in mine)
        accepted = named or self._objective is None or reading.step is not None
        if not (accepted or mine):
            return []
        pairs = [p for p in reading.pairs if not p.with_colon or named or p in mine]
        pairs = self._readable(line, pairs if accepted else mine)
        if reading.is_step_unclear and mine:
            self._note("two steps", line, "it says two different epochs or steps")
            return []
        source = Source(line[:EXCERPT_CHARACTERS], frozenset(p.name for p in reading.pairs), named)
        return [Found(p.name, p.value, reading.step, source) for p in pairs if p.value is not None]

    def _readable(self, line: str, pairs: list[Pair]) -> list[Pair]:
        """The pairs that have a value, each name once: of two values none is known to be right."""
        values: dict[str, list[Pair]] = {}
        for pair in pairs:
            if pair.refusal and self._is_asked(pair.name):
                self._note(f"value of {pair.name}", line, pair.refusal)
            if pair.value is not None or pair.refusal:
                values.setdefault(pair.name, []).append(pair)
        unclear = {n for n, p in values.items() if any(not _equal(p[0], other) for other in p)}
        for name in sorted(unclear):
            if self._is_asked(name) and not any(p.refusal for p in values[name]):
                self._note(f"{name} twice", line, f"it names {name} twice, with different values")
        return [p[0] for n, p in values.items() if n not in unclear]

    def _by_pattern(self, pattern: re.Pattern[str], line: str, default: str | None) -> list[Found]:
        """What the pattern finds; a match without a name is a value of `default`."""
        found = []
        for match in pattern.finditer(line[:TEXT_LIMIT_CHARACTERS]):
            groups = match.groupdict()
            name, text = groups.get("name") or default, groups["value"] or ""
            value, step = whole_numeral(text), whole_numeral(groups.get("step") or "")
            if name and value.value is not None:
                said = None if step.value is None else Step("epoch", step.value)
                source = Source(line[:EXCERPT_CHARACTERS], frozenset(), name == self._objective)
                found.append(Found(name, value.value, said, source))
            elif name and self._is_asked(name) and any(c.isdigit() for c in text):
                self._note(f"value of {name}", line, value.refusal or f"{text!r} is no number")
        return found

    def _is_asked(self, name: str) -> bool:
        return name == self._objective or name in self._others

    def _is_known(self, name: str) -> bool:
        if not self._is_asked(name) and name not in self._names:
            if len(self._names) >= MOST_NAMES:
                return False
            self._names.add(name)
        return True

    def _note(self, kind: str, line: str, why: str) -> None:
        if kind not in self.notes:
            self.notes[kind] = f'not read: "{line.strip()[:EXCERPT_CHARACTERS]}": {why}'

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, found: Found) -> int | None:
        """The step of a value; None if it is not counted."""
        if found.name == self._objective:
            step = self._objective_step(found)
            return step if step is None or self._is_within(step, found) else None
        number = _whole(found.step)
        if found.step is None:
            is_stray = found.source.has_objective and self.steps_by in (BY_EPOCH, BY_STEP)
            return None if is_stray else self._count(found.name)
        if number is None:
            return None if found.source.has_objective else self._count(found.name)
        step = number + self.step_offset
        is_within = self._max_epochs is None or step <= self._max_epochs
        return step if is_within or not found.source.has_objective else None

    def _objective_step(self, found: Found) -> int | None:
        text, step = found.source.text, found.step
        if step is None:
            if self.steps_by not in ("", COUNTED):
                self._note("no step", text, f"{found.name} has come with its step before")
                return None
            self.steps_by = COUNTED
            return self._count(found.name)
        number = _whole(step)
        if number is None:
            self._note("fraction", text, f"{step.name} {step.value:g} is no whole number from 0")
            return None
        by = BY_EPOCH if step.name == "epoch" else BY_STEP
        if self.steps_by == BY_EPOCH and by == BY_STEP:
            self._note("no epoch", text, f"{found.name} has come with its epoch before")
            return None
        if self.steps_by == COUNTED:
            self._note("counted", text, "values before it, without a step, were counted from 1")
        return number + self.step_offset

    def _is_within(self, step: int, found: Found) -> bool:
        """Whether a step of the objective is one of the epochs that the trial is to train."""
        by = BY_EPOCH if found.step is None or found.step.name == "epoch" else BY_STEP
        if self._max_epochs is not None and step > self._max_epochs:
            why = f"step {step} is beyond budget.max_epochs ({self._max_epochs})"
            if by == BY_EPOCH or (self._reached or 0) > 0:
                self.beyond = step
            if not self._reached:
                self._note("beyond", found.source.text, why)
            return False
        self._reached = max(step, self._reached or 0)
        if found.step is not None:
            self.steps_by = by
        return True

    def _count(self, name: str) -> int:
        self._counts[name] = self._counts.get(name, self._first_step) + 1
        return self._counts[name]


def _equal(one: Pair, other: Pair) -> bool:
    same = one.value == other.value or (one.value != one.value and other.value != other.value)
    return same and one.refusal == other.refusal


def _whole(step: Step | None) -> int | None:
    """The step as a whole number from 0; None if it is not one."""
    if step is None or not 0 <= step.value <= 1e15 or step.value != int(step.value):
        return None
    return int(step.value)


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
        found = [metric for line in lines for metric in self._read(line)]
        self._metrics.close()
        return found

    @property
    def tail(self) -> list[str]:
        """The last lines, without secrets and control characters."""
        return self._lines.tail

    @property
    def metrics(self) -> MetricReader:
        """What reads the lines."""
        return self._metrics

    def _read(self, line: Line) -> list[Metric]:
        found = self._metrics.find(line.text)
        if not line.rewritten and not self._shown:
            return self._metrics.metrics(found)
        past = []
        for new in found:
            old = self._shown.pop(new.name, None)
            if old is not None and old.step != new.step:
                past.append(old)
            self._shown[new.name] = new
        if not line.rewritten:
            past += self._shown.values()
            self._shown = {}
        return self._metrics.metrics(past)
