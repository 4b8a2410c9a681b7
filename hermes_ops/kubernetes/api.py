"""The border to Kubernetes' API: few calls, plain facts back, errors translated once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.template import CONTAINER, EPOCH, SWEEP, TRIAL, TRY

CALL_TIMEOUT_S = 10.0
LOG_IDLE_TIMEOUT_S = 60.0
_GONE, _CONFLICT, _EXPIRED, _TOO_MANY = 404, 409, 410, 429

Plain = Mapping[str, Any]


class Rejected(HermesError):
    """Kubernetes does not accept a request: a right or a setting is missing or wrong."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod as far as its trial's task looks at it.

    `code` is the exit code of the trial's container once that has ended; `lost` says why the pod
    was ended from outside (Evicted, NodeLost, ...); `gone_by_s` is when a pod that is being deleted
    should be gone, in Unix seconds. `sweep` is the value of the sweep's label.
    """

    name: str
    uid: str
    version: str
    phase: str
    owner: str = ""
    epoch: int = 0
    node: str = ""
    started: bool = False
    code: int | None = None
    ended_for: str = ""
    waits_for: str = ""
    message: str = ""
    lost: str = ""
    gone_by_s: float | None = None
    sweep: str = ""
    trial: int = -1

    @property
    def ended(self) -> bool:
        """True once its container has ended or will never start."""
        return self.code is not None or self.phase in ("Succeeded", "Failed")

    @classmethod
    def of(cls, pod: Plain) -> PodView:
        """From the API's document."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        container = _container(status)
        state: Plain = container.get("state") or {}
        terminated, waiting = state.get("terminated") or {}, state.get("waiting") or {}
        gone_by = metadata.get("deletionTimestamp")
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            version=metadata["resourceVersion"],
            phase=status.get("phase") or "Pending",
            owner=labels.get(TRY, ""),
            epoch=_number(labels.get(EPOCH), 0),
            node=(pod.get("spec") or {}).get("nodeName") or "",
            started=bool(terminated) or "running" in state,
            code=terminated.get("exitCode"),
            ended_for=terminated.get("reason") or "",
            waits_for=waiting.get("reason") or "",
            message=waiting.get("message") or status.get("message") or _unscheduled(status),
            lost=status.get("reason") or "",
            gone_by_s=datetime.fromisoformat(gone_by).timestamp() if gone_by else None,
            sweep=labels.get(SWEEP, ""),
            trial=_number(labels.get(TRIAL), -1),
        )


def _number(label: str | None, absent: int) -> int:
    return int(label) if label and label.isdecimal() else absent


def _container(status: Plain) -> Plain:
    statuses = status.get("containerStatuses") or ()
    return next((s for s in statuses if s.get("name") == CONTAINER), {})


def _unscheduled(status: Plain) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "")
    return ""


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a pod: as it is now, or as it was last where it is `gone`.

    `version` is that of the whole namespace; where `pod` is None it alone is news.
    """

    version: str
    pod: PodView | None = None
    gone: bool = False

    @classmethod
    def of(cls, event: Plain) -> Change:
        """From an event of a watch; Unavailable where it says that the watch is over."""
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            raise Unavailable(f"Kubernetes ended a watch of pods: {found.get('message')}")
        version = found["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return cls(version)
        return cls(version, PodView.of(found), kind == "DELETED")


class Pods(Protocol):
    """The pods of one namespace."""

    def create(self, pod: Any) -> PodView | None:  # noqa: ANN401 - the client's own model
        """The new pod; None when there is one of that name."""

    def read(self, name: str) -> PodView | None:
        """The pod; None when there is none of that name."""

    def find(self, labels: Mapping[str, str]) -> list[PodView]:
        """All pods with these labels."""

    def own(self, pod: PodView, attempt: str) -> bool:
        """Note whose it is; False when it has changed meanwhile."""

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete it if it is still as it was seen; False when it has changed meanwhile."""

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        """The lines of its log with their times, as they come."""


