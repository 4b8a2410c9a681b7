"""What Hermes Ops adds to Airflow."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from hermes_ops.airflow import preload
from hermes_ops.airflow.page import APP, VIEW


class HermesPlugin(AirflowPlugin):
    """What Hermes Ops adds to Airflow's pages."""

    name = "hermes_ops"
    listeners = [preload]  # noqa: RUF012 - Airflow reads a plain list
    fastapi_apps = [APP]  # noqa: RUF012 - Airflow reads a plain list
    external_views = [VIEW]  # noqa: RUF012 - Airflow reads a plain list
