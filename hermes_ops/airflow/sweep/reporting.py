"""After the last trial: send what is left to MLflow, write the report, free the disk."""

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
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.janitor import free_ended
from hermes_ops.airflow.folders import Accounts, TrialFolder, sweep_folder
from hermes_ops.airflow.records import CLOSED_TAG, FAILED_TAG, FAILURES_TAG, Segment
from hermes_ops.airflow.sweep.best_model import log_best_model
from hermes_ops.airflow.trial.metrics import Ending, finish_run, save_segments
from hermes_ops.config import SweepConfig
from hermes_ops.core.failures import failure_lines
from hermes_ops.core.secondary import why_no_best
from hermes_ops.core.sweep_state import FAILED, final_state
from hermes_ops.errors import Refused, Unavailable
from hermes_ops.simulator.reported import background
from hermes_ops.tracking import MetricSender, SweepRef, Tracker, TrialRun
from hermes_ops.tracking.columns import log_columns
from hermes_ops.tracking.nights import log_outcome
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.summary import Collected, collect, find

log = logging.getLogger(__name__)

DRAIN_S = 120.0


def close_sweep(
    tracker: Tracker,
    sweep: str,
    config: SweepConfig,
    finals: Mapping[int, str],
) -> dict[str, Any]:
    """Settle every run, write the report, keep the best model, free the checkpoints.

    :param finals: what each trial's task says it ended as, by trial number
    :return: the document of the sweep, as `hermes sweep run --json` prints it
    :raises Unavailable: MLflow is away; Airflow tries again
    """
    ref = find(tracker, sweep, config.name)
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


def _ended(tracker: Tracker, ref: SweepRef, config: SweepConfig) -> Collected:
    """Give the sweep's run its final state, and why trials failed; what has become of the sweep."""
    tags, parent = tracker.sweep(ref).tags, ref.parent_run_id
    closed, failed = CLOSED_TAG in tags, FAILED_TAG in tags
    tracker.finish_sweep(parent, final_state(closed=closed, failed=failed, has_best=True))
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
    said = {FAILURES_TAG: "\n".join(why)} if why else {}
    if state == FAILED and not failed:
        said[FAILED_TAG] = why[0] if why else why_no_best(summary.to_document(), summary.metric)
    if said:
        tracker.set_tags(parent, said)
    if state == summary.state:
        return collected
    tracker.finish_sweep(parent, state)
    reason = summary.reason or said.get(FAILED_TAG, "")
    return replace(collected, summary=replace(summary, state=state, reason=reason))


def _settle(tracker: Tracker, sweep: str, run: TrialRun, final: str) -> None:
    """Send what a trial could not send and give its run the state that the trial has."""
    folder = TrialFolder.of(sweep, run.number)
    if folder.metrics.exists():
        sender = MetricSender(run.run_id, folder.metrics, folder.sent, tracker)
        if not sender.drain(DRAIN_S):
            raise Unavailable(f"MLflow has not taken all metrics of trial {run.number} yet")
    if run.unwritten:  # whoever opened it has been killed before
        try:
            tracker.add_params(run.run_id, run.unwritten)
        except Refused as error:
            log.warning("The params of trial %s are not written: %s", run.number, error)
    if run.state in RUN_STATUS:
        return
    accounts = Accounts.of(folder.segments())
    record = Segment(
        epoch=0,
        running=False,
        started_s=0.0,
        step=int(folder.result().get("step") or 0),
        service_gpu_s=accounts.service_gpu_s,
        segments=accounts.segments,
        preemptions=accounts.preemptions,
    )
    save_segments(tracker, run.run_id, folder)
    finish_run(tracker, run.run_id, Ending(final, "settled after the sweep's end"), record)


def _upload(
    tracker: Tracker, ref: SweepRef, sweep: str, config: SweepConfig, collected: Collected
) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write(folder, tracker, sweep, config, collected)
        tracker.log_folder(ref.parent_run_id, folder, "report")
    log_best_model(tracker, sweep, config, collected)


def _write(
    folder: Path, tracker: Tracker, sweep: str, config: SweepConfig, collected: Collected
) -> None:
    """Write the report there and beside the trials; a failure is logged and costs the report."""
    try:
        told = background(tracker, config, collected)
        report.write(folder, collected.summary, collected.curves, collected.segments, told)
        shutil.copytree(folder, sweep_folder(sweep) / "report", dirs_exist_ok=True)
    except Exception:  # trials that have trained for days must not be lost to a picture of them
        log.exception("The report of %s could not be written.", sweep)
