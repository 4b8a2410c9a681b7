"""The trigger that supervises a trial's pods while its task is deferred, in Airflow's triggerer.

A trial has one pod, or one on each of its nodes. The trigger runs the same code for the pods, their
stop flag and their metrics as a task's process, in threads of a process that it shares with the
other triggers. If the triggerer is killed, the next one runs the trigger again and goes on with the
pods, or with what the trial has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseTrigger, TriggerEvent
from kubernetes.config import ConfigException

from hermes_ops.airflow.accounts import SEEN_S
from hermes_ops.airflow.clock_steps import ClockSteps
from hermes_ops.airflow.folders import (
    TrialFolder,
    WakeFile,
    controller_wake_file,
    notice_text,
    read_start,
    read_stop_flag,
    write_start,
)
from hermes_ops.airflow.hosts import Host
from hermes_ops.airflow.records import StopFlag
from hermes_ops.airflow.trial.connections import URI, mlflow_variables
from hermes_ops.airflow.trial.local import GRACE_S
from hermes_ops.airflow.trial.metrics import MetricFeed, tracking_uri
from hermes_ops.airflow.trial.running_segment import TaskLogCopy, watch_segment
from hermes_ops.airflow.trial.segment_run import exit_code_reader
from hermes_ops.errors import HermesError, error_text
from hermes_ops.kubernetes import (
    ClusterPods,
    GangSegment,
    PodLimits,
    PodSegment,
    labels_of_sweep,
)
from hermes_ops.kubernetes.template import GRACE_MARGIN_S, TRIAL
from hermes_ops.tracking import Tracker
from hermes_ops.trial.outcome import INFRASTRUCTURE

POD_GRACE_S = GRACE_S + GRACE_MARGIN_S
"""Seconds that a pod has to end: those of its script, then those of hermes-trial."""

SOONEST_S, LATEST_S = 0.05, 0.5
LOOKS_A_SECOND = 2_000
"""Checks of stop flags, and of metrics, of all pods together; each pod is checked at intervals
between `SOONEST_S` and `LATEST_S`."""
LOOK_S = 5.0
"""Seconds between two checks of a pod; it is also checked as soon as its log ends."""
CONNECTIONS = 1_000
"""Concurrent connections to Kubernetes' API: each pod's log has one."""

Say = Callable[[str], None]
Event = dict[str, Any]
_HELD: set[str] = set()
"""The pods of this process."""


@dataclass(frozen=True, slots=True)
class HeldPod:
    """The pod of a trigger, as Airflow stores and shows it: no field is secret.

    `owner` is the try that made it, `start_s` how long its start may take, `cluster` the arguments
    of Airflow's Kubernetes hook; `host` and `host_name` are those of its lease. `others` are the
    names of the trial's pods on its other nodes.
    """

    sweep: str
    number: int
    epoch: int
    run_id: str
    name: str
    namespace: str
    owner: str
    start_s: float
    cluster: Mapping[str, Any]
    mlflow_conn_id: str | None = None
    host: str = ""
    host_name: str = ""
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its pods, that of the first one first."""
        return (self.name, *self.others)

    @property
    def folder(self) -> TrialFolder:
        """The trial's folder."""
        return TrialFolder.from_sweep(self.sweep, self.number)

    def pods(self) -> ClusterPods:
        """Return the client of its namespace."""
        with translate_hook_errors():
            return ClusterPods(_client(tuple(sorted(self.cluster.items()))), self.namespace)

    def segment(
        self,
        pods: ClusterPods,
        say: Say,
        limits: PodLimits,
        requests: Sequence[Any] = (),
        *,
        holder: PodTrigger | None = None,
        log_over: Callable[[], None] = lambda: None,
    ) -> PodSegment | GangSegment:
        """Return the segment of its pods; `requests` are the pods to make, none if they are made.

        The end of the first pod is the segment's.
        """
        request_of = {request.metadata.name: request for request in requests}

        def follow(name: str) -> PodSegment:
            is_first = name == self.name
            return PodSegment(
                pods,
                request=request_of.get(name),
                name=name,
                owner=self.owner,
                epoch=self.epoch,
                trial={**labels_of_sweep(self.sweep), TRIAL: str(self.number)},
                record=exit_code_reader(self.folder, self.epoch) if is_first else _no_result,
                emit=say if is_first else functools.partial(_say_of, say, name),
                limits=limits,
                holder=holder,
                log_over=log_over,
                siblings=frozenset(self.names),
                installation=Host.here().home_id,
            )

        first, *others = map(follow, self.names)
        if not others:
            return first
        begun = any(part.get("epoch") == self.epoch for part in self.folder.segments())
        return GangSegment(first, tuple(others), say, was_whole=begun)


