"""A trial on several nodes: who is where, what the nodes tell each other, when one is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.gang.layout import Gang, GangNode
from hermes_ops.trial.gang.leader import KILLED_LOST_S, GangLeader, RemoteWorker, await_nodes
from hermes_ops.trial.gang.member import GangMember, NodeWorkers
from hermes_ops.trial.gang.messages import (
    LOST_S,
    ORDERS,
    SCOPE,
    NodeReport,
    Orders,
    RankEnd,
    report_key,
)
from hermes_ops.trial.group import StopAgreement, TrialRank
from hermes_ops.trial.rendezvous import KeyValueStore, RendezvousServer
from hermes_ops.trial.store_client import StoreClient, insist
from hermes_ops.trial.worker_environment import gang_addresses, worker_environment

SHARES = st.lists(st.integers(1, 8), min_size=2, max_size=5)


def gang_of(*shares: int, node: int = 0) -> Gang:
    return Gang(tuple(GangNode(f"h{n}", k) for n, k in enumerate(shares)), node)


# -- who is where ----------------------------------------------------------------------------------


@given(SHARES)
def test_each_rank_is_on_one_node_and_meets_its_like_of_the_other_nodes(shares: list[int]) -> None:
    gang = gang_of(*shares)
    places = [gang.place(rank) for rank in range(gang.size)]
    assert gang.size == sum(shares)
    assert [r for n in range(len(shares)) for r in gang.ranks(n)] == list(range(gang.size))
    assert [(p.node, p.local_rank) for p in places] == [
        (n, k) for n, share in enumerate(shares) for k in range(share)
    ]
    for place in places:
        alike = [p for p in places if p.local_rank == place.local_rank]
        assert place.local_size == shares[place.node]
        assert place.cross_size == len(alike)
        assert [p.cross_rank for p in alike] == list(range(len(alike)))


@given(SHARES)
def test_the_store_knows_how_many_meet_in_each_scope_that_horovod_asks_for(
    shares: list[int],
) -> None:
    gang = gang_of(*shares)
    addresses = gang_addresses(gang, Path("/g"), tf_config=True)
    met: dict[str, int] = {}
    for rank in range(gang.size):
        own = worker_environment({}, rank, addresses)
        for scope in (
            "global",
            f"local_{own['HOROVOD_HOSTNAME']}",
            f"cross_{own['HOROVOD_LOCAL_RANK']}",
        ):
            met[scope] = met.get(scope, 0) + 1
    assert gang.scopes() == met


def test_a_worker_on_another_node_finds_the_first_one_and_its_own_place() -> None:
    addresses = gang_addresses(gang_of(2, 1), Path("/g"), tf_config=True)
    found = worker_environment({"HOROVOD_HOSTNAME": "mine"}, 2, addresses)
    expected = {
        "HERMES_RANK": "2", "HERMES_SIZE": "3", "HERMES_LOCAL_RANK": "0", "HERMES_LOCAL_SIZE": "1",
        "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "node-1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h0",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400", "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h0",
        "MASTER_PORT": "29401", "HERMES_GROUP_STORE": "h0:29400",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "HOROVOD_GLOO_IFACE" not in found  # the loopback interface leads to no other node
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["h0:29410", "h0:29411", "h1:29410"]},
        "task": {"type": "worker", "index": 2},
    }


@pytest.mark.parametrize("text", ["", "a", "a=1", "a=1,b=0", "a=1,b", "a=1,,b=1", "a=1,b=x"])
def test_a_gang_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST=WORKERS,HOST=WORKERS"):
        Gang.parse(text, 0)
    with pytest.raises(ValueError, match="there is no node 2"):
        Gang.parse("a=1,b=1", 2)


# -- what they tell each other ---------------------------------------------------------------------


def test_reports_and_orders_arrive_as_they_were_sent() -> None:
    ends = {2: RankEnd(-9, 0.5)}
    report = NodeReport(7, ends, {2: ("last", "words")}, is_told_to_stop=True, has_left=True)
    assert NodeReport.decode(report.encode()) == report
    orders = Orders(go=True, stop=True, kill=True, over=True, stopping=True)
    assert Orders.decode(orders.encode()) == orders


@pytest.mark.parametrize("data", [None, b"", b"\xff", b"[]", b"7", b'{"beat": "x", "go": 1}'])
def test_what_is_no_report_and_no_order_changes_nothing(data: bytes | None) -> None:
    assert NodeReport.decode(data) is None
    assert Orders.decode(data) == Orders()


# -- the first node --------------------------------------------------------------------------------


class Lead:
    """The first of two nodes, with the reports of the other, under a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s, self.beat, self.told = 100.0, 0, 0
        self.store = KeyValueStore({})
        self.leader = GangLeader(gang_of(1, 2), self.store, lambda: self.now_s)
        self.leader.on_told_to_stop = self._tell

    def _tell(self) -> None:
        self.told += 1

    def report(self, **facts: Any) -> None:
        self.beat += 1
        self.store.put(SCOPE, report_key(1), NodeReport(self.beat, **facts).encode())

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def orders(self) -> Orders:
        return Orders.decode(self.store.get(SCOPE, ORDERS))

    @property
    def workers(self) -> list[RemoteWorker]:
        return self.leader.workers()


