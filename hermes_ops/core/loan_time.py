"""How much GPU time teams have borrowed and lent, from what their trials held."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hermes_ops.core.quota import Quota


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
        beyond = {team: max(0, held[team] - own) for team, own in guaranteed.items()}
        idle = {team: max(0, own - held[team]) for team, own in guaranteed.items()}
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
