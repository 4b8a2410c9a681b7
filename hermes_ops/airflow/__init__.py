"""Airflow: the only package that imports airflow (operators, controller, metadata, DAG factory).

What DAG files import from here is loaded when it is asked for: importing this package, or `hermes`
on the command line, loads no Airflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_ops.airflow.plugin import HermesPlugin as HermesPlugin
    from hermes_ops.airflow.prune.dag import prune_dag as prune_dag
    from hermes_ops.airflow.sweep.dag import SweepTaskGroup as SweepTaskGroup
    from hermes_ops.airflow.sweep.dag import sweep as sweep
    from hermes_ops.airflow.sweep.dag import sweep_asset as sweep_asset
    from hermes_ops.airflow.sweep.dag import sweep_dag as sweep_dag
    from hermes_ops.airflow.sweep.machine_cleanup import (
        machine_cleanup_dag as machine_cleanup_dag,
    )
    from hermes_ops.airflow.sweep.nightly_dags import nightly_dags as nightly_dags
    from hermes_ops.airflow.sweep.nightly_dags import refuse_broken as refuse_broken

_PUBLIC = {
    "HermesPlugin": "plugin",
    "SweepTaskGroup": "sweep.dag",
    "machine_cleanup_dag": "sweep.machine_cleanup",
    "nightly_dags": "sweep.nightly_dags",
    "prune_dag": "prune.dag",
    "refuse_broken": "sweep.nightly_dags",
    "sweep_asset": "sweep.dag",
    "sweep_dag": "sweep.dag",
}
"""Where each public name is defined; `sweep` is the package of that name, which can be called."""

__all__ = ["HermesPlugin", "SweepTaskGroup", "machine_cleanup_dag", "nightly_dags", "prune_dag",
           "refuse_broken", "sweep", "sweep_asset", "sweep_dag"]  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    if name == "sweep":
        return import_module("hermes_ops.airflow.sweep")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
