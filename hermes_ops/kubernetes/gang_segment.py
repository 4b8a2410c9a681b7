"""The lifecycle of a segment on several nodes: a pod on each, all or none of them.

The first pod owns the trial: its end is the segment's. The others only run workers. If a pod does
not start in time, none may go on; if one is lost later, the others are stopped in order, and the
trial goes on from its checkpoint. A pod that ends by a mistake of the trial, as one that is out of
memory, is a failure of the trial, whichever pod it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hermes_ops.core.summary import INCOMPLETE
from hermes_ops.kubernetes.pod_segment import FAILED, VANISHED, PodSegment


class GangStep(enum.Enum):
    """The next action for the pods of a segment."""

    WAIT = "wait"
    STOP = "stop"
    GIVE_UP = "give up"
    FAIL = "fail"


class PodState(NamedTuple):
    """The state of a pod that is not the first: `code` is None while its container runs.

    `is_mistake`: a mistake of the trial has ended it or keeps it from starting.
    """

    has_started: bool
    code: int | None
    is_being_deleted: bool
    is_mistake: bool = False


def next_step(first_started: bool, others: Sequence[PodState]) -> GangStep:
    """Decide, while the first pod has not ended.

    A pod whose container has ended with 0 has been dismissed by the first one, which is about to
    end. One that has ended by a mistake would do so again. One that is lost before all have started
    leaves a gang that never was.
    """
    if any(pod.is_mistake and pod.code is not None for pod in others):
        return GangStep.FAIL
    lost = [pod for pod in others if pod.code not in (None, 0)]
    if lost and not (first_started and all(pod.has_started for pod in others)):
        return GangStep.GIVE_UP
    if lost or any(pod.is_being_deleted and pod.code is None for pod in others):
        return GangStep.STOP
    return GangStep.WAIT


@dataclass(slots=True)
class GangSegment:
    """A segment that runs as several pods.

    `was_whole`: all of them had started before they were followed from here.
    """

    first: PodSegment
    others: tuple[PodSegment, ...]
    emit: Callable[[str], None]
    was_whole: bool = False
    trouble: str = field(default="", init=False)
    _is_stopped: bool = False
    _code: int | None = None  # whatever the first pod says from then on

    @property
    def holder(self) -> Any:  # noqa: ANN401 - as that of a pod
        """Takes over all pods once they are created."""
        return self.first.holder

    @property
    def ran_s(self) -> float | None:
        """Return the observed run time of the first pod's container, in seconds; None: unknown."""
        return self.first.ran_s

    @property
    def handed_over(self) -> bool:
        """True once all pods exist and their holder may take them over."""
        return all(pod.handed_over for pod in self._pods)

    def start(self) -> None:
        """Start the clocks; the first poll creates or adopts the pods."""
        for pod in self._pods:
            pod.start()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None when the segment still runs after that many seconds."""
        if self._code is not None:
            return self._code
        code = self.first.wait(0.0 if self._is_starting else seconds)
        if code == VANISHED and not (self._has_started(self.first) or self._is_stopped):
            return self._give_up((self.first,))
        if code is not None:
            self.trouble = self.trouble or self.first.trouble
            return code
        for pod in self.others:
            pod.wait(seconds if self._is_starting else 0.0)
        others = [self._state(pod) for pod in self.others]
        return self._take(next_step(self._has_started(self.first), others))

    def stop(self) -> None:
        """Ask the script to checkpoint and exit, on all nodes."""
        self._is_stopped = True
        for pod in self._pods:
            pod.stop()

    def hurry(self) -> None:
        """Shorten the grace period: the trial has ended for good."""
        for pod in self._pods:
            pod.hurry()

    def release(self) -> None:
        """Stop following the pods, which go on."""
        for pod in self._pods:
            pod.release()

    def finish(self) -> None:
        """Delete the pods at the same time and wait until all are gone."""
        for pod in self._pods:
            pod.stop()
            pod.wait(0.0)
        for pod in self._pods:
            pod.finish()

    @property
    def _pods(self) -> tuple[PodSegment, ...]:
        return (self.first, *self.others)

    @property
    def _is_starting(self) -> bool:
        return not all(pod.has_started for pod in self._pods)

    def _has_started(self, pod: PodSegment) -> bool:
        return self.was_whole or pod.has_started

    def _state(self, pod: PodSegment) -> PodState:
        started = self._has_started(pod)
        return PodState(started, pod.exit_code, pod.is_being_deleted, pod.is_mistake)

    def _take(self, step: GangStep) -> int | None:
        if step is GangStep.WAIT or self._is_stopped:
            return None
        if step is GangStep.GIVE_UP:
            return self._give_up(self.others)
        reasons = _reasons(self.others)
        if step is GangStep.FAIL:
            self._code, self.trouble = FAILED, reasons
            return FAILED
        self.trouble = reasons or "one of its pods is being deleted"
        self.emit(f"All pods of the trial are stopped: {self.trouble}")
        self.stop()
        return None

    def _give_up(self, pods: Sequence[PodSegment]) -> int:
        """End a segment that has never trained, for what has become of these pods."""
        why = _reasons(pods) or "one has ended"
        self._code = INCOMPLETE
        self.trouble = f"not all of its {len(self._pods)} pods have started: {why}"
        return INCOMPLETE


def _reasons(pods: Sequence[PodSegment]) -> str:
    return "; ".join(f"{pod.name}: {pod.trouble}" for pod in pods if pod.trouble)
