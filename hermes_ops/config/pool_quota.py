"""The quota file of a pool: its teams with what is guaranteed, lent and limited."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from hermes_ops.config.fields import Model, Name, refusal
from hermes_ops.config.files import Document, KeyPath, read_document
from hermes_ops.config.problems import Violation, nearest, translate_errors, violation, with_line
from hermes_ops.core.priority_class import (
    BUILT_IN_CLASSES,
    DEFAULT_CLASS,
    PriorityClass,
    class_refusal,
)
from hermes_ops.core.quota import HALF_LIFE_S, Quota, TeamQuota, UserBudget
from hermes_ops.errors import ConfigError, Problem

_HOUR_S = 3_600.0
_MOST_GPUS = 1_000_000
_MOST_NAMES = 10_000


def _without_blanks_around(name: str) -> str:
    if name != name.strip():
        raise refusal("a name without blanks around it", f"write {name.strip()}")
    return name


_Bare = AfterValidator(_without_blanks_around)
PersonName = Annotated[str, Field(min_length=1, max_length=250, examples=["ann"]), _Bare]
TeamName = Annotated[str, Field(min_length=1, max_length=250, examples=["vision"]), _Bare]
AirflowTeam = Annotated[str, Field(min_length=1, max_length=50, examples=["vision"])]
GpuCount = Annotated[int, Field(ge=0, le=_MOST_GPUS, examples=[4])]
SweepCount = Annotated[int, Field(ge=0, le=1_000_000, examples=[2])]
GpuHours = Annotated[float, Field(ge=0, le=1e9, examples=[100.0])]
Weight = Annotated[float, Field(ge=1e-6, le=1e9, examples=[2.0])]


class OthersSpec(Model):
    """What users of no team may hold together."""

    guaranteed: GpuCount = 0
    """GPUs that are their own whenever they want them."""
    borrow: GpuCount | None = None
    """The most GPUs that are lent to them beyond that; null: as many as others leave idle."""
    weight: Weight = 1.0
    """Their share among borrowers."""

    @property
    def most(self) -> int | None:
        """The most GPUs that they may hold at once; None without a limit."""
        return None if self.borrow is None else self.guaranteed + self.borrow


class TeamSpec(OthersSpec):
    """A team: what it may hold, and who belongs to it."""

    name: TeamName
    """Its name; jobs of a trace name it in the column vc."""
    users: Annotated[tuple[PersonName, ...], Field(strict=False, max_length=_MOST_NAMES)] = ()
    """The users whose sweeps are the team's."""
    airflow_team: AirflowTeam | None = None
    """The team of Airflow, with core.multi_team, whose DAGs' sweeps are the team's."""


class UserSpec(Model):
    """What one user may hold, whatever the team."""

    name: PersonName
    """The user's name, as in Airflow."""
    gpus: GpuCount | None = None
    """The GPUs that the user's trials may hold at once; null: no limit."""
    sweeps: SweepCount | None = None
    """The sweeps of the user that may train at once; null: no limit."""
    gpu_hours_per_day: GpuHours | None = None
    """The GPU-hours that the user's trials may use in a day (UTC); null: no limit."""
    gpu_hours_per_month: GpuHours | None = None
    """The GPU-hours that the user's trials may use in a month (UTC); null: no limit."""

    @property
    def has_budget(self) -> bool:
        """True with a limit of sweeps or of GPU-hours."""
        limits = (self.sweeps, self.gpu_hours_per_day, self.gpu_hours_per_month)
        return any(limit is not None for limit in limits)


class ClassSpec(Model):
    """A priority class: which trials of a team go first, and who may use it."""

    name: Annotated[Name, Field(examples=["gold"])]
    """interactive, normal, nightly, or a name of your own, as sweep files write it."""
    priority: Annotated[int | None, Field(ge=-1_000_000, le=1_000_000, examples=[50])] = None
    """Trials of a higher one go before those of a lower one of the same team; null: what a built-in
    class has, interactive 100, normal 0, nightly -100."""
    teams: Annotated[tuple[TeamName, ...] | None, Field(strict=False, max_length=_MOST_NAMES)] = (
        None
    )
    """The teams whose users may use it; null, without users: everybody."""
    users: Annotated[tuple[PersonName, ...] | None, Field(strict=False, max_length=_MOST_NAMES)] = (
        None
    )
    """Users who may use it, whatever their team; null, without teams: everybody."""


