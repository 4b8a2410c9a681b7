"""What the API says of a pod and of itself, in our own words."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import ClusterPods, Forbidden, PodEvent, PodView, Rejected

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
    assert (found.started, found.ended, found.deletion_grace_s) == (True, False, None)


def test_the_exit_code_is_that_of_the_trials_container() -> None:
    found = view(phase="Running", containerStatuses=state(terminated={"exitCode": 75}))
    assert (found.code, found.ended) == (75, True)
    killed = state(terminated={"exitCode": 137, "reason": "OOMKilled"})
    assert view(phase="Failed", containerStatuses=killed).ended_for == "OOMKilled"


@pytest.mark.parametrize(
    ("start", "ran_s"),
    [
        ({"startedAt": "2026-11-29T23:59:58Z"}, 62.0),
        ({"startedAt": None}, None),
        ({"startedAt": "soon"}, None),
        ({}, None),
    ],
)
def test_a_container_that_has_ended_has_run_from_its_start_to_its_end(
    start: dict[str, Any], ran_s: float | None
) -> None:
    terminated = {"exitCode": 0, "finishedAt": "2026-11-30T00:01:00Z", **start}
    assert view(containerStatuses=state(terminated=terminated)).ran_s == ran_s


def test_a_pod_that_waits_says_why() -> None:
    waiting = state(waiting={"reason": "ImagePullBackOff", "message": "no such image"})
    found = view(phase="Pending", containerStatuses=waiting)
    assert (found.waits_for, found.message, found.started) == (
        "ImagePullBackOff", "no such image", False,
    )  # fmt: skip
    unplaced = [{"type": "PodScheduled", "status": "False", "message": "Insufficient GPUs"}]
    assert view(phase="Pending", conditions=unplaced).message == "Insufficient GPUs"


def init(name: str, **container: Any) -> dict[str, Any]:
    return {"name": name, "state": container}


def test_a_pod_waits_for_what_its_init_container_waits_for() -> None:
    waiting = state(waiting={"reason": "PodInitializing"})
    missing = init("data", waiting={"reason": "ErrImagePull", "message": "no such image"})
    later = init("more", waiting={"reason": "PodInitializing"})
    found = view(phase="Pending", initContainerStatuses=[missing, later], containerStatuses=waiting)
    assert (found.waits_for, found.message) == ("ErrImagePull", "no such image")
    done = init("data", terminated={"exitCode": 0, "reason": "Completed"})
    found = view(phase="Pending", initContainerStatuses=[done, later], containerStatuses=waiting)
    assert (found.waits_for, found.init_failure) == ("PodInitializing", "")


def test_a_pod_names_the_init_container_that_has_failed() -> None:
    failed = init("data", terminated={"exitCode": 3, "reason": "Error"})
    waiting = state(waiting={"reason": "PodInitializing"})
    found = view(phase="Failed", initContainerStatuses=[failed], containerStatuses=waiting)
    assert (found.ended, found.code, found.lost) == (True, None, "")
    assert found.init_failure == "its init container data ended with 3 (Error)"


def test_a_pod_says_whether_a_container_beside_the_trials_runs() -> None:
    over = state(terminated={"exitCode": 0})[1:]
    runs = [{"name": "logs", "state": {"running": {"startedAt": "x"}}}]
    assert view(phase="Running", containerStatuses=[*over, *runs]).sidecars_run
    assert view(phase="Running", containerStatuses=over, initContainerStatuses=runs).sidecars_run
    alone = state(running={"startedAt": "x"})[1:]
    ended = [{"name": "logs", "state": {"terminated": {"exitCode": 0}}}]
    assert not view(phase="Running", containerStatuses=[*alone, *ended]).sidecars_run


def test_a_sidecar_that_ends_with_the_pod_is_no_failure() -> None:
    spec = {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "data"}]}
    proxy = init("proxy", terminated={"exitCode": 143, "reason": "Error"})
    data = init("data", terminated={"exitCode": 3, "reason": "Error"})
    waiting = state(waiting={"reason": "PodInitializing"})
    for states, inits, failure in (
        (state(terminated={"exitCode": 1}), [proxy], ""),
        (state(terminated={"exitCode": 1}), [data], ""),
        (waiting, [proxy, data], "its init container data ended with 3 (Error)"),
    ):
        status = {"phase": "Failed", "initContainerStatuses": inits, "containerStatuses": states}
        found = PodView.from_json({"metadata": METADATA, "spec": spec, "status": status})
        assert found.init_failure == failure


@pytest.mark.parametrize("reason", ["Unknown", "ContainerStatusUnknown"])
def test_a_container_that_its_restarted_node_knows_no_more_was_lost(reason: str) -> None:
    gone = {"exitCode": 255, "reason": reason}
    assert view(phase="Failed", containerStatuses=state(terminated=gone)).lost == reason
    waiting = state(waiting={"reason": "PodInitializing"})
    lost = [init("data", terminated=gone)]
    found = view(phase="Failed", initContainerStatuses=lost, containerStatuses=waiting)
    assert found.lost == reason


def test_a_container_that_cannot_start_says_why() -> None:
    ended = {"exitCode": 128, "reason": "StartError", "message": "no such file: hermes-trial"}
    found = view(phase="Failed", containerStatuses=state(terminated=ended))
    assert found.message == "no such file: hermes-trial"


def test_an_evicted_pod_and_one_that_is_being_deleted_say_so() -> None:
    found = view(phase="Failed", reason="Evicted", message="low on memory")
    assert (found.lost, found.message, found.ended) == ("Evicted", "low on memory", True)
    leaving = {**METADATA, "deletionTimestamp": "1970-01-01T00:01:00Z",
               "deletionGracePeriodSeconds": 45}  # fmt: skip
    assert PodView.from_json({"metadata": leaving}).deletion_grace_s == 45.0


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


@pytest.mark.parametrize(
    ("requested", "limited", "fits"),
    [
        ("limits.memory=64Gi,requests.nvidia.com/gpu=1", "limits.memory=32Gi,pods=9", False),
        ("requests.nvidia.com/gpu=2", "requests.nvidia.com/gpu=1", True),
        ("limits.cpu=1500m,limits.memory=32Gi", "limits.cpu=2,limits.memory=32Gi", True),
        ("limits.cpu=many", "limits.cpu=2", True),
        ("", "", True),
    ],
)
def test_a_pod_that_no_quota_of_its_namespace_can_ever_admit_is_refused(
    requested: str, limited: str, fits: bool
) -> None:
    message = f'pods "p" is forbidden: exceeded quota: q, requested: {requested}, used: '
    error = api_error(403, f"{message}limits.memory=0,limits.cpu=1, limited: {limited}")
    with pytest.raises(Unavailable if fits else Rejected, match="exceeded quota: q"):
        pods(error).create({})


def test_what_is_refused_names_the_reason() -> None:
    with pytest.raises(Rejected, match="violates PodSecurity"):
        pods(api_error(403, "violates PodSecurity")).create({})


@pytest.mark.parametrize(("status", "kind"), [(401, Forbidden), (403, Forbidden), (422, Rejected)])
def test_a_missing_right_is_told_from_what_is_wrong_with_a_pod(
    status: int, kind: type[Rejected]
) -> None:
    with pytest.raises(Rejected) as refused:
        pods(api_error(status)).create({})
    assert refused.type is kind


def test_the_lines_of_a_log_are_whole_however_they_arrive() -> None:
    class Stream:
        def stream(self, _: int) -> Any:
            return iter([b"1 a\n2", b" b\n3 c"])

        def close(self) -> None:
            pass

    client: Any = SimpleNamespace(read_namespaced_pod_log=lambda *_, **__: Stream())
    assert list(ClusterPods(client, "trials").log("p", None)) == ["1 a", "2 b", "3 c"]


def test_what_a_pods_volumes_lack_is_in_its_own_events_until_an_image_is_pulled() -> None:
    def event(reason: str, second: int, message: str = "") -> dict[str, Any]:
        at = f"2026-01-01T00:00:{second:02}Z"
        return {"reason": reason, "message": message, "lastTimestamp": at}

    late, early = event("FailedMount", 9, "late"), event("FailedAttachVolume", 2, "early")
    api = pods({"items": [late, event("Scheduled", 1), early]})
    assert api.unmounted(view(phase="Pending")) == ("early", "late")
    assert api.client.asked[0][2]["field_selector"] == "involvedObject.uid=u"
    assert pods({"items": [late, event("Pulling", 10)]}).unmounted(view()) is None


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
