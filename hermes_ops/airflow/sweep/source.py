"""Where a plan takes its sweep from: the run's configuration, or what stands in the DAG's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.airflow.sweep.templates import Render, rendered
from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.files import read
from hermes_ops.errors import ConfigError, Problem

DEFAULT_POOL = "gpus"


@dataclass(frozen=True, slots=True)
class Call:
    """A function that gives a sweep when the plan runs.

    Arguments may be XComs of other tasks. Parameters that are not given take what Airflow's
    context has under their name (`ds`, `params`, `data_interval_start`).
    """

    function: Callable[..., Mapping[str, Any]]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sweep, as plain data."""
        args = [resolved(a, context) for a in self.args]
        kwargs = {k: resolved(v, context) for k, v in self.kwargs.items()}
        signature = inspect.signature(self.function)
        given = signature.bind_partial(*args, **kwargs).arguments
        known = {n: context[n] for n in signature.parameters if n not in given and n in context}
        return self.function(*args, **kwargs, **known)


@dataclass(frozen=True, slots=True)
class SweepSource:
    """A sweep as plain data, as a function, or (None) as the configuration of the DAG run.

    Relative paths are taken from `base`. `pool` is the pool of the trials' tasks, which are made
    before the sweep is read.
    """

    data: Mapping[str, Any] | Call | None = None
    base: Path | None = None
    pool: str = DEFAULT_POOL

    @classmethod
    def of(cls, sweep: object, base: Path, pool: str | None) -> SweepSource:
        """From what users write: a path of a sweep file, its content, or a `Call`."""
        if isinstance(sweep, Call):
            return cls(sweep, base, pool or DEFAULT_POOL)
        if isinstance(sweep, Mapping):
            found = sweep.get("pool")
            return cls(sweep, base, pool or (found if isinstance(found, str) else DEFAULT_POOL))
        path = base / str(sweep)
        data = read(path).data
        if not isinstance(data, Mapping):
            problem = Problem("(top level)", type(data).__name__, "a sweep", "write its keys")
            raise ConfigError(str(path), (problem,))
        return cls.of(data, path.parent, pool)

    @property
    def references(self) -> list[Any]:
        """Whatever of it may be an XCom of another task."""
        if isinstance(self.data, Call):
            return [*self.data.args, *self.data.kwargs.values()]
        return [self.data]

    def config(self, context: Mapping[str, Any], render: Render) -> SweepConfig:
        """The sweep of this run; ConfigError with every problem that it has."""
        source = str(context["run_id"])
        if self.data is None:
            return parse(dict(context["params"]), source=source, base=None)
        if isinstance(self.data, Call):
            found = self.data(context)
        else:
            found = rendered(resolved(self.data, context), render, source)
        if isinstance(found, Mapping):
            found = {"pool": self.pool, **found}
        config = parse(found, source=source, base=self.base)
        if config.pool != self.pool:
            problem = Problem(
                "pool",
                config.pool,
                f"{self.pool}, the pool that the DAG gives to the trials",
                "name the pool in the DAG, with `pool=`",
            )
            raise ConfigError(source, (problem,))
        return config


def resolved(value: Any, context: Mapping[str, Any]) -> Any:  # noqa: ANN401 - plain data of any shape
    """The value with the XComs in it pulled."""
    if isinstance(value, Mapping):
        return {k: resolved(v, context) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(v, context) for v in value]
    if not isinstance(value, Path) and (resolve := getattr(value, "resolve", None)) is not None:
        return resolve(context)
    return value
