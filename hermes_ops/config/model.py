"""The sweep file as one pydantic model: frozen, strict, unknown keys refused.

The models validate single keys and parameters. Conditions between keys are in `conditions`; `parse`
applies both. The file is also given as JSON Schema: whole for editors, by key for Airflow's trigger
form.
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
    DeadlineText,
    EnvironmentName,
    EnvironmentValue,
    MetricPattern,
    Model,
    Name,
    Real,
    ScriptVariable,
    Seconds,
    Text,
    ValueField,
)
from hermes_ops.config.files import to_yaml
from hermes_ops.config.parameters import SpaceSpec, to_space
from hermes_ops.config.pod import PodSpec, RunIn, default_run_in
from hermes_ops.config.sections import (
    MOST_METRICS,
    BestModel,
    Checkpoints,
    Direction,
    MetricSpec,
    Nightly,
)
from hermes_ops.config.workers import (
    BatchSpec,
    GpuRange,
    Gpus,
    LearningRateScale,
    ResizePoint,
    Workers,
)
from hermes_ops.core.deadline import Deadline
from hermes_ops.core.secondary_metrics import SecondaryMetric, violations
from hermes_ops.search import ALGORITHMS, SAMPLERS, make_sampler
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible, feasible_positions
from hermes_ops.search.space import Space

if TYPE_CHECKING:
    from hermes_ops.search.interface import Sampler

MOST_TRIALS = 100_000
MOST_CONSTRAINTS = 50
DEFAULT_STARTUP_TRIALS = 5


class Algorithm(StrEnum):
    """How the next configuration is found."""  # or a sampler of an installed package: _missing_

    GRID = "grid"
    RANDOM = "random"
    TPE = "tpe"

    @classmethod
    def _missing_(cls, value: object) -> Algorithm | None:
        if not isinstance(value, str) or value not in SAMPLERS:
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = value.upper(), value
        return member

    def __eq__(self, other: object) -> bool:
        """Compare by name: each look-up of a package's sampler makes another member."""
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        """Return the hash of the name."""
        return str.__hash__(self)

    @property
    def is_builtin(self) -> bool:
        """True for one that comes with Hermes Ops."""
        return self.value in ALGORITHMS


def _known_algorithms(schema: dict[str, Any]) -> None:
    """Add the samplers of installed packages to the schema of `search.algorithm`."""
    added = [name for name in SAMPLERS if name not in ALGORITHMS]
    if added:
        schema.pop("$ref", None)
        schema.update(type="string", enum=[*ALGORITHMS, *added])


