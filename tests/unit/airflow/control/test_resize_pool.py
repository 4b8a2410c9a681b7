"""Trials that are resized while anything is killed, in a model of Airflow's pool and its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.metadata_rows import OCCUPYING, TaskInstanceRow, TaskRank
from hermes_ops.airflow.records import (
    LEASE_KEY,
    STOP_KEY,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
)
from hermes_ops.core.model import Gpu, Grant, Job, Phase, Plan, Snapshot
from hermes_ops.core.plan import check, diff
from tests.unit.airflow.builders import SWEEP, Journal, pending, row, sweep_file, sweep_with

SLOTS, TRIALS = 4, 3
S = TrialState
TRIAL = {**sweep_file()["trial"], "gpus": {"min": 1, "max": SLOTS}}
SPEC = sweep_with(trial=TRIAL).spec


class Killed(BaseException):
    """SIGKILL: nothing of the controller runs on."""


@dataclass
class Pool(Journal):
    """Airflow with one pool, the trials' tasks, and the GPUs of the scripts that live."""

    trials_now: list[TrialRecords] = field(
        default_factory=lambda: [pending(n) for n in range(TRIALS)]
    )
    live: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unrecorded: dict[int, Lease] = field(default_factory=dict)  # of segments that have just started
    writes_left: int | None = None
    resized: int = 0

    def _write(self) -> None:
        if self.writes_left == 0:
            raise Killed
        if self.writes_left is not None:
            self.writes_left -= 1

    def change(self, number: int, **records: Any) -> None:
        self.trials_now[number] = replace(self.trials_now[number], **records)

    def change_task(self, number: int, **columns: Any) -> None:
        self.change(number, row=replace(self.trials_now[number].row, **columns))

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        self._write()
        kinds = {LEASE_KEY: ("lease", Lease), STOP_KEY: ("stop", StopFlag)}
        if key in kinds:
            name, kind = kinds[key]
            self.change(task.map_index, **{name: decode(kind, value)})

    def rerank(self, ranks: Iterable[TaskRank]) -> int:
        self._write()
        changed = 0
        for rank in ranks:
            for trial in self.trials_now:
                if trial.row.id == rank.id and trial.row.state not in OCCUPYING:
                    changes = {"pool_slots": rank.pool_slots, "priority_weight": 0}
                    self.change_task(trial.number, **changes)
                    changed += 1
        return changed

    def change_slots(self, row: TaskInstanceRow, slots: int) -> bool:
        self._write()
        own = self.trials_now[row.number].row
        fits = slots <= own.pool_slots or self.open_slots >= slots - own.pool_slots
        if own.state != "running" or not fits:
            return False
        self.change_task(row.number, pool_slots=slots)
        return True

    @property
    def open_slots(self) -> int:
        rows = (trial.row for trial in self.trials_now)
        return SLOTS - sum(r.pool_slots for r in rows if r.state in OCCUPYING)

    # What Airflow and the tasks do

    def schedule(self) -> None:
        """Queue and start each waiting task whose slots fit; the others become ready."""
        for number, trial in enumerate(self.trials_now):
            state = trial.row.state
            if state == "scheduled" and trial.row.pool_slots <= self.open_slots:
                self.change_task(number, state="running")
            elif state not in ("scheduled", "running", "success"):
                self.change_task(number, state="scheduled")

    def run_task(self, number: int, *, is_impatient: bool = False) -> None:
        """Make one step of a task that runs."""
        trial = self.trials_now[number]
        segment, stop = trial.segment, trial.stop
        if trial.row.state != "running":
            return
        if number in self.unrecorded:
            self._record(number, self.unrecorded.pop(number))
        elif number in self.live and segment is not None:
            if stop is not None and stop.epoch == segment.epoch:
                self._close(number, segment, stop)
        elif trial.has_lease_in_force and trial.lease is not None:
            self._start(number, trial.lease, segment)
        elif is_impatient or trial.state is not S.RESIZING:
            if segment is not None:
                self.change(number, segment=replace(segment, resizing=False))
            self.change_task(number, state="up_for_reschedule")

    def _close(self, number: int, segment: SegmentRecord, stop: StopFlag) -> None:
        del self.live[number]
        self.change(number, segment=replace(segment, running=False, resizing=stop.resize))
        if not stop.resize:
            self.change_task(number, state="up_for_reschedule")

    def _start(self, number: int, own: Lease, before: SegmentRecord | None) -> None:
        """Start the segment that is recorded next, unless another trial is on one of its GPUs."""
        if any(set(own.gpus) & set(gpus) for gpus in self.live.values()):
            return
        self.resized += before is not None and before.resizing
        self.live[number], self.unrecorded[number] = own.gpus, own

    def _record(self, number: int, own: Lease) -> None:
        record = SegmentRecord(own.epoch, running=True, started_s=1.0, gpus=own.gpus)
        self.change(number, segment=record)

    def kill_task(self, number: int) -> None:
        """Kill a task's process, and with it its script; Airflow tries it again."""
        if self.trials_now[number].row.state == "running":
            self.live.pop(number, None)
            self.unrecorded.pop(number, None)
            self.change_task(number, state="up_for_retry")

    def assert_sound(self) -> None:
        """Check that the pool is not over-committed, nor a GPU in use twice."""
        assert self.open_slots >= 0
        used = [gpu for gpus in self.live.values() for gpu in gpus]
        assert len(used) == len(set(used)) <= SLOTS
        for number, gpus in self.live.items():
            held = self.trials_now[number].row
            assert held.state == "running"
            assert len(gpus) <= held.pool_slots


