"""The outlook on a deadline by `hermes sweep check`: whether it is likely to be kept."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_ops.cli.sweep_check import Estimate, cost_estimate, slots_of
from hermes_ops.core.amounts import duration, utc_text
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.config import SweepConfig

LIKELY, UNLIKELY, OPEN, UNKNOWN = "likely", "unlikely", "open", "unknown"


@dataclass(frozen=True, slots=True)
class DeadlineOutlook:
    """Whether a sweep that starts now is likely to keep its deadline: `kept` is one of the above.

    `at_s` is the deadline in Unix seconds, `left_s` the time until then.
    """

    at_s: float
    left_s: float
    kept: str
    reason: str

    def document(self) -> dict[str, Any]:
        """Return it for the JSON document of the check."""
        return {**asdict(self), "at": utc_text(self.at_s)}

    def render(self) -> str:
        """Return it as lines for a terminal."""
        answer = {
            LIKELY: "Likely to be kept",
            UNLIKELY: "Not likely to be kept",
            OPEN: "May be kept or not",
            UNKNOWN: "Cannot tell whether it will be kept",
        }[self.kept]
        when = f"{utc_text(self.at_s)}, {duration(self.left_s)} after a start now"
        return f"Deadline: {when}.\n  {answer}: {self.reason}"


def outlook(
    config: SweepConfig, estimate: Estimate | None, slots: int | None, now_s: float
) -> DeadlineOutlook | None:
    """Return the outlook of a sweep with a deadline; None without one.

    `estimate` is the cost by earlier sweeps, `slots` the GPUs of the pool; None: not known.
    """
    at_s = config.deadline_at_s(now_s)
    if at_s is None:
        return None
    kept, reason = _judge(config, estimate, slots, at_s - now_s)
    return DeadlineOutlook(at_s, at_s - now_s, kept, reason)


def _judge(
    config: SweepConfig, estimate: Estimate | None, slots: int | None, left_s: float
) -> tuple[str, str]:
    wall_s = config.budget.wall_clock_seconds
    if wall_s is not None and wall_s <= left_s:
        return LIKELY, f"budget.wall_clock_seconds ({wall_s:g}) ends the sweep before."
    parallel = _parallel(config, slots)
    if parallel is None:
        return UNKNOWN, "the number of the pool's GPUs is not known: Airflow does not tell it."
    if parallel == 0:
        gpus = config.trial.gpu_range.least
        return UNLIKELY, f"a trial needs {gpus} GPUs and the pool has {slots}."
    limit_s = config.trial.time_limit_seconds
    most_s = inf if limit_s is None else ceil(config.trial_count / parallel) * limit_s
    if most_s <= left_s:
        text = f"by trial.time_limit_seconds all trials take at most {duration(most_s)}"
        return LIKELY, f"{text}{_concurrency_text(parallel)}."
    if estimate is None:
        return UNKNOWN, "no earlier sweep has trained this script, so the time of an epoch is open."
    return _by_earlier(config, estimate, parallel, left_s)


def _by_earlier(
    config: SweepConfig, estimate: Estimate, parallel: int, left_s: float
) -> tuple[str, str]:
    low_s, middle_s, high_s = (
        _sweep_s(config, rate, parallel) for rate in estimate.gpu_s_per_epoch_quartiles
    )
    kept = LIKELY if high_s <= left_s else UNLIKELY if low_s > left_s else OPEN
    text = (
        f"all trials take about {duration(middle_s)} ({duration(low_s)} to {duration(high_s)})"
        f"{_concurrency_text(parallel)}"
    )
    if kept is LIKELY:
        return kept, f"{text}."
    trial_s = estimate.gpu_s_per_epoch * config.budget.max_epochs / config.trial.gpu_range.least
    whole = min(config.trial_count, int(left_s // trial_s) * parallel)
    return kept, f"{text}; {whole} of {config.trial_count} come to their last epoch by then."


def _concurrency_text(parallel: int) -> str:
    return f", {parallel} at a time, if no other sweep has GPUs of the pool"


def _parallel(config: SweepConfig, slots: int | None) -> int | None:
    """Return how many trials train at the same time; None if the pool's GPUs are not known."""
    if slots is None:
        return None
    most = config.budget.max_parallel
    fits = slots // config.trial.gpu_range.least
    return min(fits, config.trial_count, *([] if most is None else [most]))


def _sweep_s(config: SweepConfig, gpu_s_per_epoch: float, parallel: int) -> float:
    """Return the seconds until all trials have trained their last epoch, a number at a time."""
    gpus, most_gpu_s = config.trial.gpu_range.least, config.budget.gpu_seconds
    trial_s = gpu_s_per_epoch * config.budget.max_epochs / gpus
    whole_s = ceil(config.trial_count / parallel) * trial_s
    return whole_s if most_gpu_s is None else min(whole_s, most_gpu_s / (parallel * gpus))


def current_outlook(
    config: SweepConfig, home: Path | None, connection: Connection | None
) -> DeadlineOutlook | None:
    """Return the outlook from what Airflow and MLflow know now; None without a deadline."""
    if config.deadline is None:
        return None
    slots = estimate = None
    try:
        slots = None if connection is None else slots_of(connection.airflow, config.pool)
        estimate = cost_estimate(config, home)
    except HermesError:  # what does not answer is not known
        pass
    return outlook(config, estimate, slots, time.time())
