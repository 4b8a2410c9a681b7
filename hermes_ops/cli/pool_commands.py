"""`hermes policy`, `controller`, `pool quota` and `pool sync`: the pool's scheduling and size."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes_ops.cli.completion import complete_policies
from hermes_ops.cli.connection import Connection, Home, current_person
from hermes_ops.core.amounts import counted, figure, utc_text

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.control.quota_settings import QuotaSettings
    from hermes_ops.airflow.credentials import AirflowCredentials
    from hermes_ops.config.pool_quota import OthersSpec, PoolQuota, UserSpec
    from hermes_ops.core.priority_class import PriorityClass
    from hermes_ops.kubernetes.gpu_nodes import GpuNode, SettledSlots


PERIOD_S, LOOK_S = 10.0, 1.0
SETTLE_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    app.command("policy")(policy)
    app.command("controller")(controller)
    pool = typer.Typer(no_args_is_help=True, help="The Airflow pool whose slots are the GPUs.")
    pool.command("sync")(sync)
    pool.command("quota")(quota)
    app.add_typer(pool, name="pool")


def sync(
    *,
    pool: Annotated[str | None, typer.Option(help="The pool; $HERMES_POOL, else gpus.")] = None,
    selector: Annotated[
        str, typer.Option(help="Only nodes with these labels.", metavar="LABELS")
    ] = "",
    resource: Annotated[
        str, typer.Option(help="Name of the nodes' GPU resource.")
    ] = "nvidia.com/gpu",
    namespace: Annotated[
        str | None,
        typer.Option(help="Of trials' pods: those on nodes that take no pods keep their slots."),
    ] = None,
    period: Annotated[float, typer.Option(min=1.0, help="Seconds between two counts.")] = PERIOD_S,
    settle: Annotated[
        float, typer.Option(min=0.0, help="Seconds that fewer GPUs must last to count.")
    ] = SETTLE_S,
    once: Annotated[bool, typer.Option("--once", help="Count once, set the pool, exit.")] = False,
) -> None:
    """Keep the pool's slots equal to the allocatable GPUs of the nodes that take pods."""
    from hermes_ops.airflow.credentials import AirflowCredentials
    from hermes_ops.kubernetes.gpu_nodes import SettledSlots, held_reader, node_reader

    name = pool or os.environ.get("HERMES_POOL") or "gpus"
    credentials = AirflowCredentials.from_environment()
    read = node_reader(selector, resource, namespace=namespace)
    held = dict if namespace is None else held_reader(namespace, resource)
    among = f" with the labels {selector}" if selector else ""
    setter = _SlotSetter(
        credentials,
        name,
        f": no node{among} that takes pods has {resource}. If there are GPUs, correct --resource "
        "or --selector (of the chart poolSync.resource, poolSync.selector), or their device plugin",
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    slots = SettledSlots(0.0 if once else settle)
    if once:
        setter.set(slots.follow(read(), time.monotonic()))
        return
    while True:
        nodes = follow_once(slots, read, setter.set, setter.slots)
        if not wait_for_count(nodes, held, period, stop.wait):
            return


def wait_for_count(
    nodes: Sequence[GpuNode],
    read_held: Callable[[], Mapping[str, int]],
    period_s: float,
    is_stopped: Callable[[float], bool],
) -> bool:
    """Wait for the next count of the GPUs; return False if it is to be the last wait.

    While trials hold GPUs on nodes that take no pods, their pods are looked at each second: a slot
    that becomes free there is none any more, and would be granted.
    """
    from hermes_ops.errors import HermesError

    holding = [node for node in nodes if node.held]
    left_s = period_s
    while left_s > 0.0:
        wait_s = min(LOOK_S, left_s) if holding else left_s
        if is_stopped(wait_s):
            return False
        left_s -= wait_s
        with contextlib.suppress(HermesError):  # the next count says what the matter is
            held = read_held() if holding and left_s > 0.0 else None
            if held is not None and any(held.get(n.name, 0) < n.held for n in holding):
                return True
    return True


def follow_once(
    slots: SettledSlots,
    read: Callable[[], tuple[GpuNode, ...]],
    put: Callable[[int], None],
    present: Callable[[], int | None] = lambda: None,
) -> tuple[GpuNode, ...]:
    """Count the GPUs and set the slots once; do nothing if the cluster or Airflow is away.

    Return the nodes, none if they were not counted.

    At the first call `present` returns the slots that the pool has, so that fewer GPUs have to last
    for a while before the slots follow, as in later calls.
    """
    from hermes_ops.errors import StackError, Unavailable

    try:
        if slots.now is None:
            slots.now = present()
        nodes = read()
        put(slots.follow(nodes, time.monotonic()))
    except (Unavailable, StackError) as error:
        typer.echo(f"The pool stays as it is: {error}", err=True)
        return ()
    return nodes


class _SlotSetter:
    """Sets the slots of one pool at each count, so that a change by hand does not last."""

    def __init__(self, credentials: AirflowCredentials, pool: str, why_none: str = "") -> None:
        self._credentials = credentials
        self._pool = pool
        self._why_none = why_none
        self._last: int | None = None

    def set(self, slots: int) -> None:
        """Log in and set them; raise HermesError if Airflow is away or refuses."""
        from hermes_ops.stack.airflow_service import set_pool

        with contextlib.closing(self._client()) as client:
            set_pool(client, self._pool, slots)
        if slots != self._last:
            typer.echo(f"The pool {self._pool} has {slots} slots{'' if slots else self._why_none}")
        self._last = slots

    def slots(self) -> int | None:
        """Log in and return the slots that the pool has; None if they cannot be read."""
        from hermes_ops.stack.airflow_service import pool_slots

        with contextlib.closing(self._client()) as client:
            return pool_slots(client, self._pool)

    def _client(self) -> httpx.Client:
        from hermes_ops.airflow.credentials import expiry_s
        from hermes_ops.stack.airflow_service import client_with_token, log_in

        credentials = self._credentials
        if not credentials.has_token:
            remedy = "correct HERMES_AIRFLOW_USER or the file of its password"
            return log_in(credentials.url, credentials.user, credentials.password(), remedy)
        token, now_s = credentials.current_token(), time.time()
        if (expires_s := expiry_s(token)) is not None and expires_s <= now_s:
            raise credentials.refused_token(token, now_s)
        return client_with_token(credentials.url, token)


def policy(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy; without it, show it.", autocompletion=complete_policies),
    ] = None,
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="A parameter of the policy.", metavar="NAME=VALUE")
    ] = None,
    home: Home = None,
) -> None:
    """Show the pool's policy, or change it while it runs, as an administrator."""
    from hermes_ops.airflow.control.policy_settings import PolicySettings
    from hermes_ops.core.options import parse_options
    from hermes_ops.policies import live_policies

    if name is None and option:
        raise typer.BadParameter("name the policy that gets the options: `hermes policy NAME`")
    connection = Connection.from_home(home)
    path = PolicySettings.file()
    if name is None:
        choice = PolicySettings.load(path)
        typer.echo(f"{choice.name} {json.dumps(choice.options) if choice.options else ''}".strip())
        if choice.by:
            when = utc_text(choice.at_s)
            typer.echo(f"Chosen {when} by {choice.by}.")
        typer.echo(f"There are: {', '.join(live_policies())}.")
        return
    choice = PolicySettings(name, dict(parse_options(option)))
    choice.build()
    by = str(current_person(_administrator(connection, "policy")))
    replace(choice, by=by, at_s=time.time()).write(path)
    when = _from_when(connection.pool)
    typer.echo(f"The pool {connection.pool} is scheduled by {name} {when}.")


