"""A sweep that has ended goes on: with more trials, or with those that were stopped.

All records are written while its DAG run is in a final state: nobody looks at it then. Only at
last are tasks cleared, which sets the run going again; a call that is cut off before that may
simply be repeated. Trials that have finished keep task, run and result.

Airflow looks at the length of a mapped task again only where one of its instances is about to be
scheduled. To add trials, one that has ended is therefore cleared with the plan (`touched` in the
sweep's record); it is not run, and the controller gives its task back the state that it had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.identity import (
    PLAN_TASK,
    REPORT_TASK,
    group_of,
    in_group,
    sweep_id,
)
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    END_TAGS,
    REACHED_TAG,
    SEGMENT_KEY,
    SWEEP_KEY,
    Segment,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep.published import published
from hermes_ops.config import Algorithm, SweepConfig, parse
from hermes_ops.errors import HermesError
from hermes_ops.tracking import SweepRef
from hermes_ops.trial.failure import Cause

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker, TrialRun

ENDED_RUN = ("success", "failed")
OF_AN_END = (
    "hermes.reason",
    "hermes.ended",
    "hermes.output_tail",
    "hermes.first_failure",
    "hermes.cause",
)
"""Tags of a trial's run that say how it ended."""


@dataclass(frozen=True, slots=True)
class More:
    """What a sweep gets in the place of its budgets; None leaves one as it is."""

    gpu_seconds: float | None = None
    wall_clock_seconds: float | None = None
    failed_trials: int | None = None

    def into(self, config: SweepConfig) -> SweepConfig:
        """The config with these budgets; ConfigError for one that is not allowed."""
        names = ("gpu_seconds", "wall_clock_seconds", "failed_trials")
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        document = json.loads(config.to_json())
        document["budget"] |= given
        return parse(document, source="the new budget", base=None)


def with_trials(config: SweepConfig, trials: int) -> SweepConfig:
    """The config of a sweep that has come to that many trials; never fewer than it had."""
    if trials <= config.trial_count:
        return config
    search = config.search.model_copy(update={"max_trials": trials})
    return config.model_copy(update={"search": search})


def report_of(plan: TaskKey) -> str:
    """The id of the report's task of the sweep that this task has planned."""
    return in_group(group_of(plan.task_id), REPORT_TASK)


