"""The controller's view of one sweep: rebuilt from Airflow and MLflow at every observation.

Nothing here must be remembered: a controller that was killed finds the same books again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any

from hermes_ops.airflow.control.deferred import Standing
from hermes_ops.airflow.control.pool import SweepFacts, Trial
from hermes_ops.airflow.control.recall import Points, Recall
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.metadata import Metadata, RunRow
from hermes_ops.airflow.records import CLOSE_KEY, CloseRecord, SweepRecord, decode
from hermes_ops.config import (
    RunIn,
    SweepConfig,
    parse,
    render_command,
    render_environment,
)
from hermes_ops.core.model import Job, JobId, Phase, SweepId
from hermes_ops.errors import Unavailable
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.tree import axes
from hermes_ops.tracking.runs import SweepRef

log = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})

FORESEEN = 256
"""Trials of a sweep, the first ones, whose configurations are looked up before they begin."""

FORESEEN_A_ROUND, DRAWN_A_ROUND = 16, 2_000
"""As a draw takes a millisecond or more, a round makes no more of them for each sweep, and draws no
more parameters."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What does not change during a sweep: its config and what follows from it.

    `recall` and `standing` keep what the last round made of the rest.
    """

    run: RunRow
    record: SweepRecord
    config: SweepConfig
    sampler: Sampler
    facts: SweepFacts
    axes: int = 1  # of its space, those below choices included
    recall: Recall = field(default_factory=Recall, compare=False)
    standing: Standing = field(default_factory=Standing, compare=False)
    _foreseen: dict[int, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, run: RunRow) -> Plan | None:
        """The sweep of a DAG run; None when its record is of another shape."""
        record = decode(SweepRecord, run.sweep)
        if record is None:
            return None
        config = parse(record.config, source=run.sweep_id, base=None)
        sampler = config.search.to_sampler()
        facts = SweepFacts(
            sweep=SweepId(run.sweep_id),
            submitted_s=_began_s(record, run),
            weight=config.weight,
            gpus=config.trial.gpus,
            sign=config.objective.sign,
            total_steps=config.budget.max_epochs,
            preemptible=config.trial.preemptible,
            deadline_s=_deadline_s(config, record, run),
            nodes=_claimed_nodes(config),
        )
        space = tuple(axes(config.search.to_space()))
        return cls(run, record, config, sampler, facts, max(1, len(space)))

    @property
    def ref(self) -> SweepRef:
        """Where MLflow has it."""
        return SweepRef(self.run.sweep_id, self.record.experiment_id, self.record.parent_run_id)

    @property
    def learns(self) -> bool:
        """True when a configuration depends on the results so far."""
        return self.config.search.learns

    def foresee(self, numbers: Iterable[int]) -> Mapping[int, Mapping[str, Any]]:
        """Configurations that trials will be opened with, by number; more of them at each call.

        Only where no result plays a part in them.
        """
        if not self.learns:
            unknown = (n for n in numbers if n < FORESEEN and n not in self._foreseen)
            most = max(1, min(FORESEEN_A_ROUND, DRAWN_A_ROUND // self.axes))
            for number in islice(unknown, most):
                self._foreseen[number] = self._draw(number)
        return self._foreseen

    def _draw(self, number: int) -> Mapping[str, Any]:
        """A configuration; empty where the search fails, which the trial's start will report."""
        try:
            return self.sampler.ask(number, ())
        except Exception as error:  # whatever a sampler raises: the others are foreseen
            log.debug("Trial %s of %s is not foreseen: %s", number, self.run.sweep_id, error)
            return {}


def _began_s(record: SweepRecord, run: RunRow) -> float:
    """When the sweep was planned; if its run was started anew since, then."""
    return max(run.started_s, record.planned_s)


def _claimed_nodes(config: SweepConfig) -> tuple[str, ...]:
    pod = config.trial.pod if config.trial.run_in is RunIn.POD else None
    return tuple(sorted(pod.checkpoint_claims or ())) if pod is not None else ()


def _deadline_s(config: SweepConfig, record: SweepRecord, run: RunRow) -> float | None:
    limit_s = config.budget.wall_clock_seconds
    return None if limit_s is None else _began_s(record, run) + limit_s


