"""What each worker of a trial finds in its environment: who it is, and where the others are.

One contract for all: Hermes' own variables, Horovod's (Gloo as controller, without MPI and
`horovodrun`), those of `torchrun`, and TF_CONFIG where it is asked for: strategies of TensorFlow
react to its mere presence.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.group import GROUP_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE
from hermes_ops.trial.rendezvous import HOSTNAME, LOOPBACK

_GLOO_TIMEOUT_S = 300  # Horovod's default of 30 s is less than a busy machine may need to start all


class GroupAddresses(NamedTuple):
    """Where the workers of one segment meet.

    `task_ports`: a port for each worker, for TF_CONFIG; empty without it.
    """

    size: int
    folder: Path
    rendezvous_port: int
    master_port: int
    task_ports: tuple[int, ...] = ()


def worker_environment(
    environment: Mapping[str, str], rank: int, group: GroupAddresses
) -> dict[str, str]:
    """Return the environment of one worker; all see all GPUs of the trial.

    What says who and where it is replaces what is there; how Horovod works may be set by the user.
    """
    size = str(group.size)
    result = {
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_TIMEOUT_S),
        **environment,
        RANK_VARIABLE: str(rank),
        SIZE_VARIABLE: size,
        "HERMES_LOCAL_RANK": str(rank),
        "HERMES_LOCAL_SIZE": size,
        GROUP_VARIABLE: str(group.folder),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": HOSTNAME,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(group.rendezvous_port),
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(group.master_port),
    }
    if group.task_ports:
        result["TF_CONFIG"] = json.dumps(_tf_config(rank, group.task_ports))
    return result


def _tf_config(rank: int, ports: tuple[int, ...]) -> dict[str, object]:
    workers = [f"{LOOPBACK}:{port}" for port in ports]
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}


def empty_group_folder(path: Path) -> None:
    """Make the folder that the workers share, with nothing in it of an earlier segment.

    Raises: OSError if it cannot be emptied: a stop that it still holds would end this segment.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.mkdir()
