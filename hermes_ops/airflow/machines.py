"""The machines of a pool without Kubernetes: one worker and one queue of Airflow on each.

HERMES_MACHINES names the machines behind a pool's slots and how many GPUs each has, in the order of
the slots: `node-a=2,node-b=4`. It is the same for the controller and every part of Airflow. The
worker of a machine has that machine's name in HERMES_MACHINE and takes the queue `gpu-NAME`. The
controller writes the queue of a task with its rank; the lease names the machine, and a task
elsewhere starts nothing. Each machine has a state folder of its own.

A GPU is known by its slot in the pool, and by its place on its machine. That place is the GPU's
index there, or counts along CUDA_VISIBLE_DEVICES where the worker was started with a list.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hermes_ops.airflow.folders import sweep_folder
from hermes_ops.airflow.hosts import NODES_VARIABLE, ONE_MACHINE, node_names
from hermes_ops.airflow.records import Lease
from hermes_ops.errors import HermesError
from hermes_ops.trial.files import replace_file

MACHINES_VARIABLE = "HERMES_MACHINES"
MACHINE_VARIABLE = "HERMES_MACHINE"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

WITH_QUEUES = ("CeleryExecutor", "EdgeExecutor")
"""Executors whose workers each take the queues that they are told."""

QUEUE_PREFIX = "gpu-"

SWEEP_NOTE = "sweep.json"
"""File of a sweep's folder on a machine: the sweep's id, for those who clean up there."""


def queue_of(machine: str) -> str:
    """Return the queue that the worker of a machine takes."""
    return f"{QUEUE_PREFIX}{machine}"


@dataclass(frozen=True, slots=True)
class MachineSlots:
    """The machine of each slot of a pool, by the slot's index; none where it has no machines."""

    of_slot: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> MachineSlots:
        """Return the machines of HERMES_MACHINES; HermesError for another form."""
        named = node_names(MACHINES_VARIABLE)
        if named and os.environ.get(NODES_VARIABLE):
            raise HermesError(
                f"{MACHINES_VARIABLE} and {NODES_VARIABLE} are both set: a pool has machines with "
                "workers of Airflow, or nodes of a cluster. Remove one of them."
            )
        if len(set(named)) < sum(1 for i, n in enumerate(named) if i == 0 or named[i - 1] != n):
            raise HermesError(
                f"{MACHINES_VARIABLE} names a machine twice: name each once, with all its GPUs."
            )
        if ONE_MACHINE in named:
            raise HermesError(
                f"{MACHINES_VARIABLE}: no machine can be called {ONE_MACHINE!r}: give it another "
                "name, there and in its worker's environment."
            )
        return cls(named)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the machines, in the order of their slots."""
        return tuple(dict.fromkeys(self.of_slot))

    def slots_of(self, machines: Iterable[str]) -> frozenset[int]:
        """Return the slots of these machines' GPUs."""
        wanted = frozenset(machines)
        return frozenset(i for i, name in enumerate(self.of_slot) if name in wanted)

    def granted(self, gpus: tuple[int, ...]) -> dict[str, object]:
        """Return what a lease for these GPUs, all of one machine, says of the machine."""
        machine = self.of_slot[gpus[0]]
        first = self.of_slot.index(machine)
        local = tuple(gpu - first for gpu in gpus)
        return {"machine": machine, "local_gpus": local, "host": "", "host_name": machine}


def devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the GPUs that this machine's worker was started for; None: all of the machine.

    HermesError where the list has anything but indices.
    """
    listed = environ.get(DEVICES_VARIABLE, "").strip()
    if not listed:
        return None
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isdigit() for part in parts):
        raise HermesError(
            f"{DEVICES_VARIABLE} of the worker is {listed!r}: list indices, as in 0,1"
        )
    return tuple(map(int, parts))


def mismatch(lease: Lease, environ: Mapping[str, str]) -> str:
    """Return why a lease for a machine cannot be used here; empty where it can."""
    here = environ.get(MACHINE_VARIABLE, "")
    if not here:
        return (
            f"its lease is for the machine {lease.machine}, and the worker that took its task has "
            f"no {MACHINE_VARIABLE}: start the worker of each machine with its name there"
        )
    if here != lease.machine:
        return (
            f"its task was run on the machine {here}, and its lease is for {lease.machine}: have "
            f"the worker of {here} take the queue {queue_of(here)} alone, and let no other worker "
            "of that name run"
        )
    try:
        able = devices(environ)
    except HermesError as error:
        return f"the worker of {here} cannot tell its GPUs: {error}"
    if able is not None and max(lease.local_gpus, default=0) >= len(able):
        return (
            f"its lease is for GPU {max(lease.local_gpus)} of {here}, counted from 0, and the "
            f"worker there was started for {len(able)} ({DEVICES_VARIABLE}): write that number "
            f"into {MACHINES_VARIABLE}"
        )
    return ""


def note_sweep(sweep: str) -> None:
    """Write the id of a sweep into its folder on this machine, once; a full disk is no failure."""
    note = sweep_folder(sweep) / SWEEP_NOTE
    with contextlib.suppress(OSError):
        if not note.exists():
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(note, json.dumps({"sweep": sweep}).encode())


def on_this_machine(lease: Lease, environ: Mapping[str, str]) -> Lease:
    """Return the lease with its GPUs by their index on this machine, for the trial's process."""
    if not lease.machine:
        return lease
    able = devices(environ)
    local = lease.local_gpus
    return replace(lease, gpus=local if able is None else tuple(able[i] for i in local))
