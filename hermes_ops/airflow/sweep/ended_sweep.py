"""A sweep that has ended: it is extended by more trials, or its stopped trials are resumed.

All records are written while its DAG run is in a final state, when nothing reads them. The tasks
are cleared last, which restarts the run; a call that is interrupted before that may be repeated.
Nothing is written, not even in MLflow, if Airflow does not let this user clear its tasks.
Trials that have finished keep task, run and result.

Airflow updates the length of a mapped task only when one of its instances is about to be scheduled.
To add trials, one that has ended is therefore cleared with the plan (`touched` in the sweep's
record); it is not run, and the controller restores the state of its task.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.client import ENDED_RUN, TaskKey
from hermes_ops.airflow.folders import pod_file
from hermes_ops.airflow.identity import (
    PLAN_TASK,
    REPORT_TASK,
    group_of,
    in_group,
    sweep_id,
)
from hermes_ops.airflow.open_secrets import redact
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CONFIG_XCOM,
    CONTINUED_TAG,
    END_TAGS,
    REACHED_TAG,
    SEGMENT_KEY,
    SWEEP_KEY,
    SegmentRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.config import Algorithm, SweepConfig, check_installation, parse
from hermes_ops.errors import HermesError, NotPermitted
from hermes_ops.tracking import SweepRef
from hermes_ops.tracking.artifacts import SWEEP_FILE
from hermes_ops.tracking.summary import DEADLINE_TAG
from hermes_ops.tracking.trial_timelines import with_extension
from hermes_ops.trial.failure import Cause

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient, TaskKey
    from hermes_ops.tracking import Tracker, TrialRun

TRIAL_END_TAGS = (
    "hermes.reason",
    "hermes.ended",
    "hermes.output_tail",
    "hermes.first_failure",
    "hermes.cause",
)
"""Tags of a trial's run that describe its end."""


@dataclass(frozen=True, slots=True)
class BudgetChanges:
    """New values of a sweep's budgets and its deadline; None leaves one as it is."""

    gpu_seconds: float | None = None
    wall_clock_seconds: float | None = None
    failed_trials: int | None = None
    deadline: str | None = None

    def into(self, config: SweepConfig) -> SweepConfig:
        """Return the config with these budgets; ConfigError for one that is not allowed."""
        names = ("gpu_seconds", "wall_clock_seconds", "failed_trials")
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        document = json.loads(config.to_json())
        document["budget"] |= given
        if self.deadline is not None:
            document["deadline"] = self.deadline
        return parse(document, source="the new budget", base=None)


def with_trials(config: SweepConfig, trials: int) -> SweepConfig:
    """Return the config with that many trials; never fewer than it has."""
    if trials <= config.trial_count:
        return config
    search = config.search.model_copy(update={"max_trials": trials})
    return config.model_copy(update={"search": search})


def deadline_tag(config: SweepConfig, start_s: float) -> dict[str, str]:
    """Return the tag of a sweep's run that holds its deadline; none without one."""
    at_s = config.deadline_at_s(start_s)
    return {} if at_s is None else {DEADLINE_TAG: repr(at_s)}


def report_of(plan: TaskKey) -> str:
    """Return the id of the report task of a sweep, by the task that has planned it."""
    return in_group(group_of(plan.task_id), REPORT_TASK)


