"""MLflow's database, in a process that may import MLflow.

    python -m hermes_ops.tracking.database upgrade
    python -m hermes_ops.tracking.database collect-garbage < {"runs": [...], "models": [...]}

The URL comes from MLFLOW_BACKEND_STORE_URI: `mlflow db upgrade URL` would show its password in the
list of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from hermes_ops.database_address import with_driver

UPGRADE, COLLECT_GARBAGE = "upgrade", "collect-garbage"


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out one of the two commands."""
    parser = argparse.ArgumentParser(description="Maintain the tables of MLflow's database.")
    parser.add_argument("command", choices=(UPGRADE, COLLECT_GARBAGE))
    if parser.parse_args(arguments).command == UPGRADE:
        upgrade()
    else:
        request = json.load(sys.stdin)
        collect_garbage(list(request["runs"]), list(request["models"]))


def _address() -> str:
    return with_driver(os.environ["MLFLOW_BACKEND_STORE_URI"])


def upgrade() -> None:
    """Upgrade the tables, or create them where there are none."""
    from sqlalchemy import create_engine, inspect

    url = _address()
    engine = create_engine(url)
    try:
        has_tables = inspect(engine).has_table("experiments")
    finally:
        engine.dispose()
    if has_tables:
        from mlflow.db import commands

        commands(["upgrade", url], standalone_mode=True)
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(url, "mlflow-artifacts:/")  # type: ignore[no-untyped-call] # MLflow's own


def collect_garbage(runs: list[str], models: list[str]) -> None:
    """Remove these deleted runs and models, and their artifacts, for good.

    `mlflow gc --run-ids` itself also removes every deleted experiment and every deleted model of
    other users. Needs MLFLOW_TRACKING_URI, the server that keeps the artifacts. Runs and models
    that are gone already are no error.
    """
    from mlflow import cli, tracking

    open_store: Any = tracking._get_store  # both are what `mlflow gc` calls; mlflow is pinned
    _gc: Any = cli._gc_tracking_resources
    _gc(
        backend_store=open_store(_address(), None),
        run_ids=runs,
        experiment_ids=None,
        logged_model_ids=models,
        older_than=None,
        time_delta=0,
        skip_experiments=True,
        skip_logged_models=not models,
        ignore_not_found=True,
    )


if __name__ == "__main__":
    main()
