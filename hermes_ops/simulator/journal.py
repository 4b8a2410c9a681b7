"""What happens in a simulation, as it happens: segments, losses, and the event log."""

from __future__ import annotations

from hermes_ops.core.model import Grant, Reason
from hermes_ops.simulator.event_log import EventLog, work_fields
from hermes_ops.simulator.lives import Life
from hermes_ops.simulator.workload import Segment, Sight


class Journal:
    """Collects what came of the jobs, and tells the log, if there is one."""

    def __init__(self, log: EventLog | None) -> None:
        self.segments: list[Segment] = []
        self.sights: list[Sight] = []
        self._log = log

    def submitted(self, now_s: float, life: Life) -> None:
        """The job has arrived."""
        if self._log is not None:
            self._log.add(now_s, "submitted", life.id, work=work_fields(life.work))

    def granted(self, now_s: float, life: Life, grant: Grant, reason: Reason) -> None:
        """The policy has given it GPUs, or another share of them."""
        if self._log is not None:
            facts = {"gpus": grant.gpus, "share": grant.share, "reason": reason.text}
            self._log.add(now_s, "granted", life.id, **facts)

    def began(self, now_s: float, life: Life) -> None:
        """It occupies its GPUs."""
        if self._log is not None:
            self._log.add(now_s, "began", life.id, gpus=life.gpus, share=life.share)

    def shared(self, now_s: float, life: Life) -> None:
        """Its share has changed."""
        if self._log is not None:
            self._log.add(now_s, "shared", life.id, share=life.share)

    def trains(self, now_s: float, life: Life) -> None:
        """Its start-up is over."""
        if self._log is not None:
            self._log.add(now_s, "trains", life.id)

    def seen(self, now_s: float, life: Life) -> None:
        """The next point of its curve has been reached."""
        point = life.work.curve[life.seen]
        self.sights.append(Sight(life.id, point.step, point.loss, now_s))
        if self._log is not None:
            self._log.add(now_s, "point", life.id, step=point.step, loss=point.loss)

    def told(self, now_s: float, life: Life, reason: Reason) -> None:
        """The policy takes its GPUs away, or ends it."""
        if self._log is not None:
            self._log.add(now_s, "told", life.id, reason=reason.text)

    def left(self, segment: Segment, life: Life) -> None:
        """It has left its GPUs."""
        self.segments.append(segment)
        if self._log is not None:
            facts = {"outcome": segment.outcome, "trained_s": life.trained_s}
            self._log.add(segment.end_s, "left", life.id, **facts)

    def ended(self, now_s: float, life: Life) -> None:
        """It is in its final state."""
        if self._log is not None:
            self._log.add(now_s, "ended", life.id, state=life.state)

    def closed(self, now_s: float) -> None:
        """The simulation is over."""
        if self._log is not None:
            self._log.add(now_s, "closed", None)
