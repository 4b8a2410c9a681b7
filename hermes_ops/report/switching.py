"""What stopping and resuming trials cost, as bounds out of the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from hermes_ops.core.summary import CurvePoints, Segment
from hermes_ops.core.training import STOPPED, training
from hermes_ops.report.background import Background, Range


def switching_gpu_s(
    curves: Mapping[int, CurvePoints], segments: Sequence[Segment], background: Background
) -> Range:
    """Return the least and the most GPU-seconds that stopping and resuming trials have cost.

    Counted are, of each segment that was stopped, its leaving (at least what a checkpoint of the
    trial takes, at most the time from the decision, or from its last value), and of each that
    resumed one, the time before it trained again, as `core.training` tells it (where that cannot
    be told, what was measured of its start at least, all until its first value at most). A
    segment that left no checkpoint counts whole. Time in which a GPU was free between two trials
    is nobody's.
    """
    low = high = 0.0
    for trial in sorted({s.trial for s in segments}):
        own = sorted((s for s in segments if s.trial == trial), key=lambda s: s.start_s)
        costs = (*_resumes(curves.get(trial, ()), own), *_leaves(trial, curves, own, background))
        low += sum(least for least, _ in costs)
        high += sum(most for _, most in costs)
    return low, high


def _resumes(points: CurvePoints, own: Sequence[Segment]) -> Iterator[Range]:
    """Of each segment after one that was stopped: GPU-seconds before it trained."""
    leads_s = training(points, own).leads_s
    for (earlier, later), lead_s in zip(pairwise(own), leads_s[1:], strict=True):
        if earlier.outcome not in STOPPED or later.outcome == "interrupted":
            continue
        inside = _values_s(points, later)
        until_s = min(inside, default=later.end_s if later.end_s is not None else later.start_s)
        most_s = max(0.0, until_s - later.start_s)
        least_s = min(most_s, (later.startup_s or 0.0) + (later.restore_s or 0.0))
        if lead_s is not None:
            least_s = most_s = min(lead_s, most_s)
        yield least_s * len(later.gpus), most_s * len(later.gpus)


def _leaves(
    trial: int,
    curves: Mapping[int, CurvePoints],
    own: Sequence[Segment],
    background: Background,
) -> Iterator[Range]:
    """Of each segment that was stopped: GPU-seconds of leaving; all of one that lost its work."""
    checkpoint_s = background.checkpoint_s.get(trial, 0.0)
    told = [at_s for number, at_s in background.stops if number == trial]
    for segment in own:
        if segment.outcome not in STOPPED or segment.end_s is None:
            continue
        length_s = max(0.0, segment.end_s - segment.start_s)
        if segment.outcome == "interrupted":
            yield length_s * len(segment.gpus), length_s * len(segment.gpus)
            continue
        values_s = _values_s(curves.get(trial, ()), segment)
        before_s = [at for at in (*values_s, *told) if segment.start_s <= at <= segment.end_s]
        most_s = segment.end_s - max(before_s, default=segment.start_s)
        yield min(checkpoint_s, most_s) * len(segment.gpus), most_s * len(segment.gpus)


def _values_s(points: CurvePoints, segment: Segment) -> list[float]:
    """When the segment reported values, in Unix seconds."""
    end_s = float("inf") if segment.end_s is None else segment.end_s
    return [ms / 1_000 for _, _, ms in points if segment.start_s <= ms / 1_000 <= end_s]
