"""The exit code of hermes-trial that a trial's own result stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.trial.visit import result_of
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.trial.outcome import FINISHED, INFRASTRUCTURE, PREEMPTED, Outcome

PAUSED = (Outcome.PREEMPTED.value, Outcome.INTERRUPTED.value)
"""Outcomes of a segment after which its trial just waits for its next lease."""


def record_of(folder: TrialFolder, epoch: int) -> Callable[[], int | None]:
    """The exit code that the trial's own result stands for."""

    def code() -> int | None:
        try:
            result = result_of(folder, epoch)
        except HermesError as error:  # the volume is away for a while
            raise Unavailable(str(error)) from error
        return code_of(result)

    return code


def code_of(result: Mapping[str, Any]) -> int | None:
    """The exit code of hermes-trial for a result that it wrote; None when it wrote none."""
    outcome = result.get("outcome")
    if not outcome:
        return None
    if outcome == Outcome.FINISHED.value:
        return FINISHED
    if outcome in PAUSED:
        return PREEMPTED
    code = abs(int(result.get("exit_code") or 1))
    return code if code not in (INFRASTRUCTURE, PREEMPTED) else 1
