"""`mlflow gc` restricted to the given runs and models.

    python -m hermes_ops.tracking.garbage < {"runs": [...], "models": [...]}

`mlflow gc --run-ids` itself also removes every deleted experiment and every deleted model of other
users. Needs MLFLOW_BACKEND_STORE_URI, the tracking database, and MLFLOW_TRACKING_URI, the server
that keeps the artifacts. Runs and models that are gone already are no error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def collect_garbage(runs: list[str], models: list[str]) -> None:
    """Remove these deleted runs and models, and their artifacts, for good."""
    from mlflow import cli, tracking

    open_store: Any = tracking._get_store  # both are what `mlflow gc` calls; mlflow is pinned
    _gc: Any = cli._gc_tracking_resources
    _gc(
        backend_store=open_store(os.environ["MLFLOW_BACKEND_STORE_URI"], None),
        run_ids=runs,
        experiment_ids=None,
        logged_model_ids=models,
        older_than=None,
        time_delta=0,
        skip_experiments=True,
        skip_logged_models=not models,
        ignore_not_found=True,
    )


def main() -> int:
    """Remove the runs and models named on standard input; return the exit code 0."""
    request = json.load(sys.stdin)
    collect_garbage(list(request["runs"]), list(request["models"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
