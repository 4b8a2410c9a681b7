"""The end of a sweep with thousands of trials that have not begun: Airflow is asked in portions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hermes_ops.airflow.client import MOST_MARKED, TaskKey
from hermes_ops.airflow.control.executor import MARKING_S
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.records import CloseRecord, SegmentRecord
from tests.unit.airflow.builders import Journal, lease, pending, row, segment, sweep_with

CLOSE = CloseRecord("stopped by its user")
TRIALS = 1_000
TASK_S = 0.03
"""What Airflow 3.3.2 takes to mark one task, measured on SQLite."""


@dataclass
class SlowAirflow(Journal):
    """Airflow, which takes its time for each task that is marked."""

    now_s: float = 0.0

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        marked = list(tasks)
        self.now_s += TASK_S * len(marked)
        super().skip(marked)

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        marked = list(tasks)
        self.now_s += TASK_S * len(marked)
        super().mark(marked, state)

    def marked(self) -> list[int]:
        return [n for _, numbers in self.of("skip") for n in numbers]


def settle(outside: SlowAirflow, sweep: SweepState, monkeypatch: pytest.MonkeyPatch) -> float:
    """Make one round, and have Airflow's rows say what was marked; return its seconds."""
    begun_s, applier = outside.now_s, outside.applier()
    monkeypatch.setattr(applier._executor, "clock", lambda: outside.now_s)
    applier.settle(sweep, outside.now_s)
    marked = set(outside.marked())
    sweep.trials = tuple(
        replace(t, row=replace(t.row, state="skipped")) if t.number in marked else t
        for t in sweep.trials
    )
    return outside.now_s - begun_s


def test_no_round_waits_long_for_the_end_of_a_large_sweep_and_all_its_trials_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = SlowAirflow()
    sweep = sweep_with(*map(pending, range(TRIALS)), close=CLOSE)
    rounds_s: list[float] = []
    while not all(t.has_ended for t in sweep.trials):
        rounds_s.append(settle(outside, sweep, monkeypatch))
    assert outside.marked() == list(range(TRIALS))
    assert max(len(numbers) for _, numbers in outside.of("skip")) == MOST_MARKED
    assert max(rounds_s) < MARKING_S + MOST_MARKED * TASK_S
    assert sum(rounds_s) == pytest.approx(TRIALS * TASK_S)


def test_trials_that_were_ended_before_are_marked_in_portions_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller died between their records and their tasks' states."""
    outside = SlowAirflow()

    def ended(number: int) -> Any:
        record: Any = {"final": "stopped_early", "task": row(number).id}
        return replace(pending(number), segment=SegmentRecord(1, False, 1.0, **record))

    sweep = sweep_with(*map(ended, range(TRIALS)))
    assert settle(outside, sweep, monkeypatch) < MARKING_S + MOST_MARKED * TASK_S
    while not all(t.row.state == "skipped" for t in sweep.trials):
        settle(outside, sweep, monkeypatch)
    assert outside.marked() == list(range(TRIALS))


def test_no_round_waits_long_for_a_large_sweep_all_of_whose_tasks_a_person_has_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that have finished get their state back."""
    outside = SlowAirflow()

    def cleared(number: int) -> TrialRecords:
        over = segment(running=False, final="finished", outcome="finished", ended_s=110.0)
        return TrialRecords(row(number), lease(), None, over)

    sweep = sweep_with(*map(cleared, range(100)))
    restored: list[int] = []
    while len(restored) < 100:
        assert settle(outside, sweep, monkeypatch) < MARKING_S + 2 * TASK_S
        restored = [number for call in outside.of("mark") for number in call[1]]
        sweep.trials = tuple(
            replace(t, row=replace(t.row, state="success")) if t.number in restored else t
            for t in sweep.trials
        )
    assert restored == list(range(100))
