"""What the API says of a pod and of itself, in our own words."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import ClusterPods, PodEvent, PodView, Rejected

METADATA = {
    "name": "p",
    "uid": "u",
    "resourceVersion": "7",
    "labels": {"hermes-ops/try": "2", "hermes-ops/epoch": "5"},
}


def view(**status: Any) -> PodView:
    return PodView.from_json({"metadata": METADATA, "spec": {"nodeName": "n"}, "status": status})


def state(**container: Any) -> list[dict[str, Any]]:
    return [{"name": "sidecar", "state": {"running": {}}}, {"name": "base", "state": container}]


def test_a_pod_says_whose_it_is_and_where() -> None:
    found = view(phase="Running", containerStatuses=state(running={"startedAt": "x"}))
    assert (found.owner, found.epoch, found.node, found.version) == ("2", 5, "n", "7")
    assert (found.started, found.ended, found.gone_by_s) == (True, False, None)


def test_the_exit_code_is_that_of_the_trials_container() -> None:
    found = view(phase="Running", containerStatuses=state(terminated={"exitCode": 75}))
    assert (found.code, found.ended) == (75, True)
    killed = state(terminated={"exitCode": 137, "reason": "OOMKilled"})
    assert view(phase="Failed", containerStatuses=killed).ended_for == "OOMKilled"


def test_a_pod_that_waits_says_why() -> None:
    waiting = state(waiting={"reason": "ImagePullBackOff", "message": "no such image"})
    found = view(phase="Pending", containerStatuses=waiting)
    assert (found.waits_for, found.message, found.started) == (
        "ImagePullBackOff", "no such image", False,
    )  # fmt: skip
    unplaced = [{"type": "PodScheduled", "status": "False", "message": "Insufficient GPUs"}]
    assert view(phase="Pending", conditions=unplaced).message == "Insufficient GPUs"


def test_an_evicted_pod_and_one_that_is_being_deleted_say_so() -> None:
    found = view(phase="Failed", reason="Evicted", message="low on memory")
    assert (found.lost, found.message, found.ended) == ("Evicted", "low on memory", True)
    leaving = {**METADATA, "deletionTimestamp": "1970-01-01T00:01:00Z"}
    assert PodView.from_json({"metadata": leaving}).gone_by_s == 60.0


def api_error(status: int, message: str = "no") -> ApiException:
    error = ApiException(status=status, reason="reason")
    error.body = json.dumps({"message": message})
    return error


class Client:
    """Answers every call with one document or error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.asked.append((name, arguments, options))
            if isinstance(self.answer, Exception):
                raise self.answer
            return SimpleNamespace(data=json.dumps(self.answer))

        return call


def pods(answer: Any) -> ClusterPods:
    return ClusterPods(Client(answer), "trials")


def test_a_pod_that_is_not_there_is_none_and_a_name_that_is_taken_makes_none() -> None:
    assert pods(api_error(404)).fetch("p") is None
    assert pods(api_error(409)).create({}) is None


def test_a_pod_that_has_changed_is_not_deleted() -> None:
    seen = view(phase="Running")
    assert pods(api_error(409)).delete(seen, 30) is False
    assert pods(api_error(404)).delete(seen, 30) is False
    api = pods({})
    assert api.delete(seen, 30) is True
    ((_, arguments, options),) = api.client.asked
    assert arguments == ("p", "trials")
    assert options["body"] == {
        "gracePeriodSeconds": 30,
        "preconditions": {"uid": "u", "resourceVersion": "7"},
    }


@pytest.mark.parametrize(
    "error",
    [
        api_error(500),
        api_error(429),
        api_error(403, "exceeded quota: gpus"),
        api_error(0),
        MaxRetryError(None, "/", None),  # type: ignore[arg-type]
    ],
    ids=["500", "429", "quota", "no answer", "no connection"],
)
def test_what_may_pass_is_asked_again(error: Exception) -> None:
    with pytest.raises(Unavailable):
        pods(error).fetch("p")


def test_what_is_refused_names_the_reason() -> None:
    with pytest.raises(Rejected, match="violates PodSecurity"):
        pods(api_error(403, "violates PodSecurity")).create({})


def test_the_lines_of_a_log_are_whole_however_they_arrive() -> None:
    class Stream:
        def stream(self, _: int) -> Any:
            return iter([b"1 a\n2", b" b\n3 c"])

        def close(self) -> None:
            pass

    client: Any = SimpleNamespace(read_namespaced_pod_log=lambda *_, **__: Stream())
    assert list(ClusterPods(client, "trials").log("p", None)) == ["1 a", "2 b", "3 c"]


def test_a_search_asks_for_all_labels() -> None:
    api = pods({"metadata": {"resourceVersion": "9"}, "items": [{"metadata": METADATA}]})
    assert [p.name for p in api.find({"b": "2", "a": "1"})] == ["p"]
    assert api.client.asked[0][2]["label_selector"] == "a=1,b=2"


def event(kind: str, **found: Any) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


class Watching:
    """Answers a watch with these events, in two pieces."""

    def __init__(self, *events: bytes) -> None:
        self.told = b"".join(events)
        self.asked: dict[str, Any] = {}

    def list_namespaced_pod(self, *_: Any, **options: Any) -> Any:
        self.asked = options
        return self

    def stream(self, _: int) -> Any:
        return iter([self.told[:50], self.told[50:]])

    def close(self) -> None:
        self.asked["closed"] = True


def test_a_watch_goes_on_from_a_version_and_tells_what_came_and_went() -> None:
    newer = {"metadata": {**METADATA, "resourceVersion": "8"}, "status": {"phase": "Running"}}
    client = Watching(
        event("MODIFIED", **newer),
        event("BOOKMARK", metadata={"resourceVersion": "11"}),
        event("DELETED", metadata={**METADATA, "resourceVersion": "12"}),
    )
    found = list(ClusterPods(client, "trials").watch_events({"a": "1"}, "7", 60.0))
    assert [(c.version, c.pod.phase if c.pod else None, c.gone) for c in found] == [
        ("8", "Running", False), ("11", None, False), ("12", "Pending", True),
    ]  # fmt: skip
    assert (client.asked["resource_version"], client.asked["timeout_seconds"]) == ("7", 60)
    assert (client.asked["watch"], client.asked["label_selector"]) == (True, "a=1")
    assert client.asked["closed"]


@pytest.mark.parametrize("at_once", [False, True], ids=["in the stream", "at the request"])
def test_changes_that_are_known_no_more_are_said_to_be_unavailable(at_once: bool) -> None:
    client: Any = Watching(event("ERROR", code=410, message="too old resource version"))
    if at_once:
        client = Client(api_error(410, "too old resource version"))
    with pytest.raises(Unavailable, match="too old resource version"):
        list(ClusterPods(client, "trials").watch_events({}, "7", 60.0))


def test_a_bookmark_is_news_of_the_version_alone() -> None:
    told = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5"}}}
    assert PodEvent.from_event(told) == PodEvent("5")
