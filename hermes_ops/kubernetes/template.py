"""The manifest of a segment's pod, in layers: defaults, the platform's template, the sweep's keys.

A later layer overrides an earlier one. The defaults fulfil the restricted pod security standard.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.config import PodSpec
from hermes_ops.config.pod import CHECKPOINTS_FOLDER, TRIAL_FOLDER

RESOURCE = "nvidia.com/gpu"
"""The extended resource of a GPU, where a sweep names no other."""

CONTAINER = "base"
"""Name of the trial's container; a template's first container gets it."""

TRIAL_MOUNT = TRIAL_FOLDER
"""Where the trial's folder is mounted, the only one of the volume that its pod sees."""

CHECKPOINTS_MOUNT = CHECKPOINTS_FOLDER
"""Where the node's claim is mounted, for a sweep that has a claim for each node."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - in the pod
"""Shared memory of processes and NCCL; container runtimes limit it to 64 MB by default."""

SHARED_MEMORY_GIB = 1
"""Most that it may take for each GPU that the trial may have; it counts as memory of the pod."""

DEFAULT_USER = 1000
GRACE_MARGIN_S = 15
"""Seconds beyond the script's grace, for hermes-trial to write its result."""

CLEANUP_REQUESTS = {"cpu": "10m", "memory": "32Mi"}
"""The resources that a pod which deletes checkpoints requests."""

SWEEP, TRIAL, EPOCH, TRY = (f"hermes-ops/{name}" for name in ("sweep", "trial", "epoch", "try"))
GANG = "hermes-ops/gang"
"""Label of the pods of a trial on several nodes: its value is the lowest of the trial's slots.

No two trials hold a slot at the same time, so pods with the same value are of one trial: the
network policies that let them reach each other are as many as there are slots.
"""
GANG_SERVICE = "hermes-ops/gang-service"
"""Label of the same pods with their headless Service: it tells installations with one namespace of
trials apart, as the slots of each count from 0.
"""
NAME_LABEL, CLEARING = "app.kubernetes.io/name", "hermes-clearing"
"""Label of each pod, and its value for a pod that deletes checkpoints."""

INSTALLATION = "hermes-ops/installation"
"""Label with the id of the state folder: two installations may have sweeps of the same name."""

MANAGED = {"app.kubernetes.io/managed-by": "hermes-ops"}
LABEL_LENGTH = 63

Plain = dict[str, Any]
_KEYS = ("name", "mountPath", "key")
_REPLACED_ITEMS = ("env", "volumes", "volumeMounts")
"""Lists whose items have one of several sources: an item replaces another one completely."""


@dataclass(frozen=True, slots=True)
class PodGang:
    """The facts that the pods of a trial on several nodes share.

    `service` is the headless Service by which they find each other, `slot` the lowest of the
    trial's slots.
    """

    service: str
    slot: int

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which the Service and the network policies find the pods."""
        return {
            "app.kubernetes.io/component": "gang",
            GANG: str(self.slot),
            GANG_SERVICE: self.service,
        }


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The fields of one segment that its pod's manifest needs.

    `folder` is the trial's folder in the claim's volume, `inside` the same without the claim's own
    folder; `identity` is unique among all trials. `nodes` are preferred; where the node's own claim
    has the checkpoints (`checkpoint_claim`), the one node is required. `most_gpus` is the largest
    number of GPUs that a segment of the trial may have. `installation` is the id of the state
    folder. For a trial on several nodes `gang` is what its pods have in common, and this is the pod
    with the number `member`, from 0.
    """

    sweep: str
    number: int
    epoch: int
    attempt: int
    identity: str
    folder: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    gpus: int
    grace_s: float
    user: int
    nodes: tuple[str, ...] = field(default=())
    inside: str = ""
    checkpoint_claim: str | None = None
    most_gpus: int = 1
    installation: str = ""
    gang: PodGang | None = None
    member: int = 0

    @property
    def name(self) -> str:
        """The pod's name: equal for all attempts at one lease, so there is at most one pod."""
        return f"{self.lease_name}-{self.member}" if self.member else self.lease_name

    @property
    def lease_name(self) -> str:
        """The name of the lease's first pod."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.sweep.lower())[:30].strip("-")
        digest = hashlib.sha256(self.identity.encode()).hexdigest()[:8]
        return f"hermes-{slug}-{digest}-{self.number}-{self.epoch}".replace("--", "-")

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which the pod is found, with its lease and its attempt."""
        return {
            NAME_LABEL: "hermes-trial",
            **MANAGED,
            **labels_of_sweep(self.sweep),
            TRIAL: str(self.number),
            EPOCH: str(self.epoch),
            TRY: str(self.attempt),
            **({INSTALLATION: self.installation} if self.installation else {}),
            **({} if self.gang is None else self.gang.labels),
        }


