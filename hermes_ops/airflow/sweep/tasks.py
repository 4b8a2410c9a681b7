"""The two ordinary tasks of a sweep: `plan` before the trials, `report` after them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from jinja2 import TemplateError

from hermes_ops.airflow.addresses import comparison_address, report_address, run_address
from hermes_ops.airflow.control.stores import check_store
from hermes_ops.airflow.identity import sweep_of
from hermes_ops.airflow.pieces import KeyValues, read_record, write_record
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    END_TAGS,
    OUTCOMES,
    SWEEP_KEY,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep.continuing import with_trials
from hermes_ops.airflow.sweep.nights import Nights
from hermes_ops.airflow.sweep.outcome import best_of
from hermes_ops.airflow.sweep.pod_sweeps import checked_pods, clear_left_disks, end_left_pods
from hermes_ops.airflow.sweep.published import published
from hermes_ops.airflow.sweep.source import SweepSource
from hermes_ops.airflow.sweep.warm_start import warmed
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.airflow.trial.links import (
    REPORT_XCOM,
    SWEEP_XCOM,
    TRIALS_XCOM,
    CompareTrialsLink,
    SweepReportLink,
    SweepRunLink,
)
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.config import RunIn, SweepConfig, parse, warnings_of
from hermes_ops.config.sweep_warnings import as_tag
from hermes_ops.core.secondary import why_no_best
from hermes_ops.errors import ConfigError, HermesError
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.comparison import ComparedSweep

CONFIG_XCOM = "hermes_config"
"""XCom key of the sweep as it was planned, for its report; secrets are stars in it."""


class PlanOperator(BaseOperator):
    """Validates the sweep, opens it in MLflow, returns the trial numbers.

    :param trial_task: the id of the mapped task that runs the trials
    :param source: where the sweep is read from; by default the configuration of the DAG run
    :param connections: what leads to MLflow in the place of its variables
    :param nights: what makes the sweep one of many nights
    """

    operator_extra_links = (SweepRunLink(), CompareTrialsLink())

    def __init__(
        self,
        *,
        trial_task: str,
        source: SweepSource | None = None,
        connections: Connections | None = None,
        nights: Nights | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.trial_task = trial_task
        self.source = source or SweepSource()
        self.connections = connections or Connections()
        self.nights = nights

    def execute(self, context: Mapping[str, Any]) -> list[int]:
        """Refuse a bad configuration before anything starts; safe to repeat."""
        store = context["task_state_store"]
        before = decode(SweepRecord, read_record(store.get, SWEEP_KEY))
        config = self._read(context) if before is None else _again(before, context)
        self.connections.enter()
        tracker = Tracker(tracking_uri())
        if before is None and self.nights is not None:
            config = self.nights.begin(config, tracker, context["ti"], self.log.info)
        if before is None:
            config = warmed(config, tracker, self.log.info)
        sweep = sweep_of(self, context)
        tags = {**self._tags(config), **(self._warn(config) if before is None else {})}
        ref = tracker.ensure_sweep(config.name, sweep, published(config).to_yaml(), tags)
        now_ms = int(time.time() * 1_000)
        tracker.views.save(ref, ComparedSweep.from_config(config), now_ms)
        record = SweepRecord(
            config=json.loads(config.to_json()),
            trials=config.trial_count,
            trial_task=self.trial_task,
            parent_run_id=ref.parent_run_id,
            experiment_id=ref.experiment_id,
            experiment=config.name,
            touched=before.touched if before is not None else (),
            planned_s=before.planned_s if before is not None else time.time(),
            nightly=self.nights is not None,
        )
        write_record(KeyValues(store.get, store.set, store.delete), SWEEP_KEY, encode(record))
        if before is not None:
            self._open_again(context, tracker, ref)
        self._leave(context["ti"], config, ref)
        self.log.info("Sweep %s: %s trials", sweep, record.trials)
        return list(range(record.trials))

    def _read(self, context: Mapping[str, Any]) -> SweepConfig:
        def render(text: str) -> str:
            return str(self.render_template(text, context))  # type: ignore[arg-type]

        try:
            config = self.source.config(context, render)
        except ConfigError as error:
            raise AirflowFailException(str(error)) from None
        except TemplateError as error:
            raise AirflowFailException(f"a template of the sweep is wrong: {error}") from None
        try:
            check_store(config.checkpoints.store)
        except HermesError as error:
            raise AirflowFailException(str(error)) from None
        if config.trial.run_in is RunIn.POD:
            return checked_pods(config)
        if not Path(config.trial.directory).is_absolute():
            raise AirflowFailException(
                f"trial.directory: found {config.trial.directory!r}; allowed: an absolute path "
                "if the sweep is triggered from Airflow. Fix: write the whole path, or start the "
                "sweep with `hermes sweep run FILE`, which takes it from the file's folder."
            )
        return config

    def _open_again(self, context: Mapping[str, Any], tracker: Tracker, ref: SweepRef) -> None:
        """The plan was cleared, or is tried again: an earlier end counts no more."""
        context["task_state_store"].set(CLOSE_KEY, {})
        tags = tracker.sweep(ref).tags
        tracker.reopen(ref.parent_run_id, [t for t in END_TAGS if t in tags])

    def _warn(self, config: SweepConfig) -> dict[str, str]:
        """Log what is likely a mistake; the tag that keeps it for those who follow the sweep."""
        warnings = warnings_of(config, pool_slots=None, environ=os.environ)
        for warning in warnings:
            self.log.warning("%s", warning)
        return as_tag(warnings)

    def _tags(self, config: SweepConfig) -> dict[str, str]:
        tags = {"hermes.sampler": config.search.algorithm.value, "hermes.name": config.name}
        return {**tags, **self.nights.tags} if self.nights is not None else tags

    def _leave(self, ti: Any, config: SweepConfig, ref: SweepRef) -> None:  # noqa: ANN401 - Airflow's own
        ti.xcom_push(CONFIG_XCOM, json.loads(published(config).to_json()))
        _leave_addresses(ti, ref)


def _leave_addresses(ti: Any, ref: SweepRef) -> None:  # noqa: ANN401 - Airflow's own
    """Leave what the links of the sweep's tasks lead to."""
    ti.xcom_push(SWEEP_XCOM, run_address(tracking_uri(), ref.experiment_id, ref.parent_run_id))
    ti.xcom_push(TRIALS_XCOM, comparison_address(tracking_uri(), ref))


