"""Retry policies of the first and the last task of a sweep: plan and report.

An outage of a service, MLflow above all, must not cost a night or a report: these tasks are retried
until it is back. After any other error they are retried a few times, seconds apart.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from itertools import accumulate
from typing import Any

from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from hermes_ops.errors import Unavailable

FIRST_PAUSE_S = 5.0

OWN_RETRIES = frozenset(
    {"retries", "retry_delay", "retry_policy", "retry_exponential_backoff", "max_retry_delay"}
)
"""Arguments of a task with which a user decides on its retries."""


class OutageRetryPolicy(RetryPolicy):
    """Retries a task for `lasts_s` seconds after its first failure while a service is away.

    The pauses double from FIRST_PAUSE_S up to `longest_pause_s` seconds. After another error the
    task is tried `tries` times in all. Tries before a person cleared the task do not count.
    """

    def __init__(self, lasts_s: float, longest_pause_s: float, tries: int) -> None:
        self.longest_pause_s, self.tries = longest_pause_s, tries
        pauses_s = accumulate(self._pause_s(n) for n in range(1, int(lasts_s / FIRST_PAUSE_S) + 2))
        self.retries = sum(end_s <= lasts_s for end_s in pauses_s)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Any = None,  # noqa: ANN401, ARG002 - Airflow's own
    ) -> RetryDecision:
        """Return whether the task is retried, and after which pause."""
        tried = max(1, try_number - max(0, max_tries - self.retries))
        if isinstance(exception, Unavailable):
            return RetryDecision.retry(timedelta(seconds=self._pause_s(tried)), str(exception))
        if tried >= self.tries:
            return RetryDecision.fail(f"tried {tried} times")
        return RetryDecision.retry(timedelta(seconds=FIRST_PAUSE_S))

    def _pause_s(self, tried: int) -> float:
        return float(min(FIRST_PAUSE_S * 2.0 ** min(tried - 1, 32), self.longest_pause_s))


HOUR_S = 3_600.0
PLAN_RETRY_POLICY = OutageRetryPolicy(HOUR_S, 60.0, tries=4)
REPORT_RETRY_POLICY = OutageRetryPolicy(24 * HOUR_S, 300.0, tries=11)


def retry_arguments(policy: OutageRetryPolicy, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a task that is retried by this policy.

    If a user has `given` arguments on retries, Airflow's own rules apply instead.
    """
    pause = {"retry_delay": timedelta(seconds=FIRST_PAUSE_S)}
    if OWN_RETRIES.isdisjoint(given):
        return {"retries": policy.retries, "retry_policy": policy, **pause}
    return {"retries": policy.tries - 1, **pause}