def labels_of_sweep(sweep: str) -> dict[str, str]:
    """Return the label of all pods of a sweep; long or odd names are told apart by a digest."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", sweep).strip("-._")
    if safe != sweep or len(safe) > LABEL_LENGTH:
        digest = hashlib.sha256(sweep.encode()).hexdigest()[:8]
        short = safe[: LABEL_LENGTH - 9].strip("-._") or "sweep"
        safe = f"{short}-{digest}"
    return {SWEEP: safe}


def manifest(spec: PodSpec, facts: PodRequest, template: Mapping[str, Any] | None = None) -> Plain:
    """Return the pod's manifest for Kubernetes' API."""
    base = _defaults(spec, facts)
    if template:
        base = merged(base, _named(template))
    return merged(base, _specifics(spec, facts))


def cleanup_manifest(
    spec: PodSpec, facts: PodRequest, template: Mapping[str, Any] | None = None
) -> Plain:
    """Return the manifest of a pod that deletes checkpoints: it mounts the node's claim alone.

    It runs on the same node, under the same rules as the trial's pod, but asks for little: other
    trials may fill the node.
    """
    pod = manifest(spec, facts, template)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
    container.pop("envFrom", None)
    container["env"] = [variable for variable in container["env"] if "valueFrom" not in variable]
    mounts = ("/tmp", CHECKPOINTS_MOUNT)  # noqa: S108 - in the pod
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["mountPath"] in mounts]
    limits = (container.get("resources") or {}).get("limits") or {}
    container["resources"] = {
        "requests": CLEANUP_REQUESTS,
        "limits": {name: limit for name, limit in limits.items() if name in CLEANUP_REQUESTS},
    }
    names = {m["name"] for m in container["volumeMounts"]}
    pod["spec"]["containers"] = [container]
    pod["spec"].pop("initContainers", None)
    pod["spec"]["volumes"] = [v for v in pod["spec"]["volumes"] if v["name"] in names]
    of_platform = ((template or {}).get("metadata") or {}).get("labels") or {}
    pod["metadata"]["labels"] = {**of_platform, NAME_LABEL: CLEARING, **MANAGED}
    return pod


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Return `under` overridden by `over`.

    Mappings are merged by key, lists of mappings by name, mount path or key; other lists are
    replaced. Tolerations are added. Node selector terms are combined, so that one term of each list
    has to match. A null in `over` does not remove a list.
    """
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        elif isinstance(below, list) and isinstance(value, list):
            result[key] = _merged_lists(key, below, value)
        elif value is not None or not isinstance(below, list):
            result[key] = value
    return result


def _merged_lists(name: str, under: list[Any], over: list[Any]) -> list[Any]:
    if not all(isinstance(item, Mapping) for item in (*under, *over)):
        return list(over)
    if name == "nodeSelectorTerms" and under and over:
        return [_joint_term(one, other) for one in under for other in over]
    result = [dict(item) for item in under]
    if name == "tolerations":
        return result + [dict(item) for item in over if item not in result]
    for item in over:
        same = next((i for i, present in enumerate(result) if _same(present, item)), None)
        if same is None:
            result.append(dict(item))
        else:
            result[same] = dict(item) if name in _REPLACED_ITEMS else merged(result[same], item)
    return result


