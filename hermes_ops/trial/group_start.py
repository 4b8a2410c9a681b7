"""Start the workers of a trial: the places where they meet, their processes, their logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hermes_ops.trial.failure import is_peer_loss
from hermes_ops.trial.files import Folder
from hermes_ops.trial.output.rank_log import RankLog
from hermes_ops.trial.ports import ReservedPort, reserve_ports
from hermes_ops.trial.processes.reaper import PlainChild, Reaper
from hermes_ops.trial.processes.workers import WorkerChild, WorkerProcesses
from hermes_ops.trial.redaction import Mask, secret_values
from hermes_ops.trial.rendezvous import RendezvousServer
from hermes_ops.trial.supervisor.options import SegmentOptions
from hermes_ops.trial.worker_environment import (
    GroupAddresses,
    empty_group_folder,
    worker_environment,
)


class MeetingPlaces(NamedTuple):
    """What is kept for the workers of one segment while it runs, and where they find it."""

    folder: Folder
    rendezvous: RendezvousServer
    ports: Sequence[ReservedPort]
    addresses: GroupAddresses

    def close(self) -> None:
        """Stop to serve them."""
        self.rendezvous.close()
        for port in self.ports:
            port.release()


def open_meeting_places(options: SegmentOptions, folder: Folder) -> MeetingPlaces:
    """Empty the folder that the workers share, and open the ports where they meet.

    Raises: OSError if that folder cannot be emptied, or no port is free.
    """
    empty_group_folder(folder.group)
    ports = reserve_ports(1 + (options.workers if options.tf_config else 0))
    rendezvous = RendezvousServer(options.workers)
    addresses = GroupAddresses(
        size=options.workers,
        folder=folder.group,
        rendezvous_port=rendezvous.port,
        master_port=ports[0].number,
        task_ports=tuple(port.number for port in ports[1:]),
    )
    return MeetingPlaces(folder, rendezvous, ports, addresses)


def make_group(
    folder: Folder, children: Sequence[WorkerChild], first_tail: Callable[[], list[str]]
) -> WorkerProcesses:
    """Return the group of these workers, by rank; `first_tail`: the last lines of the first."""
    mask = Mask(secret_values(os.environ))
    logs = [
        RankLog(child.output, folder.rank_log(rank), mask)
        for rank, child in enumerate(children)
        if rank
    ]
    for log in logs:
        log.say(f"a segment with {len(children)} workers begins")
    return WorkerProcesses(
        children, logs, lambda rank: is_peer_loss(logs[rank - 1].tail if rank else first_tail())
    )


def worker_environments(
    environment: Mapping[str, str], addresses: GroupAddresses
) -> list[dict[str, str]]:
    """Return the environment of each worker, by rank."""
    return [worker_environment(environment, rank, addresses) for rank in range(addresses.size)]


def start_processes(
    environments: Sequence[Mapping[str, str]],
    start_ready: Callable[[Mapping[str, str]], WorkerChild | None],
    command: Sequence[str],
    directory: str | None,
    reaper: Reaper,
) -> list[WorkerChild]:
    """Start a process in each environment: in a standby interpreter if `start_ready` has one.

    Raises: OSError if one cannot be started; then those that were have been killed.
    """
    children = {
        rank: child
        for rank, environment in enumerate(environments)
        if (child := start_ready(environment)) is not None
    }
    missing = [rank for rank in range(len(environments)) if rank not in children]
    try:
        for rank in missing:
            environment = environments[rank]
            children[rank] = PlainChild(reaper, command, environment, directory, len(missing))
    except OSError:
        for child in children.values():
            child.kill()
        reaper.end()
        raise
    return [children[rank] for rank in range(len(environments))]
