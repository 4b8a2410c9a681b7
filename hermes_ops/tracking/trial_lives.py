"""The life of each trial as MLflow has it: when it waited, held GPUs, and had ended meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from hermes_ops.core.summary import Segment
from hermes_ops.tracking.rest import chunked_tag, joined_json
from hermes_ops.tracking.runs import (
    EXTENDED,
    RUN_STATUS,
    SweepRef,
    SweepRun,
    TrialRun,
    ended_spans_of,
)
from hermes_ops.tracking.tracker import Tracker

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TrialLife:
    """All segments of a trial, also those before it restarted from scratch. Unix seconds.

    `submitted_s` is when its sweep began, or was extended by it. In `ended_spans` the trial or its
    sweep had ended and was continued later.
    """

    submitted_s: float
    segments: tuple[Segment, ...]
    ended_spans: tuple[Span, ...] = ()


def fetch_trial_lives(tracker: Tracker, sweep: SweepRef) -> tuple[TrialLife, ...]:
    """Return the lives of a sweep's trials by number, in one request. Raise Unavailable."""
    own, runs = tracker.every_run(sweep)
    starts_ms = [run.started_ms for run in runs] if own is None else [own.started_ms]
    began_s = min(starts_ms, default=0) / 1_000
    lives = groupby(runs, key=lambda run: run.number)
    return tuple(_life(own, began_s, number, tuple(of_trial)) for number, of_trial in lives)


def _life(own: SweepRun | None, began_s: float, number: int, runs: Sequence[TrialRun]) -> TrialLife:
    tags = {} if own is None else own.tags
    spans = [*ended_spans_of(tags), *_ended_spans(runs)]
    segments = dict.fromkeys(segment for run in runs for segment in _segments(run))
    added_s = [at_s for first, at_s in _extensions(tags) if number >= first]
    return TrialLife(max([began_s, *added_s]), tuple(segments), tuple(spans))


def _segments(run: TrialRun) -> Iterator[Segment]:
    """Yield the segments of a run; one whose end is not known ended with the run, at the latest."""
    has_ended = run.ended_ms is not None and run.state in RUN_STATUS
    for segment in run.segments:
        if segment.end_s is None and has_ended and run.ended_ms is not None:
            yield replace(segment, end_s=max(segment.start_s, run.ended_ms / 1_000))
        else:
            yield segment


def _ended_spans(runs: Sequence[TrialRun]) -> Iterator[Span]:
    """Yield when the trial had ended: before it continued, and before it restarted."""
    for run in runs:
        yield from ended_spans_of(run.tags)
    for before, after in pairwise(runs):
        if before.ended_ms is not None:
            yield before.ended_ms / 1_000, after.started_ms / 1_000


def _extensions(tags: Mapping[str, str]) -> tuple[tuple[int, float], ...]:
    """Return the first new trial of each extension of a sweep, and when that was."""
    found = joined_json(EXTENDED, tags)
    entries: Iterable[object] = found if isinstance(found, list) else ()
    return tuple(
        (int(entry[0]), float(entry[1]))
        for entry in entries
        if isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(number, int | float) for number in entry)
    )


def with_extension(tags: Mapping[str, str], trials: int, now_s: float) -> dict[str, str]:
    """Return the tag of a sweep with so many trials, and these tags, that gets further ones now."""
    entries = [*_extensions(tags), (trials, round(now_s, 3))]
    return chunked_tag(EXTENDED, json.dumps(entries))