def _joint_term(one: Mapping[str, Any], other: Mapping[str, Any]) -> Plain:
    """Return the node selector term that matches where both do."""
    kinds = ("matchExpressions", "matchFields")
    joint = {kind: [*(one.get(kind) or ()), *(other.get(kind) or ())] for kind in kinds}
    return _without_nothing(joint)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    for key in _KEYS if "mountPath" not in one else ("mountPath",):
        if key in one and key in other:
            return bool(one[key] == other[key])
    return one == other


def _named(template: Mapping[str, Any]) -> Plain:
    """Return the template with its first container renamed to CONTAINER."""
    spec = dict(template.get("spec") or {})
    containers = [dict(container) for container in spec.get("containers") or ()]
    if containers:
        containers[0]["name"] = CONTAINER
        spec["containers"] = containers
    return {**template, "spec": spec}


def _defaults(spec: PodSpec, facts: PodRequest) -> Plain:
    read_only = True if spec.read_only_root is None else spec.read_only_root
    container = {
        "name": CONTAINER,
        "imagePullPolicy": "IfNotPresent",
        "env": _variables({"HOME": "/tmp", "USER": "hermes"}),  # noqa: S108 - in the pod
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": read_only,
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the pod
            *_shared_memory_mount(spec, facts),
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": facts.user,
                "runAsGroup": facts.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *_shared_memory_volume(spec, facts)],
        },
    }


def _has_shared_memory(spec: PodSpec, facts: PodRequest) -> bool:
    """Return whether the pod gets shared memory: not where the sweep mounts some itself."""
    if max(facts.most_gpus, facts.gpus) < 2:
        return False
    return all(volume.mount.rstrip("/") != SHARED_MEMORY for volume in spec.volumes or ())


def _shared_memory_volume(spec: PodSpec, facts: PodRequest) -> list[Plain]:
    if not _has_shared_memory(spec, facts):
        return []
    limit = f"{SHARED_MEMORY_GIB * max(facts.most_gpus, facts.gpus)}Gi"
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]


def _shared_memory_mount(spec: PodSpec, facts: PodRequest) -> list[Plain]:
    if not _has_shared_memory(spec, facts):
        return []
    return [{"name": "shared-memory", "mountPath": SHARED_MEMORY}]


def _specifics(spec: PodSpec, facts: PodRequest) -> Plain:
    metadata: Plain = {"name": facts.name, "labels": facts.labels}
    if spec.namespace is not None:
        metadata["namespace"] = spec.namespace
    pod: Plain = {
        "restartPolicy": "Never",
        **_host_name(facts),
        "terminationGracePeriodSeconds": round(facts.grace_s) + GRACE_MARGIN_S,
        "nodeSelector": spec.node_selector,
        "tolerations": _tolerations(spec),
        "affinity": _affinity(facts),
        "priorityClassName": spec.priority_class,
        "serviceAccountName": spec.service_account,
        "securityContext": _without_nothing({"runAsUser": spec.user}),
        "imagePullSecrets": [{"name": name} for name in spec.pull_secrets or ()],
        "containers": [_container(spec, facts)],
        "volumes": [
            {"name": "trials", "persistentVolumeClaim": {"claimName": spec.claim}},
            *_checkpoint_volume(facts),
            *(_volume(n, v.model_dump()) for n, v in enumerate(spec.volumes or ())),
        ],
    }
    return {"metadata": metadata, "spec": _without_nothing(pod)}


def _host_name(facts: PodRequest) -> Plain:
    """Return what makes the pod known as NAME.SERVICE to the others of its trial."""
    if facts.gang is None:
        return {}
    return {"hostname": facts.name, "subdomain": facts.gang.service}


