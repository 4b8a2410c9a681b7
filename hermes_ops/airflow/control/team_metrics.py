"""Prometheus metrics of the teams of a pool's quota."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from hermes_ops.core.loans import TeamHolding

_LABELS = ("pool", "team")


class TeamMetrics:
    """What teams hold, and the GPU time that they have had while this controller observed.

    Between two observations a team is taken to hold what it held at the first one. The label `team`
    is empty for the users of no team.
    """

    def __init__(self, pool: str, registry: CollectorRegistry) -> None:
        self._pool = pool
        self._gpus = Gauge(
            "hermes_team_gpus",
            "GPUs of a team of the pool's quota: held, borrowed (of those held), guaranteed.",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._waiting = Gauge(
            "hermes_team_trials_waiting", "Waiting trials of a team.", _LABELS, registry=registry
        )
        self._gpu_s = Counter(
            "hermes_team_gpu_seconds",
            "GPU-seconds of a team: held, borrowed (of those held).",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._holdings: Sequence[TeamHolding] = ()
        self._at_s: float | None = None

    def observe(self, holdings: Sequence[TeamHolding], now_s: float) -> None:
        """Show these holdings; teams that are not among them are shown no more."""
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        for before in self._holdings:
            for kind, gpus in (("held", before.held), ("borrowed", before.borrowed)):
                self._gpu_s.labels(self._pool, before.team, kind).inc(gpus * passed_s)
        for holding in holdings:
            self._show(holding)
        for gone in {h.team for h in self._holdings} - {h.team for h in holdings}:
            for kind in ("held", "borrowed", "guaranteed"):
                self._gpus.remove(self._pool, gone, kind)
            self._waiting.remove(self._pool, gone)
        self._holdings, self._at_s = holdings, now_s

    def _show(self, holding: TeamHolding) -> None:
        counts = {
            "held": holding.held,
            "borrowed": holding.borrowed,
            "guaranteed": holding.guaranteed,
        }
        for kind, gpus in counts.items():
            self._gpus.labels(self._pool, holding.team, kind).set(gpus)
        self._waiting.labels(self._pool, holding.team).set(holding.waiting)
        for kind in ("held", "borrowed"):
            self._gpu_s.labels(self._pool, holding.team, kind)
