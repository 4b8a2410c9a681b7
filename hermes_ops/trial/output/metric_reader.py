"""Find metrics in the lines of a script's output, and tell them from the arguments it prints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.output.numerals import whole_numeral
from hermes_ops.trial.output.pairs import (
    TEXT_LIMIT_CHARACTERS,
    FoundValue,
    NamedValue,
    PairFinder,
    SourceLine,
    StatedStep,
)
from hermes_ops.trial.output.pattern_process import Match, search

MOST_NAMES = 1000  # of metrics other than the objective
EXCERPT_CHARACTERS = 160  # of a line that is cited
COUNTED, BY_EPOCH, BY_STEP = "counted", "epoch", "step"


class MetricReader:
    """Find metrics in lines: pairs, JSON objects, or the groups of a user's regular expression.

    Without a regular expression, a line with the objective counts. The metrics that `others` names
    count on any line; those with a pattern of their own there are read by it alone. Any other line
    counts if it says its epoch or step, and if it is no list of the script's arguments (see
    `ArgumentFilter`). More than 1,000 names are not read; the objective and the others always are.

    A value without a step gets the next step of its name after `first_step`, the checkpoint's, as
    long as the objective has not come with a step. `stored` has the highest step of each name so
    far: a name that was printed less often than once an epoch continues from there. If complete
    fits of Keras are not run again (`is_replay`), the code between them prints its values again;
    these are counted from 1 until `begin_training`. If a line has several steps, the epoch counts.
    `notes` has a text for each kind of value that the sweep file asks for and that cannot be read.
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
        stored: Mapping[str, int] | None = None,
        is_replay: bool = False,
        steps_by: str = "",
        parameters: Collection[str] = (),
    ) -> None:
        self._objective = objective
        others = others or {}
        patterns_by_name = {name: text for name, text in others.items() if text}
        self._has_pattern = bool(pattern)
        self._own_patterns = tuple(patterns_by_name)
        self.patterns = tuple([pattern] if pattern else []) + tuple(patterns_by_name.values())
        self._others = frozenset(others)
        names = [n for n in (objective, *others) if n is not None and n not in patterns_by_name]
        self._finder = PairFinder(names)
        self._first_step = first_step
        self._stored = stored
        self._is_replay = is_replay  # the script prints again what it printed between its fits
        self._counts: dict[str, int] = {}
        self._names: set[str] = set()
        self._arguments = ArgumentFilter(parameters, self._others, stored or ())
        self._max_epochs = max_epochs
        self._last_step: int | None = None  # of the objective, in this segment
        self._reached = reached  # the highest step of the objective so far
        self.step_offset = step_offset  # of a trial that an earlier version has begun
        self.steps_by = steps_by  # COUNTED, BY_EPOCH or BY_STEP, once the objective has come
        self.beyond: int | None = None  # a step of the objective after its last epoch
        self.notes: dict[str, str] = {}

    def read(self, line: str) -> list[Metric]:
        """Return the metrics of one line."""
        return self.metrics(self.find(line))

    def find(self, line: str) -> list[FoundValue]:
        """Return the values of one line, their steps not counted yet; patterns may not end."""
        text = line[:TEXT_LIMIT_CHARACTERS]
        matches = [
            (place, match)
            for place, pattern in enumerate(self.patterns)
            for match in search(re.compile(pattern), text)
        ]
        return self.values_of(line, matches)

    def values_of(self, line: str, matches: Sequence[tuple[int, Match]]) -> list[FoundValue]:
        """Return the values of one line of which the patterns have been searched for.

        A match comes with the place of its pattern in `patterns`.
        """
        if self._has_pattern:
            values = self._by_pattern(matches, 0, line, self._objective)
        else:
            values = self._by_pairs(line) if "=" in line or ":" in line else []
        if self._own_patterns:
            values = [f for f in values if f.name not in self._own_patterns]
            for place, name in enumerate(self._own_patterns, start=int(self._has_pattern)):
                named = self._by_pattern(matches, place, line, name)
                values += [f for f in named if f.name == name]
        return [f for f in values if self._is_known(f.name)]

    def metrics(self, values: list[FoundValue]) -> list[Metric]:
        """Return the metrics of a line's values at their steps, counted if the script has said
        none."""
        is_free = self._objective is not None and not self._has_pattern
        counted = self._arguments.pass_on(values) if is_free else values
        for text in self._arguments.dropped:
            self._note("arguments", text, "it looks like a list of the script's arguments")
        self._arguments.dropped.clear()
        metrics: list[Metric] = []
        for value in counted:
            step = self._step(value)
            if step is not None:
                metrics.append(Metric(value.name, value.value, step))
        return metrics

    def close(self) -> None:
        """Note what was held back to the end."""
        self._arguments.close()
        self.metrics([])

    # -- what a line holds ---------------------------------------------------------------------

    def _by_pairs(self, line: str) -> list[FoundValue]:
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
        source = SourceLine(
            line[:EXCERPT_CHARACTERS], frozenset(p.name for p in reading.pairs), named
        )
        return [
            FoundValue(p.name, p.value, reading.step, source) for p in pairs if p.value is not None
        ]

    def _readable(self, line: str, pairs: list[NamedValue]) -> list[NamedValue]:
        """Return the pairs that have a value, each name once: conflicting values are dropped."""
        values: dict[str, list[NamedValue]] = {}
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

    def _by_pattern(
        self, matches: Sequence[tuple[int, Match]], place: int, line: str, default: str | None
    ) -> list[FoundValue]:
        """Return the values of one pattern; a match without a name is a value of `default`."""
        values = []
        for said_name, text, step_text in (match for pattern, match in matches if pattern == place):
            name = said_name or default or ""
            value, step = whole_numeral(text), whole_numeral(step_text)
            if name and value.value is not None:
                at = None if step.value is None else StatedStep("epoch", step.value)
                source = SourceLine(line[:EXCERPT_CHARACTERS], frozenset(), name == self._objective)
                values.append(FoundValue(name, value.value, at, source))
            elif name and self._is_asked(name) and any(c.isdigit() for c in text):
                self._note(f"value of {name}", line, value.refusal or f"{text!r} is no number")
        return values

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

    def _step(self, value: FoundValue) -> int | None:
        """Return the step of a value; None if it is not counted."""
        if value.name == self._objective:
            step = self._objective_step(value)
            return step if step is None or self._accept_step(step, value) else None
        number = _whole(value.step)
        if value.step is None:
            is_stray = value.source.has_objective and self.steps_by in (BY_EPOCH, BY_STEP)
            return None if is_stray else self._count(value.name)
        if number is None:
            return None if value.source.has_objective else self._count(value.name)
        step = number + self.step_offset
        is_within = self._max_epochs is None or step <= self._max_epochs
        return step if is_within or not value.source.has_objective else None

    def _objective_step(self, value: FoundValue) -> int | None:
        text, step = value.source.text, value.step
        if step is None:
            if self.steps_by not in ("", COUNTED):
                self._note("no step", text, f"{value.name} has come with its step before")
                return None
            self.steps_by = COUNTED
            return self._count(value.name)
        number = _whole(step)
        if number is None:
            self._note("fraction", text, f"{step.name} {step.value:g} is no whole number from 0")
            return None
        by = BY_EPOCH if step.name == "epoch" else BY_STEP
        if self.steps_by == BY_EPOCH and by == BY_STEP:
            self._note("no epoch", text, f"{value.name} has come with its epoch before")
            return None
        if self.steps_by == COUNTED:
            self._note("counted", text, "values before it, without a step, were counted from 1")
        return number + self.step_offset

    def _accept_step(self, step: int, value: FoundValue) -> bool:
        """Return whether a step of the objective is within `max_epochs`, and remember it."""
        by = BY_EPOCH if value.step is None or value.step.name == "epoch" else BY_STEP
        if self._max_epochs is not None and step > self._max_epochs:
            why = f"step {step} is beyond budget.max_epochs ({self._max_epochs})"
            if by == BY_EPOCH or (self._reached or 0) > 0:
                self.beyond = step
            if not self._reached:
                self._note("beyond", value.source.text, why)
            return False
        self._reached = max(step, self._reached or 0)
        if value.step is not None:
            self.steps_by = by
            self._watch_restart(step, value.source.text)
        return True

    def _watch_restart(self, step: int, text: str) -> None:
        """Note that a resumed script counts its steps from the trial's first ones again."""
        follows_first = self._last_step is not None and self._last_step <= 1
        if follows_first and step == (self._last_step or 0) + 1 < self._first_step:
            self._note(
                "restart",
                text,
                f"resumed after step {self._first_step}, the script counts its steps from the start"
                " again, where they have had their values: it has not loaded its checkpoint, or "
                "must print steps of the whole trial",
            )
        self._last_step = step

    def begin_training(self, *, again: bool) -> None:
        """Note that a `fit` trains, so that new values are printed; with `again` they are repeated.

        The next value of a name then follows those that code between the fits has repeated, and
        those that the complete fits had printed before the checkpoint.
        """
        if self._is_replay and not again:
            self._is_replay = False
            for name, count in self._counts.items():
                self._counts[name] = count + self._before(name, count)

    def _count(self, name: str) -> int:
        if name not in self._counts:
            self._counts[name] = 0 if self._is_replay else self._before(name)
        self._counts[name] += 1
        return self._counts[name]

    def _before(self, name: str, again: int = 0) -> int:
        """Return how often a name was printed before the checkpoint, less the repeated values."""
        if self._stored is None:
            return self._first_step
        return min(self._first_step, max(0, self._stored.get(name, 0) - again))


