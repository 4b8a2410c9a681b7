"""Delayed restarts of trials that are interrupted again and again: by a node, a disk, a busy GPU.

An interruption is not a failure of the script, so it does not count against `max_failures`. With
each interruption in a row the trial waits longer before it gets GPUs again, which others use. After
STUCK_AFTER times people are told what they can do: a trial never ends for interruptions, as it
continues once their cause is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hermes_ops.airflow.clock_steps import is_due

if TYPE_CHECKING:
    from hermes_ops.airflow.control.trial_state import TrialRecords
    from hermes_ops.airflow.records import SegmentRecord

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0

STUCK_AFTER = 10
"""Interruptions in a row before a new step after which a trial will hardly go on by itself."""


def restart_delay_s(segment: SegmentRecord | None) -> float:
    """Return the seconds that a trial waits after this segment; 0 after a first interruption.

    They double from FIRST_PAUSE_S up to LONGEST_PAUSE_S, until the trial has trained a new step.
    """
    if segment is None or segment.running or segment.final or segment.interruptions < 2:
        return 0.0
    return float(min(FIRST_PAUSE_S * 2.0 ** min(segment.interruptions - 2, 10), LONGEST_PAUSE_S))


def delayed_trials(trials: Iterable[TrialRecords], now_s: float) -> frozenset[int]:
    """Return the numbers of the trials that get no GPU offered now because of interruptions."""
    return frozenset(t.number for t in trials if _is_delayed(t.segment, now_s))


def _is_delayed(segment: SegmentRecord | None, now_s: float) -> bool:
    wait_s = restart_delay_s(segment)
    if not wait_s or segment is None or segment.ended_s is None:
        return False
    return not is_due(now_s, segment.ended_s + wait_s, wait_s)


def interruption_text(segment: SegmentRecord) -> str:
    """Return how often the trial was interrupted, and why; empty if it does not wait for that.

    The text continues a sentence that begins with the trial's name. It is there during the next try
    too, until that has a new step.
    """
    has_new_step = segment.running and segment.step > segment.steps_at_start
    if segment.final or segment.interruptions < 2 or has_new_step:
        return ""
    times = f"{segment.interruptions} times in a row before a new step"
    if segment.running:
        return f"was interrupted {times}, and is tried now"
    wait_s = restart_delay_s(segment)
    return f"was interrupted {times}, and waits {wait_s:.0f} s before it is tried: {segment.reason}"


def is_stuck(segment: SegmentRecord) -> bool:
    """Return whether the trial was interrupted so often that people are to look after it."""
    return segment.interruptions >= STUCK_AFTER and bool(interruption_text(segment))
