"""The pool's page as plain rows for a reader, and the sources of all pages.

Those are Airflow's database, the controller's files and MLflow.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hermes_ops.airflow.control.jobs import job_id
from hermes_ops.airflow.control.pool_file import read_view
from hermes_ops.airflow.control.quota_settings import QuotaInForce, QuotaSettings
from hermes_ops.airflow.control.sweep_state import RunningSweeps, SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.explanation import (
    UNDECIDED,
    away_lines,
    notice_lines,
    ownership,
    problem_lines,
    quota_lines,
    scaling_line,
    short,
    stuck_lines,
    trouble_line,
)
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import PoolRow
from hermes_ops.airflow.page.access import UNSEEN, Reader
from hermes_ops.airflow.page.progress import ProgressCache
from hermes_ops.airflow.page.usage_view import UsageReader
from hermes_ops.airflow.records import SweepRecord, decode
from hermes_ops.airflow.sweep.source import DEFAULT_POOL
from hermes_ops.core.model import QUEUED_PHASES
from hermes_ops.errors import HermesError, Refused
from hermes_ops.tracking.rest import MISSING

if TYPE_CHECKING:
    from hermes_ops.tracking import SweepRef, Tracker
    from hermes_ops.tracking.curves import CurveReader

log = logging.getLogger(__name__)

T = TypeVar("T")

SILENCE_S = 10.0
"""Seconds without requests for optional data after MLflow did not answer."""
FRESH_S = 1.0
"""Seconds that one view serves all readers of the page."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one instant: its sweeps, and the controller's newest view (empty if it has none).

    `row` is None when Airflow has no such pool; `jobs` are the view's facts of each trial, by id.
    """

    pool: str
    time_s: float
    sweep_states: Mapping[str, SweepState]
    row: PoolRow | None
    view: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]
    quota: QuotaInForce | None = None


@dataclass(slots=True)
class PageSources:
    """Reads for all requests of one API server; writes nothing anywhere."""

    metadata: Metadata
    open_tracker: Callable[[], Tracker]
    clock: Callable[[], float] = time.time
    progress: ProgressCache = field(default_factory=ProgressCache)
    usage: UsageReader = field(init=False)
    curve_readers: dict[SweepRef, CurveReader] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sweeps: dict[str, RunningSweeps] = field(default_factory=dict)
    _quotas: dict[str, QuotaInForce] = field(default_factory=dict)
    _pool_views: dict[str, PoolView] = field(default_factory=dict)
    _tracker: Tracker | None = None
    _failed_s: float = -SILENCE_S

    def __post_init__(self) -> None:
        self.usage = UsageReader(self.metadata, lambda: self.tracker, self.clock)

    @classmethod
    def from_airflow(cls) -> PageSources:
        """Return the sources of the Airflow that runs this process; Unsupported for its version."""
        from hermes_ops.airflow.trial.metrics import tracking_uri

        def open_tracker() -> Tracker:
            from hermes_ops.tracking import Tracker

            return Tracker(tracking_uri())

        metadata = Metadata.from_airflow()
        metadata.check()
        return cls(metadata, open_tracker)

    @property
    def tracker(self) -> Tracker:
        """The client of MLflow; HermesError when its address is not configured."""
        with self._lock:
            if self._tracker is None:
                self._tracker = self.open_tracker()
            return self._tracker

    def from_mlflow(self, ask: Callable[[Tracker], T]) -> T | None:
        """Return MLflow's answer; None when it does not answer, and for SILENCE_S after that.

        A page that is refreshed constantly must not wait for it each time. For a run that was
        deleted in MLflow return None as well, without that pause.
        """
        if 0 <= self.clock() - self._failed_s < SILENCE_S:
            return None
        try:
            return ask(self.tracker)
        except HermesError as error:
            if isinstance(error, Refused) and error.code == MISSING:
                return None
            log.warning("MLflow is left out of the page: %s", error)
            self._failed_s = self.clock()
            return None

    def pools(self) -> tuple[str, ...]:
        """Return the pools in which sweeps run, and this machine's default pool, sorted."""
        records = (decode(SweepRecord, run.sweep) for run in self.metadata.sweeps())
        used = {str(r.config.get("pool", DEFAULT_POOL)) for r in records if r is not None}
        return tuple(sorted(used | {os.environ.get("HERMES_POOL", DEFAULT_POOL)}))

    def pool_view(self, pool: str) -> PoolView:
        """Return the pool, at most FRESH_S old."""
        with self._lock:
            cached = self._pool_views.get(pool)
            # A negative age: the clock has been set back since.
            if cached is None or not 0 <= self.clock() - cached.time_s <= FRESH_S:
                cached = self._pool_views[pool] = self._read_pool(pool)
            return cached

    def _read_pool(self, pool: str) -> PoolView:
        running = self._sweeps.setdefault(
            pool, RunningSweeps(pool, machines=MachineSlots.from_environment())
        )
        quota = self._quotas.setdefault(pool, QuotaInForce(QuotaSettings.file(pool)))
        with suppress(HermesError):  # a malformed quota: the controller reports it
            if quota.refresh():
                running.assign_teams(quota.spec)
        running.refresh(self.metadata)
        sweep_states = {s: SweepState.fetch(p, self.metadata, {}) for s, p in running.specs.items()}
        specs = running.specs.values()
        trial_tasks = [(s.run.dag_id, s.run.run_id, s.record.trial_task) for s in specs]
        row = self.metadata.pool(pool, trial_tasks)
        view = read_view(pool) or {}
        jobs = {j["id"]: j for j in view.get("jobs", ())}
        return PoolView(pool, self.clock(), sweep_states, row, view, jobs, quota)


