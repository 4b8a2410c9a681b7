"""Records of trials: any combination of them, and an example of each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from hypothesis import strategies as st

from hermes_ops.airflow.control.trial_state import (
    TrialRecords,
    TrialState,
)
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES, OCCUPYING
from hermes_ops.airflow.records import HELD_POOL_SLOTS, Lease, SegmentRecord, StopFlag
from tests.unit.airflow.builders import flag, lease, row, segment, ti_id

PAUSED, OTHER_OUTCOME = "preempted", "finished"
WAITS = (None, "scheduled", "up_for_reschedule", "up_for_retry", "restarting")
ROW_STATES = (*WAITS, *OCCUPYING, *ENDED_TASK_STATES)
FINALS = (None, "finished", "failed", "stopped_early", "cancelled")
LEASES = (None, *(lease(e, revoked=r) for e, r in product((1, 2), (False, True))))
STOPS = (
    None, flag(1), flag(2), flag(2, "cancelled"), flag(1, resize=True), flag(2, resize=True),
)  # fmt: skip
SEGMENTS: tuple[SegmentRecord | None, ...] = (
    None,
    *(
        segment(e, r, final=f, task=t)
        for e, r, f, t in product((1, 2, 3), (False, True), FINALS, ("", ti_id(0)))
    ),
    *(segment(e, False, resizing=True) for e in (1, 2, 3)),
)
ROWS = st.builds(
    lambda state, slots: row(0, state, pool_slots=slots),
    st.sampled_from(ROW_STATES),
    st.sampled_from((1, HELD_POOL_SLOTS)),
)


def is_open(t: TrialRecords) -> bool:
    """Return whether the segment of the trial's lease is on record as running."""
    if t.lease is None or t.segment is None:
        return False
    return t.segment.running and t.segment.epoch == t.lease.epoch


def is_live(t: TrialRecords) -> bool:
    return t.row.state in ("running", "deferred")


def is_told(t: TrialRecords) -> bool:
    return t.lease is not None and t.stop is not None and t.stop.epoch == t.lease.epoch


def keeps_slots(t: TrialRecords) -> bool:
    """Return whether a live task has ended its segment for another size, and nothing since."""
    if t.row.state != "running" or t.segment is None or t.stop is None:
        return False
    return t.segment.resizing and t.stop.resize and t.stop.epoch == t.segment.epoch


def outcome_in_folder(t: TrialRecords) -> str:
    """Return the outcome that the controller can have read: it asks under these conditions."""
    if not is_open(t):
        return ""
    if t.row.state == "deferred":
        return t.left if is_told(t) and t.left == PAUSED else ""
    return t.left if t.row.state == "scheduled" else ""


@st.composite
def any_records(draw: Callable[[Any], Any]) -> TrialRecords:
    """Draw any combination of the records of a trial, impossible ones too."""
    found = TrialRecords(
        draw(ROWS),
        draw(st.sampled_from(LEASES)),
        draw(st.sampled_from(STOPS)),
        draw(st.sampled_from(SEGMENTS)),
        draw(st.sampled_from(("", PAUSED, OTHER_OUTCOME))),
    )
    return TrialRecords(found.row, found.lease, found.stop, found.segment, outcome_in_folder(found))


S = TrialState

OPEN, OPEN_LEASE = segment(2), lease(2)
KEPT = segment(2, False, resizing=True)

ENDED_HERE = segment(2, False, final="failed", task=ti_id(0))

EXAMPLES: Mapping[
    TrialState, tuple[str | None, Lease | None, StopFlag | None, SegmentRecord | None, str]
] = {
    S.PENDING: ("scheduled", None, None, None, ""),
    S.GRANTED: ("queued", OPEN_LEASE, None, segment(1, False), ""),
    S.RUNNING: ("running", OPEN_LEASE, flag(1), OPEN, ""),
    S.STOPPING: ("running", OPEN_LEASE, flag(2), OPEN, ""),
    S.RELEASED: ("deferred", OPEN_LEASE, flag(2), OPEN, PAUSED),
    S.UNATTENDED: ("up_for_retry", OPEN_LEASE, None, OPEN, ""),
    S.PREEMPTED: ("scheduled", OPEN_LEASE, flag(2), OPEN, PAUSED),
    S.CONCLUDING: ("scheduled", OPEN_LEASE, None, OPEN, OTHER_OUTCOME),
    S.RESIZING: ("running", OPEN_LEASE, flag(2, resize=True), KEPT, ""),
    S.LEAVING: ("up_for_reschedule", OPEN_LEASE, flag(2), segment(2, False), ""),
    S.WAITING: ("scheduled", OPEN_LEASE, flag(2), segment(2, False), ""),
    S.REVOKED_RUNNING: ("running", lease(2, revoked=True), None, OPEN, ""),
    S.REVOKED_STOPPING: ("running", lease(2, revoked=True), flag(2), OPEN, ""),
    S.REVOKED_PREEMPTED: ("scheduled", lease(2, revoked=True), None, OPEN, PAUSED),
    S.ENDING: ("running", OPEN_LEASE, None, segment(2, False, final="finished"), ""),
    S.UNMARKED: ("scheduled", OPEN_LEASE, None, ENDED_HERE, ""),
    S.UNREPORTED: ("failed", OPEN_LEASE, None, OPEN, ""),
    S.CLEARED: ("scheduled", OPEN_LEASE, None, segment(2, False, final="failed"), ""),
    S.ENDED: ("success", OPEN_LEASE, None, segment(2, False, final="finished"), ""),
    S.SEGMENT_WITHOUT_LEASE: ("running", None, None, OPEN, ""),
    S.SEGMENT_AHEAD: ("scheduled", OPEN_LEASE, None, segment(3), ""),
    S.SEGMENT_AHEAD_LEAVING: ("running", OPEN_LEASE, None, segment(3), ""),
}  # fmt: skip
