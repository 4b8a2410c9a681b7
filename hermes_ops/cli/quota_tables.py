"""The quota of a pool as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hermes_ops.cli.tables import TableColumn, TableRow, fit_table
from hermes_ops.core.amounts import figure

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hermes_ops.config.pool_quota import OthersSpec, PoolQuota, UserSpec
    from hermes_ops.core.priority_class import PriorityClass

_TEAMS = (
    TableColumn("team"),
    TableColumn("guaranteed", right=True),
    TableColumn("borrow", right=True),
    TableColumn("weight", right=True),
    TableColumn("users", wraps=True),
)
_USERS = (
    TableColumn("user"),
    TableColumn("GPUs at once", right=True),
    TableColumn("sweeps", right=True),
    TableColumn("GPU-h a day", right=True),
    TableColumn("a month", right=True),
)

_CLASSES = (
    TableColumn("class"),
    TableColumn("priority", right=True),
    TableColumn("who may use it", wraps=True),
)


def quota_tables(quota: PoolQuota, width: int) -> Iterator[RenderableType]:
    """Yield tables of the teams, of the users with limits, and of the classes.

    The classes are shown where the file says something of them.
    """
    rows = [_team(team.name, team, ", ".join(team.users)) for team in quota.teams]
    rows.append(_team("others", quota.others, "everybody else"))
    yield fit_table("", _TEAMS, rows, width)
    if quota.users:
        yield fit_table("", _USERS, map(_user, quota.users), width)
    if quota.classes:
        yield fit_table("", _CLASSES, map(_class, quota.quota().classes), width)


def _class(each: PriorityClass) -> TableRow:
    groups = (("team", each.teams), ("user", each.users))
    who = ", ".join(f"{kind} {name}" for kind, names in groups for name in sorted(names or ()))
    is_open = each.teams is None and each.users is None
    return TableRow((each.name, str(each.priority), "everybody" if is_open else who or "nobody"))


def _user(user: UserSpec) -> TableRow:
    limits = (user.gpus, user.sweeps, user.gpu_hours_per_day, user.gpu_hours_per_month)
    return TableRow((user.name, *("any" if n is None else figure(n, 7) for n in limits)))


def _team(name: str, team: OthersSpec, users: str) -> TableRow:
    borrow = "any" if team.borrow is None else str(team.borrow)
    return TableRow((name, str(team.guaranteed), borrow, f"{team.weight:g}", users))
