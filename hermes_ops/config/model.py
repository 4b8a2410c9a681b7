"""The sweep file as one pydantic model: frozen, strict, unknown keys refused.

The models hold what can be said of one key or one parameter. What connects several keys is in
`checks`, and `parse` is the door that applies both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from hermes_ops.config.fields import (
    ConstraintText,
    Cron,
    EnvironmentName,
    MetricPattern,
    Model,
    Name,
    Real,
    ScriptVariable,
    Seconds,
    Text,
    ValueField,
)
from hermes_ops.config.keeping import BestModel, Checkpoints
from hermes_ops.config.metrics import MOST_METRICS, Direction, MetricSpec
from hermes_ops.config.nightly import Nightly
from hermes_ops.config.parameters import SpaceSpec, to_space
from hermes_ops.config.pod import PodSpec, RunIn
from hermes_ops.core.secondary import Secondary, violations
from hermes_ops.search import make_sampler
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible, positions
from hermes_ops.search.space import Space

if TYPE_CHECKING:
    from hermes_ops.search.interface import Sampler

MOST_TRIALS = 100_000
MOST_CONSTRAINTS = 50
DEFAULT_STARTUP_TRIALS = 5


class Algorithm(StrEnum):
    """How the next configuration is found."""

    GRID = "grid"
    RANDOM = "random"
    TPE = "tpe"


class EarlyStop(StrEnum):
    """Which rule ends hopeless trials before their last epoch."""

    NONE = "none"
    MEDIAN = "median"
    ASHA = "asha"


class Workspace(StrEnum):
    """Where the script of a trial runs."""

    SHARED = "shared"
    COPY = "copy"


class Objective(Model):
    """What is optimised."""

    metric: Annotated[Text, Field(min_length=1, max_length=250, examples=["val_loss"])]
    """Name of the metric, as the script reports it."""
    direction: Annotated[Direction, Field(strict=False)] = Direction.MINIMIZE
    """minimize or maximize."""
    target: Annotated[Real | None, Field(examples=[0.05])] = None
    """Value that is good enough: the sweep ends when a trial has reported it or a better one and
    keeps the bounds of all metrics; null: no value is."""

    @property
    def sign(self) -> float:
        """1.0 to minimise, -1.0 to maximise: a loss is the metric times the sign."""
        return 1.0 if self.direction is Direction.MINIMIZE else -1.0


Point = dict[str, ValueField]


def _startup_default(fields: Mapping[str, Any]) -> int:
    most: int = fields.get("max_trials", DEFAULT_STARTUP_TRIALS)
    return min(DEFAULT_STARTUP_TRIALS, most)


class Search(Model):
    """Which configurations are tried, and in what order."""

    algorithm: Annotated[Algorithm, Field(strict=False, examples=["tpe"])]
    """grid, random or tpe."""
    max_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS, examples=[16])]
    """How many trials the sweep has; a grid may have fewer combinations, never more."""
    seed: Annotated[int, Field(ge=0, lt=2**32, examples=[7])] = 0
    """Seed of the search: the same seed and results give the same configurations."""
    startup_trials: Annotated[
        int, Field(ge=1, le=MOST_TRIALS, default_factory=_startup_default, examples=[5])
    ]
    """tpe: how many trials are drawn at random before results are used; 5 or max_trials if less."""
    points_to_evaluate: Annotated[
        tuple[Point, ...], Field(strict=False, examples=[[{"learning_rate": 0.001}]])
    ] = ()
    """Known configurations that are tried first; each names every parameter that it has."""
    warm_start: Annotated[int, Field(ge=0, le=1_000, examples=[3])] = 0
    """How many of the best configurations of earlier sweeps of this name are tried after those."""
    constraints: Annotated[
        tuple[ConstraintText, ...],
        Field(
            strict=False,
            max_length=MOST_CONSTRAINTS,
            examples=[["batch_size * accumulation <= 512"]],
        ),
    ] = ()
    """Conditions between parameters that every configuration satisfies; one that names a parameter
    which a configuration does not have is satisfied."""
    space: SpaceSpec
    """Parameters by name; each has a type and its bounds or values."""

    @property
    def learns(self) -> bool:
        """True when a configuration depends on the results so far: not with grid and random."""
        return self.algorithm not in (Algorithm.GRID, Algorithm.RANDOM)

    def to_space(self) -> Space:
        """The space that `make_sampler` takes, in the order of the file."""
        return to_space(self.space)

    def to_feasible(self) -> Feasible:
        """The space with its constraints."""
        return Feasible(self.to_space(), tuple(Constraint.of(text) for text in self.constraints))

    def to_sampler(self) -> Sampler:
        """The sampler of the sweep."""
        feasible = self.to_feasible()
        return make_sampler(
            self.algorithm.value,
            feasible.space,
            self.seed,
            self.startup_trials,
            self.points_to_evaluate,
            self.max_trials,
            feasible.constraints,
        )


class TrialSpec(Model):
    """The training script and what it needs."""

    python: Annotated[Text, Field(min_length=1, examples=["/opt/venv/bin/python"])] | None = None
    """Interpreter of the script; null: the one that Hermes runs in."""
    command: Annotated[
        tuple[Text, ...],
        Field(
            strict=False,
            min_length=1,
            max_length=1_000,
            examples=[["python", "train.py", "--learning-rate", "{learning_rate}"]],
        ),
    ]
    """Program and arguments; {name} is replaced, a leading python is the interpreter above."""
    directory: Annotated[Text, Field(min_length=1, examples=["."])] = "."
    """Working directory; relative to the folder of the sweep file, in a pod to the image's own.
    copy: that folder itself, with workspace copy."""
    workspace: Annotated[Workspace, Field(strict=False)] = Workspace.SHARED
    """shared: all trials run in the directory; copy: each runs in a copy of it, made at its start
    and kept through preemptions."""
    run_in: Annotated[RunIn, Field(strict=False)] = RunIn.PROCESS
    """process: on the Airflow worker; pod: in a cluster of Kubernetes."""
    pod: PodSpec | None = None
    """With run_in pod: what the pod is like beyond the installation's defaults."""
    environment: Annotated[
        dict[ScriptVariable, Text], Field(max_length=1_000, examples=[{"DATA": "/data"}])
    ] = Field(default_factory=dict)
    """Environment variables of the script, texts as they stand; none that Hermes sets itself."""
    gpus: Annotated[int, Field(ge=1, le=1_024, examples=[1])] = 1
    """GPUs that a trial holds while it trains."""
    preemptible: bool = True
    """Whether a trial may be stopped at a checkpoint and resumed later."""
    metric_pattern: Annotated[
        MetricPattern | None,
        Field(examples=["(?P<name>\\w+): (?P<value>\\S+)"]),
    ] = None
    """Regular expression for the output's lines, with the groups name and value, optionally step;
    null: name=value pairs and JSON objects."""
    tensorboard: Annotated[Text, Field(min_length=1, examples=["runs"])] | None = None
    """Folder below which the script writes event files of TensorBoard, relative to directory;
    their scalars are metrics. null: they are not read."""
    secrets: Annotated[
        tuple[EnvironmentName, ...], Field(strict=False, max_length=1_000, examples=[["LICENCE"]])
    ] = ()
    """Environment variables whose values are masked in logs and results, beside those whose names
    say so (TOKEN, PASSWORD, ...)."""
    time_limit_seconds: Annotated[Seconds | None, Field(examples=[3600])] = None
    """Training time of a trial, all segments together, after which it has failed."""
    finish_seconds: Annotated[Seconds, Field(examples=[300])] = 300.0
    """Time that the script has after its last epoch (budget.max_epochs) for what is left to do;
    then it is ended, and the trial is finished."""
    max_failures: Annotated[int, Field(ge=0, le=1_000, examples=[2])] = 2
    """Failures of the script that are retried; one more and the trial has failed. What cannot
    change (a missing package, an argument that is refused, NaN) is not retried."""

    @model_validator(mode="before")
    @classmethod
    def _own_directory(cls, data: object) -> object:
        """Read `directory: copy` as what it stands for; a folder of that name is `./copy`."""
        if isinstance(data, Mapping) and data.get("directory") == Workspace.COPY.value:
            return {**data, "directory": ".", "workspace": Workspace.COPY.value}
        return data


