"""The warnings and the likely cost of a sweep file, for `hermes sweep check` and `run`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from statistics import quantiles
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from hermes_ops.cli.connection import Connection
from hermes_ops.config import RunIn, SweepConfig, SweepWarning, warnings_of
from hermes_ops.config.model import Workspace
from hermes_ops.errors import HermesError, StackError
from hermes_ops.references import names_in
from hermes_ops.stack.layout import default_home
from hermes_ops.stack.record import StackRecord, environment_of, load
from hermes_ops.trial.environment import InheritanceRule
from hermes_ops.trial.workspace import WorkspaceError, survey

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking.earlier_sweeps import SweepCost

REFUSED = 2
"""The exit code of `--strict` where there are warnings."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class WarningList:
    """The warnings of one sweep file."""

    file: Path
    warnings: tuple[SweepWarning, ...]
    overrides: tuple[str, ...] = ()

    def render(self) -> str:
        """Return them as a numbered list for a terminal; an empty text if there are none."""
        from hermes_ops.config.overrides import places

        if not self.warnings:
            return ""
        count = len(self.warnings)
        where = places(self.file, [w.path for w in self.warnings], self.overrides)
        shown = zip(self.warnings, where, strict=True)
        lines = [f"  {n}. {warning.at(line)}" for n, (warning, line) in enumerate(shown, start=1)]
        return "\n".join([f"{count} warning{'s' if count > 1 else ''}:", *lines])

    def document(self) -> list[dict[str, str]]:
        """Return them as a JSON list."""
        return [warning.document() for warning in self.warnings]

    def refuse(self) -> None:
        """Print the warnings and end the command with REFUSED, if there are any."""
        if self.warnings:
            typer.echo(
                f"{self.render()}\nNothing was started: --strict refuses warnings.", err=True
            )
            raise typer.Exit(REFUSED)


def collect_warnings(
    config: SweepConfig, file: Path, connection: Connection | None, dag_id: str | None = None
) -> WarningList:
    """Return the warnings of a file; with those that need Airflow, if it answers.

    The script is checked where its trials train: on this machine, unless Airflow is on another
    one. `dag_id`: the DAG that is to run the sweep.
    """
    if connection is None:
        warnings = warnings_of(config, pool_slots=None, environ=os.environ)
        return WarningList(file, (*warnings, *workspace_warnings(config, os.environ)))
    slots, obstacle = None, None
    try:
        slots = slots_of(connection.airflow, config.pool)
        obstacle = None if dag_id is None else dag_obstacle(connection.airflow, dag_id)
    except HermesError:  # it does not answer: what it knows is not known
        pass
    environ = os.environ if is_here(connection.airflow_url) else None
    warnings = warnings_of(config, pool_slots=slots, environ=environ)
    warnings = (*warnings, *workspace_warnings(config, environ), *reference_warnings(config))
    warnings = (*warnings, *executor_warnings(config))
    if environ is not None:  # the quota is in the state folder of that machine
        warnings = (*warnings, *class_warnings(config))
    return WarningList(file, (*warnings, *([_dag_warning(dag_id, *obstacle)] if obstacle else ())))


def refuse_class(config: SweepConfig, source: str, connection: Connection | None) -> None:
    """Raise ConfigError if the person may not start a sweep of this class in the pool.

    Without Airflow, or while it does not answer, nobody knows who that is.
    """
    from hermes_ops.airflow.control.quota_settings import refuse_class_in_pool

    if connection is not None and (user := user_or_none(connection.airflow)) is not None:
        refuse_class_in_pool(config.pool, config.priority_class, user, source)


def user_or_none(airflow: AirflowClient) -> str | None:
    """Return the Airflow user who is logged in; None while Airflow does not answer."""
    try:
        return airflow.user_name()
    except HermesError:
        return None


def class_warnings(config: SweepConfig) -> tuple[SweepWarning, ...]:
    """Return the warning on a class in a pool without a quota."""
    from hermes_ops.airflow.control.quota_settings import QuotaSettings

    try:
        has_none = QuotaSettings.of_pool(config.pool) is None
    except HermesError:
        return ()
    if config.priority_class is None or not has_none:
        return ()
    found = f"{config.priority_class}, and the pool {config.pool} has no quota"
    fix = "set a quota with `hermes pool quota FILE`, or remove the key"
    return (SweepWarning(("class",), found, "the class has no effect", fix),)


def executor_warnings(config: SweepConfig) -> tuple[SweepWarning, ...]:
    """Return the warning on trials as processes if the pool's controller refuses them."""
    from hermes_ops.airflow.control.pool_file import read_view
    from hermes_ops.airflow.hosts import REMEDY

    refusal = (read_view(config.pool) or {}).get("process_refusal")
    if config.trial.run_in is not RunIn.PROCESS or not refusal:
        return ()
    found, leads_to = f"process, and {refusal}", "the sweep is refused when it is planned"
    return (SweepWarning(("trial", "run_in"), found, leads_to, REMEDY),)


def slots_of(airflow: AirflowClient, pool: str) -> int | None:
    """Return the slots of a pool; None if it has no limit or does not exist."""
    row = airflow.pool(pool)
    slots = -1 if row is None else int(row["slots"])
    return None if slots < 0 else slots


def dag_obstacle(airflow: AirflowClient, dag_id: str) -> tuple[str, str] | None:
    """Return why Airflow starts no task of the DAG, and the remedy; None if it starts them."""
    dag = airflow.dag(dag_id) or {}
    if dag.get("is_stale"):
        remedy = "put its file back, or correct it (Airflow lists import errors)"
        return "is no longer in Airflow's DAG folder", remedy
    if dag.get("is_paused"):
        return "is paused in Airflow", "unpause it (the switch on its page)"
    return None


