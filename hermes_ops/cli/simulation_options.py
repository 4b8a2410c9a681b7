"""The options of `hermes simulate` and `hermes compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hermes_ops.core.options import parse_options
from hermes_ops.errors import ConfigError, HermesError, Problem

if TYPE_CHECKING:
    from hermes_ops.config.pool_quota import PoolQuota
    from hermes_ops.core.model import Gpu
    from hermes_ops.core.quota import Quota
    from hermes_ops.simulator.comparison import Contender
    from hermes_ops.simulator.published_workloads import PublishedWorkload
    from hermes_ops.simulator.workload_source import WorkloadSource

TRIALS = 64
GAP_SECONDS = 60.0
JOB_SECONDS = 600.0
LOAD = 1.0
LEAST = {
    "trials": 1, "prior_sweeps": 0, "good": 1, "poisson": 1, "trial_batch": 1,
    "gap_seconds": 0.001, "job_seconds": 0.001, "switch_seconds": 0,
}  # fmt: skip
SOURCE = "the command line"
QUOTA_SUFFIX = "+quota"
"""The end of the name of a policy that decides within the quotas of `--teams`."""

Out = Annotated[Path | None, Option(help="Folder for tables and pictures.", metavar="FOLDER")]
Json = Annotated[bool, Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The options that say what is simulated; None where one was not given."""

    trace: Annotated[Path | None, Option(help="CSV of jobs.", metavar="FILE")] = None
    curves: Annotated[Path | None, Option(help=".npz of learning curves.", metavar="FILE")] = None
    workload: Annotated[
        str | None, Option(help="A published workload of elastic jobs.", metavar="NAME")
    ] = None
    data: Annotated[
        Path | None, Option(help="Its files; default: examples/elastic.", metavar="FOLDER")
    ] = None
    load: Annotated[
        float | None, Option(help="Its load, as published; default 1.", metavar="L")
    ] = None
    poisson: Annotated[int | None, Option(help="Number of random jobs.", metavar="N")] = None
    gap_seconds: Annotated[
        float | None, Option(help="Mean seconds between arrivals; default 60.", metavar="S")
    ] = None
    job_seconds: Annotated[
        float | None, Option(help="Median seconds of a job; default 600.", metavar="S")
    ] = None
    trials: Annotated[
        int | None, Option(help="Number of configurations; default 64.", metavar="N")
    ] = None
    prior_sweeps: Annotated[
        int | None, Option(help="Earlier sweeps to learn from.", metavar="N")
    ] = None
    good: Annotated[int | None, Option(help="Trials within 1 % of the best.", metavar="N")] = None
    trial_gpus: Annotated[
        str | None, Option(help="GPUs that a trial may take, as 2, 1-4 or 1,2,4.", metavar="SIZES")
    ] = None
    trial_batch: Annotated[
        int | None,
        Option(help="Samples a step of such a trial; default: as published.", metavar="N"),
    ] = None
    switch_seconds: Annotated[
        float, Option(help="Start-up seconds of every segment.", metavar="S")
    ] = 0.0

    disturbances: Annotated[
        Path | None, Option(help="CSV of nodes that fail or slow down.", metavar="FILE")
    ] = None
    teams: Annotated[
        Path | None,
        Option(help="Quota file: teams of users; NAME+quota decides within it.", metavar="FILE"),
    ] = None

    def source(self) -> WorkloadSource:
        """Return the source of the workloads.

        Raise ConfigError if not exactly one is named, or an option belongs to another one.
        """
        from hermes_ops.simulator.workload_source import DisturbedSource, TeamSource

        self._check()
        source = self._chosen_source()
        if self.teams is not None:
            members = self.pool_quota(None).team_of_user.items()
            source = TeamSource(source, tuple(members)) if members else source
        return DisturbedSource(source, self.disturbances) if self.disturbances else source

    def pool_quota(self, gpus: int | None) -> PoolQuota:
        """Return the quotas of `--teams` for a pool of that many GPUs, if that is known."""
        from hermes_ops.config.pool_quota import load_quota

        if self.teams is None:
            fix = "name a quota file with --teams"
            raise option_error("--teams", "nothing", "a quota file", fix)
        return load_quota(self.teams, gpus)

    def _chosen_source(self) -> WorkloadSource:
        from hermes_ops.simulator.workload_source import CurvesSource, PoissonSource, TraceSource

        if self.workload is not None:
            return self._named(self.workload)
        if self.trace is not None:
            return TraceSource(self.trace, self.switch_seconds)
        if self.curves is not None:
            trials, priors = self.trials or TRIALS, self.prior_sweeps or 0
            source = CurvesSource(self.curves, trials, priors, self.good, self.switch_seconds)
            return source if self.trial_gpus is None else self._sized(source, self.trial_gpus)
        gap_s = self.gap_seconds or GAP_SECONDS
        length_s = self.job_seconds or JOB_SECONDS
        users = () if self.teams is None else self.pool_quota(None).members
        return PoissonSource(self.poisson or 0, gap_s, length_s, self.switch_seconds, users)

    def _sized(self, source: WorkloadSource, sizes: str) -> WorkloadSource:
        """Return the sweeps of the source, whose trials may take these numbers of GPUs."""
        from hermes_ops.simulator.published_workloads import EXAMPLES
        from hermes_ops.simulator.sized_trials import SizedSweepSource, parse_sizes

        try:
            numbers = parse_sizes(sizes)
        except ValueError:
            fix = "write a number, a range or a list"
            allowed = "numbers of GPUs from 1, as 2, 1-4 or 1,2,4"
            raise option_error("--trial-gpus", repr(sizes), allowed, fix) from None
        folder = self.data or EXAMPLES
        self._check_folder(folder, "measured step times")
        return SizedSweepSource(source, folder, numbers, self.trial_batch)

    @property
    def layout(self) -> str | None:
        """The nodes x GPUs that a published workload is for; None for another source."""
        from hermes_ops.simulator.published_workloads import published_workload

        return None if self.workload is None else published_workload(self.workload).layout

    @property
    def parameters(self) -> Mapping[str, Mapping[str, object]]:
        """The parameters of policies with which a published workload was published."""
        from hermes_ops.simulator.published_workloads import published_workload

        return {} if self.workload is None else published_workload(self.workload).parameters

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of a published workload's own workloads; none where they are drawn."""
        if self.workload is None:
            return ()
        named, data, load = self._published(self.workload)
        return () if named.numbers is None else named.numbers(data, load)

    def _named(self, name: str) -> WorkloadSource:
        named, data, load = self._published(name)
        return named.make(data, load)

    def _published(self, name: str) -> tuple[PublishedWorkload, Path, float]:
        """Return the workload of that name, the folder of its files, and its load."""
        from hermes_ops.simulator.published_workloads import EXAMPLES, published_workload

        named = published_workload(name)
        if self.load is not None and self.load not in named.loads:
            allowed = ", ".join(map(str, named.loads)) or f"none with --workload {name}"
            raise option_error("--load", str(self.load), allowed, "name one, or leave it out")
        data = self.data or EXAMPLES
        if named.needs_data:
            self._check_folder(data, f"the files of {name}")
        return named, data, LOAD if self.load is None else self.load

    def _check_folder(self, folder: Path, content: str) -> None:
        if not folder.is_dir():
            found = f"{folder}, which is no folder"
            fix = "name the folder with --data, or run this in a checkout of Hermes Ops"
            raise option_error("--data", found, f"a folder with {content}", fix)

    def _check(self) -> None:
        sources = ("trace", "curves", "poisson", "workload")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) or "no workload"
            allowed = "one of --trace, --curves, --poisson, --workload"
            raise option_error("the workload", found, allowed, "name exactly one")
        belong = {"trials": "curves", "prior_sweeps": "curves", "good": "curves",
                  "trial_gpus": "curves", "trial_batch": "curves",
                  "gap_seconds": "poisson", "job_seconds": "poisson",
                  "load": "workload", "data": "workload"}  # fmt: skip
        if self.curves is not None and self.trial_gpus is not None:
            del belong["data"]
        problems = tuple(
            Problem(_option(name), f"with --{given[0]}", f"with --{owner}", "leave it out")
            for name, owner in belong.items()
            if getattr(self, name) is not None and owner != given[0]
        )
        if problems:
            raise ConfigError(SOURCE, problems)
        if self.trial_batch is not None and self.trial_gpus is None:
            allowed = "with --trial-gpus"
            raise option_error("--trial-batch", str(self.trial_batch), allowed, "add --trial-gpus")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise option_error(_option(name), str(value), f"at least {least}", "correct it")


