"""A controller that is killed between any two writes, in a model of Airflow and of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.cleanup.user_clear import asks_from_scratch
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import IMPOSSIBLE, TrialRecords, TrialState
from hermes_ops.airflow.metadata_rows import TaskInstanceRow, TaskRank
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    TASK_STATES,
    CloseRecord,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
)
from tests.unit.airflow.builders import Journal, lease, row, segment, sweep_with
from tests.unit.airflow.control.trial_records import any_records

CLOSE = CloseRecord("the budget is spent")
ROUNDS = 20
"""More rounds than any trial needs to end."""


SPEC = sweep_with().spec


class Killed(BaseException):
    """SIGKILL: nothing of the controller runs on."""


@dataclass
class World(Journal):
    """Airflow, its database and MLflow, with the one trial that they hold; may kill its client."""

    trial: TrialRecords = field(kw_only=True)
    writes_left: int | None = None  # None: the controller lives
    finals: list[str] = field(default_factory=list)

    def _write(self) -> None:
        if self.writes_left == 0:
            raise Killed
        if self.writes_left is not None:
            self.writes_left -= 1

    def change(self, **records: Any) -> None:
        """Replace records of the trial, and keep the final states that it has had."""
        self.trial = replace(self.trial, **records)
        final = self.trial.final
        if final is not None and final not in self.finals[-1:]:
            self.finals.append(final)

    def change_task(self, **columns: Any) -> None:
        self.change(row=replace(self.trial.row, **columns))

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        self._write()
        if key == LEASE_KEY:
            self.change(lease=decode(Lease, value))
        elif key == STOP_KEY:
            self.change(stop=decode(StopFlag, value))
        elif key == SEGMENT_KEY:
            self.change(segment=decode(SegmentRecord, value))

    def note(self, task: TaskKey, text: str) -> None:
        self._write()
        self.change_task(note=text)

    def set_aside(self, trial: Any, reason: str) -> None:
        self._write()
        super().set_aside(trial, reason)

    def open_trial(self, ref: Any, number: int, config: Any, tags: Any, **options: Any) -> str:
        self._write()
        return super().open_trial(ref, number, config, tags, **options)

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        self._write()
        self.change_task(state="skipped")

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        self._write()
        self.change_task(state=state)

    def rerank(self, ranks: Iterable[TaskRank]) -> int:
        self._write()
        for rank in ranks:
            self.change_task(pool_slots=rank.pool_slots)
        return 1

    def change_slots(self, row: TaskInstanceRow, slots: int) -> bool:
        self._write()
        if self.trial.row.state == "running":
            self.change_task(pool_slots=slots)
        return self.trial.row.state == "running"

    # What Airflow and the task do between two rounds

    def go_on(self) -> None:
        """Make one step of the scheduler or of the task."""
        state = self.trial.row.state
        if state == "scheduled" and self.trial.row.pool_slots < HELD_POOL_SLOTS:
            self.change_task(state="queued")
        elif state == "queued":
            self.change_task(state="running")
        elif state in ("running", "deferred"):
            self._run_task()
        elif state in (None, "up_for_reschedule", "up_for_retry", "restarting"):
            self.change_task(state="scheduled")

    def _run_task(self) -> None:
        trial = self.trial
        segment, lease = trial.segment, trial.lease
        if segment is not None and trial.final is not None:
            self.change_task(state=TASK_STATES.get(trial.final, "skipped"))
        elif trial.is_under_way and segment is not None:
            if trial.is_told_to_stop and trial.stop is not None and trial.stop.resize:
                self.change(segment=replace(segment, running=False, resizing=True))
            elif trial.is_told_to_stop and trial.stop is not None:
                self.change(segment=replace(segment, running=False, final=trial.stop.final))
                self.change_task(
                    state="up_for_reschedule" if trial.stop.final is None else "skipped"
                )
        elif trial.state is TrialState.RESIZING:
            pass  # it waits for its next lease
        elif lease is not None and trial.has_lease_in_force:
            self.change(segment=SegmentRecord(lease.epoch, running=True, started_s=1.0))
        else:
            self._leave()

    def _leave(self) -> None:
        """Give the slots back: with a final flag the trial ends."""
        segment, stop = self.trial.segment, self.trial.stop
        if segment is not None and segment.resizing:
            final = stop.final if stop is not None and stop.epoch == segment.epoch else None
            self.change(segment=replace(segment, resizing=False, final=final))
        if self.trial.final is None:
            self.change_task(state="up_for_reschedule")


def can_arise(trial: TrialRecords) -> bool:
    """Return whether a writer leads to these records, whatever process is killed.

    The controller records `finished` of a task that has ended, and of no other.
    """
    ended_here = trial.segment is not None and trial.segment.task == trial.row.id
    return trial.state not in IMPOSSIBLE and not (trial.final == "finished" and ended_here)


def settle(world: World, close: CloseRecord | None, now_s: float) -> None:
    """Make one round of the controller that lives, or of the next one."""
    try:
        world.applier().settle(SweepState(SPEC, (world.trial,), close), now_s)
    except Killed:
        world.writes_left = None  # the next controller is not killed


@settings(max_examples=200)
@given(any_records(), st.integers(0, 5), st.integers(0, 3))
def test_a_trial_has_one_final_state_whenever_the_controller_is_killed_as_its_sweep_ends(
    trial: TrialRecords, writes: int, rounds: int
) -> None:
    assume(can_arise(trial))
    world = World(trial=replace(trial, left=""))
    world.finals = [trial.final] if trial.final is not None else []
    world.writes_left = writes
    for number in range(ROUNDS):
        settle(world, CLOSE, 200.0 + number)
        if number >= rounds:  # the task does nothing before that
            world.go_on()
    assert world.trial.state is TrialState.ENDED
    assert len(world.finals) <= 1
    assert world.trial.lease is None or world.finals


@settings(max_examples=100)
@given(any_records(), st.integers(0, 5))
def test_what_a_round_has_written_is_not_written_again_by_the_next_one(
    trial: TrialRecords, writes: int
) -> None:
    assume(can_arise(trial))
    world = World(trial=trial)
    world.writes_left = writes
    for number in range(4):
        settle(world, None, 200.0 + number)
        world.change(left="" if world.trial.segment != trial.segment else world.trial.left)
    settled = world.trial
    settle(world, None, 300.0)
    assert world.trial == settled


@pytest.mark.parametrize("writes", range(7))
def test_a_trial_begins_from_scratch_once_and_keeps_its_use_whenever_the_controller_is_killed(
    writes: int,
) -> None:
    used = segment(2, False, final="failed", spans=((5.0, 7.0),), sizes=(2,), service_gpu_s=4.0)
    asked = row(state="scheduled", note="from scratch")
    trial = TrialRecords(asked, lease(2), None, used)
    world = World(trial=trial, opened={0: {"rate": 0.1}}, writes_left=writes)
    for number in range(3):
        settle(world, None, 200.0 + number)
    again, own = world.trial.segment, world.trial.lease
    assert again is not None
    assert own is not None
    assert (again.final, again.spans, again.earlier_spans) == (None, (), ((5.0, 7.0),))
    assert (again.earlier_gpu_s, own.anew, own.revoked) == (4.0, 3, True)
    assert not asks_from_scratch(world.trial.row.note)
    assert world.trial.state is TrialState.WAITING
