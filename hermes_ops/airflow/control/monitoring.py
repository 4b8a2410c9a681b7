"""Metrics of a controller and its pool for Prometheus, and the HTTP server that serves them.

The names of the metrics stand here and nowhere else. `/metrics` is for Prometheus, `/livez` and
`/readyz` are for probes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from time import gmtime, strftime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer

from hermes_ops.airflow.control.decisions import action_name
from hermes_ops.airflow.control.pool_health import (
    FailureCounter,
    idle_gpus,
    longest_start_s,
    oldest_checkpoint_s,
    silent_trials,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.core.model import Phase, Snapshot, SweepId
from hermes_ops.core.plan import Action, Stop
from hermes_ops.core.quota import Quota, TeamHolding, team_holdings
from hermes_ops.errors import ConfigError, Problem, Unavailable, error_text
from hermes_ops.trial.failure import Cause

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("hermes.controller")

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
        self._add_health()
        for gauge in (self._gpus, self._held, self._leading, self._preemptions):
            gauge.labels(pool)  # there from the start, at zero: a rate then misses no first step
        for outcome in ("done", "skipped", "failed"):
            self._rounds.labels(pool, outcome)
        for action in ("start", "stop", "end", "resize"):
            self._decisions.labels(pool, action)
        self._age.labels(pool).set(nan)

    def _add_health(self) -> None:
        """Add what shows that trials do not get on although rounds are done."""
        self._idle = self._gauge(
            "hermes_gpus_idle", "Free GPUs while a trial waits that could start on them; else 0."
        )
        self._start_s = self._gauge(
            "hermes_trial_start_seconds",
            "Seconds since the oldest grant of GPUs whose trial does not run yet; 0 without any.",
        )
        self._silent = self._gauge(
            "hermes_trials_silent",
            "Running trials without a new value for far longer than they usually take.",
        )
        self._checkpoint_s = self._gauge(
            "hermes_checkpoint_age_seconds",
            "Seconds of training that no checkpoint holds, of the running trial with the most.",
        )
        self._failures = self._counter(
            "hermes_trial_failures",
            "Failures of trials, also of those that are tried again.",
            "cause",
        )
        self._failed = FailureCounter()
        self._teams = TeamMetrics(self._pool, self.registry)
        for gauge in (self._idle, self._start_s, self._silent, self._checkpoint_s):
            gauge.labels(self._pool)
        for cause in Cause:
            self._failures.labels(self._pool, cause.value)

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
        """Return whether the loop has beaten within `STALLED_S`."""
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

    def watch_disk(self, folder: Path) -> None:
        """Show at each scrape what is free on the file system of the state folder."""
        reads: tuple[tuple[str, str, Callable[[os.statvfs_result], float]], ...] = (
            ("free_bytes", "Bytes that may still be written to the state folder.",
             lambda disk: disk.f_bavail * disk.f_frsize),
            ("size_bytes", "Size of the state folder's file system in bytes.",
             lambda disk: disk.f_blocks * disk.f_frsize),
            # Some file systems have no fixed number of files.
            ("free_inodes", "Files that may still be made in the state folder.",
             lambda disk: disk.f_favail if disk.f_files else nan),
            ("inodes", "Files that the state folder's file system can hold.",
             lambda disk: disk.f_files or nan),
        )  # fmt: skip
        for name, text, read in reads:
            gauge = self._gauge(f"hermes_state_folder_{name}", text)
            gauge.labels(self._pool).set_function(partial(_read_disk, folder, read))

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time one round and count how it ended; what it raises is passed on."""
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
        rounds = before.rounds + 1 if before else 1
        self.trouble = Trouble(since_s, rounds, error_text(error))

    def _failing_s(self) -> float:
        trouble = self.trouble
        return 0.0 if trouble is None else max(0.0, self._clock() - trouble.since_s)

    @property
    def unready(self) -> str:
        """Return why this controller does not do its work now; empty while it does."""
        trouble = self.trouble
        if not self.alive:
            return "the controller's loop hangs"
        if trouble is None:
            return ""
        since = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(trouble.since_s))
        return f"rounds have failed since {since} ({trouble.rounds} in a row): {trouble.reason}"

    def observed_problems(self, steps: int) -> None:
        """Show how many steps of single sweeps and trials fail now."""
        self._problems.labels(self._pool).set(steps)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Time one decision."""
        with self._decision_s.labels(self._pool).time():
            yield

    def observed(
        self, snapshot: Snapshot, max_parallel: Mapping[SweepId, int] = MappingProxyType({})
    ) -> None:
        """Show the pool as this round saw it; `max_parallel` are the limits of sweeps."""
        counts = Tally(job.phase for job in snapshot.jobs)
        for phase in Phase:
            self._trials.labels(self._pool, phase.value).set(counts[phase])
        self._gpus.labels(self._pool).set(len(snapshot.gpus))
        self._held.labels(self._pool).set(sum(len(job.gpus_held) for job in snapshot.holding))
        self._start_s.labels(self._pool).set(longest_start_s(snapshot))
        self._silent.labels(self._pool).set(silent_trials(snapshot))
        self._idle.labels(self._pool).set(idle_gpus(snapshot, max_parallel))

    def observed_teams(self, snapshot: Snapshot, quota: Quota | None) -> None:
        """Show what each team of the pool's quota holds and waits for; no team without a quota."""
        holdings = () if quota is None else team_holdings(snapshot, quota)
        self._teams.observe(holdings, snapshot.time_s)

    def observed_trials(self, trials: Mapping[str, Sequence[TrialRecords]], now_s: float) -> None:
        """Show what has been recorded of the trials of every sweep that runs, by sweep."""
        age_s = max(
            (oldest_checkpoint_s(records, now_s) for records in trials.values()), default=0.0
        )
        self._checkpoint_s.labels(self._pool).set(age_s)
        for cause, failures in self._failed.new_failures(trials):
            self._failures.labels(self._pool, cause).inc(failures)

    def decided(self, snapshot: Snapshot, actions: Sequence[Action]) -> None:
        """Count what is carried out; a preemption is a stop of a trial that trains."""
        for action in actions:
            self._decisions.labels(self._pool, action_name(action)).inc()
            stops = isinstance(action, Stop) and not action.final
            if stops and snapshot.index[action.job].phase is Phase.RUNNING:
                self._preemptions.labels(self._pool).inc()


