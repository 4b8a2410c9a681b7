"""The calls of a round, several at a time: what fails of one sweep is kept from all others.

A call that a round makes for one sweep goes through `FaultBarrier.attempt`. What it raises is
recorded as a `Fault` and tried again later, less and less often, and the round continues. A service
that answers nobody is no fault of a sweep: then the round is skipped, as soon as a second sweep
finds that out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, ParamSpec, TypeVar

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.core.amounts import shortened, utc_text
from hermes_ops.errors import HermesError, Unavailable, error_text

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

THE_POOL = ""
"""The subject of calls that belong to no sweep."""

FIRST_PAUSE_S, LONGEST_PAUSE_S, SERVICE_PAUSE_S = 1.0, 60.0, 5.0
"""A step that failed is tried again after a second, then after two, four and so on; where a service
did not answer, in the next rounds, then each five seconds."""

MOST_TRIES = 5
"""The most tries to start a trial; then it ends as failed."""

SERVICE_PATIENCE_S = 600.0
"""Seconds after which a service that answers for other trials is taken never to answer for one."""

REASON_CHARACTERS = 1_000

SLOW_S = 1.0
"""A call that takes so long is named in the log, as all sweeps have waited for it."""

DRAW, RENDER = "draw its configuration", "make its command"
OPEN, GRANT = "open its run in MLflow", "write its lease"
STARTING = frozenset({DRAW, RENDER, OPEN, GRANT})
"""The steps of a trial's start: while one of them fails, the trial is offered no GPU."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a call: a sweep, or one trial of it."""

    sweep: str
    trial: int | None = None

    def __str__(self) -> str:
        if self.sweep == THE_POOL:
            return "the pool"
        return self.sweep if self.trial is None else f"trial {self.trial} of {self.sweep}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that fails: why, since when, how often. It is not tried again before `again_s`.

    `is_service` is True while a service did not answer, which is not the subject's own fault.
    `begun_s` is `since_s` by the uptime, which no step of the clock changes.
    """

    subject: Subject
    step: str
    reason: str
    since_s: float
    tries: int
    again_s: float
    is_service: bool
    begun_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Return whether it may be tried again."""
        return is_due(now_s, self.again_s, LONGEST_PAUSE_S)

    def __str__(self) -> str:
        times = "once" if self.tries == 1 else f"{self.tries} times"
        return f"{self.step}: failed {times} since {utc_text(self.since_s)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The answer of a call that was made."""

    value: T


