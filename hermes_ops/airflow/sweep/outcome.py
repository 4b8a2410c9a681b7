"""What comes out of a sweep for the tasks behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.summary import find


def best_of(
    tracker: Tracker, experiment: str, document: Mapping[str, Any]
) -> tuple[SweepRef, dict[str, Any]]:
    """The sweep's run, and the best trial of a closed sweep's document with where to find it.

    Beside the document's own keys (`number`, `config`, `best`, `final`, ...): `sweep`, its id;
    `mlflow_run_id`, the trial's run; `mlflow_sweep_run_id`, the sweep's; `model_uri`, what MLflow's
    `load_model` and `download_artifacts` take, None where the trial left no model.
    """
    ref = find(tracker, document["sweep"], experiment)
    best = document["best"]
    run_id = next(t.run_id for t in tracker.trials(ref) if t.number == best["number"])
    has_model = tracker.artifacts.has(ref.parent_run_id, "model")
    where = {
        "sweep": document["sweep"],
        "mlflow_run_id": run_id,
        "mlflow_sweep_run_id": ref.parent_run_id,
        "model_uri": f"runs:/{ref.parent_run_id}/model" if has_model else None,
    }
    return ref, {**best, **where}
