"""Links from the tasks of a sweep to MLflow: each task pushes the address as an XCom.

They belong to the operators, not to the plugin: Airflow's API server then reads the XCom by itself.
A link of a plugin would have to, and the task SDK has no access to XComs there. No address has the
password of a server's address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

if TYPE_CHECKING:
    from hermes_ops.tracking import SweepRef


def run_address(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the page of a run on the tracking server `uri`."""
    return f"{_server(uri)}/#/experiments/{experiment_id}/runs/{run_id}"


def report_address(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the page of a sweep's report, an artifact of the sweep's run."""
    return f"{run_address(uri, experiment_id, run_id)}/artifacts/report/report.html"


def comparison_address(uri: str, sweep: SweepRef) -> str:
    """Return the page of the tracking server `uri` that compares the trials of a sweep."""
    from hermes_ops.tracking.comparison import comparison_path

    return f"{_server(uri)}{comparison_path(sweep)}"


def _server(uri: str) -> str:
    """Return the address of a server without its password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


RUN_XCOM = "hermes_mlflow_run"
"""XCom key of the address of a trial's run in MLflow."""
SWEEP_XCOM, REPORT_XCOM = "hermes_mlflow_sweep", "hermes_report"
"""XCom keys of the addresses of a sweep's run and of its report."""
TRIALS_XCOM = "hermes_mlflow_trials"
"""XCom key of the address of MLflow's table and charts of a sweep's trials."""


class StandingXCom(BaseXCom):
    """Airflow's XComs, except that a trial's link stays when the trial gets its next slot.

    Airflow deletes the XComs of a task's last run before the next run may begin: two requests
    while a GPU idles, for an address that is about to be written again. `hermes up` configures
    this class as Airflow's XCom backend; without it the links work too, and starts take longer.
    """

    @classmethod
    def delete(
        cls, key: str, task_id: str, dag_id: str, run_id: str, map_index: int | None = None
    ) -> None:
        """Delete an XCom as Airflow does, except the address of a trial's run."""
        if key != RUN_XCOM:
            super().delete(key, task_id, dag_id, run_id, map_index)


class _XComLink(BaseOperatorLink):
    """A link to the address in the XCom `xcom_key`; empty while there is none."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """Return the address; called in the task's own process alone."""
        value = BaseXCom.get_value(ti_key=ti_key, key=self.xcom_key)
        return str(value) if value else ""


class MlflowRunLink(_XComLink):
    """The link from a trial's task to its run in MLflow."""

    name = "MLflow run"
    xcom_key = RUN_XCOM

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401 - Airflow's own
        """Return the address, from the XCom only where this process has not pushed it itself."""
        return getattr(operator, "run_link", "") or super().get_link(operator, ti_key=ti_key)


class SweepRunLink(_XComLink):
    """The link from a sweep's tasks to its run in MLflow, with all its trials."""

    name = "Sweep in MLflow"
    xcom_key = SWEEP_XCOM


class CompareTrialsLink(_XComLink):
    """The link from a sweep's tasks to its trials in MLflow: their table and charts."""

    name = "Compare trials"
    xcom_key = TRIALS_XCOM


class SweepReportLink(_XComLink):
    """The link from a sweep's last task to its report."""

    name = "Sweep report"
    xcom_key = REPORT_XCOM
