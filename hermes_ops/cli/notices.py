"""What somebody who follows a sweep is told once: why it does not go on, what its plan found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hermes_ops.cli.warning_list import is_paused, slots_of
from hermes_ops.config import SweepConfig, never_fits
from hermes_ops.config.sweep_warnings import WARNINGS_TAG, from_tag, sentence
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.cli.locating import Place

PERIOD_S = 5.0


@dataclass(slots=True)
class Notices:
    """Finds what to say of a followed sweep, each thing once.

    `warnings`: documents of the warnings that its user has seen; None until its plan has left some.
    """

    connection: Connection
    place: Place
    warnings: list[dict[str, str]] | None
    config: SweepConfig | None = None
    _asked_s: float = -PERIOD_S
    _said: set[str] = field(default_factory=set)
    _advised: bool = False

    def due(
        self, now_s: float, view: Mapping[str, Any] | None, *, over: bool = False
    ) -> Iterator[str]:
        """Yield what is new, by a monotonic clock and the newest view of the pool.

        `over`: the sweep has ended, so that nothing keeps it from starting.
        """
        if over or now_s - self._asked_s >= PERIOD_S:
            self._asked_s = now_s
            yield from self._new(self._asked(over))
        yield from self._new(not_preemptible(view or {}, self.place.sweep))
        if not self._advised and (line := advice(view or {}, self.place.sweep)):
            self._advised = True
            yield line

    def _new(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                yield line

    def _asked(self, over: bool) -> Iterator[str]:
        """Yield what the services say; nothing of what one does not answer now."""
        try:
            yield from self._from_plan()
            yield from () if over else self._obstacles()
        except HermesError:
            return

    def _obstacles(self) -> Iterator[str]:
        airflow, dag = self.connection.airflow, self.place.dag_id
        told = {warning["where"] for warning in self.warnings or ()}
        if "Airflow" not in told and is_paused(airflow, dag):
            yield (
                f"The DAG {dag} is paused in Airflow: no trial of {self.place.sweep} starts until "
                "it is unpaused (the switch on its page)."
            )
        if self.config is None or told & {"trial.gpus", "pool"}:
            return
        pool = self.config.pool
        slots = slots_of(airflow, pool)
        reason = None if slots is None else never_fits(self.config.trial.gpus, pool, slots)
        if reason is not None:
            yield f"{self.place.sweep}: {reason}. Give the pool more slots, or stop the sweep."

    def _from_plan(self) -> Iterator[str]:
        """Take what the plan has left: the configuration, and warnings that nobody has seen."""
        from hermes_ops.cli.outcome import configured
        from hermes_ops.tracking.summary import find

        if self.config is None:
            try:
                self.config = configured(self.connection, self.place)
            except HermesError:  # not planned yet
                return
        if self.warnings is None:
            tracker = self.connection.tracker
            tags = tracker.sweep(find(tracker, self.place.sweep, self.config.name)).tags
            self.warnings = from_tag(tags.get(WARNINGS_TAG, ""))
            for warning in self.warnings:
                yield f"Warning: {sentence(warning)}"


def not_preemptible(view: Mapping[str, Any], sweep: str) -> Iterator[str]:
    """Yield a line for each reason why trials of the sweep cannot be preempted now."""
    facts = view.get("sweeps", {}).get(sweep, {})
    for reason in dict.fromkeys(facts.get("not_preemptible", {}).values()):
        yield f"Trials that cannot be preempted while they train: {reason}."


def advice(view: Mapping[str, Any], sweep: str) -> str:
    """Return what is said of a trial whose values are not read; empty if all are."""
    facts = view.get("sweeps", {}).get(sweep, {})
    return next((f"Trial {n}: {text}" for n, text in facts.get("advice", {}).items()), "")
