"""Who used how much of the GPUs: held, trained and lost GPU-seconds, waiting, preemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import inf

from hermes_ops.core.summary import Segment

BY = ("user", "team", "sweep", "day")


@dataclass(frozen=True, slots=True)
class TrialUse:
    """The segments of a trial, whose it is, and when it began to wait; Unix seconds."""

    sweep: str
    user: str
    team: str
    submitted_s: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The figures of one user, team, sweep or day (UTC): `key`.

    `gpu_seconds` is the time for which GPUs were held, `lost_gpu_seconds` the part of it in which
    scripts started and read checkpoints back. `waiting_seconds` is that before segments.
    """

    key: str
    trials: int = 0
    gpu_seconds: float = 0.0
    lost_gpu_seconds: float = 0.0
    waiting_seconds: float = 0.0
    preemptions: int = 0

    @property
    def trained_gpu_seconds(self) -> float:
        """The GPU-seconds that were held and not lost."""
        return self.gpu_seconds - self.lost_gpu_seconds

    def document(self) -> dict[str, str | int | float]:
        """Return the figures by name."""
        return {**asdict(self), "trained_gpu_seconds": self.trained_gpu_seconds}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a trial's life: what each of its seconds counts, and a preemption at its end."""

    start_s: float
    end_s: float
    gpus: int = 0
    lost_gpus: int = 0
    waiting: int = 0
    is_preempted: bool = False


def usage(
    trials: Iterable[TrialUse], by: str, since_s: float = 0.0, now_s: float = inf
) -> tuple[Usage, ...]:
    """Return the use between two moments, sorted by its key: one of BY.

    Segments that run still count until `now_s`. A trial counts in each group in which it held GPUs
    or waited. The sums over all groups are the same whatever the groups are.
    """
    groups: dict[str, Usage] = {}
    for trial in trials:
        touched = set[str]()
        for key, part in _parts(trial, by, since_s, now_s):
            seconds = part.end_s - part.start_s
            usage = groups.get(key, Usage(key))
            groups[key] = replace(
                usage,
                trials=usage.trials + (key not in touched),
                gpu_seconds=usage.gpu_seconds + part.gpus * seconds,
                lost_gpu_seconds=usage.lost_gpu_seconds + part.lost_gpus * seconds,
                waiting_seconds=usage.waiting_seconds + part.waiting * seconds,
                preemptions=usage.preemptions + part.is_preempted,
            )
            touched.add(key)
    return tuple(groups[key] for key in sorted(groups))


def _parts(
    trial: TrialUse, by: str, since_s: float, now_s: float
) -> Iterator[tuple[str, _Stretch]]:
    """Yield what counts of a trial, each part with its group."""
    clipped = (
        replace(
            stretch,
            start_s=max(stretch.start_s, since_s),
            end_s=min(stretch.end_s, now_s),
            is_preempted=stretch.is_preempted and since_s <= stretch.end_s <= now_s,
        )
        for stretch in _stretches(trial, now_s)
    )
    counting = (part for part in clipped if part.end_s > part.start_s)
    if by == "day":
        yield from ((_day(part.start_s), part) for whole in counting for part in _by_day(whole))
        return
    key_of: dict[str, Callable[[TrialUse], str]] = {
        "user": lambda t: t.user,
        "team": lambda t: t.team,
        "sweep": lambda t: t.sweep,
    }
    yield from ((key_of[by](trial), part) for part in counting)


def _stretches(trial: TrialUse, now_s: float) -> Iterator[_Stretch]:
    """Yield the whole life of a trial, in order: what it waited, lost and trained."""
    segments = sorted(trial.segments, key=lambda segment: segment.start_s)
    if segments:
        yield _Stretch(trial.submitted_s, segments[0].start_s, waiting=1)
    for segment in segments:
        end_s = now_s if segment.end_s is None else segment.end_s
        start_up_s = (segment.startup_s or 0.0) + (segment.restore_s or 0.0)
        trains_s, gpus = min(end_s, segment.start_s + start_up_s), len(segment.gpus)
        preempted = segment.outcome == "preempted"
        if trains_s < end_s:
            yield _Stretch(segment.start_s, trains_s, gpus, gpus)
            yield _Stretch(trains_s, end_s, gpus, is_preempted=preempted)
        else:
            yield _Stretch(segment.start_s, end_s, gpus, gpus, is_preempted=preempted)
    for before, after in pairwise(segments):
        if before.end_s is not None:
            yield _Stretch(before.end_s, after.start_s, waiting=1)


def _by_day(whole: _Stretch) -> Iterator[_Stretch]:
    """Yield the part of each day (UTC); the last one has the preemption."""
    start_s = whole.start_s
    while start_s < whole.end_s:
        day = datetime.fromtimestamp(start_s, UTC).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        end_s = min(whole.end_s, (day + timedelta(days=1)).timestamp())
        is_last = end_s == whole.end_s
        yield replace(
            whole, start_s=start_s, end_s=end_s, is_preempted=whole.is_preempted and is_last
        )
        start_s = end_s


def _day(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).date().isoformat()
