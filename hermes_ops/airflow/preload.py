"""Airflow's listener: what is done before the first task, before each task and after it.

With LocalExecutor each task runs in a process forked from the scheduler's. What that has imported
already costs the task nothing; the rest is paid at every start of every segment while a GPU idles.
The DAG processor forks as well, every half a minute for each file.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from airflow.listeners import hookimpl
from structlog.contextvars import get_contextvars

from hermes_ops.airflow.folders import pod_file
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.airflow.trial import afterwards, ahead

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

AFTERWARDS_NICE = 10
"""Lower priority for the process of a task that has left: the next one on its slot starts now."""

POD_MODULE = "hermes_ops.airflow.trial.pods"
"""Half a second of imports, for installations that say what their pods are like."""


@hookimpl
def on_starting(component: object) -> None:
    """Called by Airflow when one of its components starts, before any worker is forked.

    Also in a task's process before it reads its DAG; Airflow has then bound the task's names to
    whatever the process logs.
    """
    if _is_task(component):
        ahead.make(get_contextvars())
        return
    program = sys.argv[1:2]  # the component does not know yet what it is
    if program not in (["scheduler"], ["dag-processor"]):
        return
    pods = program == ["scheduler"] and pod_file().exists()
    for name in (*NEEDED, POD_MODULE) if pods else NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:  # the tasks will say so themselves; the scheduler must start
            log.warning("%s is not preloaded", name, exc_info=True)
    _rehearse()


def _rehearse() -> None:
    """Do once what takes longest the first time, so that no task's process has to.

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
    """Called by Airflow in a task's process when the task's state has been reported."""
    if _is_task(component):
        os.nice(AFTERWARDS_NICE)
    afterwards.run()


def _is_task(component: object) -> bool:
    """Whether Airflow speaks of a task's process, and of no component."""
    return type(component).__name__ == "TaskRunnerMarker"