def test_nothing_starts_before_all_nodes_have_reported() -> None:
    lead = Lead()

    def clock() -> float:
        return lead.now_s

    assert await_nodes(lead.leader, 5.0, lambda: False, clock, lead.sleep) == ["h1"]
    assert lead.now_s >= 105.0
    assert await_nodes(lead.leader, 5.0, lambda: True, clock, lead.sleep) == ["h1"]
    assert lead.orders == Orders()
    lead.report()
    assert await_nodes(lead.leader, 5.0, lambda: False, clock, lead.sleep) == []
    lead.leader.go()
    assert lead.orders == Orders(go=True)


def test_a_worker_far_away_ends_when_its_node_says_and_when_it_did() -> None:
    lead = Lead()
    lead.report()
    first, second = lead.workers
    assert (first.poll(), second.poll()) == (None, None)
    lead.now_s = 110.0
    lead.report(ends={1: RankEnd(3, 2.0)}, tails={1: ("no data",)})
    assert (first.poll(), first.ended_s, second.poll()) == (3, 108.0, None)
    assert (first.log.tail, second.log.tail) == (["no data"], [])


def test_a_node_that_says_nothing_is_lost_sooner_if_it_was_to_kill_its_workers() -> None:
    lead = Lead()
    lead.report(ends={1: RankEnd(0, 0.0)})
    first, second = lead.workers
    assert second.poll() is None
    lead.now_s += KILLED_LOST_S + 1
    assert (second.poll(), lead.leader.lost) == (None, [])
    second.kill()
    assert lead.orders.kill
    assert (first.poll(), second.poll(), lead.leader.lost) == (0, 70, ["h1"])


def test_a_node_is_lost_after_a_silence_and_not_while_it_reports() -> None:
    lead = Lead()
    worker = lead.workers[0]
    for _ in range(3):
        lead.report()
        assert worker.poll() is None
        lead.now_s += LOST_S - 1
    assert worker.poll() is None
    lead.now_s += 2
    assert (worker.poll(), lead.leader.lost) == (70, ["h1"])


def test_a_node_that_has_to_be_left_is_told_once() -> None:
    lead = Lead()
    for _ in range(3):
        lead.report(is_told_to_stop=True)
        assert lead.workers[0].poll() is None
    assert lead.told == 1
    lead.workers[0].expect_stop()
    assert (lead.orders.stopping, lead.orders.stop) == (True, False)
    lead.workers[0].stop()
    assert lead.orders.stop


def test_the_first_node_waits_a_little_for_the_others_to_leave() -> None:
    lead = Lead()
    lead.report()
    lead.leader.dismiss(lead.sleep)
    assert lead.orders.over
    assert 102.0 < lead.now_s < 104.0
    gone = Lead()
    gone.report(has_left=True)
    gone.leader.dismiss(gone.sleep)
    assert gone.now_s == 100.0


# -- another node ----------------------------------------------------------------------------------


