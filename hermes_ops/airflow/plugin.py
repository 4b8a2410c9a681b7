"""Links from a sweep's tasks to their MLflow runs."""

from __future__ import annotations

import os
from typing import Any

from airflow.plugins_manager import AirflowPlugin
from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

from hermes_ops.airflow import preload
from hermes_ops.airflow.operator import RUN_XCOM, HermesTrialOperator


class MlflowRunLink(BaseOperatorLink):
    """From a trial's task to its run in MLflow."""

    name = "MLflow run"
    operators = [HermesTrialOperator]  # noqa: RUF012 - Airflow reads a plain list

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ANN401, ARG002 - Airflow's own
        """The address, empty while the trial has no run."""
        base = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        value = BaseXCom.get_value(ti_key=ti_key, key=RUN_XCOM)
        if not base or not value:
            return ""
        experiment, _, run = str(value).partition("/")
        return f"{base}/#/experiments/{experiment}/runs/{run}"


class HermesPlugin(AirflowPlugin):
    """What Hermes Ops adds to Airflow's pages."""

    name = "hermes_ops"
    listeners = [preload]  # noqa: RUF012 - Airflow reads a plain list
    operator_extra_links = [MlflowRunLink()]  # noqa: RUF012 - Airflow reads a plain list
