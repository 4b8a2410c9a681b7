"""The end of a sweep: send what is left, write the report, keep the best model, free the disk."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hermes_ops import report
from hermes_ops.airflow.accounts import Accounts
from hermes_ops.airflow.control.cleanup.janitor import RESUMABLE, free_ended
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.folders import (
    TrialFolder,
    counted_segments,
    read_ending,
    sweep_folder,
)
from hermes_ops.airflow.records import (
    CLOSED_TAG,
    FAILED_TAG,
    FAILURES_TAG,
    OUTCOMES,
    TASK_STATES,
    SegmentRecord,
)
from hermes_ops.airflow.trial.metrics import (
    TrialOutcome,
    finish_run,
    save_segments,
    segment_facts,
)
from hermes_ops.config import RunIn, SweepConfig
from hermes_ops.core.secondary_metrics import why_no_best
from hermes_ops.core.summary import FAILED, TrialSummary, failure_lines, final_state
from hermes_ops.errors import HermesError, Refused, Unavailable
from hermes_ops.simulator.report_background import background
from hermes_ops.tracking import MetricSender, SweepRef, Tracker, TrialRun
from hermes_ops.tracking.artifacts import package_model
from hermes_ops.tracking.earlier_sweeps import log_outcome
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.summary import CollectedSweep, collect, log_columns
from hermes_ops.tracking.tracker import require_sweep

log = logging.getLogger(__name__)

DRAIN_S = 120.0


def close_sweep(
    tracker: Tracker,
    sweep: str,
    config: SweepConfig,
    finals: Mapping[int, str],
) -> dict[str, Any]:
    """Settle every run, write the report, keep the best model, free the checkpoints.

    :param finals: the final state of each trial's task, by trial number
    :return: the document of the sweep, as `hermes sweep run --json` prints it
    :raises Unavailable: MLflow is away; Airflow tries again
    """
    ref = require_sweep(tracker, sweep, config.name)
    for run in tracker.trials(ref):
        _settle(tracker, sweep, run, finals.get(run.number, "cancelled"))
    collected = _ended(tracker, ref, config)
    log_columns(tracker, collected)
    log_outcome(tracker, collected)
    DecisionLog(tracker).upload(sweep, ref.parent_run_id, force=True)
    _upload(tracker, ref, sweep, config, collected)
    states = {t.number: t.state for t in collected.summary.trials if t.state in RUN_STATUS}
    rules = config.checkpoints
    free_ended(sweep, states, rules.keep_seconds, time.time(), rules.store)
    return collected.summary.to_document()


def _ended(tracker: Tracker, ref: SweepRef, config: SweepConfig) -> CollectedSweep:
    """Write the sweep's final state and why trials failed; return the sweep's results."""
    tags, parent = tracker.sweep(ref).tags, ref.parent_run_id
    closed, failed = CLOSED_TAG in tags, FAILED_TAG in tags
    tracker.finish(parent, final_state(closed=closed, failed=failed, has_best=True))
    collected = collect(
        tracker,
        ref,
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        others=config.secondary,
    )
    summary = collected.summary
    state = final_state(closed=closed, failed=failed, has_best=summary.best is not None)
    why = failure_lines((t.number, t.reason) for t in summary.trials if t.state == "failed")
    reasons = {FAILURES_TAG: "\n".join(why)} if why else {}
    if state == FAILED and not failed:
        reasons[FAILED_TAG] = why[0] if why else why_no_best(summary.to_document(), summary.metric)
    if reasons:
        tracker.set_tags(parent, reasons)
    if state == summary.state:
        return collected
    tracker.finish(parent, state)
    reason = summary.reason or reasons.get(FAILED_TAG, "")
    return replace(collected, summary=replace(summary, state=state, reason=reason))


def _settle(tracker: Tracker, sweep: str, run: TrialRun, final: str) -> None:
    """Send what a trial could not send, and write the trial's final state to its run."""
    folder = TrialFolder.from_sweep(sweep, run.number)
    if folder.metrics.exists():
        sender = MetricSender(run.run_id, folder.metrics, folder.sent, tracker)
        if not sender.drain(DRAIN_S):
            raise Unavailable(f"MLflow has not taken all metrics of trial {run.number} yet")
    if run.unwritten:  # the process that opened it was killed
        try:
            tracker.add_params(run.run_id, run.unwritten)
        except Refused as error:
            log.warning("The params of trial %s are not written: %s", run.number, error)
    _save_segments(tracker, run, folder)
    if run.state in RUN_STATUS:
        return
    if (known := read_ending(folder)) is not None and _is_end_of(known.state, final):
        tracker.finish(run.run_id, known.state, known.tags)
        return
    accounts = Accounts.from_segments(counted_segments(folder))
    record = SegmentRecord(
        epoch=0,
        running=False,
        started_s=0.0,
        step=int(folder.result().get("step") or 0),
        service_gpu_s=accounts.service_gpu_s,
        segments=accounts.segments,
        preemptions=accounts.preemptions,
    )
    finish_run(tracker, run.run_id, TrialOutcome(final, "settled after the sweep's end"), record)


