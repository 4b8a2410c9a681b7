"""Exit codes of hermes-trial, and the one that a trial's own result stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.trial.visit import result_of
from hermes_ops.errors import HermesError, Unavailable

EXIT_FINISHED, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED = 0, 70, 75


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
    known = {"finished": EXIT_FINISHED, "preempted": EXIT_PREEMPTED, "interrupted": EXIT_PREEMPTED}
    if outcome in known:
        return known[outcome]
    code = abs(int(result.get("exit_code") or 1))
    return code if code not in (EXIT_INFRASTRUCTURE, EXIT_PREEMPTED) else 1
