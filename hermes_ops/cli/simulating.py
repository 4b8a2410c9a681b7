"""What `hermes simulate` and `hermes compare` were asked to do, from their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hermes_ops.core.options import parse_options
from hermes_ops.errors import ConfigError, HermesError, Problem

if TYPE_CHECKING:
    from hermes_ops.core.model import Gpu
    from hermes_ops.simulator.compare import Contender, Task

TRIALS = 64
GAP_SECONDS = 60.0
JOB_SECONDS = 600.0
LEAST = {
    "trials": 1, "prior_sweeps": 0, "good": 1, "poisson": 1,
    "gap_seconds": 0.001, "job_seconds": 0.001, "switch_seconds": 0,
}  # fmt: skip
SOURCE = "the command line"

Out = Annotated[Path | None, Option(help="Folder for tables and pictures.", metavar="FOLDER")]
Json = Annotated[bool, Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that say what is simulated; None where one was not given."""

    trace: Annotated[Path | None, Option(help="CSV of jobs.", metavar="FILE")] = None
    curves: Annotated[Path | None, Option(help=".npz of learning curves.", metavar="FILE")] = None
    poisson: Annotated[int | None, Option(help="So many random jobs.", metavar="N")] = None
    gap_seconds: Annotated[
        float | None, Option(help="Mean gap of their arrivals; 60.", metavar="S")
    ] = None
    job_seconds: Annotated[float | None, Option(help="Median length; 600.", metavar="S")] = None
    trials: Annotated[int | None, Option(help="Configurations drawn; 64.", metavar="N")] = None
    prior_sweeps: Annotated[
        int | None, Option(help="Earlier sweeps to learn from.", metavar="N")
    ] = None
    good: Annotated[int | None, Option(help="Trials within 1 % of the best.", metavar="N")] = None
    switch_seconds: Annotated[
        float, Option(help="Start-up seconds of every segment, the first too.", metavar="S")
    ] = 0.0

    disturbances: Annotated[
        Path | None, Option(help="CSV of nodes that fail or slow down.", metavar="FILE")
    ] = None

    def task(self) -> Task:
        """Where the workloads come from; ConfigError when it is not one source, or not this one."""
        from hermes_ops.simulator.compare import DisturbedTask

        self._check()
        source = self._source()
        return DisturbedTask(source, self.disturbances) if self.disturbances else source

    def _source(self) -> Task:
        from hermes_ops.simulator.compare import CurvesTask, PoissonTask, TraceTask

        if self.trace is not None:
            return TraceTask(self.trace, self.switch_seconds)
        if self.curves is not None:
            trials, priors = self.trials or TRIALS, self.prior_sweeps or 0
            return CurvesTask(self.curves, trials, priors, self.good, self.switch_seconds)
        gap_s = self.gap_seconds or GAP_SECONDS
        length_s = self.job_seconds or JOB_SECONDS
        return PoissonTask(self.poisson or 0, gap_s, length_s, self.switch_seconds)

    def _check(self) -> None:
        sources = ("trace", "curves", "poisson")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) or "no workload"
            allowed = "one of --trace, --curves, --poisson"
            raise refused("the workload", found, allowed, "name exactly one")
        belong = {"trials": "curves", "prior_sweeps": "curves", "good": "curves",
                  "gap_seconds": "poisson", "job_seconds": "poisson"}  # fmt: skip
        problems = tuple(
            Problem(_option(name), f"with --{given[0]}", f"with --{owner}", "leave it out")
            for name, owner in belong.items()
            if getattr(self, name) is not None and owner != given[0]
        )
        if problems:
            raise ConfigError(SOURCE, problems)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise refused(_option(name), str(value), f"at least {least}", "correct it")


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of `Asked`; it gets them together, as `asked`."""
    fields = signature(Asked, eval_str=True).parameters
    own = signature(command, eval_str=True).parameters

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - what each option holds
        command(asked=Asked(**{name: given.pop(name) for name in fields}), **given)

    every = {**fields, **own}
    del every["asked"]
    options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in every.values()]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]  # what Typer reads
    return run


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refused(where: str, found: str, allowed: str, fix: str) -> ConfigError:
    """The error of one wrong option."""
    return ConfigError(SOURCE, (Problem(where, found, allowed, fix),))


def gpus_of(number: int | None, nodes: str | None) -> tuple[Gpu, ...]:
    """The GPUs of `--gpus` and `--nodes`; ConfigError when they disagree or both are missing."""
    from hermes_ops.simulator.engine import layout

    if number is None and nodes is None:
        raise refused("--gpus", "nothing", "a number of GPUs", "say --gpus 64 or --nodes 16x4")
    found = layout(nodes if nodes is not None else str(number))
    if number is not None and len(found) != number:
        said = f"{number}, and --nodes {nodes} with {len(found)}"
        raise refused("--gpus", said, "the same number", "leave one of them out")
    return found


def contenders(
    policies: str, pairs: Sequence[str] | None, *, guards: bool
) -> tuple[Contender, ...]:
    """The policies of `--policies`, each with its own `POLICY.NAME=VALUE`; ConfigError if wrong."""
    from hermes_ops.simulator.compare import Contender

    names = tuple(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise refused("--policies", repr(policies), "names, parted by commas", "name one")
    own: dict[str, dict[str, object]] = {name: {} for name in names}
    for key, value in parse_options(pairs).items():
        policy, _, name = key.partition(".")
        if policy not in own or not name:
            allowed = f"POLICY.NAME=VALUE with one of {', '.join(names)}"
            raise refused("--policy-option", repr(key), allowed, "name the policy first")
        own[policy][name] = value
    return tuple(Contender(name, tuple(own[name].items()), guards) for name in names)


def folder_of(out: Path | None) -> Path | None:
    """The folder to write into, made if need be; HermesError when it cannot be one."""
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HermesError(f"{out} cannot be a folder ({error}): name one with --out.") from error
    return out
