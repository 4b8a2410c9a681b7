"""Links from the tasks of a sweep to MLflow: each task leaves the address as an XCom."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

from hermes_ops.airflow.operator import RUN_XCOM, HermesTrialOperator
from hermes_ops.airflow.tasks import REPORT_XCOM, SWEEP_XCOM, PlanOperator, ReportOperator


class MlflowRunLink(BaseOperatorLink):
    """From a trial's task to its run in MLflow."""

    name = "MLflow run"
    operators = [HermesTrialOperator]  # noqa: RUF012 - Airflow reads a plain list

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """The address, empty while the trial has no run."""
        return _page(ti_key, RUN_XCOM)


class SweepRunLink(BaseOperatorLink):
    """From a sweep's tasks to its run in MLflow, with all its trials."""

    name = "Sweep in MLflow"
    operators = [PlanOperator, ReportOperator]  # noqa: RUF012 - as above

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """The address, empty while the sweep is not planned."""
        return _page(ti_key, SWEEP_XCOM)


class SweepReportLink(BaseOperatorLink):
    """From a sweep's last task to its report."""

    name = "Sweep report"
    operators = [ReportOperator]  # noqa: RUF012 - as above

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """The address, empty while there is no report."""
        return _page(ti_key, REPORT_XCOM)


LINKS = (MlflowRunLink(), SweepRunLink(), SweepReportLink())


def _page(ti_key: Any, key: str) -> str:  # noqa: ANN401 - Airflow's own
    value = BaseXCom.get_value(ti_key=ti_key, key=key)
    return str(value) if value else ""
