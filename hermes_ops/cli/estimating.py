"""What a sweep is likely to cost, from earlier sweeps of the same script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from hermes_ops.config import SweepConfig
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.tracking.spending import Spent

HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """GPU-seconds that all trials take to their last epoch: low and high are the quartiles."""

    sweeps: int
    trials: int
    gpu_s_per_epoch: float
    low_gpu_s: float
    gpu_s: float
    high_gpu_s: float
    last_gpu_s: float
    """What the newest of those sweeps really used."""

    def render(self, script: str) -> str:
        """As lines for a terminal."""
        return "\n".join(
            [
                f"Estimate from {self.trials} trials of {self.sweeps} earlier sweeps of {script}:",
                f"  GPU-seconds an epoch {self.gpu_s_per_epoch:,.2f}",
                f"  GPU-seconds          {self.gpu_s:,.0f} ({self.gpu_s / HOUR_S:,.1f} hours), "
                f"from {self.low_gpu_s:,.0f} to {self.high_gpu_s:,.0f}, if no trial ends early",
                f"  the newest had used  {self.last_gpu_s:,.0f}",
            ]
        )


def script_of(command: Sequence[str]) -> str:
    """What a training command runs: its Python file or module by name, else its program."""
    for place, argument in enumerate(command):
        if argument == "-m" and place + 1 < len(command):
            return command[place + 1]
        if argument.endswith(".py"):
            return PurePath(argument).name
    return PurePath(command[0]).name if command else ""


def estimated(config: SweepConfig, earlier: Sequence[Spent]) -> Estimate | None:
    """The estimate from these sweeps, the newest first; None without any."""
    rates = sorted(rate for spent in earlier for rate in spent.gpu_s_per_epoch)
    if not rates:
        return None
    low, middle, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    epochs = config.trial_count * config.budget.max_epochs
    most = config.budget.gpu_seconds
    low_gpu_s, gpu_s, high_gpu_s = (
        epochs * rate if most is None else min(epochs * rate, most) for rate in (low, middle, high)
    )
    return Estimate(
        sweeps=len(earlier),
        trials=len(rates),
        gpu_s_per_epoch=middle,
        low_gpu_s=low_gpu_s,
        gpu_s=gpu_s,
        high_gpu_s=high_gpu_s,
        last_gpu_s=earlier[0].gpu_s,
    )


def estimate(config: SweepConfig, home: Path | None) -> str | None:
    """The estimate as text; None where no MLflow is known, or it has no such sweep.

    HermesError when an MLflow is known and does not answer.
    """
    from hermes_ops.cli.connection import connect_tracker
    from hermes_ops.errors import StackError
    from hermes_ops.tracking.spending import earlier_spending

    try:
        tracker = connect_tracker(home)
    except StackError:
        return None
    script = script_of(config.trial.command)
    found = estimated(config, earlier_spending(tracker, config.name, _runs(script, config)))
    return None if found is None else found.render(script)


def _runs(script: str, config: SweepConfig) -> Any:  # noqa: ANN401 - a predicate on sweep files
    def like(document: Mapping[str, Any]) -> bool:
        trial = document.get("trial")
        if not isinstance(trial, dict):
            return False
        command = trial.get("command") or ()
        same = script_of([str(argument) for argument in command]) == script
        return same and trial.get("gpus", 1) == config.trial.gpus

    return like


def estimate_or_reason(config: SweepConfig, home: Path | None) -> str | None:
    """The estimate, or why there is none now though there may be earlier sweeps."""
    try:
        return estimate(config, home)
    except HermesError as error:
        return f"No estimate: {error}"
