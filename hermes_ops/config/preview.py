"""A preview of a sweep without running it: the first trials and the greatest cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hermes_ops.config.model import Algorithm, SweepConfig
from hermes_ops.config.script import script_warnings
from hermes_ops.config.sweep_warnings import SweepWarning, config_warnings
from hermes_ops.search.space import Config, text


@dataclass(frozen=True, slots=True)
class CostBound:
    """The most that a sweep can use, failures retried to the limit; None where nothing bounds it.

    `epochs` counts completed ones: what a retry repeats since its checkpoint is not in it.
    """

    trials: int
    epochs: int
    gpu_seconds: float | None
    wall_clock_seconds: float | None


@dataclass(frozen=True, slots=True)
class Preview:
    """The resolved sweep file, the first trials with their numbers from 0, and the cost bound.

    The first `certain` trials depend on no result; the others are what would come without any.
    """

    resolved_yaml: str
    trials: tuple[Config, ...]
    certain: int
    note: str
    cost: CostBound

    def document(self) -> dict[str, Any]:
        """Return the first trials and the bound of the cost as a JSON object."""
        return {
            "first_trials": list(self.trials),
            "certain": self.certain,
            "cost": asdict(self.cost),
        }

    def render(self) -> str:
        """Return the whole preview as text for a terminal."""
        lines = [self.resolved_yaml.rstrip(), "", "First trials:"]
        for number, config in enumerate(self.trials):
            values = "  ".join(f"{name}={text(value)}" for name, value in config.items())
            mark = "" if number < self.certain else "  (depends on the results)"
            lines.append(f"  {number}: {values}{mark}")
        lines += [f"  {self.note}", "", "At most:", *_cost_lines(self.cost)]
        return "\n".join(lines) + "\n"


def check_preview(config: SweepConfig, count: int = 10) -> Preview:
    """Return the preview, with the first `count` trials that the sampler gives without results."""
    sampler = config.search.to_sampler()
    shown = min(count, config.trial_count)
    certain = min(shown, _independent(config))
    trials = tuple(sampler.ask(number, ()) for number in range(shown))
    return Preview(config.to_yaml(), trials, certain, _note(config, shown), cost_bound(config))


def _independent(config: SweepConfig) -> int:
    """Return the number of trials that depend on no result."""
    search = config.search
    if not search.learns:
        return search.max_trials
    if search.algorithm is not Algorithm.TPE:
        return len(search.points_to_evaluate)
    return max(search.startup_trials, len(search.points_to_evaluate))


def _note(config: SweepConfig, shown: int) -> str:
    left = config.trial_count - shown
    text = f"{left} more trials." if left else "These are all the trials."
    if _independent(config) < config.trial_count:
        text += f" From number {_independent(config)} on they depend on the results."
    search = config.search
    is_seeded = search.algorithm is Algorithm.GRID or "seed" in search.model_fields_set
    if config.schedule is not None and not is_seeded:
        text += " Each night draws others: the file has no search.seed."
    if search.warm_start:
        best = "best comes" if search.warm_start == 1 else f"{search.warm_start} best come"
        text += f" Where there are earlier sweeps, their {best} first"
        text += "." if is_seeded else ", and others are drawn: the file has no search.seed."
    return text


def cost_bound(config: SweepConfig) -> CostBound:
    """Return the bounds that follow from the file alone.

    The bound of the GPU-seconds is the least of: each trial's time limit times its GPUs times its
    allowed tries; the wall-clock budget times the GPUs of the trials that may train at once; the
    sweep's own budget. For a range of GPUs the largest number counts.
    """
    trials, trial, budget = config.trial_count, config.trial, config.budget
    gpus = trial.gpu_range.most
    by_limit = None
    if trial.time_limit_seconds is not None:
        by_limit = trials * trial.time_limit_seconds * gpus * (trial.max_failures + 1)
    by_clock = None
    if budget.wall_clock_seconds is not None and budget.max_parallel is not None:
        by_clock = budget.wall_clock_seconds * budget.max_parallel * gpus
    bounds = [bound for bound in (by_limit, by_clock, budget.gpu_seconds) if bound is not None]
    return CostBound(
        trials=trials,
        epochs=trials * budget.max_epochs,
        gpu_seconds=min(bounds, default=None),
        wall_clock_seconds=budget.wall_clock_seconds,
    )


def _cost_lines(cost: CostBound) -> list[str]:
    gpu = "no bound (set budget.gpu_seconds or trial.time_limit_seconds)"
    wall = "no bound (set budget.wall_clock_seconds)"
    if cost.gpu_seconds is not None:
        gpu = f"{cost.gpu_seconds:,.0f} ({cost.gpu_seconds / 3600:,.1f} hours)"
    if cost.wall_clock_seconds is not None:
        wall = f"{cost.wall_clock_seconds:,.0f} ({cost.wall_clock_seconds / 3600:,.1f} hours)"
    return [
        f"  trials               {cost.trials:,}",
        f"  epochs               {cost.epochs:,}",
        f"  GPU-seconds          {gpu}",
        f"  wall-clock seconds   {wall}",
    ]


def warnings_of(
    config: SweepConfig, *, pool_slots: int | None, environ: Mapping[str, str] | None
) -> tuple[SweepWarning, ...]:
    """Return the warnings of a valid sweep: its likely mistakes.

    `pool_slots`: of its pool; None if they are not known. `environ`: the environment of the
    processes that train on this machine; None if they train elsewhere: then this machine's disk is
    not examined.
    """
    from_config = config_warnings(config, pool_slots)
    from_script = () if environ is None else script_warnings(config, environ)
    return (*from_config, *from_script)
