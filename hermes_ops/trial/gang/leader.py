"""The leader, on the first node of a trial: it treats workers of other nodes as remote children."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hermes_ops.trial.gang.layout import Gang
from hermes_ops.trial.gang.messages import (
    LOST_S,
    ORDERS,
    SCOPE,
    NodeReport,
    Orders,
    report_key,
)
from hermes_ops.trial.outcome import INFRASTRUCTURE
from hermes_ops.trial.rendezvous import KeyValueStore

KILLED_LOST_S = 5.0
"""The same seconds once its workers are to be killed."""

LEAVE_S, LOOK_S = 3.0, 0.1


class NodeView:
    """The view that the first node has of another one, by its reports."""

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        self.report: NodeReport | None = None
        self._data: bytes | None = None
        self.ends: dict[int, tuple[int, float]] = {}

    def take(self, data: bytes | None, now_s: float) -> None:
        """Take in its newest report; each one differs from the one before."""
        if data == self._data or (report := NodeReport.decode(data)) is None:
            return
        self._data, self.report, self.heard_s = data, report, now_s
        for rank, end in report.ends.items():
            self.ends.setdefault(rank, (end.code, now_s - end.ago_s))


class GangLeader:
    """Follow the other nodes by their reports, and give them orders; used in one thread.

    `on_told_to_stop` is called when another node has to be left.
    """

    def __init__(
        self, gang: Gang, store: KeyValueStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gang = gang
        self._store = store
        self._clock = clock
        self._orders = Orders()
        self._views = {node: NodeView(clock()) for node in range(1, len(gang.nodes))}
        self._lost: set[int] = set()
        self.on_told_to_stop: Callable[[], None] = lambda: None
        self._publish()

    @property
    def missing(self) -> list[str]:
        """Return the hosts that have not reported yet."""
        self._look()
        return [self._gang.nodes[n].host for n, v in self._views.items() if v.report is None]

    @property
    def lost(self) -> list[str]:
        """Return the hosts that have fallen silent before their workers had ended."""
        return [self._gang.nodes[node].host for node in sorted(self._lost)]

    def go(self) -> None:
        """Have all nodes start their workers."""
        now_s = self._clock()
        for view in self._views.values():
            view.heard_s = now_s
        self._order(self._orders._replace(go=True))

    def stop(self) -> None:
        """Have all nodes send SIGTERM to their workers."""
        self._order(self._orders._replace(stop=True))

    def expect_stop(self) -> None:
        """Have all nodes prepare for a stop that their workers learn of by other means."""
        self._order(self._orders._replace(stopping=True))

    def kill(self) -> None:
        """Have all nodes kill their workers."""
        self._order(self._orders._replace(kill=True))

    def dismiss(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Let all nodes leave, and wait a little for those that live to say that they do."""
        self._order(self._orders._replace(over=True))
        by_s = self._clock() + LEAVE_S
        while self._clock() < by_s and self._still_there():
            sleep(LOOK_S)

    def workers(self) -> list[RemoteWorker]:
        """Return the workers of the other nodes, by rank."""
        return [
            RemoteWorker(self, node, rank)
            for node in self._views
            for rank in self._gang.ranks(node)
        ]

    def end_of(self, node: int, rank: int) -> tuple[int, float] | None:
        """Return a worker's exit code and when it ended; None while it lives.

        Those of a node that is lost have ended with INFRASTRUCTURE.
        """
        self._look()
        view = self._views[node]
        if rank not in view.ends and self._is_silent(view):
            self._lost.add(node)
            view.ends[rank] = (INFRASTRUCTURE, self._clock())
        return view.ends.get(rank)

    def tail(self, node: int, rank: int) -> list[str]:
        """Return a worker's last lines, once it has ended."""
        report = self._views[node].report
        return [] if report is None else list(report.tails.get(rank, ()))

    def _is_silent(self, view: NodeView) -> bool:
        limit_s = KILLED_LOST_S if self._orders.kill else LOST_S
        return self._clock() - view.heard_s > limit_s

    def _look(self) -> None:
        now_s, was_told = self._clock(), self._is_told_to_stop
        for node, view in self._views.items():
            view.take(self._store.get(SCOPE, report_key(node)), now_s)
        if self._is_told_to_stop and not was_told:
            self.on_told_to_stop()

    @property
    def _is_told_to_stop(self) -> bool:
        return any(v.report is not None and v.report.is_told_to_stop for v in self._views.values())

    def _still_there(self) -> bool:
        self._look()
        return any(
            node not in self._lost and view.report is not None and not view.report.has_left
            for node, view in self._views.items()
        )

    def _order(self, orders: Orders) -> None:
        self._orders = orders
        self._publish()

    def _publish(self) -> None:
        self._store.put(SCOPE, ORDERS, self._orders.encode())


class RemoteWorker:
    """A worker on another node."""

    pid, output = 0, -1

    def __init__(self, leader: GangLeader, node: int, rank: int) -> None:
        self._leader = leader
        self._node, self._rank = node, rank
        self.log = RemoteLog(leader, node, rank)

    def poll(self) -> int | None:
        """Return the exit code, None while it lives."""
        end = self._leader.end_of(self._node, self._rank)
        return None if end is None else end[0]

    @property
    def ended_s(self) -> float:
        """Return when it ended, on this node's monotonic clock."""
        end = self._leader.end_of(self._node, self._rank)
        return 0.0 if end is None else end[1]

    def stop(self) -> None:
        """Send SIGTERM to it, and with it to all workers of other nodes."""
        self._leader.stop()

    def expect_stop(self) -> None:
        """Have its node prepare for a stop that its workers learn of by other means."""
        self._leader.expect_stop()

    def kill(self) -> None:
        """Kill it, and with it all workers of other nodes."""
        self._leader.kill()


class RemoteLog:
    """The last lines of a worker on another node, which writes its output to a file itself."""

    source: int | None = None

    def __init__(self, leader: GangLeader, node: int, rank: int) -> None:
        self._leader = leader
        self._node, self._rank = node, rank

    def read(self) -> None:
        """Do nothing: there is no pipe."""

    def drain(self) -> None:
        """Do nothing: there is no pipe."""

    @property
    def tail(self) -> list[str]:
        """The last lines, once it has ended."""
        return self._leader.tail(self._node, self._rank)


def await_nodes(
    leader: GangLeader,
    limit_s: float,
    is_stopped: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[str]:
    """Wait until all nodes have reported; return the hosts of those that have not.

    The wait ends after `limit_s`, or when the trial is told to stop.
    """
    by_s = clock() + limit_s
    while (missing := leader.missing) and clock() < by_s and not is_stopped():
        sleep(LOOK_S)
    return missing