@dataclass(slots=True)
class FaultBarrier:
    """Makes the calls of a round, and remembers which of them fail; safe in threads."""

    clock: Callable[[], float] = time.time
    uptime: Callable[[], float] = time.monotonic
    _faults: dict[tuple[Subject, str], Fault] = field(default_factory=dict)
    _succeeded_s: dict[str, float] = field(default_factory=dict)  # by step; the uptime
    _away: dict[str, Unavailable] = field(default_factory=dict)  # by sweep, in this round
    _answered: bool = False  # a service, in this round
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_round(self) -> None:
        """Forget who was not answered in the last round."""
        with self._lock:
            self._away, self._answered = {}, False

    def keep(self, sweeps: Collection[str]) -> None:
        """Forget the faults of all other sweeps: they have stopped running."""
        kept = {*sweeps, THE_POOL}
        with self._lock:
            self._faults = {k: f for k, f in self._faults.items() if k[0].sweep in kept}

    def attempt(
        self,
        subject: Subject,
        step: str,
        call: Callable[P, T],
        *args: P.args,
        **named: P.kwargs,
    ) -> Done[T] | None:
        """Make a call for a subject; None if it failed, or if it is too early to try again.

        Raises Unavailable once a service has answered nobody and a second sweep asks in vain.
        """
        try:
            return self._called(subject, step, lambda: call(*args, **named))
        except Unavailable as error:
            self._leave_out(subject.sweep, error)
            return None

    def isolate(
        self,
        subject: Subject,
        step: str,
        call: Callable[P, T],
        *args: P.args,
        **named: P.kwargs,
    ) -> Done[T] | None:
        """Make a call as `attempt` does, to a service that the round can do without: MLflow."""
        try:
            return self._called(subject, step, lambda: call(*args, **named))
        except Unavailable:
            return None

    def _called(self, subject: Subject, step: str, call: Callable[[], T]) -> Done[T] | None:
        if not self._is_due(subject, step):
            return None
        begun_s = time.monotonic()
        try:
            value = call()
        except Exception as error:  # whatever it is: the others must go on
            self.note(subject, step, error)
            if isinstance(error, Unavailable):
                raise
            return None
        self.clear(subject, step)
        took_s = time.monotonic() - begun_s
        if took_s >= SLOW_S:
            log.warning("Of %s: %s took %.1f s, for which the round waited", subject, step, took_s)
        return Done(value)

    def note(self, subject: Subject, step: str, error: Exception) -> None:
        """Record that a step failed."""
        now_s, key, is_service = self.clock(), (subject, step), isinstance(error, Unavailable)
        reason = shortened(error_text(error), REASON_CHARACTERS)
        with self._lock:
            before = self._faults.get(key)
            tries = 1 if before is None else before.tries + 1
            pause_s = _pause_s(tries, is_service)
            again_s = now_s + pause_s
            first = (now_s, self.uptime()) if before is None else (before.since_s, before.begun_s)
            fault = Fault(subject, step, reason, first[0], tries, again_s, is_service, first[1])
            self._faults[key] = fault
        if before is None or before.reason != reason:
            trace = None if isinstance(error, HermesError) else error
            log.warning("Of %s: %s", subject, fault, exc_info=trace)

    def clear(self, subject: Subject, step: str) -> None:
        """Record that a step succeeded."""
        with self._lock:
            self._succeeded_s[step] = self.uptime()
            self._faults.pop((subject, step), None)

    def forget(self, subject: Subject) -> None:
        """Forget all that failed of a subject: it has ended."""
        with self._lock:
            self._faults = {k: f for k, f in self._faults.items() if k[0] != subject}

    def answered(self) -> None:
        """Say that a service has answered in this round."""
        self._answered = True

    def end_round(self) -> None:
        """Raise Unavailable if a service was asked in this round and has answered nobody."""
        with self._lock:
            away = next(iter(self._away.values()), None)
            if away is not None and not self._answered:
                raise away

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return all that fails now, the oldest first."""
        with self._lock:
            return tuple(sorted(self._faults.values(), key=lambda f: f.since_s))

    def starting(self, sweep: str) -> dict[int, Fault]:
        """Return the trials of a sweep whose start fails, by number."""
        return {
            f.subject.trial: f
            for f in self.faults
            if f.subject.sweep == sweep and f.subject.trial is not None and f.step in STARTING
        }

    def is_hopeless(self, fault: Fault) -> bool:
        """Return whether a trial's start has been tried often enough."""
        if not fault.is_service:
            return fault.tries >= MOST_TRIES
        others_s = self._succeeded_s.get(fault.step, -inf)
        return self.lasted_s(fault) >= SERVICE_PATIENCE_S and others_s > fault.begun_s

    def lasted_s(self, fault: Fault) -> float:
        """Return the seconds since the step first failed, however the clock was set meanwhile."""
        return self.uptime() - fault.begun_s

    def _is_due(self, subject: Subject, step: str) -> bool:
        with self._lock:
            fault = self._faults.get((subject, step))
            if subject.sweep in self._away:
                return False
            return fault is None or fault.is_due(self.clock())

    def _leave_out(self, sweep: str, error: Unavailable) -> None:
        """Ask nothing more for that sweep in this round; raise if nobody is answered."""
        with self._lock:
            self._away[sweep] = error
            if len(self._away) > 1 and not self._answered:
                raise error


def _pause_s(tries: int, is_service: bool) -> float:
    """Return the seconds to wait after `tries` tries; a service may be back at once."""
    if is_service:
        return SERVICE_PAUSE_S if tries >= MOST_TRIES else 0.0
    return float(min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S))


CONCURRENT_REQUESTS = 4
"""Requests at the same time; with SQLite one, as its writers would only wait for each other."""


@dataclass(slots=True)
class RequestPool:
    """Runs calls concurrently; with a concurrency of 1, one after the other."""

    concurrency: int = 1
    in_background: bool = False
    """Run calls in a thread also with a concurrency of 1, so that the caller does not wait."""
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="requests")

    def submit(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Start the call; its future gets the result or the error. A call must submit no other."""
        if self.concurrency > 1 or self.in_background:
            return self._pool.submit(call, *args, **named)
        try:
            return resolved(call(*args, **named))
        except Exception as error:  # the future passes it on
            return rejected(error)


def results_of(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of all calls, once each is over; raises the first error."""
    wait(futures)
    return [call.result() for call in futures]


def resolved(answer: T) -> Future[T]:
    """Return a future that holds this result."""
    future: Future[T] = Future()
    future.set_result(answer)
    return future


def rejected(error: Exception) -> Future[Any]:
    """Return a future that holds this error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
