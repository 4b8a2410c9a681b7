"""Where simulated workloads come from: traces, curves, random arrivals; disturbances of nodes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Protocol

from hermes_ops.core.model import PastTrial
from hermes_ops.simulator.csv_file import CsvFile
from hermes_ops.simulator.curves import CurveDataset, read_curves, sample
from hermes_ops.simulator.traces import poisson, read_trace
from hermes_ops.simulator.workload import Costs, Interference, NodeFailure, Work, Workload

COLUMNS = ("node", "at_s", "until_s", "speed")


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """The workload of one seed, and the trials of earlier sweeps that a policy may know."""

    workload: Workload
    prior: tuple[PastTrial, ...] = ()


class WorkloadSource(Protocol):
    """A source of workloads: one a seed, the same for every policy."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    @property
    def varies(self) -> bool:
        """False when every seed gives the same workload."""
        ...

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the workload of this seed; raise ConfigError when that is impossible."""
        ...


@dataclass(frozen=True, slots=True)
class TraceSource:
    """The jobs of a trace, all of them, with one start-up cost for all."""

    path: Path
    startup_s: float = 0.0
    varies: bool = False

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name.partition(".")[0]

    def draw(self, seed: int) -> DrawnWorkload:  # noqa: ARG002  # the same for every seed
        """Return the trace, whatever the seed."""
        return DrawnWorkload(
            _with_startup(_trace(self.path.absolute(), _written_ns(self.path)), self.startup_s)
        )


@dataclass(frozen=True, slots=True)
class DerivedSource:
    """The base of sources that change the workloads of another source."""

    source: WorkloadSource

    @property
    def name(self) -> str:
        """The other source's name."""
        return self.source.name

    @property
    def varies(self) -> bool:
        """Whether the other source varies."""
        return self.source.varies


@dataclass(frozen=True, slots=True)
class TeamSource(DerivedSource):
    """The workloads of another source, in which users who are in a team have it.

    `teams` are (user, team); a job of a user who is in none keeps the team that its source names.
    """

    teams: tuple[tuple[str, str], ...]

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the other source's workload, with the teams of its users."""
        drawn, team_of = self.source.draw(seed), dict(self.teams)
        jobs = tuple(
            replace(work, virtual_cluster=team_of.get(work.user, work.virtual_cluster))
            for work in drawn.workload.jobs
        )
        return replace(drawn, workload=replace(drawn.workload, jobs=jobs))


@dataclass(frozen=True, slots=True)
class CurvesSource:
    """Sweeps of `trials` configurations drawn from a file of learning curves."""

    path: Path
    trials: int = 64
    prior_sweeps: int = 0
    good: int | None = None
    startup_s: float = 0.0
    varies: bool = True

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.stem

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the sweep of this seed."""
        workload, prior = sample(
            _curves(self.path.absolute(), _written_ns(self.path)),
            self.trials,
            seed,
            prior_sweeps=self.prior_sweeps,
            costs=Costs(startup_s=self.startup_s),
            good=self.good,
        )
        return DrawnWorkload(workload, prior)


@dataclass(frozen=True, slots=True)
class PoissonSource:
    """`jobs` random jobs: exponential gaps of this mean, log-normal lengths of this median.

    `users` are (user, the most GPUs at once; None: no limit). Each job is that of one of them who
    may hold its GPUs, all of them equally likely, and of nobody where there is none.
    """

    jobs: int
    mean_gap_s: float
    median_s: float
    startup_s: float = 0.0
    users: tuple[tuple[str, int | None], ...] = ()
    varies: bool = True

    @property
    def name(self) -> str:
        """Its number of jobs."""
        return f"poisson-{self.jobs}"

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the arrivals of this seed."""
        drawn = poisson(self.jobs, mean_gap_s=self.mean_gap_s, seed=seed, median_s=self.median_s)
        chance = random.Random(f"users of {seed}")  # noqa: S311  (no secret)
        jobs = tuple(replace(work, user=self._user(work, chance)) for work in drawn.jobs)
        return DrawnWorkload(_with_startup(replace(drawn, jobs=jobs), self.startup_s))

    def _user(self, work: Work, chance: random.Random) -> str:
        able = [user for user, most in self.users if most is None or work.gpus <= most]
        return chance.choice(able) if able else ""


@dataclass(frozen=True, slots=True)
class DisturbedSource(DerivedSource):
    """Another source's workloads, with failures and slowdowns of nodes from a file."""

    path: Path

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the other source's workload and add the disturbances."""
        drawn = self.source.draw(seed)
        disturbances = read_disturbances(self.path)
        return replace(drawn, workload=replace(drawn.workload, disturbances=disturbances))


@lru_cache(maxsize=4)  # one reading for all seeds of a process
def _curves(path: Path, written_ns: int) -> CurveDataset:  # noqa: ARG001  # part of the key: a newer file is read again
    return read_curves(path)


@lru_cache(maxsize=4)
def _trace(path: Path, written_ns: int) -> Workload:  # noqa: ARG001
    return read_trace(path)


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _with_startup(workload: Workload, startup_s: float) -> Workload:
    if not startup_s:
        return workload
    jobs = (replace(w, costs=replace(w.costs, startup_s=startup_s)) for w in workload.jobs)
    return replace(workload, jobs=tuple(jobs))


def read_disturbances(path: Path) -> tuple[NodeFailure | Interference, ...]:
    """Read a CSV file: from `at_s` to `until_s` a node's jobs train at `speed` of their pace.

    Speed 0 is a failure: the node is away, and its jobs resume from their last checkpoints.
    Nodes are node-0, node-1, ..., as `--nodes` names them. Raise ConfigError, with line numbers,
    for a file that cannot be read, other columns, and values that cannot be.
    """
    table = CsvFile(path, COLUMNS, "the file of disturbances")
    drawn = [_disturbance(table, line, row) for line, row in table.rows()]
    table.close()
    return tuple(disturbance for disturbance in drawn if disturbance is not None)


def _disturbance(
    table: CsvFile, line: int, row: Mapping[str, str]
) -> NodeFailure | Interference | None:
    node, *numbers = row.values()
    problems = list(_wrong(node, numbers))
    for found, allowed in problems:
        table.add(line, found, allowed)
    if problems:
        return None
    at_s, until_s, speed = map(float, numbers)
    if speed == 0.0:
        return NodeFailure(at_s, node, until_s)
    return Interference(at_s, node, until_s, speed)


def _wrong(node: str, numbers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (found, allowed) for each problem of a row."""
    if not node:
        yield repr(",".join((node, *numbers))), f"{len(COLUMNS)} cells, the first a node"
        return
    try:
        at_s, until_s, speed = map(float, numbers)
    except ValueError:
        yield repr(",".join(numbers)), "three numbers"
        return
    if not 0.0 <= at_s < until_s or not isfinite(until_s):
        yield f"from {numbers[0]} to {numbers[1]}", "seconds from 0, the end after the begin"
    if not 0.0 <= speed <= 1.0:
        yield f"speed {numbers[2]}", "0 (the node is away) to 1"