def is_here(url: str) -> bool:
    """Return True if the address is one of this machine."""
    return urlsplit(url).hostname in LOOPBACK


def connect_if_possible(home: Path | None) -> Connection | None:
    """Return the services of the stack of `home`, or of the environment; None without any.

    Requests have a short timeout: a command that can do without them must not wait.
    """
    from hermes_ops.airflow.client import AirflowClient

    try:
        connection = Connection.from_home(home)
    except HermesError:
        return None
    return replace(
        connection, airflow=AirflowClient(connection.airflow.credentials, timeout_s=ANSWER_S)
    )


def _dag_warning(dag_id: str | None, why: str, remedy: str) -> SweepWarning:
    found = f"the DAG {dag_id} {why}"
    return SweepWarning(("Airflow",), found, "no trial starts until then", remedy)


def reference_warnings(config: SweepConfig) -> tuple[SweepWarning, ...]:
    """Return a warning for each reference to a variable that trials do not have.

    Return none for an Airflow that `hermes up` has not started, and for pods: their variables are
    not known on this machine.
    """
    if config.trial.run_in is RunIn.POD:
        return ()
    try:
        inherited = inherited_names(load(default_home()))
    except StackError:
        return ()
    return tuple(
        SweepWarning(
            ("trial", "environment", key),
            f"{{env:{name}}}, and trials of this stack have no variable {name}",
            "no trial can start",
            f"start the stack with `hermes up --trial-environment {name}` where {name} is set",
        )
        for key, value in config.trial.environment.items()
        for name in names_in(value)
        if name not in inherited and name not in config.trial.environment
    )


def inherited_names(record: StackRecord) -> frozenset[str]:
    """Return the names of the variables that trials of a stack inherit."""
    rule = InheritanceRule(record.trial_environment)
    return frozenset({*record.inherited, *filter(rule.reaches_trials, environment_of(record))})


def workspace_warnings(
    config: SweepConfig, environ: Mapping[str, str] | None
) -> tuple[SweepWarning, ...]:
    """Return the warning on a folder that is too large to be copied for each trial.

    `environ` None: trials train on another machine, and nothing is checked.
    """
    trial, folder = config.trial, Path(config.trial.directory)
    is_here = environ is not None and trial.run_in is RunIn.PROCESS and os.path.isdir(folder)
    if trial.workspace is not Workspace.COPY or not is_here:
        return ()
    home = os.environ.get("HERMES_HOME")
    try:
        survey(folder, [Path(home)] if home else [])
    except WorkspaceError as error:
        found, _, fix = str(error).partition(": ")
        return (SweepWarning(("trial", "workspace"), found, "no trial can start", fix),)
    return ()


HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """GPU-seconds that all trials take up to their last epoch; low and high are the quartiles."""

    sweeps: int
    trials: int
    gpu_s_per_epoch: float
    low_gpu_s: float
    gpu_s: float
    high_gpu_s: float
    last_gpu_s: float
    """GPU-seconds that the newest of those sweeps used."""
    gpu_s_per_epoch_quartiles: tuple[float, float, float]

    def render(self, script: str) -> str:
        """Return it as lines for a terminal."""
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
    """Return the name of the Python file or module that a command runs, else of its program."""
    for place, argument in enumerate(command):
        if argument == "-m" and place + 1 < len(command):
            return command[place + 1]
        if argument.endswith(".py"):
            return PurePath(argument).name
    return PurePath(command[0]).name if command else ""


def estimate_cost(config: SweepConfig, earlier: Sequence[SweepCost]) -> Estimate | None:
    """Return the estimate from earlier sweeps, which come newest first; None without any."""
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
        gpu_s_per_epoch_quartiles=(low, middle, high),
    )


def cost_estimate(config: SweepConfig, home: Path | None) -> Estimate | None:
    """Return the estimate; None if no MLflow is known, or it has no such sweep.

    Raise HermesError if an MLflow is known and does not answer.
    """
    from hermes_ops.cli.connection import connect_tracker
    from hermes_ops.tracking.earlier_sweeps import earlier_spending

    try:
        tracker = connect_tracker(home)
    except StackError:
        return None
    script = script_of(config.trial.command)
    return estimate_cost(config, earlier_spending(tracker, config.name, _runs(script, config)))


def estimate_text(config: SweepConfig, home: Path | None) -> str | None:
    """Return the estimate as text; None if no MLflow is known, or it has no such sweep.

    Raise HermesError if an MLflow is known and does not answer.
    """
    estimate = cost_estimate(config, home)
    return None if estimate is None else estimate.render(script_of(config.trial.command))


def _runs(script: str, config: SweepConfig) -> Any:  # noqa: ANN401 - a predicate on sweep files
    gpus = config.trial.model_dump(mode="json")["gpus"]

    def like(document: Mapping[str, Any]) -> bool:
        trial = document.get("trial")
        if not isinstance(trial, dict):
            return False
        command = trial.get("command") or ()
        same = script_of([str(argument) for argument in command]) == script
        return same and trial.get("gpus", 1) == gpus

    return like


def estimate_or_reason(config: SweepConfig, home: Path | None) -> str | None:
    """Return the estimate, or the reason why MLflow could not be asked for one."""
    try:
        return estimate_text(config, home)
    except HermesError as error:
        return f"No estimate: {error}"
