"""The Airflow plugin: a page, a check of new runs, and this module as a listener.

The listener works before the first task, before each task and after it. With LocalExecutor each
task runs in a process forked from the scheduler's. What that has imported already costs the task
nothing; the rest is paid at every start of every segment while a GPU idles. The DAG processor forks
as well, every half a minute for each file.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin
from structlog.contextvars import get_contextvars

from hermes_ops.airflow.folders import pod_file
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.airflow.open_secrets import SecretGuard
from hermes_ops.airflow.page import APP, VIEW
from hermes_ops.airflow.trial import local, segment_run

log = logging.getLogger(__name__)

NEEDED = (
    "hermes_ops.airflow.sweep.dag",
    "hermes_ops.tracking",
    "hermes_ops.tracking.sender",
    "airflow.dag_processing.bundles.local",
    "airflow.providers.standard.operators.empty",
    "airflow.sdk.bases.sensor",
    "airflow.sdk.execution_time.supervisor",
    "airflow.version",
    "encodings.idna",
    "jinja2.ext",
)

DEFERRED_WORK_NICE = 10
"""Niceness of a task's process for its deferred work: the next task on its slot starts now."""

POD_MODULE = "hermes_ops.airflow.trial.pods"
"""Half a second of imports, for installations that configure pods."""


@hookimpl
def on_starting(component: object) -> None:
    """Prepare a component of Airflow that starts, before any worker is forked.

    Also in a task's process before it reads its DAG; Airflow has then bound the task's names to
    whatever the process logs.
    """
    if _is_task(component):
        local.start_process(get_contextvars())
        return
    program = sys.argv[1:2]  # the component does not know yet what it is
    if program not in (["scheduler"], ["dag-processor"]):
        return
    preload(pods=program == ["scheduler"] and pod_file().exists())


def preload(*, pods: bool) -> None:
    """Import what a task's process needs, for those that are forked from this one."""
    for name in (*NEEDED, POD_MODULE) if pods else NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:  # the tasks will say so themselves; the scheduler must start
            log.warning("%s is not preloaded", name, exc_info=True)
    _rehearse()


def _rehearse() -> None:
    """Warm up what is slow the first time, so that no task's process pays for it.

    A sweep's DAG is made, and a client of Airflow's API with the certificates that it trusts.
    """
    try:
        from airflow.sdk.api.client import Client

        from hermes_ops.airflow.sweep.dag import sweep_dag

        sweep_dag(MAIN_DAG)
        Client(base_url="http://127.0.0.1", token="").close()
    except Exception:  # whatever it is, the tasks will say so themselves; the scheduler must start
        log.warning("The start of a task is not rehearsed", exc_info=True)


@hookimpl
def before_stopping(component: object) -> None:
    """Do the deferred work of a task, in its process, once its state has been reported."""
    if _is_task(component):
        os.nice(DEFERRED_WORK_NICE)
    segment_run.run_pending()


def _is_task(component: object) -> bool:
    """Return whether the process is a task's, and no component of Airflow."""
    return type(component).__name__ == "TaskRunnerMarker"


class HermesPlugin(AirflowPlugin):
    """The plugin; `plugins/` registers it."""

    name = "hermes_ops"
    listeners = [sys.modules[__name__]]  # noqa: RUF012 - Airflow reads a plain list
    fastapi_apps = [APP]  # noqa: RUF012 - Airflow reads a plain list
    fastapi_root_middlewares = [  # noqa: RUF012 - Airflow reads a plain list
        {"name": "Hermes Ops", "middleware": SecretGuard, "args": [], "kwargs": {}}
    ]
    external_views = [VIEW]  # noqa: RUF012 - Airflow reads a plain list
