"""What is checked before anything is started; each refusal is one line with its remedy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess

import psutil

from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.settings import AUTOMATIC_PORT, Settings

MINIMUM_FREE_BYTES = 512 * 1024**2
# A UNIX socket's address holds 108 bytes on Linux, 104 on macOS.
LONGEST_SOCKET_PATH_BYTES = 100
MEBIBYTE = 1024**2
# The controller wraps every policy in its guards; these options are theirs.
GUARD_PREFIX = "guard_"


def gpu_count() -> int:
    """Return how many GPUs `nvidia-smi -L` lists; 0 where there is none."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def slots_of(settings: Settings) -> int:
    """Return the pool's slots: as set, else the number of GPUs; raises `StackError` on neither."""
    slots = settings.slots or gpu_count()
    if not slots:
        raise StackError(
            "nvidia-smi finds no GPU here, so the number of slots is unknown: "
            "say how many trials may run at once with --slots N"
        )
    return slots


def prepare_home(layout: Layout) -> None:
    """Create the folders of the home; raises `StackError` if that cannot be done."""
    longest = max(len(os.fsencode(p)) for p in (layout.supervisor_socket, layout.standby_socket))
    if longest > LONGEST_SOCKET_PATH_BYTES:
        raise StackError(
            f"The path {layout.home} is too long for UNIX sockets in it "
            f"({longest} bytes, at most {LONGEST_SOCKET_PATH_BYTES}): "
            "give a shorter one with --home"
        )
    try:
        layout.create()
        probe = layout.run / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise StackError(
            f"{layout.home} cannot be written ({error.strerror}): "
            "give another folder with --home or HERMES_HOME, or correct its owner"
        ) from error


def check_disk(layout: Layout) -> None:
    """Raise `StackError` if the disk of the home is nearly full."""
    free_bytes = shutil.disk_usage(layout.home).free
    if free_bytes < MINIMUM_FREE_BYTES:
        raise StackError(
            f"The disk of {layout.home} is full ({free_bytes // MEBIBYTE} MiB free, at least "
            f"{MINIMUM_FREE_BYTES // MEBIBYTE} MiB needed for databases and checkpoints): "
            "free some space, or give a folder on another disk with --home"
        )


def choose_port(wanted: int, option: str) -> int:
    """Return `wanted`, or a free port for 0; raises `StackError` if it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise StackError(
                f"Port {wanted} on 127.0.0.1 cannot be used ({_owner(wanted) or error.strerror}): "
                f"give another with {option} N, or {option} {AUTOMATIC_PORT} for any free one"
            ) from error
        return int(probe.getsockname()[1])


def _owner(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listening = connection.status == psutil.CONN_LISTEN
            if listening and connection.pid and tuple(connection.laddr)[1:2] == (port,):
                name = psutil.Process(connection.pid).name()
                return f"{name}, process {connection.pid}, listens there"
    return ""


def check_databases(settings: Settings) -> None:
    """Raise `StackError` if a PostgreSQL database that was set cannot be reached."""
    named = {"--airflow-db": settings.airflow_db, "--mlflow-db": settings.mlflow_db}
    for option, url in named.items():
        if url is not None and url.startswith("postgresql"):
            _check_postgresql(option, url)


def _check_postgresql(option: str, url: str) -> None:
    if importlib.util.find_spec("psycopg2") is None:
        raise StackError(
            f"{option} names a PostgreSQL database but its driver is not installed: "
            "pip install 'hermes-ops[postgresql]'"
        )
    import psycopg2

    try:
        psycopg2.connect(
            url.replace("postgresql+psycopg2", "postgresql", 1), connect_timeout=10
        ).close()
    except psycopg2.Error as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StackError(
            f"The database of {option} cannot be reached ({reason}): "
            "correct the address, or start PostgreSQL and create the database"
        ) from error


def check_policy(settings: Settings) -> None:
    """Raise `ConfigError` if the policy or a parameter is unknown, or it cannot run live."""
    from hermes_ops.policies import check_live, make_policy

    check_live(settings.policy)
    options = settings.policy_options.items()
    make_policy(settings.policy, {k: v for k, v in options if not k.startswith(GUARD_PREFIX)})


def check_dags(settings: Settings) -> None:
    """Raise `StackError` if an extra DAG folder is not there."""
    for folder in settings.dags:
        if not folder.expanduser().is_dir():
            raise StackError(f"--dags {folder} is not a folder: correct it, or leave it out")