def _equal(one: NamedValue, other: NamedValue) -> bool:
    same = one.value == other.value or (one.value != one.value and other.value != other.value)
    return same and one.refusal == other.refusal


def _whole(step: StatedStep | None) -> int | None:
    """Return the step as a whole number from 0; None if it is not one."""
    if step is None or not 0 <= step.value <= 1e15 or step.value != int(step.value):
        return None
    return int(step.value)


_MOST_HELD = 1000
_OBJECTS = re.compile(
    r"Namespace\(|(?:Args|Arguments|Config|Configuration|Params|Parameters|Options|Settings)\("
)
ARGUMENT_NAMES = frozenset((
    "epochs", "num_epochs", "n_epochs", "nb_epochs", "max_epochs", "num_train_epochs",
    "total_epochs", "max_steps", "batch_size", "train_batch_size", "eval_batch_size",
    "batchsize", "per_device_train_batch_size", "seed", "random_seed", "random_state",
    "num_workers", "workers", "n_workers", "weight_decay", "momentum",
))  # fmt: skip
_SHOWN_WITH_METRICS = frozenset({"lr", "learning_rate"})


class ArgumentFilter:
    """Hold back what may be an argument until the script's lines tell.

    Arguments are printed once, metrics again and again. So before the first value of the objective
    a line without it counts once another one with the same names has said another step. And a line
    with the objective that looks like arguments (`Namespace(…)`, `epochs`, `seed`, parameters of
    the sweep) counts once another one with the same names has come; a line of another kind that
    holds the objective shows that it was none. `dropped` are such lines that were not counted.
    `stored` are the names that earlier segments of the trial have read: no arguments.
    """

    def __init__(
        self,
        parameters: Collection[str],
        asked: Collection[str],
        stored: Collection[str],
    ) -> None:
        names = {name.lower() for name in parameters}
        self._names = ARGUMENT_NAMES | (names - _SHOWN_WITH_METRICS)
        self._asked = asked  # metrics that the sweep file names, beside the objective
        self._stored = stored
        self._held: dict[frozenset[str], list[FoundValue]] = {}
        self._suspect: list[FoundValue] = []
        self._begun = False
        self.dropped: list[str] = []

    def pass_on(self, values: Sequence[FoundValue]) -> list[FoundValue]:
        """Return the values of a line that count now, and those held back that it confirms."""
        if not values:
            return []
        if self._begun:
            return [*self._confirmed(values), *values]
        if any(f.source.has_objective for f in values):
            return self._with_objective(values)
        named = [f for f in values if f.name in self._asked and self._is_sure(f)]
        return named + self._without_objective([f for f in values if f not in named])

    def _confirmed(self, values: Sequence[FoundValue]) -> list[FoundValue]:
        """Return the line that was held back before the objective came, if this is its second."""
        before = self._held.pop(values[0].source.names, [])
        return before if before and before[0].step != values[0].step else []

    def _with_objective(self, values: Sequence[FoundValue]) -> list[FoundValue]:
        source = values[0].source
        before = self._suspect
        if self._looks_like_arguments(values):
            self._suspect = list(values)
            if not before or before[0].source.names != source.names:
                self.dropped += [f.source.text for f in before[:1]]
                return []
        else:
            self.dropped += [f.source.text for f in before[:1]]
            before = []
        self._begun = True
        return [*before, *values]

    def _looks_like_arguments(self, values: Sequence[FoundValue]) -> bool:
        source = values[0].source
        names = {name.rpartition("/")[2].lower() for name in source.names}
        return bool(_OBJECTS.search(source.text)) or not names.isdisjoint(self._names)

    def _is_sure(self, values: FoundValue) -> bool:
        """Tell whether a metric that the sweep file names is no argument, as its line tells."""
        return not values.source.names or not self._looks_like_arguments([values])

    def _without_objective(self, values: Sequence[FoundValue]) -> list[FoundValue]:
        if not values:
            return []
        names, step = values[0].source.names, values[0].step
        before = self._held.get(names)
        if before is None and all(f.name in self._stored for f in values):
            self._held[names] = before = []
        if before is None:
            if sum(map(len, self._held.values())) < _MOST_HELD:
                self._held[names] = list(values)
            return []
        if before and before[0].step == step:
            return []
        self._held[names] = []
        return [*before, *values]

    def close(self) -> None:
        """Take what is still held back for arguments: nothing has confirmed it."""
        self.dropped += [f.source.text for f in self._suspect[:1] if not self._begun]
        self._suspect = []
