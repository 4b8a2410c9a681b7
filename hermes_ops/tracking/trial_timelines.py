"""Timelines of trials, read from MLflow: when each waited, held GPUs, or had ended for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from hermes_ops.core.summary import Segment
from hermes_ops.core.usage import TrialUse
from hermes_ops.tracking.rest import chunked_tag
from hermes_ops.tracking.runs import (
    EXTENDED,
    RUN_STATUS,
    SweepRef,
    SweepRun,
    TrialRun,
    ended_spans_of,
    number_pairs,
)
from hermes_ops.tracking.tracker import Tracker

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TrialTimeline:
    """When a trial was submitted, trained, and had ended; all times are Unix seconds.

    `submitted_s` is when its sweep began, or when an extension of the sweep added the trial.
    `segments` includes those before a restart from scratch. `ended_spans` are the times between an
    end of the trial, or of its sweep, and its continuation.
    """

    submitted_s: float
    segments: tuple[Segment, ...]
    ended_spans: tuple[Span, ...] = ()

    def to_use(self, sweep: str, user: str, team: str, pool: str) -> TrialUse:
        """Return the trial's part in the usage of its user and team."""
        return TrialUse(sweep, user, team, self.submitted_s, self.segments, pool, self.ended_spans)


def fetch_trial_timelines(tracker: Tracker, sweep: SweepRef) -> tuple[TrialTimeline, ...]:
    """Return the timelines of a sweep's trials in the order of their numbers, by one request.

    Raise Unavailable if MLflow does not answer.
    """
    parent, runs = tracker.every_run(sweep)
    starts_ms = [run.started_ms for run in runs] if parent is None else [parent.started_ms]
    began_s = min(starts_ms, default=0) / 1_000
    timelines = groupby(runs, key=lambda run: run.number)
    return tuple(
        _timeline(parent, began_s, number, tuple(of_trial)) for number, of_trial in timelines
    )


def _timeline(
    parent: SweepRun | None, began_s: float, number: int, runs: Sequence[TrialRun]
) -> TrialTimeline:
    tags = {} if parent is None else parent.tags
    spans = [*ended_spans_of(tags), *_ended_spans(runs)]
    segments = dict.fromkeys(segment for run in runs for segment in _segments(run))
    added_s = [at_s for first, at_s in _extensions(tags) if number >= first]
    return TrialTimeline(max([began_s, *added_s]), tuple(segments), tuple(spans))


def _segments(run: TrialRun) -> Iterator[Segment]:
    """Yield the segments of a run; one without an end is taken to have ended with the run."""
    has_ended = run.ended_ms is not None and run.state in RUN_STATUS
    for segment in run.segments:
        if segment.end_s is None and has_ended and run.ended_ms is not None:
            yield replace(segment, end_s=max(segment.start_s, run.ended_ms / 1_000))
        else:
            yield segment


def _ended_spans(runs: Sequence[TrialRun]) -> Iterator[Span]:
    """Yield the times between an end of the trial and its continuation or restart."""
    for run in runs:
        yield from ended_spans_of(run.tags)
    for before, after in pairwise(runs):
        if before.ended_ms is not None:
            yield before.ended_ms / 1_000, after.started_ms / 1_000


def _extensions(tags: Mapping[str, str]) -> tuple[tuple[int, float], ...]:
    """Return the number of the first new trial of each extension of a sweep, and its Unix time."""
    return tuple((int(trials), at_s) for trials, at_s in number_pairs(EXTENDED, tags))


def with_extension(tags: Mapping[str, str], trials: int, now_s: float) -> dict[str, str]:
    """Return the tag that records an extension now, for a sweep with these trials and tags."""
    entries = [*_extensions(tags), (trials, round(now_s, 3))]
    return chunked_tag(EXTENDED, json.dumps(entries))