def with_simulation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each field of SimulationOptions.

    It gets them together, as `simulation`.
    """
    fields = signature(SimulationOptions, eval_str=True).parameters
    command_options = signature(command, eval_str=True).parameters

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - what each option holds
        command(simulation=SimulationOptions(**{name: given.pop(name) for name in fields}), **given)

    every = {**fields, **command_options}
    del every["simulation"]
    options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in every.values()]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]  # what Typer reads
    return run


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_error(where: str, found: str, allowed: str, fix: str) -> ConfigError:
    """Return the error of one wrong option."""
    return ConfigError(SOURCE, (Problem(where, found, allowed, fix),))


def gpus_of(number: int | None, nodes: str | None, published: str | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of `--gpus` and `--nodes`, or the `published` nodes x GPUs without either.

    Raise ConfigError if they disagree or are missing.
    """
    from hermes_ops.simulator.engine import layout

    if number is None and nodes is None:
        nodes = published
    if number is None and nodes is None:
        raise option_error("--gpus", "nothing", "a number of GPUs", "say --gpus 64 or --nodes 16x4")
    gpus = layout(nodes if nodes is not None else str(number))
    if number is not None and len(gpus) != number:
        found = f"{number}, and --nodes {nodes} with {len(gpus)}"
        raise option_error("--gpus", found, "the same number", "leave one of them out")
    return gpus


