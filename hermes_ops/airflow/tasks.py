"""The two ordinary tasks of a sweep: `plan` before the trials, `report` after them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow.continuing import with_trials
from hermes_ops.airflow.metrics import tracking_uri
from hermes_ops.airflow.published import published
from hermes_ops.airflow.records import OUTCOMES, SWEEP_KEY, SweepRecord, decode, encode
from hermes_ops.config import parse
from hermes_ops.errors import ConfigError
from hermes_ops.tracking import Tracker


class PlanOperator(BaseOperator):
    """Validates the run's configuration, opens the sweep in MLflow, returns the trial numbers.

    :param trial_task: the id of the mapped task that runs the trials
    """

    def __init__(self, *, trial_task: str, **kwargs: Any) -> None:  # noqa: ANN401 - Airflow's own
        super().__init__(**kwargs)
        self.trial_task = trial_task

    def execute(self, context: Mapping[str, Any]) -> list[int]:
        """Refuse a bad configuration before anything starts; safe to repeat."""
        run_id = str(context["run_id"])
        try:
            config = parse(dict(context["params"]), source=run_id, base=None)
        except ConfigError as error:
            raise AirflowFailException(str(error)) from None
        if not Path(config.trial.directory).is_absolute():
            raise AirflowFailException(
                f"trial.directory: found {config.trial.directory!r}; allowed: an absolute path "
                "if the sweep is triggered from Airflow. Fix: write the whole path, or start the "
                "sweep with `hermes sweep run FILE`, which takes it from the file's folder."
            )
        before = decode(SweepRecord, context["task_state_store"].get(SWEEP_KEY))
        if before is not None:  # it has been extended, or this is another try
            config = parse(before.config, source=run_id, base=None)
        tracker = Tracker(tracking_uri())
        sweep = tracker.ensure_sweep(
            config.name,
            run_id,
            published(config).to_yaml(),
            {"hermes.sampler": config.search.algorithm.value, "hermes.name": config.name},
        )
        record = SweepRecord(
            config=json.loads(config.to_json()),
            trials=config.trial_count,
            trial_task=self.trial_task,
            parent_run_id=sweep.parent_run_id,
            experiment_id=sweep.experiment_id,
            experiment=config.name,
            touched=before.touched if before is not None else (),
        )
        context["task_state_store"].set(SWEEP_KEY, encode(record))
        self.log.info("Sweep %s: %s trials", run_id, record.trials)
        return list(range(record.trials))


class ReportOperator(BaseOperator):
    """Closes the sweep in MLflow and writes its report, whatever became of the trials.

    :param plan_task: the id of the task that planned the sweep
    :param trial_task: the id of the mapped task that ran the trials
    """

    def __init__(
        self,
        *,
        plan_task: str,
        trial_task: str,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.plan_task = plan_task
        self.trial_task = trial_task

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """The best trial; fails when the sweep was never planned or no trial has a result."""
        from hermes_ops.airflow.reporting import close_sweep

        numbers = context["ti"].xcom_pull(task_ids=self.plan_task)
        if numbers is None:
            raise AirflowFailException("the sweep was not planned; see the log of its plan task")
        config = parse(dict(context["params"]), source=str(context["run_id"]), base=None)
        config = with_trials(config, len(numbers))
        finals = self._finals(context)
        document = close_sweep(Tracker(tracking_uri()), str(context["run_id"]), config, finals)
        if document["best"] is None:
            raise AirflowFailException("no trial of the sweep reported its objective")
        return dict(document["best"])

    def _finals(self, context: Mapping[str, Any]) -> dict[int, str]:
        """What each trial's task ended as."""
        ti = context["ti"]
        found = ti.get_task_states(
            dag_id=ti.dag_id, task_ids=[self.trial_task], run_ids=[ti.run_id]
        )
        states: Mapping[str, str] = found.get(ti.run_id) or {}
        return {
            int(name.rpartition("_")[2]): OUTCOMES.get(str(state), "failed")
            for name, state in states.items()
            if name.rpartition("_")[2].isdigit()
        }
