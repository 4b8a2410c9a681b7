"""The progress of a trial by its objective, and when its script is to be ended as finished."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hermes_ops.trial.metrics import Metric


class TrainingProgress:
    """The trial's newest step, and whether its last epoch is over.

    Only the objective moves it; without one, every metric that is not `secondary`. A script that
    has trained `max_epochs` ends by itself. It is ended if it reports the objective at a step
    beyond them, or `finish_s` seconds after the last one: in this segment, where it trains again
    because it was stopped before it could save anything (`resumed_at`: its checkpoint's step).
    """

    def __init__(
        self,
        objective: str | None,
        max_epochs: int | None,
        *,
        finish_s: float,
        step: int,
        secondary: Collection[str],
        resumed_at: int,
    ) -> None:
        self._objective = objective
        self._max_epochs = max_epochs
        self._finish_s = finish_s
        self._secondary = secondary
        self.step = step
        self.beyond: int | None = None
        self._trained_at_s: float | None = None  # on the monotonic clock, in this segment
        self.is_in_last_lines = max_epochs is not None and min(step, resumed_at) >= max_epochs

    @property
    def is_complete(self) -> bool:
        """Tell whether the last epoch has been reported."""
        return self._max_epochs is not None and self.step >= self._max_epochs

    def note(self, metric: Metric) -> bool:
        """Take a stored value in; return whether the trial has trained further."""
        counts = (
            metric.name == self._objective
            if self._objective
            else metric.name not in self._secondary
        )
        if not counts or metric.step <= self.step:
            return False
        if self._is_beyond(metric):
            self.pass_end(metric.step)
            return False
        self.step = metric.step
        self.is_in_last_lines = self.is_in_last_lines or self.is_complete
        return True

    def within(self, metrics: Iterable[Metric]) -> list[Metric]:
        """Leave out the objective beyond the last epoch, and what comes with it at that step."""
        values = list(metrics)
        if self.is_complete and any(self._is_last(m) for m in values):
            self.is_in_last_lines = True
        past = {m.step for m in values if m.name == self._objective and self._is_beyond(m)}
        for step in past:
            self.pass_end(step)
        return [m for m in values if m.step not in past] if past else values

    def pass_end(self, step: int) -> None:
        """Note that the objective was reported at a step beyond the last epoch."""
        self.beyond = self.beyond or step

    def why_over(self, now_s: float) -> str | None:
        """Return why the script is to be ended as finished now; None as long as it may go on."""
        if self.beyond is not None:
            return f"it has reported step {self.beyond}, beyond budget.max_epochs"
        if not self.is_in_last_lines:
            return None
        if self._trained_at_s is None:
            self._trained_at_s = now_s
        if now_s - self._trained_at_s < self._finish_s:
            return None
        return f"it has not ended {self._finish_s:g} s (trial.finish_seconds) after its last epoch"

    def _is_last(self, metric: Metric) -> bool:
        return metric.name == self._objective and metric.step == self._max_epochs

    def _is_beyond(self, metric: Metric) -> bool:
        return self._max_epochs is not None and metric.step > self._max_epochs
