"""The one place where Airflow's own intervals turn into ours."""

from __future__ import annotations


def reschedule_delay_s(min_heartbeat_interval_s: float) -> float:
    """Seconds that a preempted task stays away before Airflow may schedule it again.

    Never zero: the executor's "success" event of the old run may arrive late, and if the task is
    SCHEDULED again by then, Airflow takes it as a mismatch and fails the task, which costs a try.
    Measured with LocalExecutor: no failure at 5 s with a heartbeat of 1 s, none at 12 s with one of
    5 s, some at 5 s with one of 5 s. On two cores with three stacks at once a process took 4.4 s to
    end after its report, and one of 47 tasks was taken so at 5 s.
    """
    return max(8.0, 2.0 * min_heartbeat_interval_s + 2.0)


def configured_reschedule_delay_s() -> float:
    """`reschedule_delay_s` for this Airflow's settings."""
    from airflow.sdk.configuration import conf

    return reschedule_delay_s(conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0))
