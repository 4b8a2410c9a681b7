"""The pod that is sent to Kubernetes refers to nothing that the installation forbids."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.config import PodRules, PodSpec
from hermes_ops.errors import NotAllowed
from hermes_ops.kubernetes import PodGang, PodRequest, check_manifest, manifest
from hermes_ops.kubernetes.template import GANG, GANG_SERVICE

SPEC = PodSpec(image="trial:1", claim="home", namespace="trials", service_account="trials",
               secrets=("bucket",), pull_secrets=("registry",))  # fmt: skip
FACTS = PodRequest(
    sweep="s", number=0, epoch=1, attempt=1, identity="i", folder="f", arguments=(),
    environment={}, gpus=1, grace_s=30.0, user=1000,
)  # fmt: skip
PLANNED = manifest(SPEC, FACTS)
RULES = PodRules()


def with_volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "more", **source}]}


def with_variable(**source: Any) -> dict[str, Any]:
    return {"initContainers": [{"name": "i", "env": [{"name": "A", "valueFrom": source}]}]}


@pytest.mark.parametrize(
    ("spec", "where", "found"),
    [
        (with_volume(secret={"secretName": "db"}), "spec.volumes.0.secret", "db"),
        (with_volume(persistentVolumeClaim={"claimName": "c"}),
         "spec.volumes.0.persistentVolumeClaim", "c"),
        (with_volume(hostPath={"path": "/"}), "spec.volumes.0.hostPath",
         'a volume of the kind hostPath: {"path": "/"}'),
        (with_volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "db"}}),
         "spec.volumes.0.csi",
         'a volume of the kind csi: {"driver": "d", "nodePublishSecretRef": {"name": "db"}}'),
        (with_volume(projected={"sources": [{"secret": {"name": "db"}}]}),
         "spec.volumes.0.projected.secret", "db"),
        (with_volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
         "spec.volumes.0.projected.serviceAccountToken",
         'a projected volume of serviceAccountToken: {"path": "t"}'),
        (with_variable(secretKeyRef={"name": "db", "key": "k"}),
         "spec.initContainers.0.env.secretKeyRef", "db"),
        ({"ephemeralContainers": [{"envFrom": [{"secretRef": {"name": "db"}}]}]},
         "spec.ephemeralContainers.0.envFrom.secretRef", "db"),
        ({"imagePullSecrets": [{"name": "db"}]}, "spec.imagePullSecrets", "db"),
        ({"serviceAccountName": "airflow"}, "spec.serviceAccountName", "airflow"),
        ({"serviceAccount": "airflow"}, "spec.serviceAccount", "airflow"),
        ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken",
         "the service account's token"),
        ({"automountServiceAccountToken": None}, "spec.automountServiceAccountToken",
         "the service account's token"),
        ({"hostNetwork": True}, "spec.hostNetwork", "hostNetwork: true"),
        ({"ephemeralContainers": [{"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
         "spec.ephemeralContainers.0.securityContext.capabilities", "the capability SYS_ADMIN"),
        ({"priorityClassName": "system-node-critical"}, "spec.priorityClassName",
         "system-node-critical"),
    ],
)  # fmt: skip
def test_what_an_operators_arguments_bring_beyond_the_rules_is_refused(
    spec: dict[str, Any], where: str, found: str
) -> None:
    pod = copy.deepcopy(PLANNED)
    pod["spec"] |= spec
    with pytest.raises(NotAllowed) as caught:
        check_manifest(pod, PLANNED, RULES)
    assert [(p.where, p.found) for p in caught.value.problems] == [(where, found)]
    check_manifest(pod, PLANNED, None)


def test_another_namespace_than_the_planned_one_is_refused() -> None:
    pod = copy.deepcopy(PLANNED)
    pod["metadata"]["namespace"] = "kube-system"
    with pytest.raises(NotAllowed, match=r"metadata\.namespace: found kube-system"):
        check_manifest(pod, PLANNED, RULES)


GANGED = manifest(SPEC, replace(FACTS, gang=PodGang("gangs", 2)))


@pytest.mark.parametrize(
    ("planned", "label", "value", "found", "allowed"),
    [
        (PLANNED, GANG, "0", "0", "no such label"),
        (PLANNED, GANG_SERVICE, "gangs", "gangs", "no such label"),
        (GANGED, GANG, "3", "3", "2"),
        (GANGED, GANG_SERVICE, "other", "other", "gangs"),
        (GANGED, GANG, None, "no label", "2"),
    ],
)
def test_a_label_that_opens_the_network_to_pods_of_another_trial_is_refused(
    planned: dict[str, Any], label: str, value: str | None, found: str, allowed: str
) -> None:
    check_manifest(planned, planned, RULES)
    pod = copy.deepcopy(planned)
    pod["metadata"]["labels"].pop(label, None)
    pod["metadata"]["labels"] |= {} if value is None else {label: value}
    with pytest.raises(NotAllowed) as caught:
        check_manifest(pod, planned, RULES)
    (problem,) = caught.value.problems
    assert (problem.where, problem.found) == (f"metadata.labels.{label}", found)
    assert problem.allowed == f"{allowed}, as Hermes Ops has planned it"
    check_manifest(pod, planned, None)


def test_other_labels_may_be_added() -> None:
    pod = copy.deepcopy(PLANNED)
    pod["metadata"]["labels"]["team"] = "a"
    check_manifest(pod, PLANNED, RULES)


def test_a_folder_of_the_host_in_the_template_allows_no_other_one() -> None:
    planned = copy.deepcopy(PLANNED)
    planned["spec"]["volumes"].append({"name": "shm", "hostPath": {"path": "/dev/shm"}})
    check_manifest(planned, planned, RULES)
    pod = copy.deepcopy(planned)
    pod["spec"]["volumes"].append({"name": "root", "hostPath": {"path": "/"}})
    with pytest.raises(NotAllowed, match=r'hostPath: \{"path": "/"\}'):
        check_manifest(pod, planned, RULES)


def test_what_was_planned_and_what_rules_allow_passes() -> None:
    check_manifest(PLANNED, PLANNED, RULES)
    pod = copy.deepcopy(PLANNED)
    pod["spec"]["volumes"] += [
        {"name": "a", "secret": {"secretName": "wandb"}},
        {"name": "b", "emptyDir": {}},
        {"name": "c", "configMap": {"name": "scripts"}},
    ]
    check_manifest(pod, PLANNED, PodRules(secrets=("wandb",)))


def test_a_platforms_template_may_hold_what_sweeps_may_not() -> None:
    template = {"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/data"}}]}}
    pod = manifest(SPEC, FACTS, template)
    check_manifest(pod, pod, RULES)
    with pytest.raises(NotAllowed, match="hostPath"):
        check_manifest(pod, PLANNED, RULES)
