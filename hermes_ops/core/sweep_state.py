"""The one state of a sweep: what lists, reports, pages, JSON and MLflow all say of it."""

from __future__ import annotations

FINISHED, FAILED, CANCELLED, SKIPPED = "finished", "failed", "cancelled", "skipped"
ENDED_STATES = (FINISHED, FAILED, CANCELLED, SKIPPED)
_OF_AIRFLOW = {"success": FINISHED, "failed": FAILED, "skipped": SKIPPED}


def final_state(*, closed: bool, failed: bool, has_best: bool) -> str:
    """Return the state of a sweep that has ended.

    `closed`: it was ended before its last trial, by a person or a budget. `failed`: because its
    first trials failed alike. `has_best`: a trial can be its best one.
    """
    if closed:
        return CANCELLED
    return FINISHED if has_best and not failed else FAILED


def sweep_state(airflow: str | None, recorded: str | None) -> str:
    """Return the state of a sweep from Airflow's word for its run and from MLflow's tag.

    Airflow knows whether it has ended, and MLflow as what: a sweep that was cancelled with a best
    trial is a success for Airflow, as the tasks behind it may run.
    """
    if airflow not in _OF_AIRFLOW:
        return airflow or "running"
    if airflow != "skipped" and recorded in ENDED_STATES:
        return recorded
    return _OF_AIRFLOW[airflow]
