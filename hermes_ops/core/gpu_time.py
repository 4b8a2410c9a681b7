"""GPU time that was used: by each user in the day and the month, by each team with a half-life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import log

from hermes_ops.core.model import Snapshot
from hermes_ops.core.quota import Quota

GpuSeconds = tuple[tuple[str, float], ...]
"""GPU-seconds by user, sorted by user."""


@dataclass(frozen=True, slots=True)
class GpuTime:
    """The GPU-seconds of users in the day and the month of `at_s`, and what they hold since then.

    `is_known` is False until what was used before has been counted.
    """

    day: GpuSeconds = ()
    month: GpuSeconds = ()
    held: tuple[tuple[str, int], ...] = ()
    at_s: float | None = None
    is_known: bool = True

    @classmethod
    def from_spans(cls, spans: Iterable[tuple[str, float, float, int]], now_s: float) -> GpuTime:
        """Return the GPU time at `now_s` of spans (user, start, end, GPUs), in Unix seconds.

        What lies after `now_s` does not count.
        """
        begins_s = day_start_s(now_s), month_start_s(now_s)
        totals: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for user, start_s, end_s, gpus in spans:
            for begin_s, total in zip(begins_s, totals, strict=True):
                seconds = min(end_s, now_s) - max(start_s, begin_s)
                if seconds > 0:
                    _add(total, user, gpus * seconds)
        return cls(_frozen(totals[0]), _frozen(totals[1]), (), now_s)

    def advance(self, snapshot: Snapshot, users: Collection[str]) -> GpuTime:
        """Return the GPU time at the snapshot's time, with what these users use in it.

        Each has used since `at_s` what it used then. Time that goes backwards counts as none.
        """
        now_s = snapshot.time_s
        since_s = now_s if self.at_s is None else min(self.at_s, now_s)
        day = self._until(self.day, day_start_s(now_s), since_s, now_s)
        month = self._until(self.month, month_start_s(now_s), since_s, now_s)
        holds = Counter[str]()
        for job in snapshot.holding:
            if job.user in users:
                holds[job.user] += job.gpus_used
        return GpuTime(day, month, tuple(sorted((+holds).items())), now_s, self.is_known)

    def _until(
        self, before: GpuSeconds, begin_s: float, since_s: float, now_s: float
    ) -> GpuSeconds:
        """Return what users have had since `begin_s`: nothing of `before` if that is over."""
        total: dict[str, float] = {}
        if since_s >= begin_s:
            for user, gpu_s in before:
                _add(total, user, gpu_s)
        for user, gpus in self.held:
            _add(total, user, gpus * (now_s - max(since_s, begin_s)))
        return _frozen(total)

    def plus(self, earlier: GpuTime) -> GpuTime:
        """Return this GPU time and what was used before another, earlier moment."""
        if earlier.at_s is None:
            return self
        if self.at_s is None:
            return earlier
        sums = []
        for current, before, start_s in (
            (self.day, earlier.day, day_start_s),
            (self.month, earlier.month, month_start_s),
        ):
            total: dict[str, float] = {}
            for user, gpu_s in (*current, *(before if earlier.at_s >= start_s(self.at_s) else ())):
                _add(total, user, gpu_s)
            sums.append(_frozen(total))
        return GpuTime(sums[0], sums[1], self.held, self.at_s)


def day_start_s(now_s: float) -> float:
    """Return when the day (UTC) of that moment began."""
    return _midnight(now_s).timestamp()


def month_start_s(now_s: float) -> float:
    """Return when the month (UTC) of that moment began."""
    return _midnight(now_s).replace(day=1).timestamp()


def day_end_s(now_s: float) -> float:
    """Return when the day (UTC) of that moment ends."""
    return (_midnight(now_s) + timedelta(days=1)).timestamp()


def month_end_s(now_s: float) -> float:
    """Return when the month (UTC) of that moment ends."""
    first = _midnight(now_s).replace(day=1)
    return (first + timedelta(days=32)).replace(day=1).timestamp()


def _midnight(now_s: float) -> datetime:
    moment = datetime.fromtimestamp(now_s, UTC)
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def _add(total: dict[str, float], user: str, gpu_s: float) -> None:
    total[user] = total.get(user, 0.0) + gpu_s


def _frozen(total: Mapping[str, float]) -> GpuSeconds:
    return tuple(sorted(total.items()))


@dataclass(frozen=True, slots=True)
class DecayedUse:
    """The decayed GPU-seconds of each team at `at_s`, and the GPUs that it holds from then on.

    Source: the half-life of Slurm's multifactor priority plug-in.
    """

    gpu_s: tuple[tuple[str, float], ...] = ()
    held: tuple[tuple[str, int], ...] = ()
    at_s: float | None = None

    @classmethod
    def from_spans(
        cls, spans: Iterable[tuple[str, float, float, int]], half_life_s: float, now_s: float
    ) -> DecayedUse:
        """Return the use at `now_s` of spans (team, start, end, GPUs), in seconds.

        What lies after `now_s` does not count.
        """
        use: dict[str, float] = {}
        for team, start_s, end_s, gpus in spans:
            older_s, newer_s = now_s - start_s, max(0.0, now_s - end_s)
            if older_s > newer_s:
                part = 2.0 ** (-newer_s / half_life_s) - 2.0 ** (-older_s / half_life_s)
                use[team] = use.get(team, 0.0) + gpus * half_life_s / log(2) * part
        return cls(tuple(sorted(use.items())), (), now_s)

    def advance(self, snapshot: Snapshot, quota: Quota) -> DecayedUse:
        """Return the use at the snapshot's time, with the GPUs that teams use in it.

        Each team has used since `at_s` what it used then. Time that goes backwards counts as none.
        """
        passed_s = 0.0 if self.at_s is None else max(0.0, snapshot.time_s - self.at_s)
        left = 2.0 ** (-passed_s / quota.half_life_s)
        held_s = quota.half_life_s / log(2) * (1.0 - left)
        use = {team: used * left for team, used in self.gpu_s}
        for team, gpus in self.held:
            use[team] = use.get(team, 0.0) + gpus * held_s
        holds = Counter[str]()
        for job in snapshot.holding:
            holds[quota.team_of(job.virtual_cluster).name] += job.gpus_used
        held = tuple(sorted((+holds).items()))
        return DecayedUse(tuple(sorted(use.items())), held, snapshot.time_s)

    def plus(self, earlier: DecayedUse, half_life_s: float) -> DecayedUse:
        """Return this use and what was used before another, earlier moment, at this use's time."""
        if self.at_s is None:
            return earlier
        passed_s = max(0.0, self.at_s - (self.at_s if earlier.at_s is None else earlier.at_s))
        left = 2.0 ** (-passed_s / half_life_s)
        use = dict(self.gpu_s)
        for team, used in earlier.gpu_s:
            use[team] = use.get(team, 0.0) + used * left
        return DecayedUse(tuple(sorted(use.items())), self.held, self.at_s)

    def factors(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each team's weight times its fair-share factor 2^(-U / S), above 0.

        U is its part of all use, S its part of all weights (Slurm, multifactor priority). A team
        that has used what its weight promises counts half.
        """
        use = dict(self.gpu_s)
        total_use = sum(use.get(team, 0.0) for team in weights)
        total_weight = sum(weights.values())
        return {
            team: weight * 2.0 ** -_excess(use.get(team, 0.0), total_use, weight / total_weight)
            for team, weight in weights.items()
        }


_LARGEST = 60.0  # a team that has used 60 times its share comes last in any case


def _excess(use: float, total: float, share: float) -> float:
    return min(_LARGEST, use / total / share) if total > 0 else 0.0