def planned(jobs: tuple[Job, ...], sizes: list[int], first: int) -> Plan:
    """Return a plan that gives the jobs these sizes as far as there are GPUs, from one on."""
    grants, free = [], [(first + i) % SLOTS for i in range(SLOTS)]
    for job, size in zip(jobs, sizes, strict=True):
        if job.phase in (Phase.ENDED, Phase.STOPPING) or not 0 < size <= len(free):
            continue
        kept = [gpu for gpu in job.gpus_held if gpu in free]
        gpus = (kept + [gpu for gpu in free if gpu not in kept])[:size]
        free = [gpu for gpu in free if gpu not in gpus]
        grants.append(Grant(job.id, tuple(sorted(gpus))))
    return Plan(tuple(grants), ranking=tuple(job.id for job in jobs))


def decide(pool: Pool, applier: Applier, sizes: list[int], first: int) -> Applier:
    """Make one round of the controller; return it, or the next one if it was killed."""
    sweep = SweepState(SPEC, tuple(pool.trials_now), None)
    try:
        applier.settle(sweep, 200.0)
        jobs = tuple(sweep.jobs(200.0))
        snapshot = Snapshot(200.0, tuple(map(Gpu, range(SLOTS))), jobs)
        plan = planned(jobs, (sizes * TRIALS)[: len(jobs)], first)
        changes = check(snapshot, plan)
        actions = diff(snapshot, plan, changes)
        applier.apply({SWEEP: sweep}, snapshot, plan, actions, {SWEEP: 0.0})
    except Killed:
        pool.writes_left = None
        return pool.applier()
    return applier


ROUNDS = st.tuples(
    st.just("decide"),
    st.lists(st.integers(0, SLOTS), min_size=TRIALS, max_size=TRIALS),
    st.integers(0, SLOTS - 1),
    st.one_of(st.none(), st.none(), st.integers(0, 4)),
)
TASKS = st.tuples(
    st.sampled_from(("run", "run", "run", "leave", "kill", "schedule")),
    st.integers(0, TRIALS - 1),
)


@settings(max_examples=50)
@given(st.lists(st.one_of(ROUNDS, TASKS, TASKS), min_size=10, max_size=40))
def test_no_slot_and_no_gpu_is_used_twice_whatever_is_killed_in_a_resize(
    steps: list[tuple[Any, ...]],
) -> None:
    pool = Pool()
    applier = pool.applier()
    for kind, *values in steps:
        if kind == "decide":
            sizes, first, pool.writes_left = values
            applier = decide(pool, applier, sizes, first)
            pool.writes_left = None
        elif kind == "schedule":
            pool.schedule()
        elif kind == "kill":
            pool.kill_task(values[0])
        else:
            pool.run_task(values[0], is_impatient=kind == "leave")
        pool.assert_sound()


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, SLOTS), min_size=2, max_size=2), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 12),
)
def test_whatever_the_controller_had_written_when_it_was_killed_the_trial_has_its_size_at_last(
    wanted: list[list[int]], writes: int, killed_in: int
) -> None:
    pool = Pool(trials_now=[pending(0)])
    applier, rounds = pool.applier(), 0
    for first, last in wanted:
        for size in (first, last):
            for _ in range(12):
                pool.writes_left = writes if rounds == killed_in else None
                applier, rounds = decide(pool, applier, [size], 0), rounds + 1
                pool.writes_left = None
                pool.schedule()
                pool.run_task(0)
                pool.assert_sound()
            assert len(pool.live[0]) == size
            assert pool.trials_now[0].row == row(0, "running", pool_slots=size, priority_weight=0)


def test_a_trial_is_resized_without_leaving_its_slots() -> None:
    pool = Pool(trials_now=[pending(0)])
    applier = pool.applier()
    for size in (1, 2, 4, 1):
        for _ in range(5):
            applier = decide(pool, applier, [size], 0)
            pool.run_task(0)
            pool.schedule()
            assert pool.trials_now[0].row.state in ("scheduled", "running")
        assert len(pool.live[0]) == size
    assert pool.resized == 3


def test_a_lease_that_is_taken_back_as_its_task_reads_it_leaves_no_worker_without_a_slot() -> None:
    """The pool shrinks between two rounds; the task then records what it has started."""
    pool = Pool(trials_now=[pending(0)])
    applier = pool.applier()
    for size in (1, 1, 1, 4, 4):
        applier = decide(pool, applier, [size], 0)
        pool.schedule()
        pool.run_task(0)
    assert (pool.live, set(pool.unrecorded)) == ({0: (0, 1, 2, 3)}, {0})
    for size in (0, 2):
        applier = decide(pool, applier, [size], 0)
        pool.assert_sound()
    for _ in range(12):
        pool.run_task(0)
        pool.assert_sound()
        applier = decide(pool, applier, [2], 0)
        pool.schedule()
    assert len(pool.live[0]) == 2