def quota(
    file: Annotated[
        Path | None, typer.Argument(help="The quota file; without it, show the quota in force.")
    ] = None,
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Set no quota: lift all limits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Show it as one JSON document.")] = False,
    home: Home = None,
) -> None:
    """Show, set or remove the quota of the pool while it runs."""
    from hermes_ops.airflow.control.quota_settings import QuotaSettings

    if file is not None and remove:
        raise typer.BadParameter("name a file or write --remove, not both")
    connection = Connection.from_home(home)
    path = QuotaSettings.file(connection.pool)
    if file is not None:
        _set_quota(connection, path, file)
    elif remove:
        by = str(current_person(_administrator(connection, "quota")))
        QuotaSettings.remove(path, by, time.time())
        typer.echo(f"The pool {connection.pool} has no quota {_from_when(connection.pool)}.")
    else:
        _show_quota(connection.pool, QuotaSettings.load(path), as_json=as_json)


def _set_quota(connection: Connection, path: Path, file: Path) -> None:
    """Check the file against the pool's size and the person's right, then put it in force."""
    from hermes_ops.airflow.control.quota_settings import QuotaSettings
    from hermes_ops.config.pool_quota import load_quota
    from hermes_ops.errors import HermesError

    row = connection.airflow.pool(connection.pool)
    if row is None:
        raise HermesError(
            f"Airflow has no pool {connection.pool!r}: create it, or name another in HERMES_POOL."
        )
    spec = load_quota(file, row["slots"])
    by = str(current_person(_administrator(connection, "quota")))
    QuotaSettings(spec, by, time.time()).write(path)
    promised = sum(team.guaranteed for team in (*spec.teams, spec.others))
    typer.echo(
        f"The pool {connection.pool} keeps this quota {_from_when(connection.pool)}: "
        f"{counted(len(spec.teams), 'team')}, "
        f"{promised} of {counted(row['slots'], 'GPU')} guaranteed."
    )


def _from_when(pool: str) -> str:
    """Return from when a setting in this state folder applies: a controller reads only its own."""
    from hermes_ops.airflow.control.pool_file import view_path
    from hermes_ops.airflow.folders import home

    if view_path(pool).exists():
        return "from now on"
    return f"once its controller has the state folder {home()}, where none has worked so far"


