"""A failure in any call that a round makes for one sweep is kept from the other sweeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cleanup.sweep_end import FIRST_FAILURES
from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.controller import Controller
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.faults import MOST_TRIES, Fault, FaultBarrier, Subject
from hermes_ops.airflow.control.feeds import CurveFeed
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.control.pool_file import read_view
from hermes_ops.airflow.control.sweep_state import SweepSpec
from hermes_ops.airflow.metadata_rows import PoolRow, RunRow, TaskInstanceRow, TaskRank
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    CloseRecord,
    Lease,
    SegmentRecord,
    StopFlag,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.core import model
from hermes_ops.core.model import Grant, Phase, Reason, Snapshot
from hermes_ops.errors import Refused, Unavailable
from tests.unit.airflow.builders import Journal, lease, row, segment, sweep_file

SWEEPS = ("sweep-a", "sweep-b")
BAD, GOOD = SWEEPS
WHY = Reason("its turn")
ROUNDS = 4

Records = dict[str, Any]


def task_id(sweep: str, number: int) -> str:
    return str(UUID(int=(SWEEPS.index(sweep) + 1) * 0xABC000 + number))


def trials_of(sweep: str) -> Iterator[tuple[TaskInstanceRow, Records]]:
    """One trial for each matter that a round may have to settle, by number."""
    own = lease()

    def made(
        state: str, records: Mapping[str, Any], **changes: Any
    ) -> tuple[TaskInstanceRow, Records]:
        number = next(numbers)
        known = {key: encode(value) for key, value in records.items()}
        if LEASE_KEY in known:
            known[LEASE_KEY]["run_id"] = f"run-{sweep}-{number}"
        facts = {"id": task_id(sweep, number), "run_key": SWEEPS.index(sweep) + 1, **changes}
        return row(number, state, **facts), known

    numbers = iter(range(100))
    gpus = SWEEPS.index(sweep)
    yield made("running", {LEASE_KEY: replace(own, gpus=(gpus,)), SEGMENT_KEY: segment()})
    yield made("scheduled", {LEASE_KEY: own, SEGMENT_KEY: segment(running=False, ended_s=9.0)})
    yield made("scheduled", {})
    yield made("scheduled", {})
    over = segment(running=False, final="cancelled", ended_s=9.0)
    yield made("scheduled", {LEASE_KEY: own, SEGMENT_KEY: replace(over, task=task_id(sweep, 4))})
    yield made("failed", {LEASE_KEY: own, SEGMENT_KEY: segment(running=False, ended_s=9.0)})
    yield made("scheduled", {LEASE_KEY: own, SEGMENT_KEY: replace(over, final="failed")})
    yield made("scheduled", {LEASE_KEY: own, SEGMENT_KEY: segment(running=False, ended_s=9.0)},
               note="from scratch")  # fmt: skip
    yield made("running", {LEASE_KEY: replace(own, revoked=True), SEGMENT_KEY: segment()})


@dataclass
class Services(Journal):
    """Airflow, its database and MLflow with two sweeps; what is written is what is read."""

    rows: dict[str, dict[int, TaskInstanceRow]] = field(default_factory=dict)
    records_of: dict[str, dict[tuple[str, int], Records]] = field(default_factory=dict)
    gone: bool = False
    fresh: bool = False  # no trial has begun

    def __post_init__(self) -> None:
        for sweep in SWEEPS:
            made = list(trials_of(sweep))
            if self.fresh:
                rows = (row(n, id=task_id(sweep, n)) for n in range(len(made)))
                made = [(own, {}) for own in rows]
            self.rows[sweep] = {own.number: own for own, _ in made}
            self.records_of[sweep] = {("trial", own.number): known for own, known in made}

    def run_of(self, sweep: str) -> RunRow:
        config = {**sweep_file(), "search": {**sweep_file()["search"], "max_trials": 9}}
        record = encode(SweepRecord(config, 9, "trial", f"parent-{sweep}", "7", "digits"))
        return RunRow(
            SWEEPS.index(sweep) + 1, "hermes_sweep", sweep, "plan", "running", 50.0, record
        )

    # Airflow's database

    def single_connection(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def expiring(self, ended_states: Any, held: int, most: int) -> tuple[Any, ...]:
        return ()

    def sweeps(self) -> tuple[RunRow, ...]:
        return () if self.gone else tuple(self.run_of(sweep) for sweep in SWEEPS)

    def trials(self, run: Any, task: str = "") -> Any:
        if not isinstance(run, RunRow):
            return self.trial_runs(run.sweep_id)
        return tuple(self.rows[run.run_id].values())

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, str]]:
        return {
            place: {key: json.dumps(value) for key, value in known.items()}
            for place, known in self.records_of[run.run_id].items()
        }

    def pool(self, name: str, own: Any) -> PoolRow:
        return PoolRow(4, 0)

    def rerank(self, ranks: Iterable[TaskRank]) -> int:
        ranks = list(ranks)
        for sweep, number in ((s, n) for s in SWEEPS for n in self.rows[s]):
            own = self.rows[sweep][number]
            for rank in ranks:
                if rank.id == own.id:
                    self.rows[sweep][number] = replace(
                        own, priority_weight=rank.priority_weight, pool_slots=rank.pool_slots
                    )
        return len(ranks)

    # Airflow's REST interface

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        place = (task.task_id, task.map_index)
        self.records_of[task.run_id].setdefault(place, {})[key] = dict(value)

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        for task in tasks:
            own = self.rows[task.run_id]
            own[task.map_index] = replace(own[task.map_index], state=state)

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        self.mark(tasks, "skipped")

    def note(self, task: TaskKey, text: str) -> None:
        own = self.rows[task.run_id]
        own[task.map_index] = replace(own[task.map_index], note=text)

    def dag_run(self, dag_id: str, run_id: str) -> None:
        return None

    # MLflow

    def open_trial(self, ref: Any, number: int, *_: Any, **__: Any) -> str:
        return f"run-{ref.sweep_id}-{number}"

    def trial_runs(self, sweep: str) -> list[Any]:
        return [
            SimpleNamespace(number=place[1], config={"rate": 0.1}, tags={}, is_open=True,
                            run_id=f"run-{sweep}-{place[1]}", unwritten={})
            for place, known in self.records_of[sweep].items() if LEASE_KEY in known
        ]  # fmt: skip

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(state="running", tags={})

    def finish(self, run_id: str, state: str, tags: Any) -> None:
        pass

    # The trials themselves

    def train(self) -> None:
        """Trials with a lease and a slot begin; those that were told to stop leave."""
        for sweep in SWEEPS:
            for number, own in self.rows[sweep].items():
                known = self.records_of[sweep][("trial", number)]
                self.rows[sweep][number] = self._trained(own, known)

    def _trained(self, own: TaskInstanceRow, known: Records) -> TaskInstanceRow:
        held, last = (
            decode(Lease, known.get(LEASE_KEY)),
            decode(SegmentRecord, known.get(SEGMENT_KEY)),
        )
        flag = decode(StopFlag, known.get(STOP_KEY))
        if held is None:
            return own
        fits = own.state == "scheduled" and own.pool_slots < HELD_POOL_SLOTS and not held.revoked
        if fits and (last is None or last.epoch < held.epoch):
            known[SEGMENT_KEY] = encode(segment(held.epoch, segments=1))
            return replace(own, state="running")
        trains = own.state == "running" and last is not None and last.running
        if trains and last is not None and flag is not None and flag.epoch == last.epoch:
            ended = replace(last, running=False, ended_s=150.0, final=flag.final)
            known[SEGMENT_KEY] = encode(ended)
            state = "skipped" if flag.final else "scheduled"
            return replace(own, state=state, pool_slots=HELD_POOL_SLOTS)
        return own


class Watched:
    """A service whose calls are told to `hook`, with its name and what is known of them."""

    def __init__(self, inner: Any, name: str, hook: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.__dict__.update(inner=inner, name=name, hook=hook)

    def __getattr__(self, method: str) -> Any:
        found = getattr(self.inner, method)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any, **named: Any) -> Any:
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            self.hook(f"{self.name}.{method}", (self.name, args, named))
            return found(*args, **named)

        return call


class InTurn:
    """Each round those have the GPUs of their sweep that had none; the others are stopped."""

    name = "in-turn"

    def initial(self) -> None:
        return None

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[model.Plan, None]:
        grants: list[Grant] = []
        for place, sweep in enumerate(SWEEPS):
            mine = [j for j in snapshot.jobs if j.sweep == sweep]
            waiting = [j for j in mine if j.phase in (Phase.WAITING, Phase.PENDING)]
            gpus = [g for g in (place, place + 2) if not self._is_held(mine, g)]
            grants += [Grant(j.id, (g,)) for j, g in zip(waiting, gpus, strict=False)]
        keep = [Grant(j.id, j.gpus_held) for j in snapshot.jobs if j.phase is Phase.STARTING]
        ranking = tuple(j.id for j in snapshot.jobs if j.phase is Phase.WAITING)
        reasons = {j.id: WHY for j in snapshot.jobs}
        return model.Plan((*keep, *grants), ranking=ranking, reasons=reasons), None

    @staticmethod
    def _is_held(jobs: Iterable[Any], gpu: int) -> bool:
        return any(gpu in j.gpus_held and j.phase is not Phase.RUNNING for j in jobs)


def concerns(sweep: str, about: object) -> bool:
    """Whether the arguments of a call name that sweep, its runs or its tasks."""
    text = repr(about)
    return sweep in text or any(task_id(sweep, number) in text for number in range(9))


@dataclass
class World:
    """A controller over two sweeps, of which one call may fail."""

    fails: str = ""
    error: Exception | None = None
    only: str = ""
    now_s: float = 1_000.0
    calls: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Mapping[str, Any]] = field(default_factory=list)
    services: Services = field(default_factory=Services)

    def hook(self, name: str, about: tuple[Any, ...]) -> None:
        if name == "decisions.append":  # a reason may name the trials of other sweeps
            about = (name, [entry.sweep for entry in about[1][0]])
        elif name == "tracker.record_decisions":
            about = (name, about[1][0])
        fails = name == self.fails and self.only in repr(about)
        if fails and self.error is not None and concerns(BAD, about[1:]):
            raise self.error
        for sweep in SWEEPS:
            if concerns(sweep, about[1:]):
                self.calls.append((sweep, name))

    def watch(self, inner: Any, name: str) -> Any:
        return Watched(inner, name, self.hook)

    def controller(self, patch: pytest.MonkeyPatch) -> Controller:
        client, metadata, tracker = (
            self.watch(self.services, name) for name in ("client", "metadata", "tracker")
        )
        log = self.watch(DecisionLog(tracker), "decisions")
        curves = self.watch(CurveFeed(tracker), "curves")
        applier = Applier(client, metadata, tracker, log, "in-turn", {})
        applier.faults.clock = applier.faults.uptime = lambda: self.now_s
        cluster = AirflowCluster("gpus", metadata, curves, applier, log, clock=lambda: self.now_s)
        thread_of_its_own: Any = SimpleNamespace(run_if_due=lambda *_: None)
        cluster._plan_value_retention = thread_of_its_own
        leadership: Any = None
        controller = Controller(cluster, leadership, PolicySettings.file())
        of = SweepSpec.from_run

        def watched(run: RunRow) -> SweepSpec | None:
            plan = of(run)
            sampler = plan and self.watch(plan.sampler, "sampler")
            return plan and replace(plan, sampler=SampleOf(run.run_id, sampler))

        patch.setattr(SweepSpec, "from_run", watched)
        patch.setattr(Controller, "_current_policy", lambda _: InTurn())
        patch.setattr(AirflowCluster, "wait", lambda own, _: own._run_upkeep())
        patch.setattr("hermes_ops.airflow.control.cluster.QUICK_VIEW_S", inf)  # each round has one
        return controller

    def play_on(self, patch: pytest.MonkeyPatch, rounds: int, round_s: float = 1.0) -> None:
        """Make that many rounds."""
        controller = self.controller(patch)
        for _ in range(rounds):
            controller._tick()
            self.problems += (read_view("gpus") or {}).get("problems", ())
            self.services.train()
            self.now_s += round_s

    def play(self, patch: pytest.MonkeyPatch) -> list[str]:
        """The outcomes of all rounds: the sweeps train, are closed, and are deleted."""
        controller = self.controller(patch)
        for turn in range(2 * ROUNDS + 1):
            if turn == ROUNDS:
                for sweep in SWEEPS:
                    place = self.services.records_of[sweep].setdefault(("plan", -1), {})
                    place[CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
            self.services.gone = turn == 2 * ROUNDS
            controller._tick()
            self.problems += (read_view("gpus") or {}).get("problems", ())
            self.services.train()
        return [
            sample.labels["outcome"]
            for family in controller.monitor.registry.collect()
            for sample in family.samples
            if sample.name == "hermes_rounds_total" and sample.value
        ]

    def fate(self, sweep: str, without: str = "") -> Any:
        """What has become of a sweep's trials, and the calls that were made for it."""
        finals = {
            place: (decode(SegmentRecord, known.get(SEGMENT_KEY)) or segment()).final
            for place, known in self.services.records_of[sweep].items()
        }
        states = {n: own.state for n, own in self.services.rows[sweep].items()}
        made = sorted(name for own, name in self.calls if own == sweep and name != without)
        return finals, states, made