class Budget(Model):
    """What a sweep may spend; null: no limit."""

    max_epochs: Annotated[int, Field(ge=1, le=10**9, examples=[20])]
    """Epochs (or reported steps) of a trial."""
    wall_clock_seconds: Annotated[Seconds | None, Field(examples=[7200])] = None
    """Time from the first trial's start to the sweep's end."""
    gpu_seconds: Annotated[Seconds | None, Field(examples=[14400])] = None
    """GPU time of all trials together."""
    failed_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Failed trials that end the sweep."""
    count_diverged: bool = False
    """Whether trials whose objective became NaN or infinite count among the failed ones."""
    same_failures: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = 3
    """How many of the first trials must fail in the same way, before any has reported a value, for
    the sweep to end as failed."""
    max_parallel: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Trials that train at the same time."""


class SweepConfig(Model):
    """A sweep: one search over one space for one training command."""

    name: Annotated[Name, Field(examples=["digits"])]
    """Name of the sweep and of its MLflow experiment."""
    objective: Objective
    metrics: Annotated[tuple[MetricSpec, ...], Field(strict=False, max_length=MOST_METRICS)] = ()
    """Metrics beside the objective: they are shown with it, and may have bounds that the best trial
    keeps; the search learns from the objective alone."""
    search: Search
    trial: TrialSpec
    budget: Budget
    checkpoints: Checkpoints = Checkpoints()
    """How many checkpoints are kept, and for how long."""
    model: BestModel = BestModel()
    """What becomes of the best trial's model in MLflow's registry."""
    weight: Annotated[float, Field(gt=0, le=1e6, examples=[1.0])] = 1.0
    """Share of the pool relative to other sweeps."""
    early_stop: Annotated[EarlyStop, Field(strict=False)] = EarlyStop.NONE
    """none, median or asha."""
    pool: Annotated[Name, Field(examples=["gpus"])] = "gpus"
    """Airflow pool whose slots are the GPUs."""
    schedule: Annotated[
        Cron | None,
        Field(examples=["0 2 * * *"]),
    ] = None
    """Cron expression at which the sweep is run; null: when triggered."""
    nightly: Nightly = Nightly()

    @property
    def secondary(self) -> tuple[Secondary, ...]:
        """The metrics beside the objective, as those who judge trials know them."""
        return tuple(metric.to_secondary() for metric in self.metrics)

    @property
    def ending_bounds(self) -> tuple[str, ...]:
        """The metrics whose bounds say with the target when the sweep ends; none without one."""
        bounded = () if self.objective.target is None else self.secondary
        return tuple(metric.name for metric in bounded if metric.is_bounded)

    def reached(self, values: Iterable[float], last: Mapping[str, float | None]) -> float | None:
        """The first of a trial's values that is as good as the target; None while none ends it.

        None too without a target, and while the last value of a metric misses a bound of it. So a
        trial that ends the sweep is one that can be the best.
        """
        objective = self.objective
        if objective.target is None or violations(self.secondary, last):
            return None
        goal = objective.sign * objective.target
        good = (v for v in values if isfinite(v) and objective.sign * v <= goal)
        return next(good, None)

    @property
    def trial_count(self) -> int:
        """How many trials there are: max_trials, or those of the whole grid if that is less."""
        if self.search.algorithm is not Algorithm.GRID:
            return self.search.max_trials
        return min(len(positions(self.search.to_feasible())), self.search.max_trials)

    def to_json(self) -> str:
        """The resolved config, one line of JSON that `parse` reads back to an equal one."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False)

    def to_yaml(self) -> str:
        """The resolved config as a sweep file."""
        from hermes_ops.config.files import to_yaml

        return to_yaml(self.model_dump(mode="json"))
