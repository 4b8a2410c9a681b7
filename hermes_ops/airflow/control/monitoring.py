"""What a controller tells Prometheus of its pool; the names stand here and nowhere else."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from time import gmtime, strftime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from hermes_ops.airflow.control.decisions import action_name
from hermes_ops.core.model import Action, Phase, Snapshot, Stop
from hermes_ops.errors import HermesError, Unavailable

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STALLED_S = 120.0
"""A loop without a round for so long hangs: each request of a round is given up after 30 s."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Rounds that fail, or are skipped as a service is away: since when, how many, the last why."""

    since_s: float
    rounds: int
    reason: str


class Monitor:
    """The metrics of one controller, in a registry of their own, and its pulse."""

    def __init__(self, pool: str = "gpus", clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._pool = pool
        self._clock = clock
        self._beat_s = clock()
        self.trouble: Trouble | None = None
        ProcessCollector(registry=self.registry)
        self._rounds = self._counter(
            "hermes_rounds", "Rounds: done, skipped (a service was away) or failed.", "outcome"
        )
        self._round_s = self._histogram(
            "hermes_round_seconds", "Seconds of one round: observe, decide, apply."
        )
        self._decision_s = self._histogram(
            "hermes_decision_seconds", "Seconds that the policy and its guards took to decide."
        )
        self._decisions = self._counter(
            "hermes_decisions", "Choices carried out: start, stop, end, resize.", "action"
        )
        self._preemptions = self._counter(
            "hermes_preemptions", "Running trials told to leave their GPUs and resume later."
        )
        self._trials = self._gauge("hermes_trials", "Trials of sweeps that run.", "phase")
        self._gpus = self._gauge("hermes_gpus", "GPUs that trials may use now.")
        self._held = self._gauge("hermes_gpus_held", "GPUs that trials hold or were granted.")
        self._leading = self._gauge("hermes_leading", "1 in the controller that leads the pool.")
        self._age = self._gauge(
            "hermes_newest_curve_point_age_seconds",
            "Seconds since the newest learning-curve point that is known; NaN while there is none.",
        )
        failing = self._gauge(
            "hermes_rounds_failing_seconds",
            "Seconds since when every round has failed or was skipped; 0 while rounds are done.",
        )
        failing.labels(pool).set_function(self._failing_s)
        self._problems = self._gauge(
            "hermes_problems",
            "Steps of single sweeps and trials that fail now and are tried again.",
        )
        self._problems.labels(pool)
        for gauge in (self._gpus, self._held, self._leading, self._preemptions):
            gauge.labels(pool)  # there from the start, at zero: a rate then misses no first step
        self._age.labels(pool).set(nan)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("pool", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("pool", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ("pool",), buckets=BUCKETS_S, registry=self.registry)

    def beat(self) -> None:
        """Say that the loop is alive: at each round, and at each try to lead."""
        self._beat_s = self._clock()

    @property
    def alive(self) -> bool:
        """True while the loop has beaten within `STALLED_S`."""
        return self._clock() - self._beat_s < STALLED_S

    def lead(self, leads: bool) -> None:
        """Say whether this controller leads its pool."""
        self._leading.labels(self._pool).set(int(leads))

    def follow(self, newest_s: Callable[[], float | None]) -> None:
        """Compute the age of the newest curve point at each scrape; `newest_s` is Unix time."""

        def age_s() -> float:
            at_s = newest_s()
            return nan if at_s is None else max(0.0, self._clock() - at_s)

        self._age.labels(self._pool).set_function(age_s)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time one round and count how it ended; what it raises goes on."""
        outcome = "failed"
        try:
            with self._round_s.labels(self._pool).time():
                yield
            outcome = "done"
            self.trouble = None
        except Unavailable as error:
            outcome = "skipped"
            self._fail(error)
            raise
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._rounds.labels(self._pool, outcome).inc()

    def _fail(self, error: Exception) -> None:
        before = self.trouble
        since_s = self._clock() if before is None else before.since_s
        reason = (
            str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        )
        self.trouble = Trouble(since_s, before.rounds + 1 if before else 1, reason)

    def _failing_s(self) -> float:
        trouble = self.trouble
        return 0.0 if trouble is None else max(0.0, self._clock() - trouble.since_s)

    @property
    def unready(self) -> str:
        """Why this controller does not do its work now; empty while it does."""
        trouble = self.trouble
        if not self.alive:
            return "the controller's loop hangs"
        if trouble is None:
            return ""
        since = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(trouble.since_s))
        return f"rounds have failed since {since} ({trouble.rounds} in a row): {trouble.reason}"

    def fails(self, steps: int) -> None:
        """Show how many steps of single sweeps and trials fail now."""
        self._problems.labels(self._pool).set(steps)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Time one decision."""
        with self._decision_s.labels(self._pool).time():
            yield

    def observed(self, snapshot: Snapshot) -> None:
        """Show the pool as this round saw it."""
        found = Tally(job.phase for job in snapshot.jobs)
        for phase in Phase:
            self._trials.labels(self._pool, phase.value).set(found[phase])
        self._gpus.labels(self._pool).set(len(snapshot.gpus))
        self._held.labels(self._pool).set(sum(len(job.gpus_held) for job in snapshot.holding))

    def decided(self, snapshot: Snapshot, actions: Sequence[Action]) -> None:
        """Count what is carried out; a preemption is a stop of a trial that trains."""
        for action in actions:
            self._decisions.labels(self._pool, action_name(action)).inc()
            stops = isinstance(action, Stop) and not action.final
            if stops and snapshot.index[action.job].phase is Phase.RUNNING:
                self._preemptions.labels(self._pool).inc()