@dataclass
class SampleOf:
    """A sweep's sampler, whose calls say of which sweep they are."""

    sweep: str
    inner: Any
    size: int | None = None

    def exhausted(self, number: int) -> bool:
        return False

    def ask(self, number: int, history: Any) -> Any:
        self.inner.hook("sampler.ask", ("sampler", self.sweep))
        return self.inner.inner.ask(number, history)


def play(patch: pytest.MonkeyPatch, home: Path, **changes: Any) -> tuple[World, list[str]]:
    home.mkdir()
    patch.setenv("HERMES_HOME", str(home))
    patch.setattr("hermes_ops.airflow.control.controller.RETRY_S", 0.0)
    world = World(**changes)
    with pytest.MonkeyPatch.context() as own:
        return world, world.play(own)


def test_the_rounds_of_this_test_make_every_kind_of_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, outcomes = play(monkeypatch, tmp_path / "own")
    assert (outcomes, world.problems) == (["done"], [])
    made = {name for sweep, name in world.calls if sweep == BAD}
    assert made >= {
        "client.put_state", "client.skip", "client.note", "client.dag_run",
        "metadata.trials", "metadata.records", "metadata.rerank", "metadata.pool",
        "tracker.set_tags", "tracker.open_trial", "tracker.trials", "tracker.reopen",
        "tracker.set_aside", "tracker.add_params",
        "tracker.finish", "tracker.sweep",
        "decisions.append", "decisions.upload", "curves.curves", "sampler.ask",
    }  # fmt: skip
    assert world.fate(BAD)[:2] == world.fate(GOOD)[:2]


