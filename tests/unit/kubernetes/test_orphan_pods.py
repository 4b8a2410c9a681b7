"""The pods of a namespace under a watch, what breaks it, and pods with no lease behind them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import PodEvent, PodView, Rejected
from hermes_ops.kubernetes.deletion import FORCE_AFTER_S
from hermes_ops.kubernetes.orphan_pods import (
    CLEARING_S,
    ORPHAN_GRACE_S,
    SHORT_S,
    WATCH_S,
    LeasesInForce,
    OrphanFindings,
    PodDeletion,
    WatchedPods,
    find_orphans,
    is_orphan,
)
from tests.unit.kubernetes.pods import POD

LEASED = PodView(
    name="p", uid="u", version="1", phase="Running", owner="1", epoch=2, sweep="s", trial=0
)
FRESH = OrphanFindings()
NONE = LeasesInForce(frozenset({"s"}), {})
THIS = LeasesInForce(frozenset({"s"}), {("s", 0): 2})


def test_a_pod_of_the_lease_in_force_is_no_orphan_and_one_of_another_lease_is() -> None:
    assert not is_orphan(LEASED, THIS)
    assert is_orphan(replace(LEASED, epoch=1), THIS)
    assert is_orphan(replace(LEASED, epoch=3), THIS)
    assert is_orphan(replace(LEASED, trial=1), THIS)


def test_a_pod_of_a_sweep_that_has_ended_is_an_orphan_and_one_of_an_unknown_sweep_is_not() -> None:
    assert is_orphan(LEASED, NONE)
    assert not is_orphan(replace(LEASED, sweep="another pool's"), NONE)
    assert not is_orphan(LEASED, LeasesInForce(frozenset(), {}))


def test_a_pod_of_another_installations_sweep_of_the_same_name_is_no_orphan() -> None:
    ours = replace(NONE, installation="ours")
    assert not is_orphan(replace(LEASED, installation="theirs"), ours)
    assert is_orphan(replace(LEASED, installation="ours"), ours)
    assert is_orphan(LEASED, ours)


def test_an_orphan_goes_when_it_has_been_one_for_its_grace_and_no_earlier() -> None:
    first = find_orphans([LEASED], NONE, FRESH, 100.0, 30)
    assert (first.deletions, first.since_s) == ((), {"u": 100.0})
    assert first.next_s == 100.0 + ORPHAN_GRACE_S
    before = find_orphans([LEASED], NONE, first, 99.0 + ORPHAN_GRACE_S, 30)
    assert before.deletions == ()
    then = find_orphans([LEASED], NONE, before, 100.0 + ORPHAN_GRACE_S, 30)
    assert then.deletions == (PodDeletion(LEASED, 30),)


def test_a_pod_that_has_a_lease_meanwhile_begins_its_grace_anew() -> None:
    first = find_orphans([LEASED], NONE, FRESH, 100.0, 30)
    leased = find_orphans([LEASED], THIS, first, 110.0, 30)
    assert leased.since_s == {}
    assert leased.next_s == inf
    again = find_orphans([LEASED], NONE, leased, 135.0, 30)
    assert again.deletions == ()


def test_the_next_pod_of_the_same_name_has_a_grace_of_its_own() -> None:
    first = find_orphans([LEASED], NONE, FRESH, 100.0, 30)
    assert find_orphans([replace(LEASED, uid="u-2")], NONE, first, 140.0, 30).deletions == ()


def test_a_pod_on_its_way_out_is_left_to_its_node_until_that_should_long_be_done() -> None:
    leaving = replace(LEASED, deletion_grace_s=45.0)
    first = find_orphans([leaving], NONE, FRESH, 100.0, 30)
    then = find_orphans([leaving], NONE, first, 145.0 + FORCE_AFTER_S, 30)
    assert then.deletions == ()
    late = find_orphans([leaving], NONE, then, 146.0 + FORCE_AFTER_S, 30)
    assert late.deletions == (PodDeletion(leaving, 0),)


def test_a_pod_that_deletes_checkpoints_goes_once_nobody_waits_for_it_any_more() -> None:
    clearing = replace(LEASED, sweep="", trial=-1, epoch=0, deletes_checkpoints=True)
    first = find_orphans([clearing], THIS, FRESH, 100.0, 30)
    assert first.next_s == 100.0 + CLEARING_S
    before = find_orphans([clearing], THIS, first, 99.0 + CLEARING_S, 30)
    assert before.deletions == ()
    then = find_orphans([clearing], THIS, before, 100.0 + CLEARING_S, 30)
    assert then.deletions == (PodDeletion(clearing, 30),)


def test_an_orphan_goes_in_time_though_the_clock_was_set_back_meanwhile() -> None:
    first = find_orphans([LEASED], NONE, FRESH, 10_000.0, 30)
    back = find_orphans([LEASED], NONE, first, 100.0, 30)
    then = find_orphans([LEASED], NONE, back, 100.0 + ORPHAN_GRACE_S, 30)
    assert then.deletions == (PodDeletion(LEASED, 30),)


def test_an_orphan_that_is_overdue_does_not_hide_when_the_next_ones_grace_ends() -> None:
    other = replace(LEASED, uid="u-2")
    last = OrphanFindings({"u": 0.0, "u-2": 90.0})
    assert find_orphans([LEASED, other], NONE, last, 100.0, 30).next_s == 90.0 + ORPHAN_GRACE_S


@given(
    epochs=st.dictionaries(st.tuples(st.just("s"), st.integers(0, 3)), st.integers(1, 3)),
    pods=st.lists(st.tuples(st.sampled_from("st"), st.integers(0, 3), st.integers(1, 3))),
)
def test_no_pod_of_a_lease_in_force_and_no_strangers_pod_ever_goes(
    epochs: dict[tuple[str, int], int], pods: list[tuple[str, int, int]]
) -> None:
    views = [
        replace(LEASED, uid=f"u-{n}", sweep=s, trial=t, epoch=e) for n, (s, t, e) in enumerate(pods)
    ]
    leased = LeasesInForce(frozenset({"s"}), epochs)
    last = OrphanFindings(dict.fromkeys((v.uid for v in views), 0.0))
    found = find_orphans(views, leased, last, 1e6, 30)
    gone = {e.pod.uid for e in found.deletions}
    wanted = {v.uid for v in views if v.sweep == "s" and epochs.get(("s", v.trial)) != v.epoch}
    assert gone == wanted


LABELS = {"a": "1"}
OTHER = replace(POD, name="p-2", uid="u-2")

Ends = Exception | None


@dataclass
class Api:
    """Lists `pods` at version "1"; each watch tells its changes and ends, by an error or by itself.

    When none is left the watch stays open until `over`.
    """

    pods: list[PodView]
    watches: list[tuple[list[PodEvent], Ends]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    away: Exception | None = None
    open: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    time_s: float = 0.0
    lasts_s: float = WATCH_S

    def list_with_version(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        assert labels == LABELS
        self.asked.append("list")
        if self.away is not None:
            raise self.away
        return self.pods, "1"

    def watch_events(
        self, labels: Mapping[str, str], version: str, seconds: float
    ) -> Iterator[PodEvent]:
        assert (labels, seconds) == (LABELS, WATCH_S)
        self.asked.append(f"watch {version}")
        if not self.watches:
            self.open.set()
            self.over.wait(60.0)
            raise Unavailable("over")
        told, end = self.watches.pop(0)
        yield from told
        self.time_s += self.lasts_s
        if end is not None:
            raise end

    def delete(self, pod: PodView, grace_s: int) -> bool:
        self.asked.append(f"delete {pod.name} {grace_s}")
        return True

    def clock(self) -> float:
        return self.time_s


def watched(api: Api) -> Any:
    return WatchedPods(api, LABELS, api.clock)


def settled(pods: Any) -> None:
    """Return when its watch has broken off."""
    assert pods._thread is not None
    pods._thread.join(60.0)


def names(pods: Any) -> list[str]:
    return sorted(pod.name for pod in pods.current())


def test_pods_are_listed_once_and_then_told_by_watches_each_from_where_the_last_one_ended() -> None:
    changed = replace(POD, phase="Running")
    told = [PodEvent("2", OTHER), PodEvent("3", changed), PodEvent("4")]
    api = Api([POD], [(told, None), ([PodEvent("5", OTHER, gone=True)], None)])
    pods = watched(api)
    pods.current()
    assert api.open.wait(60.0)
    assert pods.current() == [changed]
    assert api.asked == ["list", "watch 1", "watch 4", "watch 5"]
    api.over.set()
    settled(pods)


@pytest.mark.parametrize(
    "end", [Unavailable("410: too old resource version"), TypeError("of the client's")]
)
def test_after_a_watch_that_broke_off_they_are_listed_anew_when_asked_for(end: Exception) -> None:
    api = Api([POD], [([PodEvent("2", OTHER)], end)])
    pods = watched(api)
    pods.current()
    settled(pods)
    assert api.asked == ["list", "watch 1"]
    api.pods = [OTHER]  # the other one's end was never told
    assert names(pods) == ["p-2"]
    assert api.open.wait(60.0)
    assert api.asked == ["list", "watch 1"] * 2
    api.over.set()
    settled(pods)


def test_a_watch_that_ends_at_once_is_not_begun_again_and_again() -> None:
    api = Api([POD], [([], None)] * 3, lasts_s=SHORT_S / 2)
    pods = watched(api)
    pods.current()
    settled(pods)
    assert api.asked == ["list", "watch 1"]


def test_who_asks_while_the_cluster_is_away_is_told() -> None:
    api = Api([POD], away=Unavailable("no answer"))
    pods = watched(api)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no answer"):
            pods.current()
    api.away, api.watches = None, [([], Unavailable("later"))]
    assert names(pods) == ["p-1"]
    settled(pods)


def test_one_who_may_not_watch_lists_each_time_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = Rejected("pods is forbidden: cannot watch")
    api = Api([POD], [([], refused), ([], refused)])
    pods = watched(api)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert names(pods) == ["p-1"]
            settled(pods)
    assert api.asked == ["list", "watch 1"] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "Pods are listed each time, as they cannot be watched: pods is forbidden: cannot watch"
    ]


def test_what_is_left_is_watched_no_more_once_the_watch_under_way_is_over() -> None:
    api = Api([POD], [([], None)])
    pods = watched(api)
    pods.stop()
    pods.current()
    settled(pods)
    assert api.asked == ["list"]


def test_a_pod_is_deleted_as_it_was_seen() -> None:
    api = Api([POD])
    assert watched(api).delete(POD, 30)
    assert api.asked == ["delete p-1 30"]