def _administrator(connection: Connection, setting: str) -> AirflowClient:
    """Return a client whose user may edit the pool, hence this setting of it; else HermesError.

    On the machine of `hermes up` the command line logs in as a user of few rights; who may read
    the password of its administrator, which is in the state folder, is the administrator. No other
    Airflow is told that password.
    """
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.credentials import AirflowCredentials
    from hermes_ops.errors import HermesError, NotPermitted
    from hermes_ops.stack.credentials import ADMIN_USER
    from hermes_ops.stack.layout import Layout, default_home

    try:
        connection.airflow.confirm_pool_edit(connection.pool)
        return connection.airflow
    except NotPermitted as error:
        file = Layout(default_home()).admin_password
        if _is_of_own_stack(connection.airflow_url) and os.access(file, os.R_OK):
            client = AirflowClient(AirflowCredentials(connection.airflow_url, ADMIN_USER, file))
            client.confirm_pool_edit(connection.pool)
            return client
        user = current_person(connection.airflow).airflow_user
        raise HermesError(
            f"The Airflow user {user} may not edit the pool {connection.pool}, so neither its "
            f"{setting}: nothing was changed. Ask an administrator of Airflow."
        ) from error


def _is_of_own_stack(airflow_url: str) -> bool:
    """Return whether that Airflow is the one of the stack in this state folder."""
    from hermes_ops.errors import StackError
    from hermes_ops.stack import client_environment

    try:
        return client_environment()["HERMES_AIRFLOW_URL"] == airflow_url
    except StackError:
        return False


def _show_quota(pool: str, settings: QuotaSettings | None, *, as_json: bool) -> None:
    if as_json:
        document = None if settings is None else settings.document()
        typer.echo(json.dumps({"pool": pool, "quota": document}))
        return
    if settings is None:
        typer.echo(f"The pool {pool} has no quota: `hermes pool quota FILE` sets one.")
        return
    from hermes_ops.cli.tables import output_console, print_whole

    console = output_console()
    for table in quota_tables(settings.quota, console.width):
        print_whole(console, table)
    if settings.by:
        when = utc_text(settings.at_s)
        typer.echo(f"Set {when} by {settings.by}.")


def quota_tables(quota: PoolQuota, width: int) -> Iterator[RenderableType]:
    """Yield tables of the teams, of the users with limits, and of the priority classes.

    Users and classes have a table only if the quota's file mentions them.
    """
    from hermes_ops.cli.tables import TableColumn, TableRow, fit_table

    def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> RenderableType:
        columns = [
            TableColumn(head, right=head in _NUMERIC_HEADS, wraps=head in _LONG_HEADS)
            for head in heads
        ]
        return fit_table("", columns, map(TableRow, rows), width)

    teams = [_team_cells(team.name, team, ", ".join(team.users)) for team in quota.teams]
    others = _team_cells("others", quota.others, "everybody else")
    yield table(("team", "guaranteed", "borrow", "weight", "users"), [*teams, others])
    if quota.users:
        heads = ("user", "GPUs at once", "sweeps", "GPU-h a day", "a month")
        yield table(heads, map(_user_cells, quota.users))
    if quota.classes:
        yield table(
            ("class", "priority", "who may use it"), map(_class_cells, quota.quota().classes)
        )


_LONG_HEADS = ("users", "who may use it")
_NUMERIC_HEADS = ("guaranteed", "borrow", "weight", "GPUs at once", "sweeps", "GPU-h a day",
                  "a month", "priority")  # fmt: skip


def _team_cells(name: str, team: OthersSpec, users: str) -> tuple[str, ...]:
    borrow = "any" if team.borrow is None else str(team.borrow)
    return name, str(team.guaranteed), borrow, f"{team.weight:g}", users


def _user_cells(user: UserSpec) -> tuple[str, ...]:
    limits = (user.gpus, user.sweeps, user.gpu_hours_per_day, user.gpu_hours_per_month)
    return user.name, *("any" if n is None else figure(n, 7) for n in limits)


def _class_cells(priority_class: PriorityClass) -> tuple[str, ...]:
    allowed = (("team", priority_class.teams), ("user", priority_class.users))
    who = ", ".join(f"{kind} {name}" for kind, names in allowed for name in sorted(names or ()))
    is_open = priority_class.teams is None and priority_class.users is None
    who = "everybody" if is_open else who or "nobody"
    return priority_class.name, str(priority_class.priority), who


def controller(
    *,
    pool: Annotated[str, typer.Option(help="The Airflow pool whose slots are the GPUs.")] = "gpus",
    home: Home = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="For Prometheus, on loopback; default: any free one.")
    ] = None,
) -> None:
    """Run the controller for an existing Airflow."""
    from hermes_ops.airflow.control.controller import main

    arguments = ["--pool", pool, *(["--home", str(home)] if home else [])]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    raise typer.Exit(main(arguments))