@dataclass(slots=True)
class Book:
    """A sweep as it stands: its trials, its curves, whether it is closing."""

    plan: Plan
    trials: tuple[Trial, ...]
    close: CloseRecord | None
    curves: Mapping[int, Points] = field(default_factory=dict)
    beside: Mapping[str, Mapping[int, Points]] = field(default_factory=dict)  # metric -> trial
    opened_now: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # in this very round
    held: frozenset[int] = frozenset()  # trials whose start has failed a moment ago
    told: bool = True  # whether MLflow has been read, so that a trial without a curve has none

    @classmethod
    def read(
        cls,
        plan: Plan,
        metadata: Metadata,
        curves: Mapping[int, Points],
        *,
        beside: Mapping[str, Mapping[int, Points]] = MappingProxyType({}),
        told: bool = True,
    ) -> Book:
        """From Airflow's rows and records and the curves known so far."""
        records = metadata.records(plan.run)
        task = plan.record.trial_task
        made, stands, sweep = plan.recall.trial, plan.standing.of, plan.run.sweep_id
        trials = tuple(
            stands(made(row, records.get((task, row.number), _NONE)), sweep)
            for row in metadata.trials(plan.run, task)
        )
        planned = records.get((plan.run.plan_task, -1), {})
        close = decode(CloseRecord, planned.get(CLOSE_KEY))
        return cls(plan, trials, close, curves, beside, told=told)

    @property
    def sweep(self) -> str:
        """The sweep's id."""
        return self.plan.run.sweep_id

    def folder(self, trial: Trial) -> TrialFolder:
        """Where the files of one of its trials lie."""
        return TrialFolder.of(self.sweep, trial.number)

    def jobs(self, now_s: float) -> list[Job]:
        """Every trial as a policy sees it; those of a closing sweep are left out."""
        if self.close is not None:
            return []
        foreseen = self.plan.foresee(t.number for t in self.trials if t.lease is None)
        facts, curves = self.plan.facts, self.curves
        job = self.plan.recall.job
        jobs = [
            job(t, facts, curves.get(t.number, ()), now_s, foreseen.get(t.number))
            for t in self.trials
        ]
        return [j for j, t in zip(jobs, self.trials, strict=True) if self._offered(j, t)]

    def _offered(self, candidate: Job, trial: Trial) -> bool:
        """A trial that has not begun is offered once Airflow would take it.

        Of a DAG that is paused Airflow takes none: only those that train are offered.
        """
        if trial.number in self.plan.record.touched:
            return False
        if trial.number in self.held and candidate.phase in (Phase.PENDING, Phase.WAITING):
            return False
        if self.plan.run.paused and candidate.phase in (Phase.PENDING, Phase.WAITING):
            return False
        return candidate.phase is not Phase.PENDING or trial.row.state == "scheduled"

    @property
    def whole(self) -> bool:
        """True once Airflow has a task for every trial of the plan."""
        return len(self.trials) >= self.plan.record.trials

    @property
    def open_trials(self) -> int:
        """Trials that have begun and have not ended."""
        return sum(t.lease is not None and not t.ended for t in self.trials)

    @property
    def has_begun(self) -> bool:
        """True once a trial has begun to train."""
        return any(t.segment is not None and t.segment.segments > 0 for t in self.trials)

    def best_trial(self) -> int | None:
        """The number of the trial with the best value so far, of two the lower; None without."""
        seen = (self._observation(t) for t in self.trials if t.lease is not None)
        able = [(o.loss, o.number) for o in seen if o.loss is not None and o.state != "failed"]
        return min(able)[1] if able else None

    @property
    def failed_trials(self) -> int:
        """Trials that ended FAILED; those that diverged if the sweep counts them."""
        counts = self.plan.config.budget.count_diverged
        return sum(t.failed and (counts or not t.diverged) for t in self.trials)

    def last_beside(self, number: int) -> dict[str, float]:
        """The last value that a trial has reported of each metric that has bounds."""
        found = ((name, points.get(number)) for name, points in self.beside.items())
        return {name: points[-1][1] for name, points in found if points}

    def history(self) -> list[Observation]:
        """What the sampler is told: every trial that has a configuration."""
        leased = [self._observation(t) for t in self.trials if t.lease is not None]
        fresh = self.opened_now.items()
        return leased + [Observation(n, dict(c), None, "running") for n, c in fresh]

    def _observation(self, trial: Trial) -> Observation:
        lease = trial.lease
        config = dict(lease.config) if lease is not None else {}
        values = [self.plan.facts.sign * v for _, v, _ in self.curves.get(trial.number, ())]
        finite = [v for v in values if v == v and abs(v) != float("inf")]  # noqa: PLR0124 - NaN
        loss = min(finite) if finite else None
        if not trial.ended:
            return Observation(trial.number, config, loss, "running")
        failed = trial.failed or loss is None
        return Observation(trial.number, config, loss, "failed" if failed else "finished")

    @property
    def can_ask(self) -> bool:
        """False while results that a configuration depends on have not been read from MLflow."""
        return not self.plan.learns or self.told or not any(t.ended for t in self.trials)

    def ask(self, number: int) -> dict[str, Any]:
        """The configuration of a trial that is about to be opened.

        Unavailable while results that it depends on have not been read from MLflow.
        """
        if not self.can_ask:
            raise Unavailable("the results of its sweep have not been read from MLflow yet")
        return dict(self.plan.sampler.ask(number, self.history()))

    def command(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The training command of a configuration."""
        return tuple(render_command(self.plan.config, dict(config)))

    def environment(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The environment variables of a configuration."""
        return render_environment(self.plan.config, dict(config))


def find_sweep(job: JobId) -> str:
    """The sweep of a trial that a policy calls by that id."""
    return job.rpartition("/")[0]


def find(books: Mapping[str, Book], job: JobId) -> tuple[Book, Trial]:
    """The trial that a policy calls by that id, and its sweep."""
    sweep, _, number = job.rpartition("/")
    return books[sweep], next(t for t in books[sweep].trials if t.number == int(number))