class PoolQuota(Model):
    """The teams of a pool, the limits of users, and how long past use counts."""

    teams: Annotated[
        tuple[TeamSpec, ...],
        Field(strict=False, max_length=_MOST_NAMES, examples=[[{"name": "vision"}]]),
    ]
    """The teams."""
    users: Annotated[tuple[UserSpec, ...], Field(strict=False, max_length=_MOST_NAMES)] = ()
    """Limits of single users."""
    others: OthersSpec = OthersSpec()
    """What users of no team may hold together."""
    classes: Annotated[tuple[ClassSpec, ...], Field(strict=False, max_length=_MOST_NAMES)] = ()
    """Priority classes beyond the built-in ones, and who may use which."""
    reclaim_notice_seconds: Annotated[float, Field(ge=0, le=86_400, examples=[30])] = 0.0
    """Seconds that a trial keeps borrowed GPUs, and is told so, once another team wants them."""
    half_life_hours: Annotated[float, Field(gt=0, le=1e6)] = HALF_LIFE_S / _HOUR_S
    """Hours after which past use counts half among borrowers."""

    rate: Annotated[float | None, Field(ge=0, le=1e9)] = None
    """The price of a GPU-hour, for `hermes usage`."""

    @cached_property
    def team_of_user(self) -> Mapping[str, str]:
        """The team of each user that a team lists."""
        return {user: team.name for team in self.teams for user in team.users}

    @property
    def members(self) -> tuple[tuple[str, int | None], ...]:
        """The users of the teams, each with the most GPUs at once; None without a limit."""
        of_user = {user.name: user.gpus for user in self.users}
        return tuple(
            (user, min((n for n in (team.most, of_user.get(user)) if n is not None), default=None))
            for team in self.teams
            for user in team.users
        )

    @cached_property
    def team_of_airflow_team(self) -> Mapping[str, str]:
        """The team for each of Airflow's teams that is named."""
        return {team.airflow_team: team.name for team in self.teams if team.airflow_team}

    def team_of(self, user: str, airflow_team: str) -> str:
        """Return the team of a sweep: that of its DAG in Airflow, else that of its owner."""
        of_dag = self.team_of_airflow_team.get(airflow_team)
        return of_dag or self.team_of_user.get(user, "")

    def quota(self) -> Quota:
        """Return the quotas as the core has them."""
        return Quota(
            tuple(_core(team, team.name) for team in self.teams),
            tuple((user.name, user.gpus) for user in self.users if user.gpus is not None),
            _core(self.others, ""),
            self.half_life_hours * _HOUR_S,
            tuple(_budget(user) for user in self.users if user.has_budget),
            _classes(self.classes),
            self.reclaim_notice_seconds,
        )


WITHOUT_TEAMS = PoolQuota(teams=())
"""What a pool without a quota file has."""

SECTIONS: dict[KeyPath, type[BaseModel]] = {
    (): PoolQuota,
    ("teams",): TeamSpec,
    ("users",): UserSpec,
    ("others",): OthersSpec,
    ("classes",): ClassSpec,
}


def load_quota(path: str | os.PathLike[str], gpus: int | None = None) -> PoolQuota:
    """Read a quota file (YAML, or JSON by its name) for a pool of `gpus` GPUs, if that is known.

    Raise ConfigError with the line of each problem: unknown keys, wrong values, a name that is
    used twice, a user in two teams, guarantees that exceed the pool.
    """
    file = Path(os.path.expanduser(path))
    return _checked(read_document(file), str(file), file.name, gpus)


def parse_quota(data: object, source: str) -> PoolQuota:
    """Return the quota in plain data that `load_quota` has accepted before, else ConfigError."""
    return _checked(Document(data), source, source, None)


def refuse_class(quota: PoolQuota, name: str | None, user: str, source: str) -> None:
    """Raise ConfigError if that user may not start a sweep of that class; None: of the default.

    Where a team is one of Airflow's, the sweep may become that team's by its DAG, which the
    controller alone knows: what such a team allows is not refused.
    """
    classes, team = quota.quota().class_by_name, quota.team_of_user.get(user, "")
    refusal, *others = (
        class_refusal(classes, name or DEFAULT_CLASS, user, each)
        for each in (team, *quota.team_of_airflow_team.values())
    )
    if refusal is not None and None not in others:
        problem = Problem("class", refusal.found, refusal.allowed, refusal.remedy)
        raise ConfigError(source, (problem,))


