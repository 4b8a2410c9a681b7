"""The operator of a sweep's trials: segments as processes of its worker, or as pods."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from airflow.sdk import BaseOperator, BaseOperatorLink

from hermes_ops.airflow.trial.links import MlflowRunLink
from hermes_ops.airflow.trial.local import LocalSegment, take_process
from hermes_ops.airflow.trial.running_segment import RunningSegment
from hermes_ops.airflow.trial.segment_run import SegmentRun
from hermes_ops.airflow.trial.trial_task import TrialTask, trial_defaults
from hermes_ops.config import RunIn, check_run_in


class HermesTrialOperator(BaseOperator):
    """Run a trial's segments as processes of this worker, or as pods where the sweep says so.

    :param number: the trial's number in its sweep, from 0
    :param pool: the Airflow pool whose slots are the GPUs
    :param mlflow_conn_id: the connection that leads to MLflow, instead of its variables
    :param storage_conn_id: the connection whose access to storage the script gets
    :param connection_templates: the templates in variables of the script, from the DAG's file, that
        name connections; no others are rendered
    """

    operator_extra_links: Collection[BaseOperatorLink] = (MlflowRunLink(),)
    run_link: str = ""

    def __init__(
        self,
        *,
        number: int,
        mlflow_conn_id: str | None = None,
        storage_conn_id: str | None = None,
        connection_templates: Collection[str] = (),
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**{**trial_defaults(), **kwargs})
        self._prestarted: LocalSegment | None = None
        self.number = number
        self.mlflow_conn_id = mlflow_conn_id
        self.storage_conn_id = storage_conn_id
        self.connection_templates = connection_templates

    @cached_property
    def trial_task(self) -> TrialTask:
        """Return the runner of this task, made once in each process."""
        return TrialTask(self)

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Run one segment, or reschedule; return the trial's summary when it has finished."""
        self._prestarted = take_process()  # it ends unless it is what is to run
        try:
            return self.trial_task.run(context)
        finally:
            if self._prestarted is not None:
                self._prestarted.finish()

    def resume(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the triggerer held the pod."""
        return self.trial_task.resume(context, event)

    def on_kill(self) -> None:
        """Have the trial write a checkpoint: Airflow ends the task."""
        self.trial_task.stop()

    def segment(
        self, segment_run: SegmentRun, sweep: str, context: Mapping[str, Any]
    ) -> RunningSegment:
        """Return the segment: a process, or a pod where the lease says so."""
        if segment_run.lease.pod is not None:
            from hermes_ops.airflow.trial.pods import HermesPodTrialOperator

            pod = HermesPodTrialOperator(
                task_id=self.task_id,
                number=self.number,
                pool=self.pool,
                mlflow_conn_id=self.mlflow_conn_id,
            )
            return pod.segment(segment_run, sweep, context)
        check_run_in(RunIn.PROCESS, "the sweep")
        return self._process(segment_run, sweep)

    def _process(self, segment_run: SegmentRun, sweep: str) -> LocalSegment:
        """Return the prestarted process if it has the same lease and variables, else a new one.

        The GPUs are of the lease's pool, also if that of the DAG has been edited since.
        """
        lease = segment_run.lease
        new = LocalSegment(
            lease,
            segment_run.folder,
            sweep,
            self.number,
            lease.pool or str(self.pool),
            self.log.info,
        )
        prestarted = self._prestarted
        if prestarted is None:
            return new
        if prestarted.stands_for(new) and not (self.mlflow_conn_id or self.storage_conn_id):
            prestarted.emit = new.emit
            return prestarted
        prestarted.finish()  # for another lease, or without the variables of the connections
        return new