@dataclass(slots=True)
class EndedSweep:
    """A sweep whose DAG run has ended, and the clients of Airflow and MLflow."""

    airflow: AirflowClient
    tracker: Tracker
    plan: TaskKey
    record: SweepRecord
    states: Mapping[int, str | None]
    """Airflow's state of each trial's task, by trial number."""
    runs: Mapping[int, TrialRun]
    ended_at: str = ""
    """When its DAG run ended, as Airflow writes it."""

    @classmethod
    def find(cls, airflow: AirflowClient, tracker: Tracker, plan: TaskKey) -> EndedSweep:
        """Return the sweep of that plan task; HermesError if it still runs or was never planned."""
        sweep = sweep_id(plan.dag_id, plan.run_id, plan.task_id)
        run = airflow.dag_run(plan.dag_id, plan.run_id)
        if run is None:
            raise HermesError(f"there is no sweep {sweep!r}: `hermes sweep list` shows them.")
        if run["state"] not in ENDED_RUN:
            raise HermesError(_still_runs(sweep, plan))
        record = decode(SweepRecord, airflow.get_state(plan, SWEEP_KEY))
        rows = airflow.task_instances(plan.dag_id, plan.run_id)
        if record is None:
            planned = any(r["task_id"] == plan.task_id and r["state"] == "success" for r in rows)
            raise HermesError(_without_record(sweep, planned=planned))
        states = {
            int(r["map_index"]): r["state"]
            for r in rows
            if r["task_id"] == record.trial_task and r["map_index"] >= 0
        }
        ref = SweepRef(sweep, record.experiment_id, record.parent_run_id)
        runs = {t.number: t for t in tracker.trials(ref)}
        return cls(airflow, tracker, plan, record, states, runs, run["end_date"] or "")

    @property
    def sweep(self) -> str:
        """The sweep's id."""
        return sweep_id(self.plan.dag_id, self.plan.run_id, self.plan.task_id)

    @property
    def config(self) -> SweepConfig:
        """The sweep's current configuration."""
        return parse(self.record.config, source=self.sweep, base=None)

    def extend(self, trials: int, more: BudgetChanges) -> int:
        """Add that many trials; return the total number."""
        config = self.config
        if config.search.algorithm is Algorithm.GRID:
            raise HermesError(
                "a grid has no further combinations: start a sweep with a finer grid, or with "
                "`algorithm: random` or `tpe`."
            )
        total = len(self.states) + trials
        grown = self._without_reached(more.into(with_trials(config, total)))
        check_installation(grown, pod_file())
        if grown.trial_count < total:
            raise HermesError(
                f"{config.search.algorithm.value!r} has {grown.trial_count} configurations, and "
                f"the sweep has {len(self.states)} trials: start a sweep with a wider space, or "
                "with another algorithm."
            )
        self._refuse_spent(grown, trials_again=())
        self.airflow.confirm_edit(self.plan)
        touched = self._to_touch()
        self._reopen(grown, touched, with_extension(self._tags(), len(self.states), time.time()))
        self._clear([self.plan.task_id, (self.record.trial_task, touched[0]), report_of(self.plan)])
        return total

    def resume(self, more: BudgetChanges, *, failed: bool) -> tuple[int, ...]:
        """Resume the stopped trials, with `failed` also the failed ones; return their numbers."""
        going_on = self._to_resume(failed)
        if not going_on:
            hint = "" if failed else " Trials that failed are tried again with --failed."
            raise HermesError(
                f"no trial of {self.sweep!r} was stopped: there is nothing to resume.{hint} "
                f"`hermes sweep extend {self.sweep}` adds trials."
            )
        config = self._without_reached(more.into(self.config))
        check_installation(config, pod_file())
        self._refuse_spent(config, trials_again=tuple(going_on))
        self.airflow.confirm_edit(self.plan)
        with suppress(NotPermitted):  # without the right on XComs: the controller restores them
            restore_plan_values(self.airflow, self.plan, self.record, self.sweep)
        for number, segment in going_on.items():
            if segment is not None:
                again = encode(segment.continued())
                self.airflow.put_state(self._trial(number), SEGMENT_KEY, again)
            if (run := self.runs.get(number)) is not None:
                self.tracker.reopen(run.run_id, [t for t in TRIAL_END_TAGS if t in run.tags])
        self._reopen(config, (), {})
        tasks = [(self.record.trial_task, number) for number in going_on]
        self._clear([*tasks, report_of(self.plan)])
        return tuple(going_on)

    def _to_resume(self, failed: bool) -> dict[int, SegmentRecord | None]:
        segments: dict[int, SegmentRecord | None] = {}
        for number, state in sorted(self.states.items()):
            if state == "skipped" or (failed and state == "failed"):
                segment = decode(
                    SegmentRecord, self.airflow.get_state(self._trial(number), SEGMENT_KEY)
                )
                if segment is None or segment.final != "stopped_early":
                    segments[number] = segment
        return segments

    def _to_touch(self) -> tuple[int]:
        """Return the trial to clear: one that has finished, or else the last one."""
        finished = [n for n, state in self.states.items() if state == "success"]
        if not self.states:
            raise HermesError(f"the sweep {self.sweep!r} has no trials: start a new sweep.")
        return (max(finished or self.states),)

    def _refuse_spent(self, config: SweepConfig, trials_again: Sequence[int]) -> None:
        """Raise HermesError where a budget or its deadline would end the sweep again at once."""
        budget, now_s = config.budget, time.time()
        deadline_s = config.deadline_at_s(now_s)
        if deadline_s is not None and deadline_s <= now_s:
            raise HermesError(
                f"its deadline ({config.deadline}) has passed: give a later one with --deadline."
            )
        used_gpu_s = 0.0 if budget.gpu_seconds is None else self._used_gpu_s()
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

    def _used_gpu_s(self) -> float:
        """Return the GPU-seconds of its trials, also those before one began from scratch."""
        _, runs = self.tracker.every_run(self._ref)
        return sum(float(run.tags.get("hermes.gpu_seconds", 0)) for run in runs)

    def _diverged(self, number: int) -> bool:
        run = self.runs.get(number)
        return run is not None and run.tags.get("hermes.cause") == Cause.DIVERGED.value

    def _without_reached(self, config: SweepConfig) -> SweepConfig:
        """Return the config without its target, if the sweep ended because that was reached."""
        if REACHED_TAG not in self._tags():
            return config
        objective = config.objective.model_copy(update={"target": None})
        return config.model_copy(update={"objective": objective})

    @property
    def _ref(self) -> SweepRef:
        return SweepRef(self.sweep, self.record.experiment_id, self.record.parent_run_id)

    def _tags(self) -> Mapping[str, str]:
        return self.tracker.sweep(self._ref).tags

    def _reopen(
        self, config: SweepConfig, touched: tuple[int, ...], added: Mapping[str, str]
    ) -> None:
        """Write the sweep's record without its end, and reopen its run in MLflow.

        The run's tag tells the controller that this end of the DAG run is over: it must not take
        the sweep, whose tasks are cleared after this, for an abandoned one.
        """
        record = replace(
            self.record,
            config=json.loads(config.to_json()),
            trials=max(config.trial_count, len(self.states)),
            touched=touched,
        )
        self.airflow.put_state(self.plan, CLOSE_KEY, {})
        self.airflow.put_state(self.plan, SWEEP_KEY, encode(record))
        parent = self.record.parent_run_id
        tags, renewed = self._tags(), deadline_tag(config, time.time())
        drop = [t for t in END_TAGS if t in tags]
        self.tracker.reopen(parent, drop, {CONTINUED_TAG: self.ended_at, **renewed, **added})
        self.tracker.artifacts.write(parent, SWEEP_FILE, redact(config).to_yaml().encode())

    def _trial(self, number: int) -> TaskKey:
        return replace(self.plan, task_id=self.record.trial_task, map_index=number)

    def _clear(self, tasks: Sequence[Any]) -> None:
        self.airflow.clear(self.plan.dag_id, self.plan.run_id, tasks)


