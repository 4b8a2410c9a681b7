"""The lifecycle of a segment's pod: one pod a lease, deleted before its task leaves.

The pod's name follows from the trial and its lease's epoch, so a second attempt at the same lease
(its worker was killed) finds the pod of the first one and adopts it. Only the attempt that the
pod's label names may end it. The trial's own record decides how it ended, never the pod's phase.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Any

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.api import Forbidden, Pods, PodView, Rejected
from hermes_ops.kubernetes.deletion import FORCE_AFTER_S, force_at_s
from hermes_ops.kubernetes.start_diagnosis import StartDiagnosis

log = logging.getLogger(__name__)

_OVER_ITS_LIMIT = re.compile(
    r"exceeds the (total )?limit|exceeded its local ephemeral storage limit"
)
"""What a node says of a pod that has written more to its disk than the pod's own limits allow.

Of one that is evicted because the node itself has too little, it says that the node was low.
"""

FAILED, VANISHED = 1, 70
"""Exit codes where the trial left no result: 70 is a failure of the infrastructure."""

HURRIED_GRACE_S = 5
POLL_S, SHORT_POLL_S = 1.0, 0.2
QUICK_START_S = 30.0
"""Seconds in which most pods start; one that waits longer is read less often."""
LOG_PATIENCE_S = 5.0


class OwnershipLost(HermesError):
    """Another attempt at the same lease owns the pod now: it must not be touched."""


@dataclass(frozen=True, slots=True)
class PodLimits:
    """Limits in seconds: a pod's time to end and to start, and that of a mistake to be corrected.

    `mistake_s` is how long an image or a setting may fail, `poll_s` the time between two reads of a
    running pod.
    """

    grace_s: float
    start_s: float
    mistake_s: float = 60.0
    poll_s: float = POLL_S


@dataclass(slots=True)
class PodSegment:
    """A segment that runs as a pod: create or adopt it, follow its log, stop it, wait for its end.

    `record` returns the exit code of the trial's own result, None while there is none. Where
    `request` is None the pod was created before. `holder` takes over the pod once it is created.
    `siblings` are the pods of the same lease; they are not predecessors, nor are pods of another
    `installation` that has a sweep of the same name.
    `log_over` is called whenever the log has ended: the container has most likely exited.
    """

    pods: Pods
    request: Any
    name: str
    owner: str
    epoch: int
    trial: Mapping[str, str]
    record: Callable[[], int | None]
    emit: Callable[[str], None]
    limits: PodLimits
    clock: Callable[[], float] = time.monotonic
    holder: Any = None
    log_over: Callable[[], None] = lambda: None
    siblings: frozenset[str] = frozenset()
    installation: str = ""
    trouble: str = ""
    is_mistake: bool = False  # the trial's or its pod's settings: it would fail again
    _wake: threading.Event = field(default_factory=threading.Event)
    _log: LogFollower | None = None
    _uid: str | None = None
    _started_s: float | None = None
    _poll_at_s: float = -inf
    _grace_s: float | None = None  # of its deletion; None while it is to go on
    _deleted_grace_s: float | None = None  # of the last deletion
    _force_at_s: dict[str, float] = field(default_factory=dict)  # of pods being deleted, by uid
    _container_code: int | None = None  # of its container
    _exit_code: int | None = None
    _is_gone: bool = False
    _is_deleted: bool = False
    _is_over_limit: bool = False  # of disk space: it was evicted for that
    _owner_lost: bool = False
    _misconfigured_since_s: float | None = None
    _refused_since_s: float | None = None
    _running_since_s: float | None = None  # its container, as far as it was seen
    _ran_s: float | None = None
    _last_message: str = ""
    _diagnosis: StartDiagnosis = field(init=False)

    def __post_init__(self) -> None:
        self._diagnosis = StartDiagnosis(self.pods, self.clock, self.emit)

    @property
    def handed_over(self) -> bool:
        """True once the pod exists and its holder may take it over."""
        return self.holder is not None and self._uid is not None

    @property
    def has_started(self) -> bool:
        """True once its container has run."""
        return self._log is not None

    @property
    def ran_s(self) -> float | None:
        """Return the observed run time of its container, in seconds; None if it is unknown."""
        return self._ran_s

    @property
    def exit_code(self) -> int | None:
        """The exit code as far as the last poll knows it."""
        return self._exit_code

    @property
    def is_being_deleted(self) -> bool:
        """True once its pod is to end by somebody's wish, ours or another's."""
        return self._is_deleted or self._grace_s is not None

    def start(self) -> None:
        """Start the clock; the first poll creates or adopts the pod while the task goes on."""
        self._started_s = self.clock()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None when the pod still runs after that many seconds."""
        self._wake.wait(max(0.0, min(seconds, self._poll_at_s - self.clock())))
        if self._wake.is_set() or self.clock() >= self._poll_at_s:
            self._wake.clear()
            self._poll()
        return self._exit_code

    def stop(self) -> None:
        """Ask the script to checkpoint and exit."""
        self._request_deletion(self.limits.grace_s)

    def hurry(self) -> None:
        """Shorten the grace period: the trial has ended for good."""
        self._request_deletion(HURRIED_GRACE_S)

    def release(self) -> None:
        """Stop following the pod, which goes on."""
        if self._log is not None:
            self._log.finish(0.0)

    def finish(self) -> None:
        """Delete the pod and wait until it is gone."""
        if self._owner_lost or self._started_s is None:
            return
        self._request_deletion(self.limits.grace_s)
        deadline_s = self.clock() + self.limits.grace_s + 2 * FORCE_AFTER_S
        while not self._is_gone and self.clock() < deadline_s:
            self._wake.wait(SHORT_POLL_S)
            self._wake.clear()
            self._poll()
        if not self._is_gone:
            log.warning("The pod %s is not gone yet; its successor waits for it", self.name)
        if self._log is not None:
            self._log.finish(LOG_PATIENCE_S)

    def _request_deletion(self, grace_s: float) -> None:
        self._grace_s = grace_s if self._grace_s is None else min(grace_s, self._grace_s)
        self._poll_at_s = -inf
        self._wake.set()

    def _poll(self) -> None:
        """Read the pod and handle its state; a cluster that does not answer is asked again."""
        self._poll_at_s = self.clock() + self._period_s
        try:
            view = self.pods.fetch(self.name)
            if self._uid is None:
                self._create_or_adopt(view)
            elif view is None or view.uid != self._uid:
                self._handle_vanished()
            else:
                self._handle_pod(view)
        except Unavailable as error:
            self._emit_once(f"{self._state}: {error}")
            self._poll_at_s = self.clock() + POLL_S
            self._give_up_late(str(error))
        except OwnershipLost:
            raise
        except HermesError as error:
            self._handle_refusal(str(error))
        else:
            self._refused_since_s = None

    @property
    def _period_s(self) -> float:
        """Return the time to the next read: short while the pod is to end or has just been made."""
        if self._grace_s is not None or self._container_code is not None:
            return SHORT_POLL_S
        if self._log is not None:
            return self.limits.poll_s
        return SHORT_POLL_S if self._waited_s < QUICK_START_S else POLL_S

    def _handle_refusal(self, reason: str) -> None:
        """Fail once the refusal has lasted for `mistake_s`: a right may be missing for a moment."""
        since_s = self._refused_since_s = self._refused_since_s or self.clock()
        if self.clock() - since_s < self.limits.mistake_s:
            self._emit_once(f"{self._state}, and Kubernetes refuses to answer: {reason}")
            self._poll_at_s = self.clock() + POLL_S
            return
        self._give_up(FAILED, reason)
        self._is_gone = self._is_gone or self._uid is None

    def _create_or_adopt(self, view: PodView | None) -> None:
        """Adopt the pod of an earlier attempt, or create one once its predecessors are gone."""
        if view is not None:
            self._adopt(view)
        elif (result := self.record()) is not None:
            self._exit_code, self._is_gone = result, True  # it ended between two attempts
        elif self.request is None:
            self._handle_vanished()
        elif self._grace_s is not None:
            self._give_up(VANISHED, "it was stopped before its pod was made")
            self._is_gone = True
        elif self._predecessors_gone():
            self._create()
        else:
            self._give_up_late("the pod of an earlier lease is not gone")

    def _create(self) -> None:
        """Create the pod; fail at once if Kubernetes refuses it, as it would refuse it again."""
        try:
            created = self.pods.create(self.request)
        except Rejected as error:
            self._give_up(FAILED, str(error))
            self._is_gone = True
            return
        if created is not None:
            self._uid = created.uid
            self.emit(f"Pod {created.name} is made")

    @property
    def _state(self) -> str:
        return "The pod goes on" if self._uid is not None else "There is no pod yet"

    def _predecessors_gone(self) -> bool:
        ours = (pod for pod in self.pods.find(self.trial) if pod.is_from(self.installation))
        others = [pod for pod in ours if pod.name not in self.siblings]
        if any(pod.epoch > self.epoch for pod in others):
            self._owner_lost = True
            raise OwnershipLost(f"the trial has a newer lease than {self.epoch}")
        for pod in others:
            self._emit_once(f"The pod {pod.name} of an earlier lease is ended first")
            self._delete(pod, self.limits.grace_s)
        return not others

    def _adopt(self, view: PodView) -> None:
        if self.request is None:
            self._check_owner(view)
        if view.owner != self.owner and not self.pods.set_owner(view, self.owner):
            return  # it has just changed: the next poll tries again
        self._uid = view.uid
        self.emit(f"Pod {view.name} of this lease is there: it is looked after from here")
        self._poll_at_s = -inf

    def _handle_pod(self, view: PodView) -> None:
        self._check_owner(view)
        self._is_deleted = view.is_being_deleted
        if view.started or view.ended:
            self._follow()
            self._note_run(view)
        if view.ended:
            self._handle_ended(view)
        elif not view.started:
            self._handle_starting(view)
        if self._grace_s is not None or view.is_being_deleted:
            self._delete(view, self._grace_of(view))

    def _grace_of(self, view: PodView) -> float:
        """Return the grace of the pod's deletion: a short one where only sidecars are left of it.

        Its GPUs are its own until they have ended too. A deletion under way stays as it is: nodes
        go on waiting for the grace with which they have begun.
        """
        grace_s = self.limits.grace_s if self._grace_s is None else self._grace_s
        has_sidecars_only = view.code is not None and view.sidecars_run
        is_short = has_sidecars_only and not view.is_being_deleted
        return min(grace_s, HURRIED_GRACE_S) if is_short else grace_s

    def _note_run(self, view: PodView) -> None:
        """Note how long the container has run: as its node says at its end, else as it was seen."""
        if view.started and view.code is None:
            self._running_since_s = self._running_since_s or self.clock()
            self._ran_s = self.clock() - self._running_since_s
        if view.ran_s is not None:
            self._ran_s = max(view.ran_s, self._ran_s or 0.0)

    def _check_owner(self, view: PodView) -> None:
        if view.owner != self.owner:
            self._owner_lost = True
            raise OwnershipLost(f"attempt {view.owner} looks after the pod {self.name} now")

    def _follow(self) -> None:
        if self._log is None:
            self._log = LogFollower(self.pods, self.name, self.emit, self._log_ended)
            self._log.start()

    def _log_ended(self) -> None:
        self._wake.set()
        self.log_over()

    def _handle_ended(self, view: PodView) -> None:
        """Record how the container ended; a pod that is being deleted counts once it is gone."""
        if view.code is not None:
            self._container_code = view.code
        if view.lost == "Evicted" and _OVER_ITS_LIMIT.search(view.message):
            self.is_mistake = self._is_over_limit = True
            self._container_code = FAILED
            self.trouble = (
                f"its pod was evicted: {view.message.strip()} Write less to /tmp, or raise "
                "trial.pod.limits.ephemeral-storage"
            )
        elif view.lost:
            self._container_code, self.trouble = (
                VANISHED,
                f"its pod was ended: {view.lost}: {view.message}",
            )
        elif view.ended_for == "OOMKilled":
            self.is_mistake = True
            self.trouble = "out of memory: raise trial.pod.limits.memory or train in less"
        elif view.ended_for in ("StartError", "ContainerCannotRun"):
            self.is_mistake = True
            self.trouble = f"its container cannot start: {view.message or 'is hermes-trial in it?'}"
        elif view.init_failure and not view.is_being_deleted:
            self.is_mistake = True
            self._container_code, self.trouble = FAILED, f"{view.init_failure}: correct trial.pod"
        if not view.is_being_deleted:
            self._decide_exit_code()

    def _handle_vanished(self) -> None:
        self._is_gone = True
        if self._container_code is None and self.record() is None:
            self.trouble = self.trouble or "its pod was deleted or its node lost"
        self._decide_exit_code()

    def _decide_exit_code(self) -> None:
        """Prefer the trial's result, then the container's exit code, then VANISHED.

        A pod that has written too much may have a second to report that it was told to stop; the
        next one would write as much.
        """
        if self._exit_code is None:
            result = self.record()
            is_overruled = bool(result) and self._is_over_limit and self._grace_s is None
            code = result if result is not None and not is_overruled else self._container_code
            self._exit_code = VANISHED if code is None else code

    def _handle_starting(self, view: PodView) -> None:
        """Fail on a wrong image or setting once it has lasted: it might be a busy registry."""
        mistake = self._diagnosis.find_mistake(view)
        if not mistake:
            self._misconfigured_since_s = None
            self._give_up_late(self._diagnosis.reason(view))
            return
        since_s = self._misconfigured_since_s = self._misconfigured_since_s or self.clock()
        if self.clock() - since_s >= self.limits.mistake_s or self._late:
            self._give_up(FAILED, mistake)

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._started_s is None else self.clock() - self._started_s

    @property
    def _late(self) -> bool:
        return self._log is None and self._waited_s >= self.limits.start_s

    def _give_up_late(self, reason: str) -> None:
        """Give up if the pod has not started within its limit."""
        if self._late:
            self._give_up(VANISHED, f"its pod did not start in time: {reason}")

    def _give_up(self, code: int, reason: str) -> None:
        if self._exit_code is None:
            self._exit_code, self.trouble = code, reason
            self.is_mistake = code == FAILED
            self._grace_s = 0.0

    def _delete(self, view: PodView, grace_s: float) -> None:
        """Delete the pod with this grace, once; by force when it is long overdue."""
        if self._is_overdue(view):
            log.warning("The node of pod %s does not end it; its object is removed", view.name)
            self.pods.delete(view, 0)
            return
        sooner = self._deleted_grace_s is not None and grace_s < self._deleted_grace_s
        if (sooner or not view.is_being_deleted) and self.pods.delete(view, round(grace_s)):
            self._deleted_grace_s = grace_s

    def _is_overdue(self, view: PodView) -> bool:
        now_s = self.clock()
        at_s = force_at_s(view, self._force_at_s, now_s)
        if at_s is None:
            return False
        self._force_at_s[view.uid] = at_s
        return now_s > at_s

    def _emit_once(self, text: str) -> None:
        if text != self._last_message:
            self._last_message = text
            self.emit(text)


