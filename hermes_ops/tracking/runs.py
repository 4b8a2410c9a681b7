"""Sweeps, trials and metrics, parsed from MLflow's JSON of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.core.summary import CurvePoints, Segment
from hermes_ops.tracking.rest import chunked_tag, joined_json, legal_name

SWEEP, TRIAL, KIND, STATE = "hermes.sweep", "hermes.trial", "hermes.kind", "hermes.state"
NAME = "hermes.name"  # of a sweep, in its file; it was the name of its experiment, too
RUN_STATUS = {  # of the final states; any other state is open
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped_early": "KILLED",
    "cancelled": "KILLED",
}
CONFIG, SEGMENT_LOG = "hermes.config", "hermes.segment_log"
TRIAL_KIND, SET_ASIDE_KIND = "trial", "set aside"
ENDED_SPANS = "hermes.ended_spans"
"""Tag of a run that was continued: from when to when it had ended, Unix seconds, as JSON."""
EXTENDED = "hermes.extended"
"""Tag of a sweep's run: the first new trial of each extension and its time, as JSON."""
WHY_TAGS = ("hermes.closed", "hermes.failed", "hermes.reached")
"""Tags of a sweep's run that hold the reason of its end."""
TIMINGS = ("startup_s", "restore_s", "checkpoint_s", "repeat_s")  # as tags hermes.startup_s, ...
_MAX_DOUBLE = 1.7976931348623157e308  # MLflow's SQL store keeps it for infinity


@dataclass(frozen=True, slots=True)
class SweepRef:
    """The ids of a sweep in MLflow: its experiment and its parent run."""

    sweep_id: str
    experiment_id: str
    parent_run_id: str


@dataclass(frozen=True, slots=True)
class LatestMetric:
    """The value of a metric at its highest step; Unix milliseconds."""

    value: float
    step: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial as stored in MLflow. Times are Unix milliseconds; `ended_ms`: None before its end."""

    number: int
    run_id: str
    config: Mapping[str, Any]
    state: str
    tags: Mapping[str, str]
    metrics: Mapping[str, LatestMetric]
    status: str
    started_ms: int
    ended_ms: int | None
    unwritten: Mapping[str, Any] = field(default_factory=dict)  # of its config, no params yet

    @property
    def is_open(self) -> bool:
        """True until the trial is in a final state: the script may have ended the run earlier."""
        return self.state not in RUN_STATUS

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that `save_segments` stored, oldest first."""
        documents = joined_json(SEGMENT_LOG, self.tags) or ()
        return tuple(Segment.from_json(self.number, s) for s in documents)

    def timing_s(self, name: str) -> float | None:
        """Return one of TIMINGS as last measured, in seconds; None when it was not."""
        seconds = number_in(self.tags.get(f"hermes.{name}"))
        return seconds if seconds is not None and 0 <= seconds < math.inf else None


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The parent run of a sweep. Times are Unix milliseconds."""

    ref: SweepRef
    name: str
    state: str
    status: str
    tags: Mapping[str, str]
    started_ms: int
    ended_ms: int | None


def tags_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run."""
    return {t["key"]: t.get("value", "") for t in run.get("data", {}).get("tags", ())}


def number_in(tag: str | None) -> float | None:
    """Return the number that a tag holds; None where it is no number, or there is no tag."""
    try:
        return None if tag is None else float(tag)
    except ValueError:
        return None


def number_pairs(key: str, tags: Mapping[str, str]) -> Iterator[tuple[float, float]]:
    """Yield the pairs of numbers of a tag that holds a JSON list of them; skip what is none."""
    pairs = joined_json(key, tags)
    for pair in pairs if isinstance(pairs, list) else ():
        match pair:
            case [int() | float() as first, int() | float() as second]:
                yield float(first), float(second)


def has_tags(run: Mapping[str, Any], tags: Mapping[str, str]) -> bool:
    """Return whether a run has exactly these tags: some databases of MLflow ignore case."""
    return tags.items() <= tags_of(run).items()