class EarlyStopRule(StrEnum):
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

    algorithm: Annotated[
        Algorithm, Field(strict=False, examples=["tpe"], json_schema_extra=_known_algorithms)
    ]
    """grid, random or tpe, or the sampler of an installed package."""
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
        """Return the space that `make_sampler` takes, in the order of the file."""
        return to_space(self.space)

    def to_feasible(self) -> Feasible:
        """Return the space with its constraints."""
        return Feasible(self.to_space(), tuple(Constraint.parse(text) for text in self.constraints))

    def to_sampler(self) -> Sampler:
        """Return the sampler of the sweep."""
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
    run_in: Annotated[RunIn, Field(strict=False, default_factory=default_run_in)]
    """process: on the Airflow worker; pod: in a cluster of Kubernetes. What the installation
    requires (HERMES_RUN_IN), or else process."""
    pod: PodSpec | None = None
    """With run_in pod: what the pod is like beyond the installation's defaults."""
    environment: Annotated[
        dict[ScriptVariable, EnvironmentValue],
        Field(max_length=1_000, examples=[{"DATA": "/data", "HF_TOKEN": "{env:HF_TOKEN}"}]),
    ] = Field(default_factory=dict)
    """Environment variables of the script, none that Hermes sets itself. {env:NAME} in a value is
    replaced by a variable that trials inherit when a trial starts: the way to pass a secret."""
    gpus: Annotated[Gpus, Field(examples=[1, {"min": 1, "max": 4}])] = 1
    """GPUs that a trial holds while it trains: a number, or a range with min, max and sizes (any,
    powers_of_two or a list), from which a policy that sizes jobs chooses. A trial whose number
    changes is stopped at a checkpoint and started again."""
    workers: Annotated[Workers, Field(strict=False)] = Workers.ONE_PROCESS
    """one_process: one process uses all GPUs of the trial; one_per_gpu: one process for each of
    them, with its rank in its environment (Horovod, PyTorch DDP)."""
    scale_learning_rate: Annotated[LearningRateScale, Field(strict=False)] = (
        LearningRateScale.SCRIPT
    )
    """With one_per_gpu, who multiplies the learning rate by the number of workers when a trial
    starts: script, hermes, or off (nobody, also at a resize)."""
    resize: Annotated[ResizePoint, Field(strict=False)] = ResizePoint.BATCH
    """Where a trial is stopped whose number of GPUs may change: after any batch, or at the end of
    an epoch."""
    tf_config: bool = False
    """With one_per_gpu, whether each worker has TF_CONFIG (tf.distribute)."""
    batch: BatchSpec | None = None
    """The batches that a policy may choose from; null: the script's own."""
    preemptible: bool = True
    """Whether a trial may be stopped at a checkpoint and resumed later."""
    metric_pattern: Annotated[
        MetricPattern | None, Field(examples=["(?P<name>\\w+): (?P<value>\\S+)"])
    ] = None
    """Regular expression for the output's lines, with the group value, optionally name and step;
    null: name=value pairs and JSON objects."""
    tensorboard: Annotated[Text, Field(min_length=1, examples=["runs"])] | None = None
    """Folder below which the script writes event files of TensorBoard, relative to directory;
    their scalars are metrics. null: they are not read."""
    secrets: Annotated[
        tuple[EnvironmentName, ...], Field(strict=False, max_length=1_000, examples=[["LICENCE"]])
    ] = ()
    """Environment variables whose values are masked in logs and results, in addition to those whose
    names mark them as secrets (TOKEN, PASSWORD, ...)."""
    time_limit_seconds: Annotated[Seconds | None, Field(examples=[3600])] = None
    """Training time of a trial, all segments together, after which it has failed."""
    finish_seconds: Annotated[Seconds, Field(examples=[300])] = 300.0
    """Time that the script has after its last epoch (budget.max_epochs) for what is left to do;
    then it is ended, and the trial is finished."""
    max_failures: Annotated[int, Field(ge=0, le=1_000, examples=[2])] = 2
    """Failures of the script that are retried; one more and the trial has failed. What cannot
    change (a missing package, an argument that is refused, NaN) is not retried."""

    @property
    def gpu_range(self) -> GpuRange:
        """The numbers of GPUs that a trial may hold."""
        return (
            self.gpus if isinstance(self.gpus, GpuRange) else GpuRange(min=self.gpus, max=self.gpus)
        )

    def processes(self, gpus: int) -> int:
        """Return how many processes train a trial on that number of GPUs."""
        return gpus if self.workers is Workers.ONE_PER_GPU else 1

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
    """Time of the whole sweep, from its start: waiting for the first GPU counts too."""
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
    """Further metrics: they are shown with the objective, and may have bounds that the best trial
    keeps; the search learns from the objective alone."""
    search: Search
    trial: TrialSpec
    budget: Budget
    checkpoints: Checkpoints = Checkpoints()
    """How many checkpoints are kept, and for how long."""
    model: BestModel = BestModel()
    """Registration of the best trial's model in MLflow's registry."""
    weight: Annotated[float, Field(gt=0, le=1e6, examples=[1.0])] = 1.0
    """Share of the pool relative to other sweeps."""
    early_stop: Annotated[EarlyStopRule, Field(strict=False, title="EarlyStop")] = (
        EarlyStopRule.NONE
    )
    """none, median or asha."""
    priority_class: Annotated[Name | None, Field(alias="class", examples=["interactive"])] = None
    """Priority class in the quota of the pool: interactive, normal, nightly or one of its own;
    null: nightly in scheduled runs of a nightly DAG, else normal."""
    pool: Annotated[Name, Field(examples=["gpus"])] = "gpus"
    """Airflow pool whose slots are the GPUs."""
    schedule: Annotated[Cron | None, Field(examples=["0 2 * * *"])] = None
    """Cron expression at which the sweep is run; null: when triggered."""
    deadline: Annotated[
        DeadlineText | None, Field(examples=["8h", "2026-12-01T08:00:00+01:00"])
    ] = None
    """Time at which the sweep ends, with its offset from UTC, or a duration from its start such as
    8h or 1d 12h; the best value by then counts. null: none."""
    owner: Annotated[str | None, Field(min_length=1, max_length=250, examples=["ann"])] = None
    """Airflow user whose quota counts in scheduled runs; null: the DAG's owner. A run that a user
    has triggered is that user's."""
    nightly: Nightly = Nightly()

    @property
    def secondary(self) -> tuple[SecondaryMetric, ...]:
        """The metrics other than the objective, as trials are judged by them."""
        return tuple(metric.to_secondary() for metric in self.metrics)

    @property
    def ending_bounds(self) -> tuple[str, ...]:
        """The metrics whose bounds say with the target when the sweep ends; none without one."""
        bounded = () if self.objective.target is None else self.secondary
        return tuple(metric.name for metric in bounded if metric.is_bounded)

    def reached(self, values: Iterable[float], last: Mapping[str, float | None]) -> float | None:
        """Return the first of a trial's values that is as good as the target; None if none is.

        Return None also without a target, and while the last value of a metric violates a bound:
        a trial that ends the sweep can be the best one.
        """
        objective = self.objective
        if objective.target is None or violations(self.secondary, last):
            return None
        goal = objective.sign * objective.target
        good = (v for v in values if isfinite(v) and objective.sign * v <= goal)
        return next(good, None)

    def deadline_at_s(self, start_s: float) -> float | None:
        """Return its deadline in Unix seconds if it begins at `start_s`; None without one."""
        return None if self.deadline is None else Deadline.from_text(self.deadline).at_s(start_s)

    @property
    def trial_count(self) -> int:
        """Return the number of trials: max_trials, or the size of the search if that is less.

        A grid has a size, and so may the sampler of another package (ConfigError if it fails).
        """
        search = self.search
        if search.algorithm is Algorithm.GRID:
            return min(len(feasible_positions(search.to_feasible())), search.max_trials)
        size = None if search.algorithm.is_builtin else search.to_sampler().size
        return search.max_trials if size is None else size

    def to_json(self) -> str:
        """Return the resolved config as one line of JSON; `parse` reads it back to an equal one."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False)

    def to_yaml(self) -> str:
        """Return the resolved config as a sweep file."""
        return to_yaml(self.model_dump(mode="json"))


EXAMPLE: dict[str, Any] = {
    "name": "my-sweep",
    "objective": {"metric": "val_loss", "direction": "minimize"},
    "search": {
        "algorithm": "tpe",
        "startup_trials": 5,
        "max_trials": 16,
        "space": {"learning_rate": {"type": "loguniform", "low": 0.0001, "high": 0.1}},
    },
    "trial": {
        "command": ["python", "train.py", "--learning-rate", "{learning_rate}"],
        "directory": "/path/to/the/script",
    },
    "budget": {"max_epochs": 20},
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a sweep file."""
    schema = SweepConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def dag_params_schema() -> dict[str, dict[str, Any]]:
    """Return for each top-level key a self-contained JSON Schema with a `default`.

    For Airflow: `Param(schema.pop("default"), **schema)`. A required key's default is an example.
    """
    whole = SweepConfig.model_json_schema()
    definitions = whole["$defs"]
    params: dict[str, dict[str, Any]] = {}
    for key, prop in whole["properties"].items():
        schema = _flatten(_inline(prop, definitions))
        schema["default"] = EXAMPLE.get(key, schema.get("default"))
        params[key] = schema
    return params


def _inline(schema: Any, definitions: dict[str, Any], around: frozenset[str] = frozenset()) -> Any:  # noqa: ANN401 - JSON of any shape
    """Replace references by definitions; `discriminator` refers to them and is dropped.

    A definition inside itself (a choice under a choice) is any object with its keys: what is in it
    is checked when the sweep is started.
    """
    if isinstance(schema, list):
        return [_inline(item, definitions, around) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = definitions[name] if name not in around else _outline(definitions[name])
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**target, **rest}, definitions, around | {name})
    kept = {key: value for key, value in schema.items() if key != "discriminator"}
    return {key: _inline(value, definitions, around) for key, value in kept.items()}


def _outline(definition: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the constant keys of a definition, which distinguish it from others."""
    constant = {k: v for k, v in definition["properties"].items() if "const" in v}
    return {"type": "object", "properties": constant, "required": definition["required"]}


def _flatten(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace `anyOf` with null by a list of types, which the form shows as an optional field."""
    options = schema.get("anyOf", [])
    if {"type": "null"} not in options or len(options) != 2:
        return schema
    (other,) = (option for option in options if option != {"type": "null"})
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**other, **rest, "type": [other["type"], "null"]}
