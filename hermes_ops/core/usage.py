"""Usage of GPUs by user, team, sweep or day: time held, lost, borrowed, lent; preemptions."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from math import inf

from hermes_ops.core.gpu_time import day_end_s
from hermes_ops.core.quota import Quota
from hermes_ops.core.summary import Segment

Figures = dict[str, str | float | None]
BY = ("user", "team", "sweep", "day")
TAKEN_WITHIN_S = 60.0
"""Seconds: a trial that starts on a GPU within this time of a preemption there has caused it."""


@dataclass(frozen=True, slots=True)
class TrialUse:
    """The use of GPUs by one trial, with its user and team; all times are Unix seconds.

    It waits from `submitted_s` on and between `segments`, except in the `ended_spans`: the times
    between an end of the trial, or of its sweep, and its continuation.
    """

    sweep: str
    user: str
    team: str
    submitted_s: float
    segments: tuple[Segment, ...]
    pool: str = ""
    ended_spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The figures of one user, team, sweep or day (UTC): `key`.

    `gpu_seconds` is the time for which GPUs were held, `lost_gpu_seconds` the part of it in which
    scripts started and read checkpoints back. `waiting_seconds` is the time before segments; the
    time between an end of a sweep or trial and its continuation does not count.
    `borrowed_gpu_seconds` is the part of `gpu_seconds` beyond the guarantee of the team,
    `lent_gpu_seconds` what others had of its guaranteed GPUs: None where no team has a guarantee,
    and for a user or a sweep. `preemptions_caused` counts the trials of others that were preempted
    for trials of this one.
    """

    key: str
    trials: int = 0
    gpu_seconds: float = 0.0
    lost_gpu_seconds: float = 0.0
    waiting_seconds: float = 0.0
    preemptions: int = 0
    preemptions_caused: int = 0
    borrowed_gpu_seconds: float = 0.0
    lent_gpu_seconds: float | None = None

    @property
    def trained_gpu_seconds(self) -> float:
        """The GPU-seconds that were held and not lost."""
        return self.gpu_seconds - self.lost_gpu_seconds

    def document(self, rate: float | None = None) -> Figures:
        """Return the figures by name, with a price where a GPU-hour has one."""
        price = {} if rate is None else {"price": self.gpu_seconds / 3_600.0 * rate}
        return {**asdict(self), "trained_gpu_seconds": self.trained_gpu_seconds, **price}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a trial's time: what each of its seconds counts, and a preemption at its end."""

    start_s: float
    end_s: float
    gpus: int = 0
    lost_gpus: int = 0
    waiting: int = 0
    is_preempted: bool = False


def usage(
    trials: Iterable[TrialUse],
    by: str,
    since_s: float = 0.0,
    now_s: float = inf,
    quota: Quota | None = None,
) -> tuple[Usage, ...]:
    """Return the use between two moments, sorted by its key: one of BY.

    Segments that run still count until `now_s`. A trial counts in each group in which it held GPUs
    or waited. The sums over all groups are the same whatever `by` is, except for what is lent,
    which only teams have. Loans are those under the quota, if there is one.
    """
    trials = tuple(trials)
    groups = _held(trials, by, since_s, now_s)
    for key, number in _caused(trials, by, since_s, now_s).items():
        groups[key] = replace(groups.get(key, Usage(key)), preemptions_caused=number)
    if quota is not None:
        _count_loans(groups, trials, by, (since_s, now_s), quota)
    return tuple(groups[key] for key in sorted(groups))


def _held(trials: Sequence[TrialUse], by: str, since_s: float, now_s: float) -> dict[str, Usage]:
    """Return what trials held and lost, and how long they waited, by group."""
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
    return groups


def _count_loans(
    groups: dict[str, Usage],
    trials: Sequence[TrialUse],
    by: str,
    between: tuple[float, float],
    quota: Quota,
) -> None:
    """Add to the groups what was borrowed and lent; days are counted one by one."""
    spans: dict[str, list[HeldSpan]] = defaultdict(list)
    for trial in trials:
        for key, part in _parts(trial, by, *between):
            if part.gpus:
                span = HeldSpan(trial.team, key, part.start_s, part.end_s, part.gpus)
                spans[key if by == "day" else ""].append(span)
    for each in spans.values():
        loans = LoanTime.from_spans(each, quota)
        for key, gpu_s in loans.borrowed_gpu_s.items():
            groups[key] = replace(groups[key], borrowed_gpu_seconds=gpu_s)
        for key, gpu_s in _lent(loans.lent_gpu_s, by, each[0].key).items():
            groups[key] = replace(groups.get(key, Usage(key)), lent_gpu_seconds=gpu_s)


