"""The machines on which trials run: this host, the nodes of a pool, executors that stay on one.

A pool's GPU indices are those of one machine, and a trial's files lie in one state folder. The
controller writes its own machine and folder into each lease; a task compares them with what it
finds itself. Nothing of it outlives a move: a controller that starts elsewhere grants leases for
where it is now.

HERMES_NODES names the nodes of a pool that spans several, and how many of the pool's slots each
has, in the order of the slots: `node-a=2,node-b=2`. Policies then see the nodes, and a trial's
lease names those of its GPUs.

An executor that hands tasks to other machines would give each of them the indices of the whole
pool. Trials as pods do not mind: Kubernetes gives them their GPUs, and their folder is on a volume.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_ops.airflow.folders import home
from hermes_ops.core.model import Gpu, Snapshot
from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from airflow.executors.executor_utils import ExecutorName

HOST_VARIABLE = "HERMES_HOST"
"""Names the machine where the kernel does not: the same for the controller and the workers."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's own name since its last start: the same in all containers of a machine, and another
one on each machine. A host name changes with each container, and a machine id is in its image."""

WRONG_HOST = "wrong_host"
"""Outcome of a segment that was not started: its task runs on another machine than its GPUs."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, its name for people, and the state folder that is seen there.

    `home_id` is empty where the folder is not one that a controller has used.
    """

    machine: str
    name: str
    home_id: str

    @classmethod
    def here(cls) -> Host:
        """Return the host of this process."""
        name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        return cls(_machine(), name, _read(home_id_file()))

    @property
    def id(self) -> str:
        """The id by which a lease and a segment record name the host."""
        return f"{self.machine}/{self.home_id}"

    def mismatch(self, lease_host: str, lease_host_name: str, *, is_pod: bool) -> str:
        """Return why a lease for that host cannot be used here; empty where it can.

        Pods have their own GPUs: their task may be on any machine that sees the state folder.
        """
        if not lease_host or lease_host == self.id:  # "": a lease of an earlier version
            return ""
        machine, _, home_id = lease_host.partition("/")
        if machine != self.machine and not is_pod:
            alike = lease_host_name == self.name  # clones of a machine, say
            here = f"{self.name} ({self.machine[:8]})" if alike else self.name
            there = f"{lease_host_name} ({machine[:8]})" if alike else lease_host_name
            return (
                f"its task was run on the machine {here}, and the GPUs of its pool are those "
                f"of {there}, the controller's: have the tasks of trials run on that "
                "machine alone (LocalExecutor, one host), or write `run_in: pod`"
            )
        if home_id != self.home_id:
            return (
                f"what looks after it on {self.name} does not see the state folder of the "
                f"controller on {lease_host_name} (HERMES_HOME is {home()} there): give both the "
                "same folder"
            )
        return ""


def home_id_file() -> Path:
    """Return the file that tells one state folder from another; copied with it.

    It lies among the sweeps: of the state folder, workers of pods may see only those.
    """
    return home() / "sweeps" / ".home-id"


def mark_home() -> Host:
    """Give the state folder its id, if it has none, and return this process's host."""
    file = home_id_file()
    if not _read(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(secrets.token_hex(8))
        with contextlib.suppress(FileExistsError):  # another pool's controller was first
            os.link(fresh, file)
        if not _read(file):  # what was there is empty: its writer was killed
            os.replace(fresh, file)
        fresh.unlink(missing_ok=True)
    return Host.here()


def _machine() -> str:
    named = os.environ.get(HOST_VARIABLE, "").replace("/", "-")
    return named or _read(BOOT_ID) or socket.gethostname()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


NODES_VARIABLE = "HERMES_NODES"
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
ONE_MACHINE = Gpu(0).node


def node_names(variable: str = NODES_VARIABLE) -> tuple[str, ...]:
    """Return the node of each slot by index, empty where the variable is not set.

    Raises HermesError for a variable of another form.
    """
    names: list[str] = []
    for part in filter(None, os.environ.get(variable, "").split(",")):
        name, _, count = part.strip().rpartition("=")
        if not NODE_NAME.fullmatch(name) or not count.isdigit():
            raise HermesError(f"{variable}: {part!r} is not NODE=GPUS, as in node-a=2: correct it.")
        names += [name] * int(count)
    return tuple(names)


def unmatched_nodes(nodes: Sequence[str]) -> str:
    """Return that a slot is behind the last node and what to do; a sentence about that slot."""
    named = ",".join(f"{node}={count}" for node, count in Counter(nodes).items())
    return (
        f"is on no node: {NODES_VARIABLE} is {named}, {len(nodes)} slots. Correct it, or give the "
        "pool as many slots; the controller reads it when it starts"
    )


def leased_nodes(snapshot: Snapshot, gpus: tuple[int, ...]) -> tuple[str, ...]:
    """Return the nodes of these GPUs, each once; none where the pool is one machine."""
    nodes = {gpu.node for gpu in snapshot.gpus if gpu.index in gpus}
    return tuple(sorted(nodes - {ONE_MACHINE}))


def node_of_each(snapshot: Snapshot, gpus: tuple[int, ...]) -> tuple[str, ...]:
    """Return the node of each of these GPUs; none where the pool is one machine."""
    nodes = tuple(snapshot.node_of.get(gpu, ONE_MACHINE) for gpu in gpus)
    return () if ONE_MACHINE in nodes else nodes


KUBERNETES_POD = "AIRFLOW_IS_K8S_EXECUTOR_POD"
"""Set by KubernetesExecutor in its pods; the configuration there may name another executor."""

LOCAL_EXECUTORS = ("airflow.executors.local_executor.LocalExecutor",)
REMOTE_EXECUTORS = ("CeleryExecutor", "KubernetesExecutor", "EdgeExecutor", "AwsEcsExecutor",
          "AwsBatchExecutor", "AwsLambdaExecutor")  # fmt: skip
"""By the name of the class: importing them needs packages and takes time."""

REMEDY = (
    "write `run_in: pod`, or have LocalExecutor run the sweep's tasks, with the scheduler and the "
    "controller on the machine of the GPUs, or name the machines of the GPUs in HERMES_MACHINES"
)


def process_refusal(trial_executor: str | None, plan_executor: str | None = None) -> str:
    """Return why trials cannot be processes of the tasks of this executor; empty where they can."""
    name = remote_executor(trial_executor, plan_executor)
    return f"{name} runs the trials' tasks, on any of its workers" if name else ""


def remote_executor(trial_executor: str | None, plan_executor: str | None = None) -> str:
    """Return the class of the executor that runs trials' tasks on other machines; else empty.

    :param trial_executor: `executor` of the trials' task; None for the default one
    :param plan_executor: that of the task which asks; it is not asked for by another process
    """
    name = _name_of(trial_executor)
    if trial_executor == plan_executor and os.environ.get(KUBERNETES_POD):
        name = "airflow.providers.cncf.kubernetes.executors.kubernetes_executor.KubernetesExecutor"
    if name is None or _is_local(name):
        return ""
    return name.rpartition(".")[2]


def configured_refusal() -> str:
    """Return the same of this process's default executor; empty where nothing names one.

    A controller needs no more of Airflow's configuration than the address of its database.
    """
    from airflow.configuration import conf

    source = conf.as_dict(display_source=True).get("core", {}).get("executor")
    if not isinstance(source, tuple) or source[1] == "default":
        return ""
    return process_refusal(None, "")


def configured_executors() -> tuple[str, ...]:
    """Return the paths of the classes of all executors in Airflow's configuration."""
    return tuple(str(name.module_path) for name in _configured())


def _name_of(asked: str | None) -> str | None:
    """Return the path of an executor's class; None where Airflow itself will refuse it."""
    executors = _configured()
    if asked is None:
        return next((k.module_path for k in executors if k.team_name is None), None)
    for name in executors:
        if asked in (name.alias, name.module_path, name.module_path.rpartition(".")[2]):
            return str(name.module_path)
    return asked


def _configured() -> list[ExecutorName]:
    from airflow.exceptions import AirflowConfigException
    from airflow.executors.executor_loader import ExecutorLoader

    try:
        return list(ExecutorLoader.get_executor_names(validate_teams=False))
    except AirflowConfigException:  # the scheduler does not start with it either
        return []


def _is_local(path: str) -> bool:
    """Return whether an executor's tasks are processes of the scheduler's machine."""
    if path in LOCAL_EXECUTORS or path == "LocalExecutor":
        return True
    if path.rpartition(".")[2] in REMOTE_EXECUTORS:
        return False
    from airflow._shared.module_loading import import_string

    try:
        return bool(getattr(import_string(path), "is_local", False))
    except (ImportError, AttributeError):  # tasks forked from its scheduler could import it
        return False
