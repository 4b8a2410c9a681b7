"""Trials that something else than their script ends again and again: a node, a disk, a busy GPU.

That is no failure of theirs, so nothing else bounds it. Each time they wait longer for their next
GPUs, which others use meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hermes_ops.airflow.clock_steps import is_due

if TYPE_CHECKING:
    from hermes_ops.airflow.control.trial_state import TrialRecords
    from hermes_ops.airflow.records import SegmentRecord

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


def pause_s(segment: SegmentRecord | None) -> float:
    """Return how long a trial waits after the end of this segment; 0 after a first interruption.

    The pauses double from FIRST_PAUSE_S up to LONGEST_PAUSE_S, until it has trained a new step.
    """
    if segment is None or segment.running or segment.final or segment.interruptions < 2:
        return 0.0
    return float(min(FIRST_PAUSE_S * 2.0 ** min(segment.interruptions - 2, 10), LONGEST_PAUSE_S))


def resting(trials: Iterable[TrialRecords], now_s: float) -> frozenset[int]:
    """Return the trials that are offered no GPUs now, as they were interrupted a moment ago."""
    return frozenset(t.number for t in trials if _rests(t.segment, now_s))


def _rests(segment: SegmentRecord | None, now_s: float) -> bool:
    wait_s = pause_s(segment)
    if not wait_s or segment is None or segment.ended_s is None:
        return False
    return not is_due(now_s, segment.ended_s + wait_s, wait_s)


def interruption(segment: SegmentRecord) -> str:
    """Return for people how often the trial was interrupted, and why; empty while it need not wait.

    It continues a sentence about the trial.
    """
    wait_s = pause_s(segment)
    if not wait_s:
        return ""
    times = f"{segment.interruptions} times in a row before a new step"
    return f"was interrupted {times}, and waits {wait_s:.0f} s before it is tried: {segment.reason}"