QUEUE_ROWS = 100
DECISION_ROWS = 30
OLD_VIEW_S = 10.0
"""Age at which a view is stale: a live controller writes it about each second."""


@dataclass(frozen=True, slots=True)
class PoolTrialRow:
    """One trial in a table; `trial` is "" for one that the reader may not see.

    `gpu` is None for a trial that waits; `since_s`: of its segment, its grant or its waiting.
    """

    trial: str
    name: str
    sweep: str
    state: str
    gpu: int | None = None
    since_s: float = 0.0
    rank: int | None = None
    step: str = ""
    value: str = ""
    preemptions: int = 0
    score: str = ""
    reason: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PoolContents:
    """Everything that the pool's page shows."""

    slots: int | None
    foreign: int
    policy: str
    age_s: float | None  # of the controller's view; None without one
    holders: Sequence[PoolTrialRow]
    free: Sequence[int]
    queue: Sequence[PoolTrialRow]
    queued: int
    sweeps: Sequence[tuple[str, Mapping[str, Any]]]
    closing: Mapping[str, str]  # why sweeps end that are about to
    unseen_sweeps: int
    decisions: Sequence[Mapping[str, Any]]
    teams: Sequence[str] = ()  # a line each: what it holds
    notices: Sequence[str] = ()  # likewise: the trials that lose their GPUs soon
    problems: Sequence[str] = ()  # rounds that fail, and what fails of sweeps that are seen

    @property
    def stale(self) -> bool:
        """Whether no controller seems to run."""
        return self.age_s is None or self.age_s > OLD_VIEW_S


def pool_contents(
    pool_view: PoolView, reader: Reader, decisions: Iterable[Mapping[str, Any]]
) -> PoolContents:
    """Return the page of a pool for a reader; sweeps that they may not see are counted only."""
    held = sorted(_holders(pool_view, reader), key=lambda r: (r.gpu or 0, r.state != "stopping"))
    slots = pool_view.row.slots if pool_view.row else None
    taken = {row.gpu for row in held}
    queue = sorted(_queue(pool_view, reader), key=lambda r: (r.rank is None, r.rank or 0))
    seen = [
        (s, b) for s, b in pool_view.sweep_states.items() if reader.reads_dag(b.spec.run.dag_id)
    ]
    age_s = max(0.0, pool_view.time_s - pool_view.view["time_s"]) if pool_view.view else None
    return PoolContents(
        slots=slots,
        foreign=pool_view.row.foreign_slots if pool_view.row else 0,
        policy=str(pool_view.view.get("policy", "")),
        age_s=age_s,
        holders=held,
        free=[gpu for gpu in range(slots or 0) if gpu not in taken],
        queue=queue[:QUEUE_ROWS],
        queued=len(queue),
        sweeps=[(s, _sweep(b)) for s, b in seen],
        closing={s: b.close.reason for s, b in seen if b.close},
        unseen_sweeps=len(pool_view.sweep_states) - len(seen),
        decisions=last_decisions(decisions, reader),
        teams=_team_lines(pool_view.view, sees_all=len(seen) == len(pool_view.sweep_states)),
        notices=_notices(pool_view.view, reader),
        problems=_problems(pool_view.view, [sweep for sweep, _ in seen]),
    )


def _team_lines(view: Mapping[str, Any], *, sees_all: bool) -> list[str]:
    """Return what each team holds, and for a reader of all sweeps what users have used."""
    quota = view.get("quota") or {}
    return quota_lines({"quota": quota if sees_all else {**quota, "users": ()}})