def _without_record(sweep: str, *, planned: bool) -> str:
    if not planned:
        return f"the sweep {sweep!r} was never planned: start a new sweep."
    return (
        f"the record of the sweep {sweep!r} has been deleted from Airflow's state store, so it "
        "cannot go on: start a new sweep. Its results are in MLflow, unless they were pruned."
    )


def _still_runs(sweep: str, plan: TaskKey) -> str:
    end = f"end it with `hermes sweep stop {sweep}`"
    if plan.task_id == PLAN_TASK:
        return f"the sweep {sweep!r} has not ended: wait for it, or {end}."
    return (
        f"the run {plan.run_id!r} of the DAG {plan.dag_id!r}, which the sweep {sweep!r} is part "
        f"of, has not ended: wait for it. If it is the sweep that runs, {end}."
    )


NUMBERS_XCOM = "return_value"
"""XCom key of the trials' numbers: what the plan task returns."""


def plan_values(record: SweepRecord, sweep: str) -> dict[str, object]:
    """Return the XComs of a sweep's plan by key, as it has written them."""
    config = parse(record.config, source=sweep, base=None)
    return {
        NUMBERS_XCOM: list(range(record.trials)),
        CONFIG_XCOM: json.loads(redact(config).to_json()),
    }


def restore_plan_values(
    client: AirflowClient, plan: TaskKey, record: SweepRecord, sweep: str
) -> list[str]:
    """Write the missing XComs of the plan and renew the others; return the missing keys."""
    missing = []
    for key, value in plan_values(record, sweep).items():
        stored = client.xcom(plan, key)
        if stored is None:
            missing.append(key)
            client.add_xcom(plan, key, value)
        else:
            client.renew_xcom(plan, key, stored)
    return missing