def contenders(
    policies: str,
    pairs: Sequence[str] | None,
    *,
    guards: bool,
    published: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    quota: Quota | None = None,
) -> tuple[Contender, ...]:
    """Return the policies of `--policies`, each with its parameters; ConfigError if one is wrong.

    `pairs`: the parameters, as `POLICY.NAME=VALUE`; before them those that are `published`. A
    policy with +quota at the end of its name decides within `quota`; any other that guarantees GPUs
    to queues by itself guarantees those of `quota`.
    """
    from hermes_ops.simulator.comparison import Contender

    names = tuple(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise option_error("--policies", repr(policies), "names, parted by commas", "name one")
    if quota is None and any(name.endswith(QUOTA_SUFFIX) for name in names):
        named = next(name for name in names if name.endswith(QUOTA_SUFFIX))
        raise option_error("--policies", named, "+quota with --teams", "add --teams FILE")
    parameters: dict[str, dict[str, object]] = {
        name: dict(published.get(name.removesuffix(QUOTA_SUFFIX), {})) for name in names
    }
    for key, value in parse_options(pairs).items():
        policy, _, name = key.partition(".")
        if policy not in parameters or not name:
            allowed = f"POLICY.NAME=VALUE with one of {', '.join(names)}"
            raise option_error("--policy-option", repr(key), allowed, "name the policy first")
        parameters[policy][name] = value
    capacities = () if quota is None else quota.capacities
    return tuple(
        Contender(
            name.removesuffix(QUOTA_SUFFIX),
            tuple(parameters[name].items()),
            guards,
            name,
            quota if name.endswith(QUOTA_SUFFIX) else None,
            capacities,
        )
        for name in names
    )


def numbers_of(text: str | None, published: Sequence[int]) -> tuple[int, ...]:
    """Return the workloads of `--numbers`, by default all; ConfigError for one that is not there.

    None of them where workloads are drawn by seed.
    """
    if text is None:
        return tuple(published)
    allowed = ", ".join(map(str, published)) or "none: its workloads are drawn, by --seeds"
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) in published for word in words):
        raise option_error("--numbers", repr(text), allowed, "name some of these, or leave it out")
    return tuple(dict.fromkeys(map(int, words)))


def folder_of(out: Path | None) -> Path | None:
    """Return the folder to write into, made if need be; HermesError if it cannot be one."""
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HermesError(f"{out} cannot be a folder ({error}): name one with --out.") from error
    return out
