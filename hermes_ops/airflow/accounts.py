"""The use of GPUs by a trial, summed over its segments.

Of a trial whose pods can write its folder the records outweigh the files: a script runs as the user
of hermes-trial, so it can rewrite `segments.jsonl`. What is on record of ended segments stays, and
a segment has lasted at least the observed run time of its container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from hermes_ops.airflow.records import SegmentRecord

SEEN_S = 10.0
"""Seconds in which a pod's program says by itself that it has begun, or that it has ended."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """Sums over a trial's segments: (start, end) Unix seconds of training, GPU-seconds, counts.

    Its training starts when the start-up and the restore that a segment has measured are over;
    `held` are the spans with them. `sizes` are the GPUs that it held in each of the spans,
    `batches` the samples of a step, empty if none are known.
    """

    spans: tuple[tuple[float, float], ...]
    sizes: tuple[int, ...]
    service_gpu_s: float
    segments: int
    preemptions: int
    batches: tuple[int | None, ...] = ()
    held: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_segments(cls, segments: tuple[Mapping[str, Any], ...]) -> Accounts:
        """Return the accounts of these segments; one that has not ended is only counted."""
        ended = [s for s in segments if s.get("end_s") is not None]
        begun = [float(s["start_s"]) for s in ended]
        held = [(b, max(b, float(s["end_s"]))) for b, s in zip(begun, ended, strict=True)]
        leads = (float(s.get("startup_s") or 0.0) + float(s.get("restore_s") or 0.0) for s in ended)
        spans = tuple(
            (min(start + lead, end), end) for (start, end), lead in zip(held, leads, strict=True)
        )
        sizes = tuple(max(1, len(s.get("gpus") or ())) for s in ended)
        service = sum((end - start) * n for n, (start, end) in zip(sizes, held, strict=True))
        preemptions = sum(s.get("outcome") in ("preempted", "interrupted") for s in ended)
        batches = tuple(s.get("batch") for s in ended)
        known_batches = batches if any(batch is not None for batch in batches) else ()
        return cls(spans, sizes, service, len(segments), preemptions, known_batches, tuple(held))

    def entered_in(self, record: SegmentRecord) -> SegmentRecord:
        """Return the record with this use of GPUs; its counts of segments stay."""
        return replace(
            record,
            spans=self.spans,
            sizes=self.sizes,
            held=self.held,
            batches=self.batches,
            service_gpu_s=self.service_gpu_s,
        )


CLOCKS_S = 3_600.0
"""The most seconds by which the clocks of a node and of a worker may differ."""

Segments = Sequence[Mapping[str, Any]]


def recorded_use(segments: Segments, record: SegmentRecord, epoch: int | None = None) -> Accounts:
    """Return the accounts up to the record's segment, without one of the lease `epoch`.

    A segment that was killed is closed in the folder later: it counts then.
    """
    new = _new_ones(segments, record, record.epoch)
    return _joined(record, segments, [s for s in new if epoch is None or s.get("epoch") != epoch])


def closed_use(
    segments: Segments, record: SegmentRecord, ran_s: float | None, ended_s: float
) -> Accounts:
    """Return the accounts with the record's segment, which has just ended.

    :param ran_s: the observed run time of its container, in seconds; None if it is unknown
    :param ended_s: about when it ended, in Unix seconds
    """
    new = _new_ones(segments, record, record.epoch - 1)
    earlier = [s for s in new if s.get("epoch") != record.epoch]
    closing = [{**s, "gpus": record.gpus} for s in new if s.get("epoch") == record.epoch]
    if ran_s is not None:
        run = {"start_s": ended_s - ran_s, "end_s": ended_s, "batch": record.batch}
        closing = as_observed(closing, {**run, "gpus": record.gpus}, CLOCKS_S)
    return _joined(record, segments, [*earlier, *closing])


def as_observed(
    segments: Sequence[dict[str, Any]], run: dict[str, Any], clocks_s: float
) -> list[dict[str, Any]]:
    """Return the segments of one lease, or the observed run of its container if they are shorter.

    Those that lie outside of the run by more than `clocks_s` do not count.
    """
    first_s, last_s = run["start_s"] - clocks_s, run["end_s"] + clocks_s
    in_time = (s for s in segments if first_s <= s["start_s"] and s.get("end_s", inf) <= last_s)
    held_s = sum(end_s - start_s for start_s, end_s in Accounts.from_segments(tuple(in_time)).held)
    is_told = held_s >= run["end_s"] - run["start_s"] - SEEN_S
    return list(segments) if is_told else [run]


def _new_ones(
    segments: Segments, record: SegmentRecord, after: int
) -> tuple[Mapping[str, Any], ...]:
    """Return the ended segments that the record does not count yet.

    Where the folder has other ones in their place, it was rewritten: then only those of leases
    `after` that one are new.
    """
    ended = tuple(s for s in segments if s.get("end_s") is not None)
    count = len(record.spans)
    counted = Accounts.from_segments(ended[:count])
    is_same = (counted.spans, counted.sizes) == (record.spans, record.sizes)
    if is_same and counted.service_gpu_s >= record.service_gpu_s - 1.0:
        return ended[count:]
    return tuple(s for s in ended if (s.get("epoch") or 0) > after)


def _joined(record: SegmentRecord, segments: Segments, new: Segments) -> Accounts:
    """Return the accounts on record with those of the new segments."""
    added = Accounts.from_segments(tuple(new))
    every = Accounts.from_segments(tuple(segments))
    batches: tuple[int | None, ...] = ()
    if record.batches or added.batches:
        before = record.batches or (None,) * len(record.spans)
        batches = (*before, *(added.batches or (None,) * len(added.spans)))
    return Accounts(
        (*record.spans, *added.spans),
        (*record.sizes, *added.sizes),
        record.service_gpu_s + added.service_gpu_s,
        every.segments,
        every.preemptions,
        batches,
        (*record.held_spans, *added.held),
    )