@dataclass(slots=True)
class EndedSweep:
    """A sweep whose DAG run has ended, and the services that know of it."""

    airflow: AirflowClient
    tracker: Tracker
    plan: TaskKey
    record: SweepRecord
    states: Mapping[int, str | None]
    """What Airflow says of each trial's task, by trial number."""
    runs: Mapping[int, TrialRun]

    @classmethod
    def find(cls, airflow: AirflowClient, tracker: Tracker, plan: TaskKey) -> EndedSweep:
        """The sweep of that plan task; HermesError when it still runs or was never planned."""
        sweep = sweep_id(plan.dag_id, plan.run_id, plan.task_id)
        run = airflow.dag_run(plan.dag_id, plan.run_id)
        if run is None:
            raise HermesError(f"there is no sweep {sweep!r}: `hermes sweep list` shows them.")
        if run["state"] not in ENDED_RUN:
            raise HermesError(_still_runs(sweep, plan))
        record = decode(SweepRecord, airflow.get_state(plan, SWEEP_KEY))
        if record is None:
            raise HermesError(f"the sweep {sweep!r} was never planned: start it anew.")
        rows = airflow.task_instances(plan.dag_id, plan.run_id)
        states = {
            int(r["map_index"]): r["state"]
            for r in rows
            if r["task_id"] == record.trial_task and r["map_index"] >= 0
        }
        ref = SweepRef(sweep, record.experiment_id, record.parent_run_id)
        runs = {t.number: t for t in tracker.trials(ref)}
        return cls(airflow, tracker, plan, record, states, runs)

    @property
    def sweep(self) -> str:
        """The sweep's id."""
        return sweep_id(self.plan.dag_id, self.plan.run_id, self.plan.task_id)

    @property
    def config(self) -> SweepConfig:
        """The sweep file as it stands."""
        return parse(self.record.config, source=self.sweep, base=None)

    def extend(self, trials: int, more: More) -> int:
        """Add that many trials; the number that there are then."""
        config = self.config
        if config.search.algorithm is Algorithm.GRID:
            raise HermesError(
                "a grid has no further combinations: start a sweep with a finer grid, or with "
                "`algorithm: random` or `tpe`."
            )
        total = len(self.states) + trials
        grown = self._without_reached(more.into(with_trials(config, total)))
        self._refuse_spent(grown, trials_again=())
        touched = self._to_touch()
        self._reopen(grown, touched)
        self._clear([self.plan.task_id, (self.record.trial_task, touched[0]), report_of(self.plan)])
        return total

    def resume(self, more: More, *, failed: bool) -> tuple[int, ...]:
        """Let the trials that were stopped go on, those that failed too if told; their numbers."""
        going_on = self._to_resume(failed)
        if not going_on:
            hint = "" if failed else " Trials that failed are tried again with --failed."
            raise HermesError(
                f"no trial of {self.sweep!r} was stopped: there is nothing to resume.{hint} "
                f"`hermes sweep extend {self.sweep}` adds trials."
            )
        config = self._without_reached(more.into(self.config))
        self._refuse_spent(config, trials_again=tuple(going_on))
        for number, segment in going_on.items():
            if segment is not None:
                again = replace(segment, running=False, final=None, failures=0)
                self.airflow.put_state(self._trial(number), SEGMENT_KEY, encode(again))
            if (run := self.runs.get(number)) is not None:
                self.tracker.reopen(run.run_id, [t for t in OF_AN_END if t in run.tags])
        self._reopen(config, ())
        tasks = [(self.record.trial_task, number) for number in going_on]
        self._clear([*tasks, report_of(self.plan)])
        return tuple(going_on)

    def _to_resume(self, failed: bool) -> dict[int, Segment | None]:
        found: dict[int, Segment | None] = {}
        for number, state in sorted(self.states.items()):
            if state == "skipped" or (failed and state == "failed"):
                segment = decode(Segment, self.airflow.get_state(self._trial(number), SEGMENT_KEY))
                if segment is None or segment.final != "stopped_early":
                    found[number] = segment
        return found

    def _to_touch(self) -> tuple[int]:
        """The trial to clear: one that has finished, or else the last one."""
        finished = [n for n, state in self.states.items() if state == "success"]
        if not self.states:
            raise HermesError(f"the sweep {self.sweep!r} has no trials: start it anew.")
        return (max(finished or self.states),)

    def _refuse_spent(self, config: SweepConfig, trials_again: Sequence[int]) -> None:
        """HermesError where a budget would end the sweep again at once."""
        budget = config.budget
        used_gpu_s = sum(float(r.tags.get("hermes.gpu_seconds", 0)) for r in self.runs.values())
        if budget.gpu_seconds is not None and used_gpu_s >= budget.gpu_seconds:
            raise HermesError(
                f"its trials have used {used_gpu_s:.0f} GPU-seconds of budget.gpu_seconds "
                f"{budget.gpu_seconds:g}: give a greater total with --gpu-seconds."
            )
        failed = sum(
            s == "failed"
            and n not in trials_again
            and (budget.count_diverged or not self._diverged(n))
            for n, s in self.states.items()
        )
        if budget.failed_trials is not None and failed >= budget.failed_trials:
            raise HermesError(
                f"{failed} trials have failed, as many as budget.failed_trials: give a greater "
                "number with --failed-trials."
            )

    def _diverged(self, number: int) -> bool:
        run = self.runs.get(number)
        return run is not None and run.tags.get("hermes.cause") == Cause.DIVERGED.value

    def _without_reached(self, config: SweepConfig) -> SweepConfig:
        """The config without its target, if the sweep ended because that was reached."""
        if REACHED_TAG not in self._tags():
            return config
        objective = config.objective.model_copy(update={"target": None})
        return config.model_copy(update={"objective": objective})

    def _tags(self) -> Mapping[str, str]:
        parent = self.record.parent_run_id
        return self.tracker.sweep(SweepRef(self.sweep, self.record.experiment_id, parent)).tags

    def _reopen(self, config: SweepConfig, touched: tuple[int, ...]) -> None:
        """The sweep's own record, without its end, and its run in MLflow."""
        record = replace(
            self.record,
            config=json.loads(config.to_json()),
            trials=max(config.trial_count, len(self.states)),
            touched=touched,
        )
        self.airflow.put_state(self.plan, CLOSE_KEY, {})
        self.airflow.put_state(self.plan, SWEEP_KEY, encode(record))
        parent = self.record.parent_run_id
        tags = self._tags()
        self.tracker.reopen(parent, [t for t in END_TAGS if t in tags])
        self.tracker.artifacts.write(parent, "sweep.yaml", published(config).to_yaml().encode())

    def _trial(self, number: int) -> TaskKey:
        return replace(self.plan, task_id=self.record.trial_task, map_index=number)

    def _clear(self, tasks: Sequence[Any]) -> None:
        self.airflow.clear(self.plan.dag_id, self.plan.run_id, tasks)


def _still_runs(sweep: str, plan: TaskKey) -> str:
    end = f"end it with `hermes sweep stop {sweep}`"
    if plan.task_id == PLAN_TASK:
        return f"the sweep {sweep!r} has not ended: wait for it, or {end}."
    return (
        f"the run {plan.run_id!r} of the DAG {plan.dag_id!r}, which the sweep {sweep!r} is part "
        f"of, has not ended: wait for it. If it is the sweep that runs, {end}."
    )
