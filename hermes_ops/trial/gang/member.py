"""The member, on every other node of a trial: it starts that node's workers, obeys and reports."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence

from hermes_ops.trial.gang.layout import Gang
from hermes_ops.trial.gang.messages import (
    LOST_S,
    MOST_LINE_CHARACTERS,
    MOST_TAIL_LINES,
    ORDERS,
    SCOPE,
    NodeReport,
    Orders,
    RankEnd,
    report_key,
)
from hermes_ops.trial.outcome import FINISHED, INFRASTRUCTURE
from hermes_ops.trial.output.rank_log import RankLog
from hermes_ops.trial.processes.workers import WorkerChild
from hermes_ops.trial.store_client import StoreClient

BEAT_S = 0.2
_CANNOT_START = 127


class NodeWorkers:
    """The workers of this node by rank, and their output."""

    _reason = ""  # why none could be started

    def __init__(self, children: Mapping[int, WorkerChild], logs: Mapping[int, RankLog]) -> None:
        self._running = dict(children)
        self._logs = dict(logs)
        self._ended: dict[int, tuple[int, float]] = {}

    @classmethod
    def not_started(cls, ranks: Sequence[int], reason: str, now_s: float) -> NodeWorkers:
        """Return workers that could not be started."""
        workers = cls({}, {})
        workers._ended = dict.fromkeys(ranks, (_CANNOT_START, now_s))
        workers._reason = reason
        return workers

    def pump(self, wait_s: float) -> None:
        """Take in output for `wait_s`, however much comes, and note who has ended."""
        by_s = time.monotonic() + wait_s
        while (left_s := by_s - time.monotonic()) > 0:
            sources = {log.source: log for log in self._logs.values() if log.source is not None}
            readable, _, _ = select.select(list(sources), [], [], left_s)
            for source in readable:
                sources[source].read()
        for rank, child in list(self._running.items()):
            code = child.poll()
            if code is not None:
                del self._running[rank]
                self._logs[rank].drain()
                self._ended[rank] = (code, child.ended_s)

    def stop(self) -> None:
        """Send SIGTERM to the running workers."""
        for child in self._running.values():
            child.stop()

    def expect_stop(self) -> None:
        """Prepare for a stop that the running workers learn of by other means."""
        for child in self._running.values():
            child.expect_stop()

    def kill(self) -> None:
        """Kill the running workers."""
        for child in self._running.values():
            child.kill()

    def ends(self, now_s: float) -> dict[int, RankEnd]:
        """Return how the ended workers ended."""
        return {rank: RankEnd(code, now_s - at_s) for rank, (code, at_s) in self._ended.items()}

    def tails(self) -> dict[int, tuple[str, ...]]:
        """Return the last lines of the ended workers."""
        if self._reason:
            return dict.fromkeys(self._ended, (self._reason,))
        return {rank: _short(self._logs[rank].tail) for rank in self._ended}


def _short(tail: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:MOST_LINE_CHARACTERS] for line in tail[-MOST_TAIL_LINES:])


class GangMember:
    """The life of a node that does not lead.

    `start` starts its workers; OSError if it cannot. `is_stopped`: the node has to be left.
    `join_s`: how long it looks for the first node.
    """

    def __init__(
        self,
        gang: Gang,
        store: StoreClient,
        start: Callable[[], NodeWorkers],
        is_stopped: Callable[[], bool],
        join_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gang = gang
        self._store = store
        self._start = start
        self._is_stopped = is_stopped
        self._clock = clock
        self._answer_by_s = clock() + join_s
        self._has_joined = False
        self._beat = os.getpid()  # another one than that of an earlier process of this node
        self._workers: NodeWorkers | None = None
        self._done = Orders()

    def run(self, leave_s: float) -> int:
        """Serve until the first node lets us leave; return the exit code of hermes-trial.

        The workers are killed when the first node is silent for too long, or when it has not let
        us leave `leave_s` after the node had to be left.
        """
        leave_by_s: float | None = None
        while True:
            orders = self._exchange()
            now_s = self._clock()
            if orders is not None and orders.over:
                self._leave()
                return FINISHED
            if self._is_stopped() and leave_by_s is None:
                leave_by_s = now_s + leave_s if self._workers is not None else now_s
            is_late = orders is not None and orders.go and not self._has_joined
            is_over = leave_by_s is not None and now_s >= leave_by_s
            if is_late or is_over or (orders is None and now_s >= self._answer_by_s):
                self._leave()
                return INFRASTRUCTURE
            if orders is not None:
                self._has_joined = True
                self._obey(orders)
            self._pump()

    def _exchange(self) -> Orders | None:
        """Report, and return the orders; None without an answer."""
        try:
            orders = Orders.decode(self._store.get(SCOPE, ORDERS))
            if self._has_joined or not orders.go:
                self._report(has_left=False)
        except OSError:
            return None
        self._answer_by_s = self._clock() + LOST_S
        return orders

    def _report(self, has_left: bool) -> None:
        self._beat += 1
        workers, now_s = self._workers, self._clock()
        report = NodeReport(
            self._beat,
            {} if workers is None else workers.ends(now_s),
            {} if workers is None else workers.tails(),
            self._is_stopped(),
            has_left,
        )
        self._store.put(SCOPE, report_key(self._gang.node), report.encode())

    def _obey(self, orders: Orders) -> None:
        if orders.go and self._workers is None:
            try:
                self._workers = self._start()
            except OSError as error:
                ranks = self._gang.ranks(self._gang.node)
                reason = f"cannot start: {error.strerror or error}"
                self._workers = NodeWorkers.not_started(ranks, reason, self._clock())
        if self._workers is None:
            return
        if orders.stopping and not self._done.stopping:
            self._workers.expect_stop()
        if orders.stop and not self._done.stop:
            self._workers.stop()
        if orders.kill and not self._done.kill:
            self._workers.kill()
        self._done = orders

    def _pump(self) -> None:
        if self._workers is None:
            time.sleep(BEAT_S)
        else:
            self._workers.pump(BEAT_S)

    def _leave(self) -> None:
        if self._workers is not None:
            self._workers.kill()
        if self._has_joined:  # else the report is that of another process
            with contextlib.suppress(OSError):
                self._report(has_left=True)