def _checked(document: Document, source: str, name: str, gpus: int | None) -> PoolQuota:
    try:
        quota = PoolQuota.model_validate(document.data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = translate_errors(errors, document.data, SECTIONS)
    else:
        problems = list(_contradictions(quota, gpus))
        if not (problems or document.problems):
            return quota
    every_problem = [*document.problems, *problems]
    raise ConfigError(
        source,
        tuple(with_line(where, problem, document.lines, name) for where, problem in every_problem),
    )


def _core(spec: OthersSpec, name: str) -> TeamQuota:
    return TeamQuota(name, spec.guaranteed, spec.borrow, spec.weight)


def _budget(user: UserSpec) -> UserBudget:
    return UserBudget(
        user.name, user.sweeps, _seconds(user.gpu_hours_per_day), _seconds(user.gpu_hours_per_month)
    )


_BUILT_IN = {each.name: each for each in BUILT_IN_CLASSES}


def _classes(specs: tuple[ClassSpec, ...]) -> tuple[PriorityClass, ...]:
    """Return the built-in classes as the file changes them, and its own; the highest first."""
    of_name = dict(_BUILT_IN)
    for spec in specs:
        built_in = of_name.get(spec.name, PriorityClass(spec.name))
        of_name[spec.name] = PriorityClass(
            spec.name,
            built_in.priority if spec.priority is None else spec.priority,
            None if spec.teams is None else frozenset(spec.teams),
            None if spec.users is None else frozenset(spec.users),
        )
    return tuple(sorted(of_name.values(), key=lambda each: (-each.priority, each.name)))


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else hours * _HOUR_S


def _contradictions(quota: PoolQuota, gpus: int | None) -> Iterator[Violation]:
    yield from _twice("teams", [team.name for team in quota.teams])
    yield from _twice("users", [user.name for user in quota.users])
    yield from _twice("classes", [each.name for each in quota.classes])
    yield from _class_problems(quota)
    teams: dict[str, str] = {}
    for index, team in enumerate(quota.teams):
        for place, user in enumerate(team.users):
            path: KeyPath = ("teams", index, "users", place)
            if user in teams:
                found = f"{user}, who is in {teams[user]!r} already"
                fix = f"remove {user} from one of the teams"
                yield violation(path, found, "each user in one team", fix)
            teams.setdefault(user, team.name)
    yield from _airflow_teams_twice(quota.teams)
    promised = sum(team.guaranteed for team in quota.teams) + quota.others.guaranteed
    if gpus is not None and promised > gpus:
        fix = "guarantee fewer GPUs, or enlarge the pool"
        found = f"{promised} guaranteed GPUs"
        yield violation(("teams",), found, f"at most {gpus}, which the pool has", fix)


def _airflow_teams_twice(teams: tuple[TeamSpec, ...]) -> Iterator[Violation]:
    owner: dict[str, str] = {}
    for index, team in enumerate(teams):
        if team.airflow_team in owner:
            path: KeyPath = ("teams", index, "airflow_team")
            found = f"{team.airflow_team!r}, which is {owner[team.airflow_team]}'s already"
            fix = "remove it from one of the teams"
            yield violation(path, found, "each of Airflow's teams once", fix)
        if team.airflow_team is not None:
            owner.setdefault(team.airflow_team, team.name)


def _class_problems(quota: PoolQuota) -> Iterator[Violation]:
    """Yield own classes without a priority, and teams that the file does not have."""
    names = [team.name for team in quota.teams]
    for index, each in enumerate(quota.classes):
        if each.priority is None and each.name not in _BUILT_IN:
            path: KeyPath = ("classes", index, "priority")
            built_in = ", ".join(
                f"{name} {built_in_class.priority}" for name, built_in_class in _BUILT_IN.items()
            )
            allowed = f"a whole number; the built-in classes have {built_in}"
            fix = "write one, or the name of a built-in class"
            yield violation(path, f"nothing, for the class {each.name!r}", allowed, fix)
        for place, team in enumerate(each.teams or ()):
            if team not in names:
                path = ("classes", index, "teams", place)
                meant = nearest(team, names)
                fix = f"did you mean {meant}?" if meant else "add the team, or remove the name"
                allowed = (
                    f"one of the teams {', '.join(names)}" if names else "no team, without any"
                )
                yield violation(path, f"the unknown team {team!r}", allowed, fix)


def _twice(section: str, names: list[str]) -> Iterator[Violation]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            path: KeyPath = (section, index, "name")
            yield violation(path, f"a second {name!r}", "each name once", "rename it")
        seen.add(name)
