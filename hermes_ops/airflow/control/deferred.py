"""Trials whose pods the triggerer holds: what the controller does as no process of theirs can.

What such a trial says of itself is read from its folder. A segment that was preempted is closed
by the controller, so that its task need not take a slot for that; every other end is concluded by
the task, which Airflow schedules again with the slots that it had.
"""

from __future__ import annotations

from dataclasses import replace

from hermes_ops.airflow.control.pool import READY_STATES, Trial
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import Segment
from hermes_ops.airflow.trial.exits import PAUSED
from hermes_ops.airflow.trial.visit import closed, result_of, with_status
from hermes_ops.errors import HermesError


def as_it_stands(trial: Trial, sweep: str) -> Trial:
    """The trial with what its folder says of the segment that a pod of its lease runs or ran."""
    lease, segment = trial.lease, trial.segment
    if lease is None or lease.pod is None or segment is None or not segment.running:
        return trial
    if segment.epoch != lease.epoch:
        return trial
    folder = TrialFolder.of(sweep, trial.number)
    try:
        if trial.row.state == "deferred":
            return replace(trial, segment=with_status(segment, folder.status()))
        if trial.row.state in READY_STATES:
            return replace(trial, left=str(result_of(folder, lease.epoch).get("outcome") or ""))
    except HermesError:  # the volume is away for a while
        return trial
    return trial


def settled(trial: Trial, folder: TrialFolder) -> Segment | None:
    """The record of a segment that was preempted and whose task waits; None where there is none."""
    if trial.left not in PAUSED or trial.segment is None:
        return None
    return closed(trial.segment, folder, trial.left)
