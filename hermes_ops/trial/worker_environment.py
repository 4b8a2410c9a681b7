"""The environment of each worker of a trial: its ranks, and the addresses of the others.

One contract for all: Hermes' own variables, Horovod's (Gloo as controller, without MPI and
`horovodrun`), those of `torchrun` and of `jax.distributed`, and TF_CONFIG where it is asked for:
strategies of TensorFlow react to its mere presence.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.gang.layout import Gang, RankPlace, scope_name
from hermes_ops.trial.group import (
    GROUP_VARIABLE,
    RANK_VARIABLE,
    SIZE_VARIABLE,
    STORE_VARIABLE,
)
from hermes_ops.trial.rendezvous import HOSTNAME, LOOPBACK

_LOOPBACK_ALONE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The network interface by which PyTorch's processes on one machine connect."""

_GLOO_TIMEOUT_S = 300  # Horovod's default of 30 s is less than a busy machine may need to start all


class GroupAddresses(NamedTuple):
    """Where the workers of one segment meet.

    `task_ports`: a port for each worker, for TF_CONFIG; empty without it. `gang`: the nodes, where
    there are several.
    """

    size: int
    folder: Path
    rendezvous_port: int
    master_port: int
    task_ports: tuple[int, ...] = ()
    gang: Gang | None = None

    def place(self, rank: int) -> RankPlace:
        """Return where the worker of a rank is."""
        if self.gang is None:
            return RankPlace(0, rank, self.size, 0, 1)
        return self.gang.place(rank)

    @property
    def first_host(self) -> str:
        """Return the address of the machine with rank 0."""
        return LOOPBACK if self.gang is None else self.gang.nodes[0].host

    def task_address(self, rank: int) -> str:
        """Return where the worker of a rank listens, by TF_CONFIG."""
        if self.gang is None:
            return f"{LOOPBACK}:{self.task_ports[rank]}"
        place = self.gang.place(rank)
        return f"{self.gang.nodes[place.node].host}:{self.task_ports[rank]}"

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables that a trial on one node does not have, or has otherwise."""
        if self.gang is None:
            return {"HOROVOD_HOSTNAME": HOSTNAME}
        node = self.gang.place(rank).node
        return {
            "HOROVOD_HOSTNAME": scope_name(node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(self.gang.nodes)),
            STORE_VARIABLE: f"{self.first_host}:{self.rendezvous_port}",
        }


def gang_addresses(gang: Gang, folder: Path, tf_config: bool) -> GroupAddresses:
    """Return where the workers of a trial on several nodes meet: all nodes know it in advance."""
    ports = tuple(gang.task_port(rank) for rank in range(gang.size)) if tf_config else ()
    return GroupAddresses(gang.size, folder, gang.port, gang.master_port, ports, gang)


def worker_environment(
    environment: Mapping[str, str], rank: int, group: GroupAddresses
) -> dict[str, str]:
    """Return the environment of one worker; all see all GPUs of the trial on their node.

    What says who and where it is replaces what is there; how Horovod works may be set by the user.
    """
    size, place = str(group.size), group.place(rank)
    local_rank, local_size = str(place.local_rank), str(place.local_size)
    result = {
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": "lo", **_LOOPBACK_ALONE} if group.gang is None else {}),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_TIMEOUT_S),
        **environment,
        RANK_VARIABLE: str(rank),
        SIZE_VARIABLE: size,
        "HERMES_LOCAL_RANK": local_rank,
        "HERMES_LOCAL_SIZE": local_size,
        GROUP_VARIABLE: str(group.folder),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": local_size,
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": group.first_host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(group.rendezvous_port),
        **_torchrun_variables(rank, group.size, place, (group.first_host, group.master_port)),
        **_jax_variables(place, (group.first_host, group.master_port)),
        **group.variables(rank),
    }
    if group.task_ports:
        tasks = [group.task_address(other) for other in range(group.size)]
        result["TF_CONFIG"] = _tf_config(rank, tasks)
    return result


def lone_worker_environment(
    environment: Mapping[str, str], port: int, task_port: int | None = None
) -> dict[str, str]:
    """Return the environment of the one worker of a trial that may have several: torchrun's, JAX'.

    A script for several processes reads these variables on one GPU too, and with a `task_port`
    TF_CONFIG. All else is as without workers: Horovod's size is 1, and no group is there.
    """
    place, master = RankPlace(0, 0, 1, 0, 1), (LOOPBACK, port)
    variables = {**_torchrun_variables(0, 1, place, master), **_jax_variables(place, master)}
    if task_port is not None:
        variables["TF_CONFIG"] = _tf_config(0, [f"{LOOPBACK}:{task_port}"])
    return {**_LOOPBACK_ALONE, **environment, **variables}


def _jax_variables(place: RankPlace, master: tuple[str, int]) -> dict[str, str]:
    """Return the variables of JAX; on one machine its store listens on the loopback alone."""
    address = f"{master[0]}:{master[1]}"
    bound = {"JAX_COORDINATOR_BIND_ADDRESS": address} if master[0] == LOOPBACK else {}
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_LOCAL_DEVICE_IDS": str(place.local_rank),
        **bound,
    }


def _torchrun_variables(
    rank: int, size: int, place: RankPlace, master: tuple[str, int]
) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def _tf_config(rank: int, tasks: Sequence[str]) -> str:
    cluster = {"worker": list(tasks)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})


def empty_group_folder(path: Path) -> None:
    """Make the folder that the workers share, with nothing in it of an earlier segment.

    Raises: OSError if it cannot be emptied: a stop that it still holds would end this segment.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.mkdir()
