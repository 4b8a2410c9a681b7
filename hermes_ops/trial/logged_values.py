"""The values that a script has logged to MLflow, as metrics of its trial."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import Follower, append_lines, decode_value
from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.step_counter import LoggedValue, StepCounter


class LoggedValues:
    """Follows the file in which the hook in the script's interpreter notes what is logged.

    The file is the memory of all segments: it is read again from its beginning in each one, so
    that a step keeps its number. `earlier` has the metrics of the segments before.
    """

    def __init__(self, path: Path, objective: str | None, first_step: int) -> None:
        self._path = path
        self._objective = objective
        self._follower = Follower(path)
        self._curve = _Curve(objective)
        self._is_ignored = False
        found = self._read()
        self._has_begun = bool(found)
        self.earlier = [] if self._is_ignored else found
        self._curve.begin(first_step)
        if first_step or self._follower.offset:
            self._note({"kind": "segment", "first_step": first_step})

    def new(self, printed_step: int = 0) -> list[Metric]:
        """Return the metrics that have come.

        `printed_step` is the highest step at which the output has held the objective. Where that
        is further than the first logged value, the output is the curve: its steps are others.
        """
        found = self._read()
        if found and not self._has_begun:
            self._has_begun = True
            first = next((m.step for m in found if m.name == self._objective), printed_step)
            if printed_step > first:
                self._is_ignored = True
                self._note({"kind": "ignored"})
        return [] if self._is_ignored else found

    def close(self) -> list[Metric]:
        """Return what has waited for a further value; the script has ended."""
        return [] if self._is_ignored else self._curve.close()

    def _read(self) -> list[Metric]:
        found: list[Metric] = []
        for entry in self._follower.new():
            if entry.get("kind") == "segment":
                self._curve.begin(int(entry["first_step"]))
            elif entry.get("kind") == "ignored":
                self._is_ignored = True
            elif (value := _logged_value(entry)) is not None:
                found += self._curve.take(value)
        return found

    def _note(self, entry: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the watch
            append_lines(self._path, [entry])


class _Curve:
    """Puts the objective's values on steps, and those of other metrics with them.

    What begins with step 0 waits for the next value, which tells what the 0 means: epoch 0, or
    that the script says no steps.
    """

    def __init__(self, objective: str | None) -> None:
        self._objective = objective
        self._counter = StepCounter()
        self._waiting: list[LoggedValue] = []
        self._waits_since_before = False  # since an earlier segment
        self._held: dict[str, float] = {}
        self._stored: set[str] = set()  # at the step of the newest value of the objective
        self._newest: LoggedValue | None = None
        self._step = 0

    def begin(self, first_step: int) -> None:
        self._counter.begin(first_step)
        self._waits_since_before = bool(self._waiting)
        self._held.clear()
        self._newest = None

    def take(self, logged: LoggedValue) -> list[Metric]:
        if not self._waiting and not self._is_first_zero(logged):
            return self._take(logged)
        if logged.name != self._objective or not self._waiting:
            self._waiting.append(logged)
            return []
        if self._waits_since_before and logged.step == 0:  # the epoch is trained once more
            self._waiting, self._waits_since_before = [logged], False
            return []
        return self._resolve(logged.step == 0, logged)

    def close(self) -> list[Metric]:
        """Return what still waits: a single value at step 0 is one without a step."""
        found = self._resolve(True) if self._waiting else []
        step = max(1, self._counter.highest or 0)
        found += [Metric(name, value, step) for name, value in self._held.items()]
        self._held.clear()
        return found

    def _is_first_zero(self, logged: LoggedValue) -> bool:
        is_first = self._counter.highest is None and not self._counter.zero_is_none
        return is_first and logged.name == self._objective and logged.step == 0

    def _resolve(self, zero_is_none: bool, *further: LoggedValue) -> list[Metric]:
        self._counter.zero_is_none = zero_is_none
        waiting, self._waiting = self._waiting, []
        return [m for logged in (*waiting, *further) for m in self._take(logged)]

    def _take(self, logged: LoggedValue) -> list[Metric]:
        if logged.name == self._objective:
            return self._take_objective(logged)
        newest = self._newest
        if newest is not None and newest.step == logged.step and logged.name not in self._stored:
            self._stored.add(logged.name)
            return [Metric(logged.name, logged.value, self._step)]
        self._held[logged.name] = logged.value
        return []

    def _take_objective(self, logged: LoggedValue) -> list[Metric]:
        number = self._counter.number(logged)
        if number is None:
            return []
        self._newest, self._step = logged, number
        self._stored = set(self._held)
        others = [Metric(name, value, number) for name, value in self._held.items()]
        self._held.clear()
        return [Metric(logged.name, logged.value, number), *others]


class FirstValues:
    """Holds back the first printed value of a metric until it is clear whether it is logged too.

    A script that prints its metrics and logs them as well says each value twice: those that it
    logs itself are in MLflow already. Nothing is held in a script that does not import MLflow, nor
    any metric in `kept`.
    """

    def __init__(self, kept: Collection[str | None]) -> None:
        self._kept = kept
        self._held: dict[str, Metric] = {}
        self._passed: set[str] = set()
        self._logged: set[str] = set()
        self._is_holding = False

    def log(self, names: Collection[str]) -> None:
        """Note that the script has imported MLflow, and which metrics it logs to it."""
        self._is_holding = True
        self._logged.update(names)
        for name in names:
            self._held.pop(name, None)

    def take(self, metrics: list[Metric]) -> list[Metric]:
        """Return what may be stored now of the metrics that were printed."""
        return [m for metric in metrics for m in self._take(metric)]

    def close(self) -> list[Metric]:
        """Return what is still held."""
        held, self._held = list(self._held.values()), {}
        return held

    def _take(self, metric: Metric) -> list[Metric]:
        name = metric.name
        if name in self._kept:
            return [metric]
        if name in self._logged:
            return []
        if not self._is_holding or name in self._passed:
            self._passed.add(name)
            return [metric]
        before = self._held.pop(name, None)
        if before is None:
            self._held[name] = metric
            return []
        self._passed.add(name)
        return [before, metric]


def _logged_value(entry: dict[str, Any]) -> LoggedValue | None:
    try:
        step = entry["step"]
        value = decode_value(entry["value"])
        return LoggedValue(
            str(entry["name"]), value, None if step is None else int(step), int(entry["run"])
        )
    except (KeyError, TypeError, ValueError):
        return None