def _again(before: SweepRecord, context: Mapping[str, Any]) -> SweepConfig:
    """The sweep of an earlier try, or one that has been extended."""
    return parse(before.config, source=str(context["run_id"]), base=None)


class ReportOperator(BaseOperator):
    """Closes the sweep in MLflow and writes its report, whatever became of the trials.

    :param plan_task: the id of the task that planned the sweep
    :param trial_task: the id of the mapped task that ran the trials
    :param connections: what leads to MLflow in the place of its variables
    """

    operator_extra_links = (SweepRunLink(), CompareTrialsLink(), SweepReportLink())

    def __init__(
        self,
        *,
        plan_task: str,
        trial_task: str,
        connections: Connections | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.plan_task = plan_task
        self.trial_task = trial_task
        self.connections = connections or Connections()

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """The best trial; fails when the sweep was never planned or no trial can be it."""
        from hermes_ops.airflow.sweep.reporting import close_sweep

        ti = context["ti"]
        numbers = ti.xcom_pull(task_ids=self.plan_task)
        if numbers is None:
            self._leave_unplanned(ti)
        found = ti.xcom_pull(task_ids=self.plan_task, key=CONFIG_XCOM)
        config = with_trials(parse(found, str(context["run_id"]), None), len(numbers))
        self.connections.enter()
        tracker = Tracker(tracking_uri())
        sweep = sweep_of(self, context)
        end_left_pods(config, sweep)
        document = close_sweep(tracker, sweep, config, self._finals(ti))
        clear_left_disks(config, sweep, document)
        if document["best"] is None:
            raise AirflowFailException(why_no_best(document, config.objective.metric))
        ref, best = best_of(tracker, config.name, document)
        page = report_address(tracking_uri(), ref.experiment_id, ref.parent_run_id)
        _leave_addresses(ti, ref)
        ti.xcom_push(REPORT_XCOM, page)
        for asset in self.outlets:
            context["outlet_events"][asset].extra = {**best, "report": page}
        return best

    def _leave_unplanned(self, ti: Any) -> None:  # noqa: ANN401 - Airflow's own
        """Skip the report of a sweep that was skipped; fail for one whose plan failed."""
        state = self._states(ti, self.plan_task).get(self.plan_task)
        if state == "skipped":
            raise AirflowSkipException("the sweep was skipped; see the log of its plan task")
        raise AirflowFailException("the sweep was not planned; see the log of its plan task")

    def _finals(self, ti: Any) -> dict[int, str]:  # noqa: ANN401 - Airflow's own
        """What each trial's task ended as."""
        return {
            int(name.rpartition("_")[2]): OUTCOMES.get(str(state), "failed")
            for name, state in self._states(ti, self.trial_task).items()
            if name.rpartition("_")[2].isdigit()
        }

    def _states(self, ti: Any, task_id: str) -> Mapping[str, str]:  # noqa: ANN401 - Airflow's own
        found = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id])
        states: Mapping[str, str] = found.get(ti.run_id) or {}
        return states
