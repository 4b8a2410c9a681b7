"""What a sweep has come to, from MLflow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes_ops.config import SweepConfig, parse
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.cli.locating import Place
    from hermes_ops.core.summary import Segment
    from hermes_ops.tracking.summary import Collected


def configured(connection: Connection, place: Place) -> SweepConfig:
    """The resolved config of a sweep; HermesError before its plan task has run."""
    from hermes_ops.airflow.records import SWEEP_KEY, SweepRecord, decode

    record = decode(SweepRecord, connection.airflow.get_state(place.plan, SWEEP_KEY))
    if record is None:
        raise HermesError(
            f"the sweep {place.sweep!r} has not been planned: see its plan task's log."
        )
    return parse(record.config, source=place.sweep, base=None)


def collected(connection: Connection, place: Place, max_slots_used: int | None = None) -> Collected:
    """Everything that MLflow holds of a sweep."""
    from hermes_ops.tracking.summary import collect, find

    config = configured(connection, place)
    return collect(
        connection.tracker,
        find(connection.tracker, place.sweep, config.name),
        metric=config.objective.metric,
        direction=config.objective.direction.value,
        max_trials=config.trial_count,
        others=config.secondary,
        max_slots_used=max_slots_used,
    )


def document(connection: Connection, place: Place, seen: int) -> dict[str, Any]:
    """The JSON document of a sweep; `seen`: the most GPUs that live processes here held at once.

    Where none was seen (trials in pods or on another machine, a sweep that had ended before) its
    `max_slots_used` comes from the segments that MLflow has.
    """
    found = collected(connection, place, seen or None)
    summary = found.summary
    if not seen:
        summary = replace(summary, max_slots_used=most_gpus(found.segments))
    return dict(json.loads(json.dumps(summary.to_document())))


def most_gpus(segments: Iterable[Segment]) -> int:
    """The most GPUs that these segments held at once; one that has not ended holds its own yet.

    A GPU counts once, also where the next segment on it begins before the last one's end is noted.
    """
    changes: list[tuple[float, int, int]] = []
    for segment in segments:
        for gpu in segment.gpus:
            changes.append((segment.start_s, 1, gpu))
            if segment.end_s is not None:
                changes.append((segment.end_s, -1, gpu))
    held: Counter[int] = Counter()
    most = 0
    for _, change, gpu in sorted(changes):  # at one instant those that leave come first
        held[gpu] += change
        most = max(most, sum(count > 0 for count in held.values()))
    return most
