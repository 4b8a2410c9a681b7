"""Trials whose pods the triggerer holds: what the controller does as no process of theirs can.

What such a trial says of itself is read from its folder. A segment that was preempted is closed
by the controller, so that its task need not take a slot for that; its slots are free as soon as the
trial has said so, while its pod is being removed. Every other end is concluded by the task, which
Airflow schedules again with the slots that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_ops.airflow.control.pool import READY_STATES, Trial
from hermes_ops.airflow.folders import StatusFile, TrialFolder
from hermes_ops.airflow.records import Lease, Segment
from hermes_ops.airflow.trial.exits import PAUSED
from hermes_ops.airflow.trial.visit import closed, result_of, with_status
from hermes_ops.errors import HermesError


@dataclass(slots=True)
class Standing:
    """The trials of one sweep with what their folders say, made again only where that changed."""

    _status: dict[int, StatusFile] = field(default_factory=dict)
    _told: dict[int, tuple[Trial, Mapping[str, Any], Trial]] = field(default_factory=dict)

    def of(self, trial: Trial, sweep: str) -> Trial:
        """The trial with what its folder says of the segment that a pod of its lease runs or ran.

        As it is while the volume is away.
        """
        lease, segment = trial.lease, trial.segment
        if lease is None or lease.pod is None or segment is None or not segment.running:
            return trial
        if segment.epoch != lease.epoch:
            return trial
        try:
            if trial.row.state == "deferred":
                seen = self._with_status(trial, segment, sweep)
                left = _left(trial, lease, sweep) if trial.told else ""
                return replace(seen, left=left) if left in PAUSED else seen
            if trial.row.state in READY_STATES:
                return replace(trial, left=_left(trial, lease, sweep))
        except HermesError:
            return trial
        return trial

    def _with_status(self, trial: Trial, segment: Segment, sweep: str) -> Trial:
        file = self._status.get(trial.number)
        if file is None:
            file = StatusFile.of(TrialFolder.of(sweep, trial.number))
            self._status[trial.number] = file
        said = file.read()
        known = self._told.get(trial.number)
        if known is None or known[0] is not trial or known[1] is not said:
            told = replace(trial, segment=with_status(segment, said))
            self._told[trial.number] = known = (trial, said, told)
        return known[2]


def _left(trial: Trial, lease: Lease, sweep: str) -> str:
    result = result_of(TrialFolder.of(sweep, trial.number), lease.epoch)
    return str(result.get("outcome") or "")


def settled(trial: Trial, folder: TrialFolder) -> Segment | None:
    """The record of a segment that was preempted and whose task waits; None where there is none."""
    if trial.left not in PAUSED or trial.segment is None or trial.row.state == "deferred":
        return None
    return closed(trial.segment, folder, trial.left)