@dataclass(slots=True)
class ClusterPods:
    """The pods of a namespace behind the official client."""

    client: Any  # kubernetes.client.CoreV1Api, which has no types
    namespace: str
    _plain: dict[str, Any] = field(
        default_factory=lambda: {"_preload_content": False, "_request_timeout": CALL_TIMEOUT_S}
    )

    def create(self, pod: Any) -> PodView | None:  # noqa: ANN401 - the client's own model
        """The new pod; None when there is one of that name, be it on its way out."""
        with _translated("create a pod"):
            try:
                answer = self.client.create_namespaced_pod(self.namespace, pod, **self._plain)
            except _api_error() as error:
                if error.status == _CONFLICT:
                    return None
                raise
            return PodView.of(json.loads(answer.data))

    def read(self, name: str) -> PodView | None:
        """The pod; None when there is none of that name."""
        with _translated("read a pod"):
            try:
                answer = self.client.read_namespaced_pod(name, self.namespace, **self._plain)
            except _api_error() as error:
                if error.status == _GONE:
                    return None
                raise
            return PodView.of(json.loads(answer.data))

    def find(self, labels: Mapping[str, str]) -> list[PodView]:
        """All pods with these labels."""
        return self.listed(labels)[0]

    def listed(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        """All pods with these labels, and the version from which `changes` goes on."""
        with _translated("list pods"):
            answer = self.client.list_namespaced_pod(
                self.namespace, label_selector=_selector(labels), **self._plain
            )
        found = json.loads(answer.data)
        pods = [PodView.of(item) for item in found["items"]]
        return pods, found["metadata"]["resourceVersion"]

    def changes(self, labels: Mapping[str, str], version: str, seconds: float) -> Iterator[Change]:
        """What becomes of the pods with these labels after that version, as it comes, so long.

        Unavailable when it breaks off, or when so old a version is not known any more.
        """
        with _translated("watch pods"):
            answer = self.client.list_namespaced_pod(
                self.namespace,
                label_selector=_selector(labels),
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=round(seconds),
                _preload_content=False,
                _request_timeout=(CALL_TIMEOUT_S, seconds + CALL_TIMEOUT_S),
            )
            with contextlib.closing(answer):
                for line in _lines(answer.stream(65_536)):
                    yield Change.of(json.loads(line))

    def own(self, pod: PodView, attempt: str) -> bool:
        """Note whose it is; False when it has changed meanwhile."""
        body = {"metadata": {"labels": {TRY: attempt}, "resourceVersion": pod.version}}
        return self._unchanged("label a pod", self.client.patch_namespaced_pod, pod.name, body=body)

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete it if it is still as it was seen; False when it has changed meanwhile."""
        body = {
            "gracePeriodSeconds": grace_s,
            "preconditions": {"uid": pod.uid, "resourceVersion": pod.version},
        }
        return self._unchanged(
            "delete a pod", self.client.delete_namespaced_pod, pod.name, body=body
        )

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        """The lines of its log with their times, as they come; Unavailable when it breaks off."""
        since = {} if since_s is None else {"since_seconds": max(1, since_s)}
        with _translated("read a pod's log"):
            answer = self.client.read_namespaced_pod_log(
                name,
                self.namespace,
                container=CONTAINER,
                follow=True,
                timestamps=True,
                _preload_content=False,
                _request_timeout=(CALL_TIMEOUT_S, LOG_IDLE_TIMEOUT_S),
                **since,
            )
            with contextlib.closing(answer):
                yield from _lines(answer.stream(65_536))

    def _unchanged(self, what: str, call: Any, name: str, **arguments: Any) -> bool:  # noqa: ANN401
        with _translated(what):
            try:
                call(name, self.namespace, **arguments, **self._plain)
            except _api_error() as error:
                if error.status in (_CONFLICT, _GONE):
                    return False
                raise
            return True


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _api_error() -> Any:  # noqa: ANN401 - the client has no types
    from kubernetes.client.exceptions import ApiException

    return ApiException


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise Unavailable(f"Kubernetes did not answer ({what}): {error}") from error
    except _api_error() as error:
        detail = f"Kubernetes answered {error.status} ({what}): {_message(error)}"
        quota = "exceeded quota" in detail
        passing = error.status in (_EXPIRED, _TOO_MANY)
        if not error.status or error.status >= 500 or passing or quota:
            raise Unavailable(detail) from error
        raise Rejected(detail) from error


def _message(error: Any) -> str:  # noqa: ANN401 - the client has no types
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(error.body)["message"])[:500]
    return str(error.reason)