def _save_segments(tracker: Tracker, run: TrialRun, folder: TrialFolder) -> None:
    """Store the trial's segments in MLflow, where those of this folder are not there yet."""
    segments = tuple(segment_facts(folder))
    is_newest = segments and segments[-1].epoch >= max((s.epoch for s in run.segments), default=0)
    if is_newest and (run.is_open or segments != run.segments):
        save_segments(tracker, run.run_id, folder)


def _is_end_of(state: str, final: str) -> bool:
    """Tell whether a trial ended in `state`, of which its task shows only `final`."""
    return state == final or (final == OUTCOMES["skipped"] and state not in TASK_STATES)


def _upload(
    tracker: Tracker, ref: SweepRef, sweep: str, config: SweepConfig, collected: CollectedSweep
) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write(folder, tracker, sweep, config, collected)
        tracker.log_folder(ref.parent_run_id, folder, "report")
    log_best_model(tracker, sweep, config, collected)


def _write(
    folder: Path, tracker: Tracker, sweep: str, config: SweepConfig, collected: CollectedSweep
) -> None:
    """Write the report to `folder` and to the sweep's folder; a failure is only logged."""
    try:
        context = background(tracker, config, collected)
        report.write(folder, collected.summary, collected.curves, collected.segments, context)
        shutil.copytree(folder, sweep_folder(sweep) / "report", dirs_exist_ok=True)
    except Exception:  # trials that have trained for days must not be lost to a picture of them
        log.exception("The report of %s could not be written.", sweep)


def end_left_pods(config: SweepConfig, sweep: str) -> None:
    """Delete the pods that killed tasks have left, after the last trial."""
    if config.trial.run_in is not RunIn.POD:
        return
    from hermes_ops.airflow.trial.pods import end_pods

    try:
        ended = end_pods(sweep, config.trial.pod)
    except HermesError as error:
        log.warning("Pods of %s may be left: %s", sweep, error)
        return
    if ended:
        log.info("%s pods of %s were left and are deleted", ended, sweep)


def clear_left_disks(config: SweepConfig, sweep: str, document: Mapping[str, Any]) -> None:
    """Delete the checkpoints of ended trials on the nodes' own claims, after the sweep's end.

    Checkpoints of trials that can be resumed stay, if the sweep keeps any.
    """
    pod = config.trial.pod if config.trial.run_in is RunIn.POD else None
    if pod is None or not pod.checkpoint_claims:
        return
    from hermes_ops.airflow.trial.node_checkpoints import clear_disks

    stays = RESUMABLE if config.checkpoints.keep_seconds > 0 else ()
    over = [int(t["number"]) for t in document["trials"] if t["state"] not in stays]
    clear_disks(sweep, pod, over)


def best_of(
    tracker: Tracker, experiment: str, document: Mapping[str, Any]
) -> tuple[SweepRef, dict[str, Any]]:
    """Return the sweep's run, and the best trial of a closed sweep's document with its addresses.

    In addition to the document's keys (`number`, `config`, `best`, `final`, ...): `sweep`, its id;
    `mlflow_run_id`, the trial's run; `mlflow_sweep_run_id`, the sweep's; `model_uri`, what MLflow's
    `load_model` and `download_artifacts` take, None where the trial left no model.
    """
    ref = require_sweep(tracker, document["sweep"], experiment)
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


REGISTERED_TAG, UNREGISTERED_TAG = "hermes.registered", "hermes.not_registered"
"""Tags of the sweep's run: the registered version of its best model, or why there is none."""


def log_best_model(
    tracker: Tracker, sweep: str, config: SweepConfig, collected: CollectedSweep
) -> None:
    """Store the best trial's model at the sweep's run; register it if the sweep file says so."""
    best = collected.summary.best
    folder = None if best is None else _model(sweep, best)
    if best is None or folder is None:
        return
    parent = collected.run.ref.parent_run_id
    run_id = next(t.run_id for t in collected.trials if t.number == best.number)
    is_model = folder.name == "model" and package_model(folder, run_id)
    tracker.log_folder(parent, folder, "model")
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
    """Return the folder of the best trial's model, else of its checkpoints; None without both."""
    folder = TrialFolder.from_sweep(sweep, best.number)
    for candidate in (folder.model, folder.checkpoints):
        if candidate.is_symlink():
            log.warning("%s is a link: it is not uploaded as the best model", candidate)
        elif candidate.is_dir() and any(candidate.iterdir()):
            return candidate
    return None