def is_numbered(run: Mapping[str, Any]) -> bool:
    """Return whether a run's tag is the number of a trial: people may edit tags."""
    number = tags_of(run).get(TRIAL, "")
    return number.isascii() and number.isdecimal()


def param_of(item: tuple[str, Any]) -> dict[str, str]:
    """Return MLflow's param for a (name, value) of a configuration."""
    name, value = item
    text = value if isinstance(value, str) else json.dumps(value)
    return {"key": legal_name(name), "value": text[:6_000]}


def ended_ms_of(info: Mapping[str, Any]) -> int | None:
    """Return the time of a run's end; None before it."""
    return int(info["end_time"]) if info.get("end_time") else None


def metric_of(entry: Mapping[str, Any]) -> LatestMetric:
    """Parse a metric; MLflow's largest double is an infinity."""
    value = float(entry["value"])
    if abs(value) >= _MAX_DOUBLE:
        value = math.copysign(math.inf, value)
    return LatestMetric(value, int(entry.get("step", 0)), int(entry.get("timestamp", 0)))


def curve_of(history: Iterable[LatestMetric]) -> CurvePoints:
    """Return the points by step, each step once with its earliest value.

    A script that resumed from a checkpoint behind its last value logs some steps again. The first
    value stands, as in the trial's own file: a value on which a decision was made never changes,
    and the time of a value is that of its first report.

    Keras' autologging counts epochs from 0 and the collector counts completed ones from 1; where
    both log, the first point is there twice and the one at step 0 is left out.
    """
    first: dict[int, LatestMetric] = {}
    for point in history:
        if point.step not in first or point.time_ms < first[point.step].time_ms:
            first[point.step] = point
    if 0 in first and 1 in first and first[0].value == first[1].value:
        del first[0]
    return tuple((s, first[s].value, first[s].time_ms) for s in sorted(first))


def sweep_of(run: Mapping[str, Any]) -> SweepRun:
    """Parse the parent run of a sweep."""
    info, tags = run["info"], tags_of(run)
    return SweepRun(
        ref=SweepRef(tags.get(SWEEP, ""), info["experiment_id"], info["run_id"]),
        name=info.get("run_name", ""),
        state=tags.get(STATE, "running"),
        status=info["status"],
        tags=tags,
        started_ms=int(info.get("start_time", 0)),
        ended_ms=ended_ms_of(info),
    )


def ended_spans_of(tags: Mapping[str, str]) -> tuple[tuple[float, float], ...]:
    """Return the spans, in Unix seconds, between an end of a run and its continuation."""
    return tuple(number_pairs(ENDED_SPANS, tags))


def with_ended_span(run: Mapping[str, Any], now_s: float) -> dict[str, str]:
    """Return the tags that record a continuation now; none for a run that has not ended."""
    ended_ms, tags = ended_ms_of(run["info"]), tags_of(run)
    if ended_ms is None or tags.get(STATE) not in RUN_STATUS:
        return {}
    spans = [*ended_spans_of(tags), (ended_ms / 1_000, round(now_s, 3))]
    return chunked_tag(ENDED_SPANS, json.dumps(spans))


def config_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with which a trial's run was created, with its types."""
    return joined_json(CONFIG, tags_of(run)) or {}


def unwritten(run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a trial's configuration that its run does not have as params."""
    have = {p["key"] for p in run.get("data", {}).get("params", ())}
    return {name: v for name, v in config.items() if legal_name(name) not in have}


def trial_of(run: Mapping[str, Any]) -> TrialRun:
    """Parse the run of a trial."""
    info, tags, config = run["info"], tags_of(run), config_of(run)
    return TrialRun(
        number=int(tags[TRIAL]),
        run_id=info["run_id"],
        config=config,
        state=tags.get(STATE, "running"),
        tags=tags,
        metrics={m["key"]: metric_of(m) for m in run.get("data", {}).get("metrics", ())},
        status=info["status"],
        started_ms=int(info.get("start_time", 0)),
        ended_ms=ended_ms_of(info),
        unwritten=unwritten(run, config),
    )
