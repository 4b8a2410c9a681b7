"""The best trial's model: into MLflow, as a model with its signature, and into the registry."""

from __future__ import annotations

import logging
from pathlib import Path

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.config import SweepConfig
from hermes_ops.core.summary import TrialSummary
from hermes_ops.errors import Refused
from hermes_ops.tracking import Tracker
from hermes_ops.tracking.packaging import package
from hermes_ops.tracking.summary import Collected

log = logging.getLogger(__name__)

REGISTERED_TAG, UNREGISTERED_TAG = "hermes.registered", "hermes.not_registered"
"""Tags of the sweep's run: the version that its best model became, or why it became none."""


def log_best_model(tracker: Tracker, sweep: str, config: SweepConfig, found: Collected) -> None:
    """Store what the best trial left at the sweep's run, and register it if that is asked for."""
    best = found.summary.best
    folder = None if best is None else _model(sweep, best)
    if best is None or folder is None:
        return
    parent = found.run.ref.parent_run_id
    run_id = next(t.run_id for t in found.trials if t.number == best.number)
    is_model = folder.name == "model" and package(folder, run_id)
    tracker.log_folder(parent, folder, "model")
    tracker.set_tags(parent, {"hermes.best_trial": str(best.number)})
    if config.model.register_as is None:
        return
    if not is_model:
        reason = f"trial {best.number} left no MLflow model: it was stopped, or did not save one"
        log.warning("The best model of %s is not registered: %s", sweep, reason)
        tracker.set_tags(parent, {UNREGISTERED_TAG: reason})
        return
    tracker.log_folder(run_id, folder, "model")  # where no later best of this sweep replaces it
    _register(tracker, config, parent, run_id, {"hermes.sweep": sweep})


def _register(
    tracker: Tracker, config: SweepConfig, parent: str, run_id: str, tags: dict[str, str]
) -> None:
    name, alias = config.model.register_as or "", config.model.alias
    try:
        version = tracker.registry.register(name, run_id, "model", tags)
        if alias is not None:
            tracker.registry.point(name, alias, version)
        tracker.set_tags(parent, {REGISTERED_TAG: f"models:/{name}/{version}"})
    except Refused as error:  # no right to, for instance: no reason to fail the sweep
        log.warning("MLflow does not register the best model: %s", error)
        tracker.set_tags(parent, {UNREGISTERED_TAG: str(error)[:1000]})


def _model(sweep: str, best: TrialSummary) -> Path | None:
    """What the best trial left: its model, or else its own checkpoints."""
    folder = TrialFolder.of(sweep, best.number)
    for candidate in (folder.model, folder.checkpoints):
        if candidate.is_symlink():
            log.warning("%s is a link: it is not uploaded as the best model", candidate)
        elif candidate.is_dir() and any(candidate.iterdir()):
            return candidate
    return None