_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT[0-2]\d:[0-5]\d:[0-5]\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
LOG_PAUSE_S = 0.5
LOG_REFUSED_PAUSE_S = 30.0
LOG_OVERLAP_S = 5
"""Seconds of the log that are read again after a break; lines emitted before are skipped."""


@dataclass(slots=True)
class LogFollower:
    """Pass each line of a pod's log to `emit` in the background, until the log ends.

    `on_end` is called whenever the log has ended, but not when its connection breaks. `pause` waits
    for a number of seconds, or until `finish` is called.
    """

    pods: Pods
    name: str
    emit: Callable[[str], None]
    on_end: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _is_refused: bool = False
    _last: tuple[float, str] = (-inf, "")
    _last_of_node: str = ""
    _last_at_s: float | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, daemon=True)
            self._thread.start()

    def finish(self, patience_s: float) -> None:
        """Wait at most `patience_s` for the rest of the log of a container that has ended."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def run(self) -> None:
        """Follow the log until a complete reading was started after the container's end."""
        while True:
            last_reading = self._over.is_set()
            whole = self._read()
            if whole:
                self.on_end()
            if last_reading or (whole and self._over.is_set()):
                return
            pause = self.pause or self._over.wait
            pause(LOG_REFUSED_PAUSE_S if self._is_refused else LOG_PAUSE_S)

    def _read(self) -> bool:
        since_s = None
        if self._last_at_s is not None:
            since_s = int(self.clock() - self._last_at_s) + LOG_OVERLAP_S
        try:
            for line in self.pods.log(self.name, since_s):
                self._take(line)
        except Forbidden as error:
            if not self._is_refused:
                self.emit(f"The log of the pod {self.name} cannot be read: {error}")
            self._is_refused = True
            return False
        except HermesError:  # it is read again from where it broke off
            return False
        self._is_refused = False
        return True

    def _take(self, line: str) -> None:
        """Emit a new line; one without a time is a message of the node, repeated at each read."""
        stamp, _, text = line.partition(" ")
        moment = _log_time(stamp)
        if moment is None:
            if line != self._last_of_node:
                self._last_of_node = line
                self.emit(line)
        elif moment > self._last:
            self._last, self._last_at_s = moment, self.clock()
            self.emit(text)


def _log_time(stamp: str) -> tuple[float, str] | None:
    """Parse a time of the log to Unix seconds and nine digits of nanoseconds; None for other text.

    Nodes write times of their own time zone.
    """
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    seconds = datetime.fromisoformat(f"{match[1]}{match[3]}").timestamp()
    return seconds, (match[2] or "").ljust(9, "0")
