"""`hermes pool sync`: the pool's slots follow the GPUs of a Kubernetes cluster."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hermes_ops.kubernetes.gpus import Node, Slots

PERIOD_S = 10.0
SETTLE_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the application."""
    pool = typer.Typer(no_args_is_help=True, help="The Airflow pool whose slots are the GPUs.")
    pool.command("sync")(sync)
    app.add_typer(pool, name="pool")


def sync(
    *,
    pool: Annotated[str | None, typer.Option(help="The pool; $HERMES_POOL, else gpus.")] = None,
    selector: Annotated[
        str, typer.Option(help="Only nodes with these labels.", metavar="LABELS")
    ] = "",
    resource: Annotated[str, typer.Option(help="What a node calls its GPUs.")] = "nvidia.com/gpu",
    period: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks.")] = PERIOD_S,
    settle: Annotated[
        float, typer.Option(min=0.0, help="Seconds that fewer GPUs must last to count.")
    ] = SETTLE_S,
    once: Annotated[bool, typer.Option("--once", help="Look once, set the pool, end.")] = False,
) -> None:
    """Keep the pool's slots at the number of GPUs that the cluster's ready nodes can give."""
    import os

    from hermes_ops.airflow.client import Credentials
    from hermes_ops.kubernetes.gpus import Slots, reader

    name = pool or os.environ.get("HERMES_POOL") or "gpus"
    credentials = Credentials.from_environment()
    read = reader(selector, resource)
    setter = _Setter(credentials.url, credentials.user, credentials.password, name)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    slots = Slots(0.0 if once else settle)
    if once:
        setter.set(slots.follow(_count(read), time.monotonic()))
        return
    while True:
        follow_once(slots, read, setter.set)
        if stop.wait(period):
            return


def follow_once(
    slots: Slots, read: Callable[[], tuple[Node, ...]], put: Callable[[int], None]
) -> None:
    """Look and set once; a cluster or an Airflow that is away changes nothing."""
    from hermes_ops.errors import StackError, Unavailable

    try:
        put(slots.follow(_count(read), time.monotonic()))
    except (Unavailable, StackError) as error:
        typer.echo(f"The pool stays as it is: {error}", err=True)


def _count(read: Callable[[], tuple[Node, ...]]) -> int:
    from hermes_ops.kubernetes.gpus import allocatable

    return allocatable(read())


class _Setter:
    """Sets the slots of one pool: at each look, so that a change by hand does not last."""

    def __init__(self, url: str, user: str, password: Callable[[], str], pool: str) -> None:
        self._login = (url, user, password)
        self._pool = pool
        self._last: int | None = None

    def set(self, slots: int) -> None:
        """Log in and set them; StackError if Airflow is away or refuses."""
        from hermes_ops.stack.airflow_admin import logged_in, set_pool

        url, user, password = self._login
        remedy = "correct HERMES_AIRFLOW_USER or the file of its password"
        with contextlib.closing(logged_in(url, user, password(), remedy)) as client:
            set_pool(client, self._pool, slots)
        if slots != self._last:
            typer.echo(f"The pool {self._pool} has {slots} slots")
        self._last = slots