@dataclass(slots=True)
class HeldTrial:
    """The trial of a held pod, for `watch_segment`; the controller reads its status itself."""

    folder: TrialFolder
    epoch: int
    clock_steps: ClockSteps = field(default_factory=ClockSteps)
    _step_s: float = 0.0
    _has_told: bool = False  # since when its container runs

    def wake_file(self) -> WakeFile:
        """Return the file that is touched when there is a stop flag."""
        return self.folder.wake_file()

    def stop_flag(self) -> StopFlag | None:
        """Return the stop flag of its lease."""
        return read_stop_flag(self.folder, self.epoch)

    def notice(self) -> str:
        """Return why and until when it keeps its GPUs; empty while nobody else wants them."""
        return notice_text(self.folder, self.epoch)

    def relay(self, ran_s: float | None = None) -> None:
        """Write when its segment began, if the clock was set, and since when its container runs.

        A full disk is tried again.
        """
        self._step_s += self.clock_steps.step_s()
        is_seen = ran_s is not None and ran_s >= SEEN_S and not self._has_told
        start = read_start(self.folder, self.epoch) if self._step_s or is_seen else None
        if start is None:
            return
        began_s = start.began_s if ran_s is None else time.time() - ran_s
        moved = replace(start, started_s=start.started_s + self._step_s, began_s=began_s)
        if write_start(self.folder, moved):
            self._step_s, self._has_told = 0.0, self._has_told or is_seen


class PodTrigger(BaseTrigger):
    """Supervises a trial's pods and fires once they are gone: `epoch`, exit `code`, `trouble`.

    :param held: the fields of `HeldPod`
    """

    def __init__(self, **held: Any) -> None:  # noqa: ANN401 - plain data
        super().__init__()
        self.held = HeldPod(**{**held, "others": tuple(held.get("others", ()))})

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that Airflow stores."""
        return f"{type(self).__module__}.{type(self).__qualname__}", asdict(self.held)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the pods are gone."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Event | None] = loop.create_future()
        given_up = threading.Event()
        say = functools.partial(_say, contextvars.copy_context(), self.log.info)

        def tell(event: Event | None) -> None:
            with contextlib.suppress(RuntimeError):  # the triggerer is ending
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(event))

        work = functools.partial(hold, self.held, say, given_up.is_set, tell)
        threading.Thread(target=work, daemon=True, name=self.held.name).start()
        try:
            event = await ended
        finally:
            given_up.set()
        if event is not None:
            yield TriggerEvent(event)

    async def on_kill(self) -> None:
        """End the pods, with the script's grace: a person has cleared or marked their task."""
        await asyncio.to_thread(end, self.held)


def hold(
    held: HeldPod, say: Say, given_up: Callable[[], bool], tell: Callable[[Event | None], None]
) -> None:
    """Supervise the pods until they are gone, then `tell` how they ended; None if given up.

    Any exception is reported as trouble: without an event the task would hold its slots forever.
    The remaining metrics are sent after that, so that the task does not wait for them. A triggerer
    that does not see the controller's state folder ends the pods: it could neither stop them nor
    read their files.
    """
    here = Host.here()
    if unseen := here.mismatch(held.host, held.host_name, is_pod=True):
        say(f"Its pod is ended: {unseen}.")
        with contextlib.suppress(Exception):  # else the controller ends it
            end(held)
        tell({**_event(held, INFRASTRUCTURE, unseen), "host": here.id})
        return
    try:
        feed = MetricFeed(held.run_id, held.folder, tracker(held.mlflow_conn_id), _poll_s)
    except Exception as error:  # such as an unknown address of MLflow
        tell(_event(held, INFRASTRUCTURE, error_text(error)))
        return
    _HELD.add(held.name)
    try:
        event = _outcome(held, feed, say, given_up)
        if event is not None:
            controller_wake_file().wake()
        tell(event)
    finally:
        _HELD.discard(held.name)
        feed.close()
    if event is not None:
        feed.pump_once(ended=True)


