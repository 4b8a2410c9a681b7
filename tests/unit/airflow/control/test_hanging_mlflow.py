"""An MLflow that takes connections and answers nothing: each request costs its whole timeout."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.control.executor import MLFLOW_PAUSE_S
from hermes_ops.airflow.folders import TrialFolder, read_ending
from hermes_ops.airflow.records import CLOSED_TAG, CloseRecord
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import SWEEP, Journal, running, sweep_with, waiting

TRIALS, TIMEOUT_S, ROUNDS = 12, 10.0, 3
CLOSE = CloseRecord("its budget is spent", "stopped_early")


@dataclass
class Hanging(Journal):
    """An MLflow that hangs, and the time that the rounds have waited for it."""

    now_s: float = 0.0
    hangs: bool = True
    later: list[Callable[[], Any]] = field(default_factory=list)

    def _mlflow(self) -> None:
        if self.hangs:
            self.now_s += TIMEOUT_S
            raise Unavailable("MLflow did not answer")

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        """Note what is to be done while the rounds go on; it never ends here."""
        self.later.append(lambda: call(*args))
        return Future()

    def applier(self, requests: int = 1) -> Any:
        applier: Any = super().applier(requests)
        applier.background = self
        applier._executor.clock = lambda: self.now_s
        return applier

    def finished(self) -> list[str]:
        return [run for _, run, _ in self.of("finish")]


def test_a_sweep_that_ends_while_mlflow_hangs_holds_up_the_rounds_once_not_for_each_trial() -> None:
    outside = Hanging()
    applier, sweep = outside.applier(), sweep_with(*map(waiting, range(TRIALS)), close=CLOSE)
    for _ in range(ROUNDS):
        applier.settle(sweep, 200.0)
    assert outside.now_s == 2 * TIMEOUT_S  # the sweep's tag, and the first trial's run
    assert {number for _, numbers in outside.of("skip") for number in numbers} == {*range(TRIALS)}
    endings = [read_ending(TrialFolder.from_sweep(SWEEP, number)) for number in range(TRIALS)]
    assert {(e.state, e.tags["hermes.reason"]) for e in endings if e} == {
        (CLOSE.state, CLOSE.reason)
    }
    assert None not in endings


def test_an_mlflow_that_answers_again_is_told_why_the_sweep_has_ended_and_how_its_trials_end() -> (
    None
):
    outside = Hanging()
    applier, sweep = outside.applier(), sweep_with(waiting(0), running(1, 0), close=CLOSE)
    for _ in range(ROUNDS):
        applier.settle(sweep, 200.0)
    outside.hangs = False
    (tag,) = outside.later  # no second one while that is under way
    tag()
    assert outside.of("tag") == [
        ("tag", sweep.spec.record.parent_run_id, {CLOSED_TAG: CLOSE.reason})
    ]
    applier.settle(sweep, 200.0)
    assert outside.finished() == []
    outside.now_s += MLFLOW_PAUSE_S
    applier.settle(sweep, 200.0)
    assert outside.finished() == ["run-0"]
