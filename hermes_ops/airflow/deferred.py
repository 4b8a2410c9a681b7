"""Trials whose pods the triggerer holds: what the controller does as no process of theirs can.

The triggerer cannot reach Airflow's task state store. So such a trial's stop flag also lies beside
its folder, and what the trial says of itself is read from there. A segment that was preempted is
closed by the controller, so that its task need not take a slot for that; every other end is
concluded by the task, which Airflow schedules again with the slots that it had.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.pool import READY_STATES, Trial
from hermes_ops.airflow.records import Segment, StopFlag, decode, encode
from hermes_ops.airflow.visit import closed, result_of, with_status
from hermes_ops.errors import HermesError

PREEMPTED = ("preempted", "interrupted")
"""Outcomes of a segment after which its trial just waits for its next lease."""


def tell(folder: TrialFolder, flag: StopFlag, *, needed: bool) -> None:
    """Write the stop flag for the triggerer; HermesError if that fails and is needed."""
    fresh = folder.stop_flag.with_suffix(".new")
    try:
        folder.stop_flag.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(encode(flag)))
        os.replace(fresh, folder.stop_flag)
    except OSError as error:
        if not needed:
            return
        raise HermesError(f"{folder.stop_flag} cannot be written: {error.strerror}") from error


def told(folder: TrialFolder, epoch: int) -> StopFlag | None:
    """The stop flag of that lease that lies beside the trial's folder."""
    try:
        flag = decode(StopFlag, json.loads(folder.stop_flag.read_text()))
    except (OSError, ValueError):
        return None
    return flag if flag is not None and flag.epoch == epoch else None


def as_it_stands(trial: Trial, folder: TrialFolder) -> Trial:
    """The trial with what its folder says of the segment that a pod of its lease runs or ran."""
    lease, segment = trial.lease, trial.segment
    if lease is None or lease.pod is None or segment is None or not segment.running:
        return trial
    if segment.epoch != lease.epoch:
        return trial
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
    if trial.left not in PREEMPTED or trial.segment is None:
        return None
    return closed(trial.segment, folder, trial.left)