def _event(held: HeldPod, code: int, trouble: str) -> Event:
    return {"epoch": held.epoch, "code": code, "trouble": trouble}


def _outcome(
    held: HeldPod, feed: MetricFeed, say: Say, given_up: Callable[[], bool]
) -> Event | None:
    log, wake_file = TaskLogCopy.from_segment(held.folder, held.epoch, say), controller_wake_file()
    with contextlib.ExitStack() as held_open:
        held_open.callback(log.close)
        try:
            limits = PodLimits(POD_GRACE_S, held.start_s, poll_s=LOOK_S)
            segment = held.segment(held.pods(), log, limits, log_over=wake_file.wake)
            held_open.callback(segment.release)
            segment.start()
            feed.start()
            trial = HeldTrial(held.folder, held.epoch)
            _, code = watch_segment(segment, trial, say, poll_s=_poll_s, given_up=given_up)
            if code is not None:
                segment.finish()
            trouble, ran_s = segment.trouble, segment.ran_s
        except Exception as error:  # another try looks after it, or it cannot be reached
            code, trouble, ran_s = INFRASTRUCTURE, error_text(error), None
    if code is None:
        return None
    start = read_start(held.folder, held.epoch)
    if start is not None and ran_s is not None:  # for the controller, or the task, that closes it
        write_start(held.folder, replace(start, ran_s=ran_s))
    return _event(held, code, trouble)


def _poll_s() -> float:
    """Return the seconds between two checks of each pod's stop flag and metrics."""
    return min(LATEST_S, max(SOONEST_S, len(_HELD) / LOOKS_A_SECOND))


def end(held: HeldPod) -> None:
    """Delete the pods, but those which another try supervises."""
    pods = held.pods()
    for name in held.names:
        while (view := pods.fetch(name)) is not None and view.owner == held.owner:
            if view.is_being_deleted or pods.delete(view, round(POD_GRACE_S)):
                break


def _say_of(say: Say, pod: str, line: str) -> None:
    """Log a line of a pod's log with the pod's name."""
    say(f"[{pod}] {line}")


def _no_result() -> None:
    """Return the exit code in the result of a pod that leaves none."""


def tracker(mlflow_conn_id: str | None) -> Tracker:
    """Return the client of that connection's MLflow, or of this process's; one per server."""
    return _tracker(tuple(sorted(mlflow_variables(mlflow_conn_id).items())))


@functools.lru_cache(maxsize=16)
def _tracker(variables: tuple[tuple[str, str], ...]) -> Tracker:
    if not variables:
        return Tracker(tracking_uri())
    environment = dict(variables)
    return Tracker(environment[URI], variables=environment)


@functools.lru_cache(maxsize=16)
def _client(cluster: tuple[tuple[str, Any], ...]) -> Any:  # noqa: ANN401 - a client without types
    client = KubernetesHook(**dict(cluster)).core_v1_client
    client.api_client.rest_client.pool_manager.connection_pool_kw["maxsize"] = CONNECTIONS
    return client


def _say(context: contextvars.Context, log: Say, text: str) -> None:
    """Log into the task's log, which the context names."""
    context.copy().run(log, text)


@contextlib.contextmanager
def translate_hook_errors() -> Iterator[None]:
    """Raise HermesError if Airflow's hook, called in this block, finds no Kubernetes cluster."""
    try:
        yield
    except (ConfigException, AirflowException, yaml.YAMLError, OSError, ValueError) as error:
        raise HermesError(
            f"no Kubernetes cluster is known ({' '.join(str(error).split())}): run Airflow's "
            "workers and triggerer in pods with a service account, set KUBECONFIG for them, or "
            "correct the connection of kubernetes_conn_id."
        ) from error
