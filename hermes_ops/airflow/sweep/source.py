"""The source of a plan's sweep: the run's configuration, or the sweep in the DAG's file.

A sweep in a DAG's file may hold Airflow's templates: `{{ ds }}` and the like.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.airflow.trial.connections import EXPRESSION, Render
from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.files import read_document
from hermes_ops.config.problems import with_line
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.references import refers

DEFAULT_POOL = "gpus"

REQUIRED = tuple(key for key, field in SweepConfig.model_fields.items() if field.is_required())
"""The keys that every sweep has."""


@dataclass(frozen=True, slots=True)
class SweepCall:
    """A function that returns a sweep when the plan runs.

    Arguments may be XComs of other tasks. Parameters without an argument take the value of that
    name in Airflow's context (`ds`, `params`, `data_interval_start`).
    """

    function: Callable[..., Mapping[str, Any]]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sweep as plain data."""
        args = [pull_xcoms(a, context) for a in self.args]
        kwargs = {k: pull_xcoms(v, context) for k, v in self.kwargs.items()}
        signature = inspect.signature(self.function)
        given = signature.bind_partial(*args, **kwargs).arguments
        from_context = {
            n: context[n] for n in signature.parameters if n not in given and n in context
        }
        return self.function(*args, **kwargs, **from_context)


