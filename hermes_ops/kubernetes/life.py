"""The life of a segment's pod: one pod a lease, gone before its task leaves.

The pod's name follows from the trial and its lease's epoch, so a second attempt at the same lease
(its worker was killed) finds the pod of the first one and goes on with it. Only the attempt that
the pod's label names may end it. What became of the trial is said by the trial's own record, never
by the pod's phase.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.api import Pods, PodView
from hermes_ops.kubernetes.logs import LogFollower

log = logging.getLogger(__name__)

FAILED, VANISHED = 1, 70
"""Exit codes for what the trial could not say itself: 70 is trouble of the infrastructure."""

HURRIED_GRACE_S = 5
FORCE_AFTER_S = 30.0
"""Beyond its grace; then its node does not answer any more, and the object alone is removed."""

LOOK_S, LOOK_SOON_S = 1.0, 0.2
IMAGE_TROUBLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONFIG_TROUBLE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
LOG_PATIENCE_S = 5.0


class OwnershipLost(HermesError):
    """Another attempt at the same lease looks after the pod now: leave it alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: what a script has to checkpoint, a pod to start, and an image or setting to work.

    `look_s` is the time between two looks at a pod that runs.
    """

    grace_s: float
    start_s: float
    mistake_s: float = 60.0
    look_s: float = LOOK_S


@dataclass(slots=True)
class PodSegment:
    """A segment as a pod: created or found again, listened to, told to stop, waited for.

    `record` is the exit code that the trial's own result stands for, None while there is none.
    Where `request` is None the pod was made before. `holder` is whatever looks after the pod, once
    it is made, in the place of the one who made it. `log_over` is called whenever its log has come
    to an end: its container has most likely exited.
    """

    pods: Pods
    request: Any
    name: str
    owner: str
    epoch: int
    trial: Mapping[str, str]
    record: Callable[[], int | None]
    emit: Callable[[str], None]
    limits: Limits
    clock: Callable[[], float] = time.time
    holder: Any = None
    log_over: Callable[[], None] = lambda: None
    trouble: str = ""
    _wake: threading.Event = field(default_factory=threading.Event)
    _log: LogFollower | None = None
    _uid: str | None = None
    _begun_s: float | None = None
    _look_at_s: float = -inf
    _grace_s: float | None = None  # what it is to be deleted with; None while it shall live
    _asked_s: float | None = None  # what it was last deleted with
    _code: int | None = None  # of its container
    _verdict: int | None = None
    _gone: bool = False
    _lost: bool = False
    _mistaken_since_s: float | None = None
    _said: str = ""

    @property
    def handed_over(self) -> bool:
        """True once the pod is there and its holder may look after it."""
        return self.holder is not None and self._uid is not None

    def start(self) -> None:
        """Begin; the pod is made or found at the first look, and the task goes on meanwhile."""
        self._begun_s = self.clock()

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None when it still runs after that long."""
        self._wake.wait(max(0.0, min(seconds, self._look_at_s - self.clock())))
        if self._wake.is_set() or self.clock() >= self._look_at_s:
            self._wake.clear()
            self._look()
        return self._verdict

    def stop(self) -> None:
        """Tell it to checkpoint and exit."""
        self._told(self.limits.grace_s)

    def hurry(self) -> None:
        """Its trial is over: it is cut off after a short grace."""
        self._told(HURRIED_GRACE_S)

    def release(self) -> None:
        """Look after it no more; it goes on."""
        if self._log is not None:
            self._log.finish(0.0)

    def finish(self) -> None:
        """Leave nothing behind: delete the pod and wait until it is gone."""
        if self._lost or self._begun_s is None:
            return
        self._told(self.limits.grace_s)
        deadline_s = self.clock() + self.limits.grace_s + 2 * FORCE_AFTER_S
        while not self._gone and self.clock() < deadline_s:
            self._wake.wait(LOOK_SOON_S)
            self._wake.clear()
            self._look()
        if not self._gone:
            log.warning("The pod %s is not gone yet; its successor waits for it", self.name)
        if self._log is not None:
            self._log.finish(LOG_PATIENCE_S)

    def _told(self, grace_s: float) -> None:
        self._grace_s = grace_s if self._grace_s is None else min(grace_s, self._grace_s)
        self._look_at_s = -inf
        self._wake.set()

    def _look(self) -> None:
        """One step; a cluster that does not answer is asked again."""
        soon = self._grace_s is not None or self._code is not None or self._log is None
        self._look_at_s = self.clock() + (LOOK_SOON_S if soon else self.limits.look_s)
        try:
            view = self.pods.read(self.name)
            if self._uid is None:
                self._begin(view)
            elif view is None or view.uid != self._uid:
                self._vanished()
            else:
                self._watch(view)
        except Unavailable as error:
            self._say(f"Kubernetes does not answer, the pod goes on: {error}")
            self._look_at_s = self.clock() + LOOK_S
            self._give_up_late(str(error))
        except OwnershipLost:
            raise
        except HermesError as error:
            self._give_up(FAILED, str(error))
            self._gone = self._gone or self._uid is None

    def _begin(self, view: PodView | None) -> None:
        """Take over the pod of an earlier attempt, or make one once its predecessors are gone."""
        if view is not None:
            self._adopt(view)
        elif (left := self.record()) is not None:
            self._verdict, self._gone = left, True  # it ended while nobody looked
        elif self.request is None:
            self._vanished()
        elif self._grace_s is not None:
            self._give_up(VANISHED, "it was stopped before its pod was made")
            self._gone = True
        elif self._predecessors_gone():
            made = self.pods.create(self.request)
            if made is not None:
                self._uid = made.uid
                self.emit(f"Pod {made.name} is made")
        else:
            self._give_up_late("the pod of an earlier lease is not gone")

    def _predecessors_gone(self) -> bool:
        others = self.pods.find(self.trial)
        if any(pod.epoch > self.epoch for pod in others):
            self._lost = True
            raise OwnershipLost(f"the trial has a newer lease than {self.epoch}")
        for pod in others:
            self._say(f"The pod {pod.name} of an earlier lease is ended first")
            self._delete(pod, self.limits.grace_s)
        return not others

    def _adopt(self, view: PodView) -> None:
        if self.request is None:
            self._check_owner(view)
        if view.owner != self.owner and not self.pods.own(view, self.owner):
            return  # it has just changed: once more
        self._uid = view.uid
        self.emit(f"Pod {view.name} of this lease is there: it is looked after from here")
        self._look_at_s = -inf

    def _watch(self, view: PodView) -> None:
        self._check_owner(view)
        if view.started or view.ended:
            self._follow()
        if view.ended:
            self._ended(view)
        elif not view.started:
            self._starting(view)
        if self._grace_s is not None or view.gone_by_s is not None:
            self._delete(view, self.limits.grace_s if self._grace_s is None else self._grace_s)

    def _check_owner(self, view: PodView) -> None:
        if view.owner != self.owner:
            self._lost = True
            raise OwnershipLost(f"attempt {view.owner} looks after the pod {self.name} now")

    def _follow(self) -> None:
        if self._log is None:
            self._log = LogFollower(self.pods, self.name, self.emit, self._log_ended)
            self._log.start()

    def _log_ended(self) -> None:
        self._wake.set()
        self.log_over()

    def _ended(self, view: PodView) -> None:
        """Take in how it ended; one that is being deleted counts once it is gone."""
        if view.code is not None:
            self._code = view.code
        if view.lost:
            self._code, self.trouble = VANISHED, f"its pod was ended: {view.lost}: {view.message}"
        elif view.ended_for == "OOMKilled":
            self.trouble = "out of memory: raise trial.pod.limits.memory or train in less"
        elif view.ended_for in ("StartError", "ContainerCannotRun"):
            self.trouble = f"its container cannot start: {view.message or 'is hermes-trial in it?'}"
        if view.gone_by_s is None:
            self._conclude()

    def _vanished(self) -> None:
        self._gone = True
        if self._code is None and self.record() is None:
            self.trouble = self.trouble or "its pod was deleted or its node lost"
        self._conclude()

    def _conclude(self) -> None:
        """The trial's own word first, then its container's, then that it is gone."""
        if self._verdict is None:
            said = self.record()
            code = said if said is not None else self._code
            self._verdict = VANISHED if code is None else code

    def _starting(self, view: PodView) -> None:
        """A wrong image or setting is a mistake once it has lasted; it might be a busy registry."""
        if view.waits_for not in IMAGE_TROUBLE + CONFIG_TROUBLE:
            self._mistaken_since_s = None
            self._give_up_late(view.message or view.waits_for or "it has not started")
            return
        since_s = self._mistaken_since_s = self._mistaken_since_s or self.clock()
        if self.clock() - since_s >= self.limits.mistake_s or self._late:
            self._give_up(FAILED, f"{view.waits_for}: {view.message}: correct trial.pod")

    @property
    def _late(self) -> bool:
        begun_s = self._begun_s if self._begun_s is not None else self.clock()
        return self._log is None and self.clock() - begun_s >= self.limits.start_s

    def _give_up_late(self, reason: str) -> None:
        """Before it has started: the start may take only so long."""
        if self._late:
            self._give_up(VANISHED, f"its pod did not start in time: {reason}")

    def _give_up(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict, self.trouble = code, reason
            self._grace_s = 0.0

    def _delete(self, view: PodView, grace_s: float) -> None:
        """Delete it with this grace, once; by force when it should long be gone."""
        if view.gone_by_s is not None and self.clock() > view.gone_by_s + FORCE_AFTER_S:
            log.warning("The node of pod %s does not end it; its object is removed", view.name)
            self.pods.delete(view, 0)
            return
        sooner = self._asked_s is not None and grace_s < self._asked_s
        if (view.gone_by_s is None or sooner) and self.pods.delete(view, round(grace_s)):
            self._asked_s = grace_s

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.emit(text)