def _container(spec: PodSpec, facts: PodRequest) -> Plain:
    environment = {**(spec.environment or {}), **facts.environment}
    container: Plain = {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": spec.pull_policy.value if spec.pull_policy else None,
        "command": ["hermes-trial"],
        "args": [_literal(argument) for argument in facts.arguments],
        "env": _variables(environment),
        "envFrom": [{"secretRef": {"name": name}} for name in spec.secrets or ()],
        "resources": _resources(spec, facts.gpus),
        "securityContext": _without_nothing(
            {"runAsUser": spec.user, "readOnlyRootFilesystem": spec.read_only_root}
        ),
        "volumeMounts": [
            {"name": "trials", "mountPath": TRIAL_MOUNT, "subPath": facts.folder},
            *_checkpoint_mount(facts),
            *(
                {"name": f"volume-{n}", "mountPath": v.mount, "readOnly": _read_only(v)}
                for n, v in enumerate(spec.volumes or ())
            ),
        ],
    }
    return _without_nothing(container)


def _resources(spec: PodSpec, gpus: int) -> Plain:
    counted = {spec.gpu_resource or RESOURCE: str(gpus)} if gpus else {}
    requests, limits = {**(spec.requests or {}), **counted}, {**(spec.limits or {}), **counted}
    return _without_nothing({"requests": requests, "limits": limits})


def _variables(environment: Mapping[str, str]) -> list[Plain]:
    return [{"name": n, "value": _literal(v)} for n, v in environment.items()]


def _literal(text: str) -> str:
    """Return the text so that Kubernetes, which replaces `$(NAME)` and `$$`, gives it unchanged."""
    return text.replace("$", "$$")


def _tolerations(spec: PodSpec) -> list[Plain]:
    return [
        _without_nothing(
            {
                "key": t.key,
                "operator": "Equal" if t.value is not None else "Exists",
                "value": t.value,
                "effect": t.effect.value if t.effect else None,
            }
        )
        for t in spec.tolerations or ()
    ]


def _affinity(facts: PodRequest) -> Plain:
    """Return a preference for the plan's nodes: only Kubernetes knows what is free there by now.

    The node is required where the checkpoints are on the node's own claim.
    """
    nodes = sorted(set(facts.nodes))
    if not nodes:
        return {}
    if facts.checkpoint_claim is not None:
        terms = {"nodeSelectorTerms": [_node_named(node) for node in nodes]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    wishes = [{"weight": 100, "preference": _node_named(node)} for node in nodes]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wishes}}


def _node_named(node: str) -> Plain:
    """Return the node selector term of one node.

    Its label `kubernetes.io/hostname` may have another value. A term takes one name.
    """
    return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}


def _checkpoint_volume(facts: PodRequest) -> list[Plain]:
    if facts.checkpoint_claim is None:
        return []
    claim = {"claimName": facts.checkpoint_claim}
    return [{"name": "checkpoints", "persistentVolumeClaim": claim}]


def _checkpoint_mount(facts: PodRequest) -> list[Plain]:
    if facts.checkpoint_claim is None:
        return []
    return [{"name": "checkpoints", "mountPath": CHECKPOINTS_MOUNT, "subPath": facts.inside}]


def _volume(number: int, volume: Mapping[str, Any]) -> Plain:
    sources: Plain = {
        "persistentVolumeClaim": {"claimName": volume["claim"], "readOnly": volume["read_only"]},
        "configMap": {"name": volume["config_map"]},
        "secret": {"secretName": volume["secret"]},
        "emptyDir": {"medium": "Memory", "sizeLimit": volume["memory"]},
    }
    named = zip(("claim", "config_map", "secret", "memory"), sources.items(), strict=True)
    return {
        "name": f"volume-{number}",
        **{kind: source for key, (kind, source) in named if volume[key] is not None},
    }


def _read_only(volume: Any) -> bool:  # noqa: ANN401 - a volume of the config
    return bool(volume.read_only and volume.memory is None)


def _without_nothing(mapping: Mapping[str, Any]) -> Plain:
    return {key: value for key, value in mapping.items() if value not in (None, {}, [])}
