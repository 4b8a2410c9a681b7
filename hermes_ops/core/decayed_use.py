"""How much of a pool each team has used: GPU-seconds whose weight halves with time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log

from hermes_ops.core.model import Snapshot
from hermes_ops.core.quota import Quota


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