def _read_disk(folder: Path, read: Callable[[os.statvfs_result], float]) -> float:
    """Return a fact of the folder's file system; NaN where nothing can be read."""
    try:
        return read(os.statvfs(folder))
    except OSError:
        return nan


LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = LOOPBACK
    port: int = 0

    @classmethod
    def from_environment(cls) -> Address:
        """Read HERMES_METRICS_HOST and HERMES_METRICS_PORT; raise ConfigError for a bad port."""
        text = os.environ.get("HERMES_METRICS_PORT") or "0"
        if not text.isdecimal() or int(text) > HIGHEST_PORT:
            problem = Problem(
                "HERMES_METRICS_PORT", repr(text), f"0 to {HIGHEST_PORT}", "correct or unset it"
            )
            raise ConfigError("the controller's environment", (problem,))
        return cls(os.environ.get("HERMES_METRICS_HOST") or LOOPBACK, int(text))


class _SilentHandler(WSGIRequestHandler):
    """Writes no line a scrape."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - its base's
        pass


def application(monitor: Monitor) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    """Return the WSGI application of one controller."""
    metrics = make_wsgi_app(monitor.registry)

    def serve(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return list(metrics(environ, start))
        if path in ("/livez", "/readyz"):
            hangs = "" if monitor.alive else monitor.unready
            why = monitor.unready if path == "/readyz" else hangs
            start("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain")])
            return [f"{why or 'ok'}\n".encode()]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/metrics, /livez, /readyz\n"]

    return serve


def serve(monitor: Monitor, address: Address) -> WSGIServer | None:
    """Listen in the background; None, with a line in the log, where the port is taken.

    A controller without its metrics still schedules.
    """
    try:
        server = make_server(
            address.host, address.port, application(monitor), ThreadingWSGIServer, _SilentHandler
        )
    except OSError as error:
        log.error(
            "No metrics: %s:%s cannot be used (%s): choose another with HERMES_METRICS_PORT",
            address.host, address.port, error.strerror or error,
        )  # fmt: skip
        return None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("Metrics at http://%s:%s/metrics", address.host, server.server_port)
    return server


_TEAM_LABELS = ("pool", "team")


class TeamMetrics:
    """Metrics of the GPUs that teams hold, and of their GPU time since this controller started.

    Between two observations a team is taken to hold what it held at the first one. The label `team`
    is empty for the users of no team.
    """

    def __init__(self, pool: str, registry: CollectorRegistry) -> None:
        self._pool = pool
        self._gpus = Gauge(
            "hermes_team_gpus",
            "GPUs of a team of the pool's quota: held, borrowed (of those held), guaranteed.",
            (*_TEAM_LABELS, "kind"),
            registry=registry,
        )
        self._waiting = Gauge(
            "hermes_team_trials_waiting",
            "Waiting trials of a team.",
            _TEAM_LABELS,
            registry=registry,
        )
        self._gpu_s = Counter(
            "hermes_team_gpu_seconds",
            "GPU-seconds of a team: held, borrowed (of those held).",
            (*_TEAM_LABELS, "kind"),
            registry=registry,
        )
        self._holdings: Sequence[TeamHolding] = ()
        self._at_s: float | None = None

    def observe(self, holdings: Sequence[TeamHolding], now_s: float) -> None:
        """Set the metrics to these holdings; remove those of teams that are not among them."""
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
