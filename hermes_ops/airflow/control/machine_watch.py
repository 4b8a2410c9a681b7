"""The machines of a pool: which have a worker now, which GPUs may be granted, how many slots.

The executor's own workers are asked, in a thread.

A machine counts while exactly one worker takes its queue. It is away once that has not been seen
for `SETTLE_S`: a worker that restarts, or answers late, costs no trial its GPUs. While nobody
answers for the executor, what was seen last holds: a broker that is away says nothing of a machine,
and workers take up to `RECONNECT_S` to come back to it.
"""

from __future__ import annotations

import ast
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.hosts import configured_executors
from hermes_ops.airflow.machines import MACHINES_VARIABLE, WITH_QUEUES, MachineSlots, queue_of
from hermes_ops.airflow.metadata_rows import OCCUPYING
from hermes_ops.errors import HermesError, Unavailable

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

log = logging.getLogger(__name__)

SETTLE_S = 10.0
PERIOD_S = 2.0

RECONNECT_S = 40.0
"""Seconds that workers may take to come back to a broker that was away, as they pause meanwhile."""


class WorkerRegistry(Protocol):
    """The workers that an executor knows."""

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable if nobody answers."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A machine that is away: since when, in Unix seconds, and why."""

    since_s: float
    reason: str


@dataclass(slots=True)
class MachineWatch:
    """Remembers when each machine was last seen; safe in threads."""

    machines: MachineSlots
    registry: WorkerRegistry
    clock: Callable[[], float] = time.time
    _seen_s: dict[str, float] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _begun_s: float = 0.0
    _looked_s: float | None = None
    _complaint: str = ""
    _away: frozenset[str] = frozenset()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._begun_s = self.clock()

    def look(self) -> None:
        """Ask for the workers once, and remember the answer."""
        try:
            takers = self.registry.takers()
        except Unavailable as error:
            if str(error) != self._complaint:
                log.warning("The workers are not known now: %s", error)
            self._complaint = str(error)
            return
        now_s = self.clock()
        with self._lock:
            if self._complaint and self._looked_s is not None:
                for name in self.machines.names:
                    if name not in self._away:
                        self._seen_s[name] = now_s + RECONNECT_S - SETTLE_S
            self._complaint, self._looked_s = "", now_s
            for name in self.machines.names:
                reason = trouble_of(name, takers.get(queue_of(name), ()))
                if reason:
                    self._reasons[name] = reason
                else:
                    self._seen_s[name] = now_s
        self._log_changes()

    def away(self) -> dict[str, Absence]:
        """Return the machines that are away; Unavailable before the first answer."""
        with self._lock:
            if self._looked_s is None:
                raise Unavailable(
                    "the workers of the machines are not known yet: "
                    f"{self._complaint or 'the executor is being asked'}"
                )
            return {
                name: Absence(self._last_s(name), self._reasons.get(name, ""))
                for name in self.machines.names
                if self._looked_s - self._last_s(name) > SETTLE_S
            }

    def _last_s(self, name: str) -> float:
        """Return when a machine was seen last; one that was never seen counts from the start."""
        return self._seen_s.get(name, self._begun_s)

    def _log_changes(self) -> None:
        away = self.away()
        for name in sorted(away.keys() - self._away):
            log.warning("The machine %s is away: %s", name, away[name].reason)
        for name in sorted(self._away - away.keys()):
            log.info("The machine %s is back", name)
        self._away = frozenset(away)

    def start(self) -> None:
        """Ask for the workers periodically, in a thread."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="machines")
        self._thread.start()

    def close(self) -> None:
        """End the thread after its look; do not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # whatever a broker's client raises: the next look may do better
                log.exception("The workers could not be asked")
            self._stop.wait(PERIOD_S)


def trouble_of(machine: str, workers: Sequence[str]) -> str:
    """Return why a machine whose queue these workers take cannot have trials; empty if it can."""
    queue = queue_of(machine)
    if not workers:
        return f"no worker takes its queue {queue}"
    if len(workers) > 1:
        names = ", ".join(sorted(workers))
        return f"{len(workers)} workers take its queue {queue}: end all but one of {names}"
    return ""


ANSWER_S = 2.0
"""Seconds in which Celery's workers answer."""

EDGE_ALIVE = ("starting", "running", "idle")
"""States of an Edge worker that takes tasks; its executor gives one without a heartbeat another."""