@dataclass(frozen=True, slots=True)
class SweepSource:
    """A sweep as plain data, as a function, or (None) as the configuration of the DAG run.

    Relative paths are taken from `base`. `pool` is the pool of the trials' tasks, which are made
    before the sweep is read. `defaults` are the keys of a sweep that the DAG itself gives.
    """

    data: Mapping[str, Any] | SweepCall | None = None
    base: Path | None = None
    pool: str = DEFAULT_POOL
    defaults: frozenset[str] = frozenset()

    @classmethod
    def from_sweep(cls, sweep: object, base: Path, pool: str | None) -> SweepSource:
        """Return the source for a path of a sweep file, its content, or a `SweepCall`.

        Raise ConfigError for a file with a key twice, with tags, or without a sweep.
        """
        if isinstance(sweep, SweepCall):
            return cls(sweep, base, pool or DEFAULT_POOL)
        if isinstance(sweep, Mapping):
            named = sweep.get("pool")
            return cls(sweep, base, pool or (named if isinstance(named, str) else DEFAULT_POOL))
        path = base / str(sweep)
        document = read_document(path)
        data = document.data
        if document.problems:
            with_lines = (with_line(*each, document.lines, path.name) for each in document.problems)
            raise ConfigError(str(path), tuple(with_lines))
        if not isinstance(data, Mapping):
            problem = Problem("(top level)", type(data).__name__, "a sweep", "write its keys")
            raise ConfigError(str(path), (problem,))
        return cls.from_sweep(data, path.parent, pool)

    @property
    def references(self) -> list[Any]:
        """The parts that may be XComs of other tasks."""
        if isinstance(self.data, SweepCall):
            return [*self.data.args, *self.data.kwargs.values()]
        return [self.data]

    def config(self, context: Mapping[str, Any], render: Render) -> SweepConfig:
        """Return the sweep of this run; ConfigError with all its problems."""
        source = str(context["run_id"])
        if self.data is None:
            self._refuse_form_examples(context, source)
            content = context["params"]
        elif isinstance(self.data, SweepCall):
            content = self.data(context)
        else:
            content = render_templates(pull_xcoms(self.data, context), render, source)
        if isinstance(content, Mapping):
            content = {"pool": self.pool, **content}
        config = parse(content, source=source, base=self.base)
        if config.pool != self.pool:
            problem = Problem(
                "pool",
                config.pool,
                f"{self.pool}, the pool that the DAG gives to the trials",
                "name the pool in the DAG, with `pool=`",
            )
            raise ConfigError(source, (problem,))
        return config

    @property
    def connection_templates(self) -> tuple[str, ...]:
        """The templates that the DAG's file has in variables of the script that name connections.

        Trials render no others, whatever their leases and the XComs of other tasks say.
        """
        if not isinstance(self.data, Mapping):
            return ()
        names = connection_variables(self.data)  # an XCom is no text
        environment = self.data["trial"]["environment"] if names else {}
        values = (str(environment.get(name, "")) for name in names)
        return tuple(dict.fromkeys(text for value in values for text in EXPRESSION.findall(value)))

    def connection_variables(self, context: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the variables of the script that come from connections: trials render them."""
        if not isinstance(self.data, Mapping):
            return ()
        return connection_variables(pull_xcoms(self.data, context))

    def unread_keys(self, context: Mapping[str, Any]) -> list[str]:
        """Return the keys of the run's configuration that no template of the DAG's file reads."""
        dag, conf = context.get("dag"), getattr(context.get("dag_run"), "conf", None) or {}
        templates = " ".join(EXPRESSION.findall(str(self.data)))
        if self.data is None or _WHOLE_CONF.search(templates):
            return []
        words = {*_WORD.findall(templates), *(getattr(dag, "params", None) or {})}
        return sorted(str(key) for key in conf if str(key) not in words)

    def refuse_unread_keys(self, context: Mapping[str, Any]) -> None:
        """Raise ConfigError for unread keys: the sweep is the file's, so they change nothing."""
        unread = self.unread_keys(context)
        if not unread:
            return
        name = unread[0]
        problem = Problem(
            "the run's configuration",
            ", ".join(unread),
            "keys that a template of the DAG's sweep file reads",
            f"start the DAG without {name}; for another sweep change the file, or start a copy of "
            "it with `hermes sweep run FILE`",
        )
        raise ConfigError(str(context["run_id"]), (problem,))

    def _refuse_form_examples(self, context: Mapping[str, Any], source: str) -> None:
        """Raise ConfigError for a run without a sweep: the form's examples are not one."""
        run = context.get("dag_run")
        given = context["params"] if run is None else run.conf or {}
        missing = [key for key in REQUIRED if key not in given and key not in self.defaults]
        if not missing:
            return
        found = "nothing" if not given else f"only {', '.join(sorted(map(str, given)))}"
        fix = "start the sweep with `hermes sweep run FILE`, or give its content as configuration"
        problem = Problem(
            "the run's configuration", found, f"a sweep: {', '.join(missing)} as well", fix
        )
        raise ConfigError(source, (problem,))


def pull_xcoms(value: Any, context: Mapping[str, Any]) -> Any:  # noqa: ANN401 - plain data of any shape
    """Return the value with its XComs replaced by their values."""
    if isinstance(value, Mapping):
        return {k: pull_xcoms(v, context) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [pull_xcoms(v, context) for v in value]
    if not isinstance(value, Path) and (resolve := getattr(value, "resolve", None)) is not None:
        return resolve(context)
    return value


PATHS = ("directory", "python", "tensorboard")
_WORD = re.compile(r"\w+")
_WHOLE_CONF = re.compile(r"\b(?:conf|params)\b(?!\s*[.\[])")
"""A template that reads all of the run's configuration."""
_SECRET = re.compile(r"\bconn\b")


def render_templates(sweep: Mapping[str, Any], render: Render, source: str) -> dict[str, Any]:
    """Return the sweep with the templates in its command, environment and paths rendered.

    A template has a space after its opening braces and before its closing ones (`{{ ds }}`).
    Without them, braces mean what they mean in a sweep file. Braces in a template's result name no
    parameter. A variable from a connection stays a template, so that no record holds its value,
    and counts as a secret (`trial.secrets`): the trial renders it. In a command, which everybody
    on the machine can read, such a template is a ConfigError.
    """
    trial = sweep.get("trial")
    if not isinstance(trial, Mapping):
        return dict(sweep)
    fresh = dict(trial)
    if isinstance(command := trial.get("command"), list | tuple):
        _refuse_secrets(command, source)
        fresh["command"] = [_replaced(a, render, _doubled) for a in command]
    if isinstance(environment := trial.get("environment"), Mapping):
        secret = connection_variables(sweep)
        _refuse_mixtures(environment, secret, source)
        fresh["environment"] = {
            k: v if k in secret else _replaced(v, render, str) for k, v in environment.items()
        }
        fresh["secrets"] = [*dict.fromkeys([*(trial.get("secrets") or ()), *secret])]
    fresh |= {k: _replaced(trial[k], render, str) for k in PATHS if k in trial}
    return {**sweep, "trial": fresh}


def connection_variables(sweep: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the variables of the script whose values come from connections."""
    trial = sweep.get("trial")
    environment = trial.get("environment") if isinstance(trial, Mapping) else None
    if not isinstance(environment, Mapping):
        return ()
    return tuple(str(k) for k, v in environment.items() if _names_a_connection(v))


def _replaced(value: Any, render: Render, written: Callable[[str], str]) -> Any:  # noqa: ANN401 - whatever the file holds
    if not isinstance(value, str):
        return value
    return EXPRESSION.sub(lambda match: written(render(match.group())), value)


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _names_a_connection(value: object) -> bool:
    expressions = EXPRESSION.findall(value) if isinstance(value, str) else ()
    return any(_SECRET.search(expression) for expression in expressions)


def _refuse_secrets(command: list[Any] | tuple[Any, ...], source: str) -> None:
    for index, argument in enumerate(command):
        if _names_a_connection(argument):
            problem = Problem(
                f"trial.command[{index}]",
                "a template of a connection",
                "templates that are no secret",
                "put it into trial.environment and read it there",
            )
            raise ConfigError(source, (problem,))


def _refuse_mixtures(environment: Mapping[str, Any], secret: tuple[str, ...], source: str) -> None:
    for name in secret:
        if refers(environment[name]):
            place, found = f"trial.environment.{name}", "a template of a connection and {env:...}"
            fix = "give the script two variables"
            raise ConfigError(source, (Problem(place, found, "one of the two", fix),))
