"""Checks before anything is started; each refusal is one line with its remedy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
from collections.abc import Collection, Iterable
from itertools import combinations

import psutil

from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.programs import PROGRAM_VARIABLE
from hermes_ops.stack.settings import AUTOMATIC_PORT, Settings
from hermes_ops.trial.disk_space import DiskSpace, disks_of, format_bytes, write_remedy

MINIMUM_FREE_BYTES = 512 * 1024**2
WARNING_FREE_BYTES = 2 * 1024**3
# A disk that is smaller than the floor of a home holds one folder, logs or sweeps.
SMALL_DISK_BYTES = MINIMUM_FREE_BYTES
# A UNIX socket's address holds 108 bytes on Linux, 104 on macOS.
LONGEST_SOCKET_PATH_BYTES = 100
# The controller wraps every policy in its guards; these options are theirs.
GUARD_PREFIX = "guard_"
# Below the ports that Linux gives to outgoing connections (from 32768) and Kubernetes to NodePorts
# (from 30000): nobody takes one of these before the service that it was chosen for listens on it.
AUTOMATIC_PORTS = range(20_000, 30_000)
PORTS_TRIED = 100


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
            f"give another folder with --home or HERMES_HOME, or {write_remedy(error)}"
        ) from error


def check_disks(layout: Layout) -> list[str]:
    """Return a line on each disk of the home that is nearly full.

    Raises `StackError` if the home's own has less than `MINIMUM_FREE_BYTES`, or another is full.
    """
    disks = disks_of(layout.folders)
    for disk in disks:
        is_home = disk.folder == layout.home
        if disk.is_full or (is_home and not disk.has(MINIMUM_FREE_BYTES)):
            raise StackError(
                f"The disk of {disk.folder} is full ({disk}, at least "
                f"{format_bytes(MINIMUM_FREE_BYTES)} needed for databases and checkpoints): "
                "free some space, or give a folder on another disk with --home"
            )
    return disk_lines(disks)


def disk_lines(disks: Iterable[DiskSpace]) -> list[str]:
    """Return a line on each disk that is full or nearly so, with the remedy."""
    lines = []
    for disk in disks:
        if disk.is_full:
            lines.append(
                f"The disk of {disk.folder} is full ({disk}): no trial is started, checkpoints and "
                "metrics cannot be written. Free some space (`hermes status --disk` shows what "
                "takes it); then everything continues by itself"
            )
        elif not disk.has(_warning_bytes(disk)):
            lines.append(
                f"The disk of {disk.folder} is nearly full ({disk}; below "
                f"{format_bytes(_warning_bytes(disk))} this is said): free some space before "
                "trials cannot write their checkpoints, such as by `hermes prune`"
            )
    return lines


def _warning_bytes(disk: DiskSpace) -> int:
    """Return below how much free space a disk is nearly full; a small one has a share of it."""
    return WARNING_FREE_BYTES if disk.total_bytes >= SMALL_DISK_BYTES else disk.total_bytes // 10


def check_ports(settings: Settings, ours: Collection[int]) -> None:
    """Raise `StackError` if a port that is set is another's; `ours` end before it is needed."""
    airflow, mlflow, metrics = settings.airflow_port, settings.mlflow_port, settings.metrics_port
    named = {"--airflow-port": airflow, "--mlflow-port": mlflow, "--metrics-port": metrics}
    for (one, port), (other, same) in combinations(named.items(), 2):
        if port == same != AUTOMATIC_PORT:
            raise StackError(f"{one} and {other} cannot share port {port}: change one of them")
    for option, port in named.items():
        if port != AUTOMATIC_PORT and not _owners(port) & set(ours):
            choose_port(port, option)


def choose_port(wanted: int, option: str) -> int:
    """Return `wanted`, or a free port for 0; raises `StackError` if it is taken."""
    if wanted == AUTOMATIC_PORT:
        return free_port()
    try:
        return _bound(wanted)
    except OSError as error:
        raise StackError(
            f"Port {wanted} on 127.0.0.1 cannot be used ({_owner(wanted) or error.strerror}): "
            f"give another with {option} N, or {option} {AUTOMATIC_PORT} for any free one"
        ) from error


def free_port() -> int:
    """Return a free port on 127.0.0.1 that stays free: a random one of `AUTOMATIC_PORTS`.

    The kernel chooses if none of those that are tried is free.
    """
    for port in random.sample(AUTOMATIC_PORTS, PORTS_TRIED):
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    """Bind the port once, 0 for any, and return it; OSError if it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def _owner(port: int) -> str:
    for pid in sorted(_owners(port)):
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            owner = f"{process.name()}, process {pid}, listens there"
            return owner + _home_of(process)
    return ""


def _home_of(process: psutil.Process) -> str:
    """Say which other home a process belongs to, if it is one of a stack."""
    environment = process.environ()
    home = environment.get("HERMES_HOME")
    if not home or not environment.get(PROGRAM_VARIABLE):
        return ""
    return f" for the stack in {home}: `hermes down --home {home}` stops that"


def _owners(port: int) -> set[int]:
    """Return the processes that listen on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        return {
            int(connection.pid)
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.pid
            and tuple(connection.laddr)[1:2] == (port,)
        }
    return set()


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
    from hermes_ops.core.options import GuardOptions
    from hermes_ops.policies import check_live, make_policy

    check_live(settings.policy)
    options = settings.policy_options.items()
    make_policy(settings.policy, {k: v for k, v in options if not k.startswith(GUARD_PREFIX)})
    GuardOptions.parse(settings.policy_options)


def check_dags(settings: Settings) -> None:
    """Raise `StackError` if an extra DAG folder is not there."""
    for folder in settings.dags:
        if not os.path.isdir(folder):
            raise StackError(f"--dags {folder} is not a folder: correct it, or leave it out")
