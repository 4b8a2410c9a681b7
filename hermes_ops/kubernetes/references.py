"""The objects outside a pod that its manifest names, checked against the installation's rules.

So are the labels by which network policies let pods of one trial reach each other.

The pod that is sent to Kubernetes may hold more than the sweep and the installation have put into
it, by the arguments of a DAG's operator or by a pod mutation hook.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.config import PodRules
from hermes_ops.config.installation import forbidden_object
from hermes_ops.errors import NotAllowed, Problem
from hermes_ops.kubernetes.template import GANG, GANG_SERVICE

Plain = Mapping[str, Any]

_HARMLESS = frozenset({"emptyDir", "downwardAPI", "image"})
_PROJECTED = {"secret": "secrets", "configMap": "config_maps"}
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that a pod names, with the field of PodRules for its kind as `rule`.

    Without a rule: access to the host or the API that no rule can allow."""

    rule: str | None
    name: str


def check_manifest(pod: Plain, planned: Plain, rules: PodRules | None) -> None:
    """Raise NotAllowed for references that are neither in the planned pod nor allowed by rules.

    The labels that open the network between pods have to be the planned ones.
    """
    if rules is None:
        return
    planned_references = {reference for _, reference in references(planned)}
    problems = [
        _problem(where, reference, rules)
        for where, reference in references(pod)
        if reference not in planned_references
        and (reference.rule is None or not rules.allows(reference.rule, reference.name))
    ]
    problems.extend(_label_problems(pod, planned))
    if problems:
        raise NotAllowed("the trial's pod", tuple(problems))


def references(pod: Plain) -> Iterator[tuple[str, Reference]]:
    """Yield each place of a pod that refers to something outside it."""
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    if namespace := metadata.get("namespace"):
        yield "metadata.namespace", Reference("namespaces", namespace)
    yield from _of_spec(spec)
    for number, volume in enumerate(spec.get("volumes") or ()):
        for where, reference in _of_volume(volume):
            yield f"spec.volumes.{number}.{where}", reference
    for kind in _CONTAINERS:
        for number, container in enumerate(spec.get(kind) or ()):
            for where, reference in _of_container(container):
                yield f"spec.{kind}.{number}.{where}", reference


def _of_spec(spec: Plain) -> Iterator[tuple[str, Reference]]:
    for key, rule in (
        ("serviceAccountName", "service_accounts"),
        ("serviceAccount", "service_accounts"),
        ("priorityClassName", "priority_classes"),
    ):
        if name := spec.get(key):
            yield f"spec.{key}", Reference(rule, name)
    for secret in spec.get("imagePullSecrets") or ():
        yield "spec.imagePullSecrets", Reference("pull_secrets", str(secret.get("name")))
    for key in _HOST:
        if spec.get(key):
            yield f"spec.{key}", Reference(None, f"{key}: true")
    if spec.get("automountServiceAccountToken") is not False:
        yield "spec.automountServiceAccountToken", Reference(None, "the service account's token")
    if spec.get("resourceClaims"):
        claims = _written(spec["resourceClaims"])
        yield "spec.resourceClaims", Reference(None, f"claims of devices: {claims}")


def _of_volume(volume: Plain) -> Iterator[tuple[str, Reference]]:
    for kind, source in volume.items():
        if kind == "name" or source is None or kind in _HARMLESS:
            continue
        if kind == "secret":
            yield kind, Reference("secrets", str(source.get("secretName")))
        elif kind == "configMap":
            yield kind, Reference("config_maps", str(source.get("name")))
        elif kind == "persistentVolumeClaim":
            yield kind, Reference("claims", str(source.get("claimName")))
        elif kind == "projected":
            yield from _projected(source)
        else:
            yield kind, Reference(None, f"a volume of the kind {kind}: {_written(source)}")


def _projected(source: Plain) -> Iterator[tuple[str, Reference]]:
    for projection in source.get("sources") or ():
        for kind, what in projection.items():
            if what is None or kind in _HARMLESS:
                continue
            if rule := _PROJECTED.get(kind):
                yield f"projected.{kind}", Reference(rule, str(what.get("name")))
            else:
                name = f"a projected volume of {kind}: {_written(what)}"
                yield f"projected.{kind}", Reference(None, name)


def _of_container(container: Plain) -> Iterator[tuple[str, Reference]]:
    for source in container.get("envFrom") or ():
        yield from _environment("envFrom", source, "secretRef", "configMapRef")
    for variable in container.get("env") or ():
        source = variable.get("valueFrom") or {}
        yield from _environment("env", source, "secretKeyRef", "configMapKeyRef")
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield "securityContext.privileged", Reference(None, "privileged: true")
    for capability in (context.get("capabilities") or {}).get("add") or ():
        yield "securityContext.capabilities", Reference(None, f"the capability {capability}")


def _written(source: object) -> str:
    """Return a source as text: the one in the template allows no other source of its kind."""
    return json.dumps(source, sort_keys=True, default=str)


def _environment(
    where: str, source: Plain, secret: str, config_map: str
) -> Iterator[tuple[str, Reference]]:
    for key, rule in ((secret, "secrets"), (config_map, "config_maps")):
        if source.get(key):
            yield f"{where}.{key}", Reference(rule, str(source[key].get("name")))


def _label_problems(pod: Plain, planned: Plain) -> Iterator[Problem]:
    labels, expected = _labels(pod), _labels(planned)
    for label in (GANG, GANG_SERVICE):
        if labels.get(label) != expected.get(label):
            yield Problem(
                f"metadata.labels.{label}",
                str(labels.get(label, "no label")),
                f"{expected.get(label, 'no such label')}, as Hermes Ops has planned it",
                "remove it from the operator's arguments or the pod mutation hook: network "
                "policies let pods with the same value reach each other",
            )


def _labels(pod: Plain) -> Plain:
    return (pod.get("metadata") or {}).get("labels") or {}


def _problem(where: str, reference: Reference, rules: PodRules) -> Problem:
    if reference.rule is not None:
        return forbidden_object(where, reference.rule, reference.name, rules)
    return Problem(
        where,
        reference.name,
        "none beyond what the installation's pod template has",
        "remove it from the operator's arguments or the pod mutation hook",
    )