def _lent(of_teams: Mapping[str, float], by: str, day: str) -> Mapping[str, float]:
    """Return what was lent by group: by team, or on that day by all of them."""
    if by == "team":
        return of_teams
    return {day: sum(of_teams.values())} if by == "day" else {}


def _caused(trials: Sequence[TrialUse], by: str, since_s: float, now_s: float) -> dict[str, int]:
    """Return how many preemptions each group has caused: its trials started on the GPUs first."""
    starts = _starts(trials)
    caused: dict[str, int] = defaultdict(int)
    for number, trial in enumerate(trials):
        for end_s, gpus in _preemptions(trial):
            queues = (starts[trial.pool, gpu] for gpu in gpus)
            takers = [taker for queue in queues if (taker := _taker(queue, end_s, number))]
            if takers and since_s <= end_s <= now_s:
                caused[_day(end_s) if by == "day" else _key(trials[min(takers)[1]], by)] += 1
    return caused


def _preemptions(trial: TrialUse) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield when the trial was preempted, and on which GPUs."""
    for segment in trial.segments:
        if segment.outcome == "preempted" and segment.end_s is not None:
            yield segment.end_s, segment.gpus


def _starts(trials: Sequence[TrialUse]) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """Return when which trials, by their place, began on each GPU of each pool, in order."""
    starts: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for number, trial in enumerate(trials):
        for segment in trial.segments:
            for gpu in segment.gpus:
                starts[trial.pool, gpu].append((segment.start_s, number))
    for each in starts.values():
        each.sort()
    return starts


def _taker(
    starts: Sequence[tuple[float, int]], end_s: float, number: int
) -> tuple[float, int] | None:
    """Return the start of another trial that is the first one on a GPU after that time, if soon."""
    place = bisect_left(starts, (end_s, -1))
    start = starts[place] if place < len(starts) else None
    if start is None or start[1] == number or start[0] > end_s + TAKEN_WITHIN_S:
        return None
    return start


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
    yield from ((_key(trial, by), part) for part in counting)


def _key(trial: TrialUse, by: str) -> str:
    return {"user": trial.user, "team": trial.team, "sweep": trial.sweep}[by]


def _stretches(trial: TrialUse, now_s: float) -> Iterator[_Stretch]:
    """Yield the stretches of time in which the trial waited, started or trained."""
    segments = sorted(trial.segments, key=lambda segment: segment.start_s)
    if segments:
        yield from _waits(trial, trial.submitted_s, segments[0].start_s)
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
            yield from _waits(trial, before.end_s, after.start_s)


def _waits(trial: TrialUse, start_s: float, end_s: float) -> Iterator[_Stretch]:
    """Yield the parts of that time in which neither the trial nor its sweep had ended."""
    for ended_s, continued_s in sorted(trial.ended_spans):
        yield _Stretch(start_s, min(ended_s, end_s), waiting=1)
        start_s = max(start_s, continued_s)
    yield _Stretch(start_s, end_s, waiting=1)


def _by_day(whole: _Stretch) -> Iterator[_Stretch]:
    """Yield the part of each day (UTC); the last one has the preemption."""
    start_s = whole.start_s
    while start_s < whole.end_s:
        end_s = min(whole.end_s, day_end_s(start_s))
        is_preempted = whole.is_preempted and end_s == whole.end_s
        yield replace(whole, start_s=start_s, end_s=end_s, is_preempted=is_preempted)
        start_s = end_s


def _day(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).date().isoformat()


# -- borrowed and lent GPU time -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """GPUs that a trial held from `start_s` to `end_s`, for a team, counted under `key`."""

    team: str
    key: str
    start_s: float
    end_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class LoanTime:
    """GPU-seconds that were borrowed, by key, and that were lent, by team."""

    borrowed_gpu_s: dict[str, float]
    lent_gpu_s: dict[str, float]

    @classmethod
    def from_spans(cls, spans: Iterable[HeldSpan], quota: Quota) -> LoanTime:
        """Return the loans of these spans under the quota.

        At each moment a team borrows what it holds beyond its guarantee. Each of its keys borrows
        in proportion to the GPUs of the team that it holds. Teams with idle guaranteed GPUs lend in
        proportion to these; only what exceeds them comes from GPUs that no team is guaranteed.
        """
        ledger = _Ledger(quota)
        changes = sorted(
            (change for span in spans if span.end_s > span.start_s for change in _changes(span)),
            key=lambda change: change[0],
        )
        for at_s, span, gpus in changes:
            ledger.advance(at_s)
            ledger.change(span, gpus)
        return cls(dict(ledger.borrowed), dict(ledger.lent))


def _changes(span: HeldSpan) -> tuple[tuple[float, HeldSpan, int], ...]:
    return (span.start_s, span, span.gpus), (span.end_s, span, -span.gpus)


class _Ledger:
    """The GPUs that teams hold at a moment, and the GPU time borrowed and lent until then.

    `_part_s` is the integral over time of the part of a team's GPUs that it borrows.
    """

    def __init__(self, quota: Quota) -> None:
        self.borrowed: dict[str, float] = defaultdict(float)
        self.lent: dict[str, float] = defaultdict(float)
        self._guaranteed = {team.name: team.guaranteed for team in quota.everyone}
        self._held = Counter[str]()
        self._of_key = Counter[tuple[str, str]]()
        self._part_s: dict[str, float] = defaultdict(float)
        self._counted_s: dict[tuple[str, str], float] = {}
        self._at_s = 0.0

    def advance(self, at_s: float) -> None:
        """Count the time until then."""
        passed_s, self._at_s = at_s - self._at_s, at_s
        if passed_s <= 0 or not self._of_key:
            return
        held, guaranteed = self._held, self._guaranteed
        beyond = {team: max(0, held[team] - share) for team, share in guaranteed.items()}
        idle = {team: max(0, share - held[team]) for team, share in guaranteed.items()}
        idle_gpus = sum(idle.values())
        part_lent = min(1.0, sum(beyond.values()) / idle_gpus) if idle_gpus else 0.0
        for team in guaranteed:
            if beyond[team]:
                self._part_s[team] += passed_s * beyond[team] / held[team]
            if idle[team] and part_lent:
                self.lent[team] += passed_s * idle[team] * part_lent

    def change(self, span: HeldSpan, gpus: int) -> None:
        """Count GPUs that a trial takes or, below 0, leaves."""
        team = span.team if span.team in self._guaranteed else ""
        place = team, span.key
        part_s = self._part_s[team]
        held = self._of_key[place]
        if held:
            self.borrowed[span.key] += held * (part_s - self._counted_s[place])
        self._counted_s[place] = part_s
        self._of_key[place] = held + gpus
        self._held[team] += gpus
        if held + gpus == 0:
            del self._of_key[place], self._counted_s[place]


# -- as columns -----------------------------------------------------------------------------------


COLUMNS = {
    "trials": "trials", "gpu_seconds": "GPU-s", "trained_gpu_seconds": "trained",
    "lost_gpu_seconds": "lost", "borrowed_gpu_seconds": "borrowed", "lent_gpu_seconds": "lent",
    "waiting_seconds": "waiting, s", "preemptions": "preempted", "preemptions_caused": "caused",
}  # fmt: skip
"""The figures of a row, and their heads in the table."""
WHOLE_POOL_COLUMNS = ("borrowed_gpu_seconds", "lent_gpu_seconds", "preemptions_caused")
"""The figures that follow from the sweeps of all users together."""
PRICE = {"price": "price"}
UNKNOWN = {"user": "unknown", "team": "none"}


_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def spreadsheet_text(text: str) -> str:
    """Return a text for a CSV cell; an apostrophe keeps spreadsheets from reading a formula."""
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


def csv_text(by: str, rows: Sequence[Figures], columns: Mapping[str, str]) -> str:
    """Return the rows as CSV, with a header line.

    A key that a spreadsheet would read as a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((by, *columns))
    for row in rows:
        writer.writerow((spreadsheet_text(str(row["key"])), *(row[name] for name in columns)))
    return out.getvalue()


def key_text(by: str, row: Figures) -> str:
    """Return the key of a row for people: a word where the user or the team is not known."""
    return str(row["key"]) or UNKNOWN.get(by, "")


def number_text(name: str, value: str | float | None) -> str:
    """Return a figure as text: prices with cents, an empty text for None."""
    if value is None or isinstance(value, str):
        return ""
    return f"{value:,.2f}" if name in PRICE else f"{value:,.0f}"
