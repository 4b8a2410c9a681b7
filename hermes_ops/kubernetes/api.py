"""Kubernetes' API: the connection, the pods of a namespace, all errors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from hermes_ops.error_message import (
    MOST_CHARACTERS,
    document_texts,
    keep_bodies_out_of_logs,
    mask_texts,
)
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.resource_quota import is_used_up
from hermes_ops.kubernetes.template import (
    CLEARING,
    CONTAINER,
    EPOCH,
    INSTALLATION,
    NAME_LABEL,
    SWEEP,
    TRIAL,
    TRY,
)

CALL_TIMEOUT_S = 10.0
LOG_IDLE_TIMEOUT_S = 60.0
_UNAUTHORIZED, _FORBIDDEN = 401, 403
_GONE, _CONFLICT, _EXPIRED, _TOO_MANY = 404, 409, 410, 429

Plain = Mapping[str, Any]


class Rejected(HermesError):
    """Kubernetes does not accept a request: a right or a setting is missing or wrong."""


class Forbidden(Rejected):
    """Kubernetes does not let this service account or user do that."""


def connect(context: str | None = None) -> Any:  # noqa: ANN401 - the client has no types
    """Return the cluster's API: in a pod by its service account, else by KUBECONFIG.

    Raise HermesError where there is neither.
    """
    from kubernetes import client, config
    from yaml import YAMLError

    keep_bodies_out_of_logs()
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            path = os.environ.get("KUBECONFIG") or None  # as it is now, not as it was at import
            config.load_kube_config(path, context=context)
        except (config.ConfigException, YAMLError, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise HermesError(
                f"no Kubernetes cluster is known ({why}): set KUBECONFIG, or run this in a pod "
                "with a service account."
            ) from error
    return client.CoreV1Api()


def own_namespace() -> str | None:
    """Return the namespace of the pod that this process runs in; None outside a cluster."""
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text().strip() if file.exists() else None


@dataclass(frozen=True, slots=True)
class PodView:
    """The fields of a pod that its trial's task reads.

    `code` is the exit code of the trial's container once that has ended. `lost` says why the pod
    was ended from outside (Evicted, NodeLost, ...). `deletion_grace_s` is the number of seconds
    that a pod which is being deleted has to end, None for any other pod. `sweep` is the value of
    the sweep's label. `waits_for` is the reason for which a container waits: the trial's, or an
    init container before it; `init_failure` names an init container that has failed.
    `deletes_checkpoints` is True for a pod that deletes checkpoints: it belongs to no trial.
    `ran_s` is how long its container has run, once it has ended, as its node says. `sidecars_run`
    is True while another of its containers runs.
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
    init_failure: str = ""
    deletion_grace_s: float | None = None
    sweep: str = ""
    trial: int = -1
    deletes_checkpoints: bool = False
    installation: str = ""
    ran_s: float | None = None
    sidecars_run: bool = False

    def is_from(self, installation: str) -> bool:
        """Return whether the pod is of that installation; True if either has no id."""
        return not installation or self.installation in ("", installation)

    @property
    def is_being_deleted(self) -> bool:
        """True once its deletion was requested, while it still has its grace period."""
        return self.deletion_grace_s is not None

    @property
    def ended(self) -> bool:
        """True once its container has ended or will never start."""
        return self.code is not None or self.phase in ("Succeeded", "Failed")

    @classmethod
    def from_json(cls, pod: Plain) -> PodView:
        """Parse the API's document of a pod."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        container = _container(status)
        state: Plain = container.get("state") or {}
        terminated = state.get("terminated") or {}
        failed_init = {} if terminated else _failed_init(pod.get("spec") or {}, status)
        waiting = _waiting_init(status) or state.get("waiting") or {}
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
            message=waiting.get("message")
            or status.get("message")
            or terminated.get("message")
            or _unscheduled(status),
            lost=status.get("reason") or _lost_track(terminated) or _lost_track(failed_init),
            init_failure=failed_init.get("text", ""),
            deletion_grace_s=_deletion_grace_s(metadata),
            sweep=labels.get(SWEEP, ""),
            trial=_number(labels.get(TRIAL), -1),
            installation=labels.get(INSTALLATION, ""),
            deletes_checkpoints=labels.get(NAME_LABEL) == CLEARING,
            ran_s=_ran_s(terminated),
            sidecars_run=_sidecars_run(status),
        )


def _ran_s(terminated: Plain) -> float | None:
    """Return the seconds between a container's start and its end; None if one is not known."""
    try:
        start, end = (datetime.fromisoformat(terminated[n]) for n in ("startedAt", "finishedAt"))
        return max(0.0, (end - start).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None


def _deletion_grace_s(metadata: Plain) -> float | None:
    if not metadata.get("deletionTimestamp"):
        return None
    return float(metadata.get("deletionGracePeriodSeconds") or 0)


def _number(label: str | None, absent: int) -> int:
    return int(label) if label and label.isdecimal() else absent


def _container(status: Plain) -> Plain:
    statuses = status.get("containerStatuses") or ()
    return next((s for s in statuses if s.get("name") == CONTAINER), {})


def _sidecars_run(status: Plain) -> bool:
    others = [s for s in status.get("containerStatuses") or () if s.get("name") != CONTAINER]
    every = (*others, *(status.get("initContainerStatuses") or ()))
    return any("running" in (s.get("state") or {}) for s in every)


def _waiting_init(status: Plain) -> Plain:
    """Return what the first waiting init container waits for, except for its turn."""
    states = (s.get("state") or {} for s in status.get("initContainerStatuses") or ())
    reasons = (state.get("waiting") or {} for state in states)
    return next((w for w in reasons if w.get("reason", "PodInitializing") != "PodInitializing"), {})


def _failed_init(spec: Plain, status: Plain) -> Plain:
    """Return the end of the init container that failed, with a `text` for its trial's user."""
    inits = spec.get("initContainers") or ()
    sidecars = {c.get("name") for c in inits if c.get("restartPolicy") == "Always"}
    for init_status in status.get("initContainerStatuses") or ():
        terminated: Plain = (init_status.get("state") or {}).get("terminated") or {}
        has_failed = terminated.get("exitCode") and init_status.get("name") not in sidecars
        if has_failed and status.get("phase") == "Failed":
            words = (
                f"its init container {init_status.get('name')} ended with {terminated['exitCode']}"
            )
            return {**terminated, "text": f"{words} ({terminated.get('reason') or 'Error'})"}
    return {}


def _lost_track(terminated: Plain) -> str:
    """Return the reason if the node has lost track of the container, as after its restart."""
    reason = str(terminated.get("reason") or "")
    return reason if reason in ("Unknown", "ContainerStatusUnknown") else ""


def _unscheduled(status: Plain) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "")
    return ""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """A change of a pod: its state now, or its last state where it is `gone`.

    `version` is the resource version of the whole namespace; an event without a `pod` updates
    that alone.
    """

    version: str
    pod: PodView | None = None
    gone: bool = False

    @classmethod
    def from_event(cls, event: Plain) -> PodEvent:
        """Parse an event of a watch; raise Unavailable where it ends the watch."""
        kind, document = event["type"], event["object"]
        if kind == "ERROR":
            raise Unavailable(f"Kubernetes ended a watch of pods: {document.get('message')}")
        version = document["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return cls(version)
        return cls(version, PodView.from_json(document), kind == "DELETED")


class Pods(Protocol):
    """The pods of one namespace."""

    def create(self, pod: Any) -> PodView | None:  # noqa: ANN401 - the client's own model
        """Create a pod and return it; None when there is one of that name."""

    def fetch(self, name: str) -> PodView | None:
        """Return the pod; None when there is none of that name."""

    def find(self, labels: Mapping[str, str]) -> list[PodView]:
        """Return all pods with these labels."""

    def set_owner(self, pod: PodView, attempt: str) -> bool:
        """Label the pod with its owner; return False when it has changed since it was read."""

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete the pod unless it has changed since it was read; return whether it was deleted."""

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        """Yield the lines of the pod's log with their times, as they arrive."""

    def unmounted(self, pod: PodView) -> tuple[str, ...] | None:
        """Return why the pod's volumes are not mounted, oldest first; None once they are."""


@dataclass(slots=True)
class ClusterPods:
    """The pods of a namespace behind the official client."""

    client: Any  # kubernetes.client.CoreV1Api, which has no types
    namespace: str
    _plain: dict[str, Any] = field(
        default_factory=lambda: {"_preload_content": False, "_request_timeout": CALL_TIMEOUT_S}
    )

    def create(self, pod: Any) -> PodView | None:  # noqa: ANN401 - the client's own model
        """Create a pod and return it; None when one of that name exists or is being deleted."""
        with translate_errors("create a pod", lambda: _variables(pod)):
            try:
                answer = self.client.create_namespaced_pod(self.namespace, pod, **self._plain)
            except _api_error() as error:
                if error.status == _CONFLICT:
                    return None
                raise
            return PodView.from_json(json.loads(answer.data))

    def fetch(self, name: str) -> PodView | None:
        """Return the pod; None when there is none of that name."""
        with translate_errors("read a pod"):
            try:
                answer = self.client.read_namespaced_pod(name, self.namespace, **self._plain)
            except _api_error() as error:
                if error.status == _GONE:
                    return None
                raise
            return PodView.from_json(json.loads(answer.data))

    def find(self, labels: Mapping[str, str]) -> list[PodView]:
        """Return all pods with these labels."""
        return self.list_with_version(labels)[0]

    def list_with_version(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        """Return the pods with these labels, and the version that `watch_events` continues from."""
        with translate_errors("list pods"):
            answer = self.client.list_namespaced_pod(
                self.namespace, label_selector=selector_of(labels), **self._plain
            )
        document = json.loads(answer.data)
        pods = [PodView.from_json(item) for item in document["items"]]
        return pods, document["metadata"]["resourceVersion"]

    def watch_events(
        self, labels: Mapping[str, str], version: str, seconds: float
    ) -> Iterator[PodEvent]:
        """Yield the changes of the pods with these labels after that version, for `seconds`.

        Raise Unavailable when the watch breaks off, or when the API has forgotten that version.
        """
        with translate_errors("watch pods"):
            answer = self.client.list_namespaced_pod(
                self.namespace,
                label_selector=selector_of(labels),
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=round(seconds),
                _preload_content=False,
                _request_timeout=(CALL_TIMEOUT_S, seconds + CALL_TIMEOUT_S),
            )
            with contextlib.closing(answer):
                for line in _lines(answer.stream(65_536)):
                    yield PodEvent.from_event(json.loads(line))

    def set_owner(self, pod: PodView, attempt: str) -> bool:
        """Label the pod with its owner; return False when it has changed since it was read."""
        body = {"metadata": {"labels": {TRY: attempt}, "resourceVersion": pod.version}}
        return self._unchanged("label a pod", self.client.patch_namespaced_pod, pod.name, body=body)

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete the pod unless it has changed since it was read; return whether it was deleted."""
        body = {
            "gracePeriodSeconds": grace_s,
            "preconditions": {"uid": pod.uid, "resourceVersion": pod.version},
        }
        return self._unchanged(
            "delete a pod", self.client.delete_namespaced_pod, pod.name, body=body
        )

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        """Yield the log's lines with their times; raise Unavailable when it breaks off."""
        since = {} if since_s is None else {"since_seconds": max(1, since_s)}
        with translate_errors("read a pod's log"):
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

    def unmounted(self, pod: PodView) -> tuple[str, ...] | None:
        """Return why the pod's volumes are not mounted, oldest first; None once they are."""
        with translate_errors("list the events of a pod"):
            answer = self.client.list_namespaced_event(
                self.namespace, field_selector=f"involvedObject.uid={pod.uid}", **self._plain
            )
        return _mount_failures(json.loads(answer.data)["items"])

    def _unchanged(self, what: str, call: Any, name: str, **arguments: Any) -> bool:  # noqa: ANN401
        with translate_errors(what):
            try:
                call(name, self.namespace, **arguments, **self._plain)
            except _api_error() as error:
                if error.status in (_CONFLICT, _GONE):
                    return False
                raise
            return True


def _mount_failures(events: Iterable[Plain]) -> tuple[str, ...] | None:
    """Return the messages of failed mounts; None if an image was pulled, as mounts come first."""
    in_order = sorted(events, key=lambda event: str(event.get("lastTimestamp") or ""))
    if any(event.get("reason") in ("Pulling", "Pulled", "Created") for event in in_order):
        return None
    reasons = ("FailedMount", "FailedAttachVolume")
    failures = (event for event in in_order if event.get("reason") in reasons)
    return tuple(str(event.get("message") or "")[:MOST_CHARACTERS] for event in failures)


def selector_of(labels: Mapping[str, str]) -> str:
    """Return the label selector of objects with all of these labels."""
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
def translate_errors(what: str, hidden: Callable[[], Iterable[str]] = tuple) -> Iterator[None]:
    """Raise our own errors instead of the client's, which contain the whole response."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise Unavailable(f"Kubernetes did not answer ({what}): {error}") from error
    except _api_error() as error:
        detail = f"Kubernetes answered {error.status} ({what}): {answer_text(error, hidden)}"
        quota = is_used_up(detail)
        passing = error.status in (_EXPIRED, _TOO_MANY)
        if not error.status or error.status >= 500 or passing or quota:
            raise Unavailable(detail) from None
        kind = Forbidden if error.status in (_UNAUTHORIZED, _FORBIDDEN) else Rejected
        raise kind(detail) from None


def answer_text(error: Any, hidden: Callable[[], Iterable[str]]) -> str:  # noqa: ANN401 - no types
    """Return the message of Kubernetes' answer, without the hidden texts."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return mask_texts(str(json.loads(error.body)["message"]), hidden())[:MOST_CHARACTERS]
    return str(error.reason)


def _variables(pod: Any) -> list[str]:  # noqa: ANN401 - the client's own model
    """Return the values of a pod's environment: Kubernetes' refusal may show any of them."""
    from kubernetes.client import ApiClient

    spec = ApiClient().sanitize_for_serialization(pod).get("spec") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return [
        text
        for c in containers
        for v in c.get("env") or ()
        for text in document_texts(v.get("value"))
    ]
