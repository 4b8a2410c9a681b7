"""Celery's configuration for workers of machines: Airflow's own, and a warm start of tasks.

Name it in Airflow's configuration:
`[celery] celery_config_options = hermes_ops.airflow.celery_options.CELERY_CONFIG`. Each task of a
worker runs in a process that is forked from the worker's. What the worker has imported costs the
task nothing; the rest is paid at every start of every segment while a GPU idles.
"""

from __future__ import annotations

from typing import Any

from airflow.providers.celery.executors.default_celery import DEFAULT_CELERY_CONFIG
from celery.signals import worker_init

from hermes_ops.airflow.plugin import preload

CELERY_CONFIG: dict[str, Any] = dict(DEFAULT_CELERY_CONFIG)


@worker_init.connect
def _preload(**_: object) -> None:
    """Import what tasks need in the worker, before it forks the processes of its tasks."""
    preload(pods=False)