@dataclass(frozen=True, slots=True)
class CeleryWorkers:
    """Celery's workers, which answer over the broker."""

    app: Any  # a celery.Celery

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable without a broker."""
        try:
            answers = self.app.control.inspect(timeout=ANSWER_S).active_queues() or {}
        except Exception as error:  # each transport of Celery's has errors of its own
            raise Unavailable(f"Celery's broker did not answer: {error}") from error
        takers: dict[str, list[str]] = {}
        for worker, queues in answers.items():
            for queue in queues:
                takers.setdefault(str(queue["name"]), []).append(str(worker))
        return takers


@dataclass(frozen=True, slots=True)
class EdgeWorkers:
    """The workers of EdgeExecutor, as its table in Airflow's database has them."""

    engine: Engine

    def takers(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the workers that take each queue; Unavailable without the table."""
        from sqlalchemy import column, exc, select, table

        names: list[Any] = [column("worker_name"), column("queues"), column("state")]
        query = select(*names[:2]).select_from(table("edge_worker", *names))
        query = query.where(names[2].in_(EDGE_ALIVE))
        try:
            with self.engine.connect() as connection:
                rows = connection.execute(query).all()
        except exc.SQLAlchemyError as error:
            raise Unavailable(f"the table edge_worker cannot be read: {error}") from error
        takers: dict[str, list[str]] = {}
        for worker, queues in rows:
            for queue in ast.literal_eval(queues) if queues else ():
                takers.setdefault(str(queue), []).append(str(worker))
        return takers


def registry_of(engine: Engine) -> WorkerRegistry:
    """Return the workers of the executor that Airflow's configuration names.

    HermesError where none of its executors hands tasks to workers on other machines.
    """
    names = [path.rpartition(".")[2] for path in configured_executors()]
    if "CeleryExecutor" in names:
        try:
            from airflow.providers.celery.executors.celery_executor_utils import app
        except ImportError as error:
            raise HermesError(
                f"Celery cannot be imported where the controller runs ({error}): install "
                "apache-airflow-providers-celery and a Celery that it works with, as for Airflow's "
                "scheduler."
            ) from error
        return CeleryWorkers(app)
    if "EdgeExecutor" in names:
        return EdgeWorkers(engine)
    raise HermesError(
        f"{MACHINES_VARIABLE} is set, and Airflow's executor is {', '.join(names) or 'unknown'}: "
        f"machines need {' or '.join(WITH_QUEUES)}. Set [core] executor, also for the "
        f"controller, or remove {MACHINES_VARIABLE}."
    )


RECHECK_S = 10.0
"""Seconds after which the pool's slots are set again: a person may have changed them."""


class Pools(Protocol):
    """Airflow's pools."""

    def resize_pool(self, name: str, slots: int) -> None:
        """Give the pool that many slots; NotPermitted if Airflow does not let this user."""


@dataclass(slots=True)
class PoolMachines:
    """The machines of one pool, none where it has none; the workers that are alive count."""

    machines: MachineSlots = field(default_factory=MachineSlots)
    watch: MachineWatch | None = None
    away: Mapping[str, Absence] = field(default_factory=dict)
    _slots: int = -1
    _again_s: float = 0.0

    def refresh(self) -> None:
        """See which machines are away; Unavailable before that is known."""
        if self.watch is not None:
            self.away = self.watch.away()

    def close(self) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()

    @property
    def lendable(self) -> frozenset[int] | None:
        """Return the slots whose GPUs may be granted now; None: all of the pool."""
        if not self.machines.of_slot:
            return None
        return self.machines.slots_of(n for n in self.machines.names if n not in self.away)

    def follow(self, pool: str, pools: Pools, trials: Iterable[TrialRecords], now_s: float) -> None:
        """Set the pool's slots to the GPUs of the machines that are there.

        Tasks that Airflow still counts on a machine that is away keep their slots until it gives
        them up: nobody else waits for those meanwhile.
        """
        lendable = self.lendable
        if lendable is None:
            return
        slots = len(lendable) + sum(
            trial.row.pool_slots
            for trial in trials
            if trial.row.state in OCCUPYING
            and trial.lease is not None
            and trial.lease.machine in self.away
        )
        if slots != self._slots or is_due(now_s, self._again_s, RECHECK_S):
            pools.resize_pool(pool, slots)
            self._slots, self._again_s = slots, now_s + RECHECK_S

    def view(self) -> dict[str, Any]:
        """Return what people see of the machines."""
        return {name: self._machine(name) for name in self.machines.names}

    def _machine(self, name: str) -> dict[str, Any]:
        slots, absence = self.machines.slots_of([name]), self.away.get(name)
        machine: dict[str, Any] = {"first_gpu": min(slots), "gpus": len(slots)}
        if absence is not None:
            machine |= {"away_since_s": absence.since_s, "reason": absence.reason}
        return machine
