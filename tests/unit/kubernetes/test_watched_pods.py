"""Pods that are listed once and then watched, and what breaks a watch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import Change, PodView, Rejected
from hermes_ops.kubernetes.watched import SHORT_S, WATCH_S, WatchedPods
from tests.unit.kubernetes.pods import POD

LABELS = {"a": "1"}
OTHER = replace(POD, name="p-2", uid="u-2")

Ends = Exception | None


@dataclass
class Api:
    """Lists `pods` at version "1"; each watch tells its changes and ends, by an error or by itself.

    When none is left the watch stays open until `over`.
    """

    pods: list[PodView]
    watches: list[tuple[list[Change], Ends]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    away: Exception | None = None
    open: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    time_s: float = 0.0
    lasts_s: float = WATCH_S

    def listed(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        assert labels == LABELS
        self.asked.append("list")
        if self.away is not None:
            raise self.away
        return self.pods, "1"

    def changes(self, labels: Mapping[str, str], version: str, seconds: float) -> Iterator[Change]:
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
    return sorted(pod.name for pod in pods.now())


def test_pods_are_listed_once_and_then_told_by_watches_each_from_where_the_last_one_ended() -> None:
    changed = replace(POD, phase="Running")
    told = [Change("2", OTHER), Change("3", changed), Change("4")]
    api = Api([POD], [(told, None), ([Change("5", OTHER, gone=True)], None)])
    pods = watched(api)
    pods.now()
    assert api.open.wait(60.0)
    assert pods.now() == [changed]
    assert api.asked == ["list", "watch 1", "watch 4", "watch 5"]
    api.over.set()
    settled(pods)


@pytest.mark.parametrize(
    "end", [Unavailable("410: too old resource version"), TypeError("of the client's")]
)
def test_after_a_watch_that_broke_off_they_are_listed_anew_when_asked_for(end: Exception) -> None:
    api = Api([POD], [([Change("2", OTHER)], end)])
    pods = watched(api)
    pods.now()
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
    pods.now()
    settled(pods)
    assert api.asked == ["list", "watch 1"]


def test_who_asks_while_the_cluster_is_away_is_told() -> None:
    api = Api([POD], away=Unavailable("no answer"))
    pods = watched(api)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no answer"):
            pods.now()
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
    pods.leave()
    pods.now()
    settled(pods)
    assert api.asked == ["list"]


def test_a_pod_is_deleted_as_it_was_seen() -> None:
    api = Api([POD])
    assert watched(api).delete(POD, 30)
    assert api.asked == ["delete p-1 30"]
