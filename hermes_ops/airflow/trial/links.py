"""Links from the tasks of a sweep to MLflow: each task leaves the address as an XCom.

They belong to the operators, not to the plugin: Airflow's API server then reads the XCom by itself.
A link of a plugin would have to, and the task SDK has no access to XComs there.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

RUN_XCOM = "hermes_mlflow_run"
"""XCom key under which a trial leaves the address of its run in MLflow."""
SWEEP_XCOM, REPORT_XCOM = "hermes_mlflow_sweep", "hermes_report"
"""XCom keys under which a sweep's tasks leave the addresses of its run and of its report."""
TRIALS_XCOM = "hermes_mlflow_trials"
"""XCom key under which they leave that of MLflow's table and charts of its trials."""


class StandingXCom(BaseXCom):
    """Airflow's XComs, but that a trial's link stays when the trial comes back to a slot.

    Airflow deletes what a task's last entry has left before the next one may begin: two requests
    while a GPU idles, for an address that is about to be written again. A setting of `hermes up`;
    an Airflow without it does the same, later.
    """

    @classmethod
    def delete(
        cls, key: str, task_id: str, dag_id: str, run_id: str, map_index: int | None = None
    ) -> None:
        """As Airflow does, but for the address of a trial's run."""
        if key != RUN_XCOM:
            super().delete(key, task_id, dag_id, run_id, map_index)


class _LeftLink(BaseOperatorLink):
    """To the address under `xcom_key`; empty while there is none."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """The address; called in the task's own process alone."""
        value = BaseXCom.get_value(ti_key=ti_key, key=self.xcom_key)
        return str(value) if value else ""


class MlflowRunLink(_LeftLink):
    """From a trial's task to its run in MLflow."""

    name = "MLflow run"
    xcom_key = RUN_XCOM

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401 - Airflow's own
        """The address; asked for only where the operator has not left it in this process."""
        return getattr(operator, "run_link", "") or super().get_link(operator, ti_key=ti_key)


class SweepRunLink(_LeftLink):
    """From a sweep's tasks to its run in MLflow, with all its trials."""

    name = "Sweep in MLflow"
    xcom_key = SWEEP_XCOM


class CompareTrialsLink(_LeftLink):
    """From a sweep's tasks to its trials in MLflow, side by side in a table and in charts."""

    name = "Compare trials"
    xcom_key = TRIALS_XCOM


class SweepReportLink(_LeftLink):
    """From a sweep's last task to its report."""

    name = "Sweep report"
    xcom_key = REPORT_XCOM