class Member:
    """A node that does not lead, with what it asks of the store and starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.started, self.stopped = 0.0, 0, False
        self.values: dict[str, bytes] = {}
        self.script: list[Any] = []
        self.member = GangMember(
            gang_of(1, 2, node=1),
            self,  # type: ignore[arg-type]
            self._start,
            lambda: self.stopped,
            10.0,
            clock=lambda: self.now_s,
        )
        monkeypatch.setattr("time.sleep", lambda _: None)

    def _start(self) -> NodeWorkers:
        self.started += 1
        raise OSError("no such program")

    def get(self, scope: str, key: str) -> bytes:
        self.now_s += 1.0
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, OSError):
            raise step
        if step == "stop":
            self.stopped, step = True, Orders()
        return bytes(step.encode())

    def put(self, scope: str, key: str, value: bytes) -> None:
        self.values[key] = value

    @property
    def report(self) -> NodeReport:
        found = NodeReport.decode(self.values["node-1"])
        assert found is not None
        return found


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


AWAY = OSError("connection refused")


def test_a_node_looks_for_the_first_one_and_leaves_when_it_may(member: Member) -> None:
    member.script = [AWAY, AWAY, Orders(), Orders(over=True)]
    assert member.member.run(40.0) == 0
    assert (member.report.has_left, member.started) == (True, 0)


def test_a_node_gives_up_when_the_first_one_is_not_there_or_falls_silent(member: Member) -> None:
    member.script = [AWAY]
    assert member.member.run(40.0) == 70
    assert 10.0 <= member.now_s < 13.0
    member.script = [Orders(), AWAY]
    assert member.member.run(40.0) == 70
    assert member.now_s >= 30.0


def test_a_node_that_cannot_start_its_workers_says_why(member: Member) -> None:
    member.script = [Orders(), Orders(go=True), Orders(go=True), Orders(go=True, over=True)]
    assert member.member.run(40.0) == 0
    assert member.started == 1
    assert {rank: end.code for rank, end in member.report.ends.items()} == {1: 127, 2: 127}
    assert member.report.tails[2] == ("cannot start: no such program",)


def test_a_node_does_not_join_a_trial_that_has_started_without_it(member: Member) -> None:
    member.script = [Orders(go=True)]
    assert member.member.run(40.0) == 70
    assert member.started == 0


def test_a_node_that_is_to_be_left_before_it_works_leaves_at_once(member: Member) -> None:
    member.script = [Orders(), "stop", Orders()]
    assert member.member.run(40.0) == 70
    assert member.report.is_told_to_stop
    assert member.now_s < 5.0


# -- the step before which all leave ---------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer(3)
    yield server
    server.close()


def test_ranks_on_several_nodes_agree_on_a_step_through_the_store(
    server: RendezvousServer, tmp_path: Path
) -> None:
    address = f"localhost:{server.port}"
    leader, other = (
        StopAgreement(TrialRank(rank, 2, str(tmp_path / str(rank)), address)) for rank in (0, 1)
    )
    left = []
    for step in range(6):
        left.append((leader.agree_to_leave(step == 1, 2), other.agree_to_leave(False, 2)))
    assert left == [(False, False)] * 3 + [(True, True)] * 3
    assert server.store.get("hermes", "stop") == b"3"


def test_a_rank_that_cannot_ask_goes_no_further_and_a_leader_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.trial.store_client._PAUSE_S", 0.0)
    gone = StopAgreement(TrialRank(1, 2, str(tmp_path), "localhost:1"))
    with pytest.raises(OSError, match="refused"):
        gone.agree_to_leave(False, 2)
    leader = StopAgreement(TrialRank(0, 2, str(tmp_path), "localhost:1"))
    assert [leader.agree_to_leave(True, 1) for _ in range(4)] == [False] * 4


def test_a_store_that_refuses_connections_is_asked_again_for_two_seconds() -> None:
    pauses: list[float] = []

    def ask() -> float:
        if sum(pauses) < 2.0:
            raise AWAY
        return sum(pauses)

    assert insist(ask, pauses.append) == 2.0
    pauses.clear()
    with pytest.raises(OSError, match="refused"):
        insist(lambda: StoreClient("localhost:1").get("a", "b"), pauses.append)
    assert pauses == [0.5] * 4


def test_a_store_without_room_is_an_error_and_a_value_that_is_absent_none(
    server: RendezvousServer,
) -> None:
    client = StoreClient(f"localhost:{server.port}")
    assert client.get("a", "b") is None
    client.put("a", "b", b"c")
    assert client.get("a", "b") == b"c"
    with pytest.raises(OSError, match="413"):
        client.put("a", "big", b"x" * 1_048_577)
