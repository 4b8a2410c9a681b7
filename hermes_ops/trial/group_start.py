"""Start the workers of a trial: the places where they meet, their processes, their logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hermes_ops.trial.failure import is_peer_loss
from hermes_ops.trial.files import Folder
from hermes_ops.trial.gang.layout import Gang
from hermes_ops.trial.gang.leader import GangLeader, RemoteWorker
from hermes_ops.trial.gang.member import NodeWorkers
from hermes_ops.trial.output.rank_log import RankLog, WorkerLog
from hermes_ops.trial.ports import ReservedPort, reserve_ports
from hermes_ops.trial.processes.reaper import PlainChild, Reaper
from hermes_ops.trial.processes.workers import WorkerChild, WorkerProcesses
from hermes_ops.trial.redaction import Mask, secret_values
from hermes_ops.trial.rendezvous import RendezvousServer
from hermes_ops.trial.supervisor.options import SegmentOptions
from hermes_ops.trial.worker_environment import (
    GroupAddresses,
    empty_group_folder,
    gang_addresses,
    worker_environment,
)


class MeetingPlaces(NamedTuple):
    """The resources of the workers of one segment while it runs, and where they find these.

    `leader`: of the other nodes, where there are some.
    """

    folder: Folder
    rendezvous: RendezvousServer
    ports: Sequence[ReservedPort]
    addresses: GroupAddresses
    leader: GangLeader | None = None

    def close(self) -> None:
        """Stop to serve them; other nodes may leave."""
        if self.leader is not None:
            self.leader.dismiss()
        self.rendezvous.close()
        for port in self.ports:
            port.release()


def open_meeting_places(options: SegmentOptions, folder: Folder) -> MeetingPlaces:
    """Empty the folder that the workers share, and open the ports where they meet.

    Raises: OSError if that folder cannot be emptied, or no port is free.
    """
    empty_group_folder(folder.group)
    if options.gang is not None:
        return _open_on_several_nodes(options.gang, options, folder)
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


def _open_on_several_nodes(gang: Gang, options: SegmentOptions, folder: Folder) -> MeetingPlaces:
    rendezvous = RendezvousServer(gang.size, gang.scopes(), ("", gang.port))
    addresses = gang_addresses(gang, folder.group, options.tf_config)
    leader = GangLeader(gang, rendezvous.store)
    return MeetingPlaces(folder, rendezvous, (), addresses, leader)


def start_node(
    options: SegmentOptions,
    folder: Folder,
    environment: Mapping[str, str],
    command: Sequence[str],
    reaper: Reaper,
) -> NodeWorkers:
    """Start the workers of a node that does not lead.

    Raises: OSError if one cannot be started.
    """
    gang = options.gang
    assert gang is not None
    addresses = gang_addresses(gang, folder.group, options.tf_config)
    environments = worker_environments(environment, addresses)
    children = start_processes(environments, lambda _: None, command, options.directory, reaper)
    mask = Mask(secret_values(os.environ))
    by_rank = dict(enumerate(children, start=gang.ranks(gang.node).start))
    logs = {
        rank: RankLog(child.output, folder.rank_log(rank), mask) for rank, child in by_rank.items()
    }
    for log in logs.values():
        log.say(f"a segment with {gang.size} workers begins")
    return NodeWorkers(by_rank, logs)


def make_group(
    folder: Folder, children: Sequence[WorkerChild], first_tail: Callable[[], list[str]]
) -> WorkerProcesses:
    """Return the group of these workers, by rank; `first_tail`: the last lines of the first."""
    mask = Mask(secret_values(os.environ))
    logs: list[WorkerLog] = []
    for rank, child in enumerate(children[1:], start=1):
        if isinstance(child, RemoteWorker):
            logs.append(child.log)
        else:
            log = RankLog(child.output, folder.rank_log(rank), mask)
            log.say(f"a segment with {len(children)} workers begins")
            logs.append(log)
    return WorkerProcesses(
        children, logs, lambda rank: is_peer_loss(logs[rank - 1].tail if rank else first_tail())
    )


def worker_environments(
    environment: Mapping[str, str], addresses: GroupAddresses
) -> list[dict[str, str]]:
    """Return the environment of each worker on this node, by rank."""
    gang = addresses.gang
    ranks = range(addresses.size) if gang is None else gang.ranks(gang.node)
    return [worker_environment(environment, rank, addresses) for rank in ranks]


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