@pytest.mark.law
@pytest.mark.parametrize(
    "error",
    [OSError("boom"), Refused("boom"), Unavailable("boom")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_call_fails_for_one_sweep_the_other_goes_on(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, _ = play(monkeypatch, tmp_path / "whole")
    pool_wide = {"metadata.pool"}  # one question about all sweeps
    names = {name for sweep, name in whole.calls if sweep == BAD} - pool_wide
    for name in sorted(names):
        caplog.clear()
        world, outcomes = play(monkeypatch, tmp_path / name, fails=name, error=error)
        seen = [p for p in world.problems if "boom" in p["reason"]]
        away = {"skipped"} if isinstance(error, Unavailable) else set()  # where nobody is answered
        assert (name, {*outcomes} - away) == (name, {"done"})
        *fate, made = world.fate(GOOD, name)
        *wanted, calls = whole.fate(GOOD, name)
        assert (name, fate) == (name, wanted)
        assert (name, set(made)) == (name, set(calls))
        assert seen or "boom" in caplog.text, name
        assert {p["sweep"] for p in seen} <= {BAD, ""}, name


STARTS = [
    ("sampler.ask", "", "draw its configuration"),
    ("tracker.open_trial", "", "open its run in MLflow"),
    ("client.put_state", LEASE_KEY, "write its lease"),
]


def begin(home: Path, patch: pytest.MonkeyPatch, fails: str, only: str, error: Exception) -> World:
    patch.setenv("HERMES_HOME", str(home))
    return World(fails, error, only, services=Services(fresh=True))


@pytest.mark.parametrize(("fails", "only", "step"), STARTS)
@pytest.mark.parametrize("error", [Refused("boom"), RuntimeError("boom")], ids=repr)
def test_a_sweep_whose_trials_cannot_be_started_ends_by_itself_with_the_reason(
    fails: str, only: str, step: str, error: Exception, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    world = begin(home, monkeypatch, fails, only, error)
    world.play_on(monkeypatch, rounds=20, round_s=70.0)
    close = decode(CloseRecord, world.services.records_of[BAD]["plan", -1][CLOSE_KEY])
    assert close is not None
    assert close.reason.startswith("no trial could be started")
    assert step in close.reason
    assert close.reason.endswith("boom")
    finals, states, _ = world.fate(BAD)
    failed = {n for n, state in states.items() if state == "failed"}
    assert len(failed) in (FIRST_FAILURES, FIRST_FAILURES + 1)  # two are tried at once
    assert {states[n] for n in states.keys() - failed} == {"skipped"}
    assert {n for (_, n), final in finals.items() if final == "failed"} == failed
    assert CLOSE_KEY not in world.services.records_of[GOOD].get(("plan", -1), {})
    assert set(world.fate(GOOD)[1].values()) <= {"running", "scheduled"}
    assert not (read_view("gpus") or {})["problems"]


@pytest.mark.parametrize(("fails", "only", "step"), STARTS)
def test_a_trial_that_cannot_be_started_fails_alone_and_holds_no_gpu(
    fails: str, only: str, step: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """Of a sweep whose other trials have begun."""
    monkeypatch.setenv("HERMES_HOME", str(home))
    world = World(fails, Refused("boom"), only)
    world.play_on(monkeypatch, rounds=30, round_s=70.0)
    found = [
        decode(SegmentRecord, known.get(SEGMENT_KEY))
        for place, known in world.services.records_of[BAD].items()
    ]
    reasons = {s.reason for s in found if s is not None and s.reason.endswith("boom")}
    assert reasons
    assert all(step in reason for reason in reasons)
    assert CLOSE_KEY not in world.services.records_of[BAD].get(("plan", -1), {})
    assert {p["step"] for p in world.problems} == {step}


def test_a_start_is_tried_a_bounded_number_of_times_with_growing_pauses() -> None:
    now, tried = [0.0], list[float]()

    def refuse() -> None:
        tried.append(now[0])
        raise Refused("boom")

    barrier = FaultBarrier(lambda: now[0])
    subject = Subject(BAD, 3)
    for second in range(40):
        now[0] = float(second)
        barrier.attempt(subject, "write its lease", refuse)
    assert tried[:MOST_TRIES] == [0.0, 1.0, 3.0, 7.0, 15.0]
    (fault,) = barrier.faults
    assert (fault.since_s, fault.is_service) == (0.0, False)
    assert "since 1970-01-01 00:00:00 UTC: " in str(fault)
    assert barrier.is_hopeless(fault)
    barrier.attempt(Subject(BAD, 4), "write its lease", lambda: None)
    assert barrier.faults == (fault,)
    barrier.forget(subject)
    assert not barrier.faults


def away() -> None:
    raise Unavailable("Airflow did not answer")


def test_a_service_that_answers_nobody_skips_the_round_and_is_no_trials_fault() -> None:
    barrier = FaultBarrier(lambda: 5.0)
    assert barrier.attempt(Subject(BAD, 1), "write its lease", away) is None
    asked: list[int] = []
    assert barrier.attempt(Subject(BAD, 2), "write its lease", asked.append, 2) is None
    assert asked == []  # the sweep is left out for the rest of the round
    with pytest.raises(Unavailable):
        barrier.attempt(Subject(GOOD, 1), "write its lease", away)
    with pytest.raises(Unavailable):
        barrier.end_round()
    barrier.begin_round()
    barrier.end_round()
    for _ in range(20):
        barrier.begin_round()
        barrier.attempt(Subject(BAD, 1), "write its lease", away)
    assert not any(barrier.is_hopeless(fault) for fault in barrier.faults)


def test_a_service_that_answers_all_but_one_trial_holds_up_no_round_and_ends_that_trial() -> None:
    now = [0.0]
    barrier = FaultBarrier(uptime=lambda: now[0])

    def round_at(second: float) -> tuple[Fault, ...]:
        now[0] = second
        barrier.begin_round()
        barrier.attempt(Subject(BAD, 1), "write its lease", away)
        assert barrier.attempt(Subject(GOOD, 1), "write its lease", barrier.answered) is not None
        barrier.end_round()
        return barrier.faults

    assert not any(barrier.is_hopeless(f) for f in round_at(0.0) + round_at(500.0))
    (fault,) = round_at(700.0)
    assert barrier.is_hopeless(fault)


def test_a_sweep_that_runs_no_more_has_no_faults() -> None:
    barrier = FaultBarrier(lambda: 0.0)
    for sweep in SWEEPS:
        barrier.note(Subject(sweep), "settle it", Refused("boom"))
    barrier.keep({GOOD})
    assert [f.subject.sweep for f in barrier.faults] == [GOOD]