def _notices(view: Mapping[str, Any], reader: Reader) -> list[str]:
    """Return a line for each trial with notice that the reader may see."""
    noticed = [job for job in view.get("jobs", ()) if job.get("notice_s")]
    seen = [job for job in noticed if reader.reads_sweep(job["id"].rpartition("/")[0])]
    return [reader.redacted(line) for line in notice_lines({"jobs": seen})]


def _problems(view: Mapping[str, Any], sweeps: Sequence[str]) -> list[str]:
    """Return the failing rounds, and of these sweeps the failing steps and stuck trials."""
    lines = (line for sweep in sweeps for line in problem_lines(view, sweep))
    whole = (trouble_line(view), scaling_line(view), *away_lines(view))
    stuck = stuck_lines(view, sweeps)
    return [line for line in dict.fromkeys([*whole, *lines, *stuck]) if line]


def last_decisions(decisions: Iterable[Mapping[str, Any]], reader: Reader) -> list[dict[str, Any]]:
    """Return the newest decisions first, without the names of trials that may not be seen."""
    newest = sorted(decisions, key=lambda d: float(d["time_s"]), reverse=True)
    return [decision_row(d, reader) for d in newest[:DECISION_ROWS]]


def decision_row(decision: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Return a decision of the log, as it is shown."""
    return {
        "time_s": float(decision["time_s"]),
        "trial": f"{decision['sweep']}/{decision['trial']}",
        "action": decision["action"],
        "gpus": ", ".join(map(str, decision["gpus"])),
        "policy": decision.get("policy", ""),
        "reason": reader.redacted(decision["reason"]),
        "score": score(decision["terms"]),
        "would_change": reader.redacted(decision.get("would_change") or ""),
    }


def score(terms: Mapping[str, Any]) -> str:
    """Return the terms of a score in one line."""
    return ", ".join(f"{name} {short(value)}" for name, value in terms.items())


def _holders(pool_view: PoolView, reader: Reader) -> Iterator[PoolTrialRow]:
    for sweep_state, trial in _trials(pool_view):
        if trial.lease is not None and (trial.has_lease_in_force or trial.is_under_way):
            state = (
                "stopping" if trial.is_told_to_stop or trial.lease.revoked else trial.phase.value
            )
            since_s = trial.lease.granted_s
            if trial.is_under_way and trial.segment is not None:
                since_s = trial.segment.started_s
            row = _row(pool_view, reader, sweep_state, trial)
            for gpu in trial.lease.gpus:
                yield replace(row, state=state, gpu=gpu, since_s=since_s)


def _queue(pool_view: PoolView, reader: Reader) -> Iterator[PoolTrialRow]:
    for sweep_state, trial in _trials(pool_view):
        if trial.phase in QUEUED_PHASES:
            ended_s = trial.segment.ended_s if trial.segment is not None else None
            since_s = ended_s or sweep_state.spec.facts.submitted_s
            yield replace(_row(pool_view, reader, sweep_state, trial), since_s=since_s)


def _trials(pool_view: PoolView) -> Iterator[tuple[SweepState, TrialRecords]]:
    return (
        (sweep_state, trial)
        for sweep_state in pool_view.sweep_states.values()
        for trial in sweep_state.trials
    )


def _row(
    pool_view: PoolView, reader: Reader, sweep_state: SweepState, trial: TrialRecords
) -> PoolTrialRow:
    """Return the trial's row for the reader, without its GPU."""
    name = job_id(sweep_state.spec.facts.sweep, trial.number)
    state, total = trial.phase.value, sweep_state.spec.facts.total_steps
    job = pool_view.jobs.get(name, {})
    if not reader.reads_dag(sweep_state.spec.run.dag_id):
        return PoolTrialRow("", UNSEEN, "", state, rank=job.get("rank"))
    step = job.get("step", 0)
    return PoolTrialRow(
        trial=name,
        name=f"trial {trial.number}",
        sweep=sweep_state.spec.facts.sweep,
        state=state,
        rank=job.get("rank"),
        step=f"{step} of {total}" if total else str(step),
        value="" if job.get("value") is None else short(job["value"]),
        preemptions=trial.segment.preemptions if trial.segment is not None else 0,
        score=score(job.get("terms", {})),
        reason=reader.redacted(job.get("reason") or UNDECIDED),
        owner=ownership(job),
    )


def _sweep(sweep_state: SweepState) -> dict[str, Any]:
    return {
        "ended": sum(t.has_ended for t in sweep_state.trials),
        "open": sweep_state.open_trials,
        "trials": len(sweep_state.trials),
        "closing": sweep_state.close.reason if sweep_state.close else "",
    }
