"""The pod of a segment: restricted by default, then the platform's template, then the sweep's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.config import PodSpec
from hermes_ops.config.pod import Effect, Toleration, Volume
from hermes_ops.kubernetes.template import CONTAINER, PodRequest, labels_of_sweep, manifest, merged

SPEC = PodSpec(image="trial:1", claim="trials")
FACTS = PodRequest(
    sweep="digits-1",
    number=3,
    epoch=2,
    attempt=1,
    identity="run-3",
    folder="sweeps/digits-1/trials/3",
    arguments=("--dir", "/hermes/trial", "--", "python", "train.py"),
    environment={"HERMES_TRIAL": "3"},
    gpus=2,
    grace_s=30.0,
    user=50_000,
)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container(pod)["env"]}


def mounts(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {m["mountPath"]: m for m in container(pod)["volumeMounts"]}


def test_a_pod_fulfils_the_restricted_standard_and_has_no_token() -> None:
    pod = manifest(SPEC, FACTS)
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 50_000,
        "runAsGroup": 50_000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    kinds = {kind for v in pod["spec"]["volumes"] for kind in v if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}


def test_a_pod_sees_its_own_folder_of_the_volume_alone() -> None:
    found = mounts(manifest(SPEC, FACTS))
    assert found["/hermes/trial"]["subPath"] == "sweeps/digits-1/trials/3"
    assert set(found) == {"/hermes/trial", "/tmp", "/dev/shm"}


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of an argument or of a variable: `$(A)`, and `$$` for the sign."""

    def value(found: re.Match[str]) -> str:
        name = found["name"]
        return "$" if name is None else variables.get(name, found[0])

    return re.sub(r"\$\$|\$\((?P<name>[^)]*)\)", value, text)


TEXTS = ["sh -c 'echo $$ > pid'", "pa$$word", "$(HERMES_TRIAL)", "$$(HERMES_TRIAL)", "cost: $",
         "$(", "$((1 + 2)) $HOME ${HOME}"]  # fmt: skip


@given(st.sampled_from(TEXTS) | st.text("$()A x", max_size=12))
def test_commands_and_variables_arrive_in_the_pod_as_they_are_written(text: str) -> None:
    environment = {"A": "another", "TEXT": text}
    facts = replace(FACTS, arguments=("--", "sh", "-c", text), environment=environment)
    pod = manifest(SPEC.model_copy(update={"environment": {"OWN": text}}), facts)
    known = {**variables(pod), "x": "other"}
    assert expanded(container(pod)["args"][-1], known) == text
    assert expanded(variables(pod)["TEXT"], known) == text
    assert expanded(variables(pod)["OWN"], known) == text


def volumes(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {v["name"]: v for v in pod["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("gpus", "most_gpus", "limit"), [(2, 1, "2Gi"), (1, 4, "4Gi"), (4, 4, "4Gi")]
)
def test_a_trial_that_may_have_several_gpus_shares_memory_on_each_number_of_them(
    gpus: int, most_gpus: int, limit: str
) -> None:
    pod = manifest(SPEC, replace(FACTS, gpus=gpus, most_gpus=most_gpus))
    name = mounts(pod)["/dev/shm"]["name"]
    assert volumes(pod)[name]["emptyDir"] == {"medium": "Memory", "sizeLimit": limit}
    assert container(pod)["resources"]["limits"] == {"nvidia.com/gpu": str(gpus)}


def test_a_trial_of_one_gpu_has_no_further_memory() -> None:
    pod = manifest(SPEC, replace(FACTS, gpus=1))
    assert set(mounts(pod)) == {"/hermes/trial", "/tmp"}
    assert set(volumes(pod)) == {"tmp", "trials"}


def test_the_shared_memory_of_a_sweep_or_of_a_template_is_the_pods() -> None:
    own = SPEC.model_copy(update={"volumes": (Volume(mount="/dev/shm", memory="9Gi"),)})
    pod = manifest(own, FACTS)
    name = mounts(pod)["/dev/shm"]["name"]
    assert volumes(pod)[name]["emptyDir"]["sizeLimit"] == "9Gi"
    assert len(volumes(pod)) == 3
    mount = {"name": "mine", "mountPath": "/dev/shm"}
    theirs = {"containers": [{"name": "x", "volumeMounts": [mount]}]}
    pod = manifest(SPEC, FACTS, {"spec": {**theirs, "volumes": [{"name": "mine"}]}})
    assert mounts(pod)["/dev/shm"]["name"] == "mine"


def test_another_number_of_gpus_is_another_pod() -> None:
    one, other = replace(FACTS, gpus=1), replace(FACTS, gpus=4, epoch=FACTS.epoch + 1)
    assert one.name != other.name


def test_gpus_are_requested_and_limited_alike() -> None:
    spec = SPEC.model_copy(update={"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}})
    assert container(manifest(spec, FACTS))["resources"] == {
        "requests": {"cpu": "2", "nvidia.com/gpu": "2"},
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "2"},
    }
    other = spec.model_copy(update={"gpu_resource": "amd.com/gpu"})
    assert container(manifest(other, FACTS))["resources"]["limits"]["amd.com/gpu"] == "2"


def test_kubernetes_waits_longer_for_the_pod_than_the_trial_for_its_script() -> None:
    assert manifest(SPEC, FACTS)["spec"]["terminationGracePeriodSeconds"] > FACTS.grace_s


def test_what_the_sweep_names_is_in_the_pod() -> None:
    spec = PodSpec(
        image="trial:2",
        claim="trials",
        namespace="team",
        node_selector={"gpu": "a100"},
        tolerations=(
            Toleration(key="gpu"),
            Toleration(key="team", value="b", effect=Effect.NO_EXECUTE),
        ),
        priority_class="low",
        service_account="trainer",
        secrets=("licence",),
        pull_secrets=("registry",),
        volumes=(Volume(mount="/data", claim="data"), Volume(mount="/dev/shm", memory="1Gi")),
        environment={"A": "pod", "B": "pod"},
    )
    pod = manifest(spec, replace(FACTS, environment={"B": "sweep", "C": "$(A)"}))
    assert pod["metadata"]["namespace"] == "team"
    assert pod["spec"]["nodeSelector"] == {"gpu": "a100"}
    assert pod["spec"]["tolerations"] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "b", "effect": "NoExecute"},
    ]
    assert (pod["spec"]["priorityClassName"], pod["spec"]["serviceAccountName"]) == (
        "low",
        "trainer",
    )
    assert container(pod)["envFrom"] == [{"secretRef": {"name": "licence"}}]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert mounts(pod)["/data"] == {"name": "volume-0", "mountPath": "/data", "readOnly": True}
    assert mounts(pod)["/dev/shm"]["readOnly"] is False
    assert {"name": "volume-1", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod[
        "spec"
    ]["volumes"]
    assert {k: v for k, v in variables(pod).items() if k in "ABC"} == {
        "A": "pod",
        "B": "sweep",
        "C": "$$(A)",
    }


def named(node: str) -> dict[str, Any]:
    """Kubernetes takes one name in such a field, and it is not that of a label."""
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def test_the_plans_nodes_are_a_wish() -> None:
    affinity = manifest(SPEC, replace(FACTS, nodes=("b", "a", "b")))["spec"]["affinity"]
    wishes = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [w["preference"] for w in wishes] == [{"matchFields": [named(n)]} for n in ("a", "b")]
    assert "affinity" not in manifest(SPEC, FACTS)["spec"]


def test_a_template_goes_before_the_defaults_and_the_sweep_before_the_template() -> None:
    template = {
        "metadata": {"annotations": {"team": "a"}, "labels": {"cost": "7"}},
        "spec": {
            "securityContext": {"fsGroup": 7},
            "containers": [
                {
                    "name": "main",
                    "image": "other:1",
                    "securityContext": {"readOnlyRootFilesystem": False},
                    "env": [{"name": "HOME", "value": "/home"}],
                    "resources": {"limits": {"cpu": "4", "nvidia.com/gpu": "9"}},
                },
                {"name": "sidecar", "image": "side:1"},
            ],
            "tolerations": [{"key": "spot", "operator": "Exists"}],
        },
    }
    spec = SPEC.model_copy(update={"tolerations": (Toleration(key="gpu"),)})
    pod = manifest(spec, FACTS, template)
    first, second = pod["spec"]["containers"]
    assert (first["name"], first["image"], second["name"]) == (CONTAINER, "trial:1", "sidecar")
    assert first["securityContext"]["readOnlyRootFilesystem"] is False
    assert first["securityContext"]["allowPrivilegeEscalation"] is False
    assert first["resources"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "2"}
    assert {v["name"]: v["value"] for v in first["env"]}["HOME"] == "/home"
    assert pod["spec"]["securityContext"]["fsGroup"] == 7
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert [t["key"] for t in pod["spec"]["tolerations"]] == ["spot", "gpu"]
    assert pod["metadata"]["annotations"] == {"team": "a"}
    assert pod["metadata"]["labels"]["cost"] == "7"


def with_template(spec: PodSpec, container: dict[str, Any], **pod: Any) -> dict[str, Any]:
    return manifest(spec, FACTS, {"spec": {"containers": [{"name": "main", **container}], **pod}})


def test_a_variable_a_mount_and_a_volume_have_one_source_whatever_the_template_says() -> None:
    from_secret = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    mount = {"name": "d", "mountPath": "/data", "subPath": "x", "readOnly": True}
    scratch = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": {}}}
    data = Volume(mount="/data", claim="data", read_only=False)
    spec = SPEC.model_copy(update={"environment": {"A": "b"}, "volumes": (data,)})
    pod = with_template(
        spec, {"env": [from_secret], "volumeMounts": [mount]}, volumes=[scratch, {"name": "d"}]
    )
    assert {"name": "A", "value": "b"} in container(pod)["env"]
    assert mounts(pod)["/data"] == {"name": "volume-0", "mountPath": "/data", "readOnly": False}
    assert volumes(pod)["tmp"] == scratch


def test_tolerations_of_the_sweep_are_added_to_those_of_the_template() -> None:
    theirs = [{"key": "gpu", "operator": "Equal", "value": "a"}]
    ours = (
        Toleration(key="gpu", effect=Effect.NO_SCHEDULE),
        Toleration(key="gpu", effect=Effect.NO_EXECUTE),
    )
    spec = SPEC.model_copy(update={"tolerations": ours})
    assert with_template(spec, {}, tolerations=theirs)["spec"]["tolerations"] == [
        *theirs,
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
    ]


def test_a_required_node_is_required_beside_what_the_template_requires_of_nodes() -> None:
    kind = {"key": "gpu", "operator": "In", "values": ["a100"]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = {"nodeSelectorTerms": [{"matchExpressions": [kind]}]}
    template = {"spec": {"affinity": {"nodeAffinity": {required: terms}}}}
    facts = replace(FACTS, nodes=("node-a",), inside="3", checkpoint_claim="disk-a")
    affinity = manifest(SPEC, facts, template)["spec"]["affinity"]["nodeAffinity"]
    joint = {"matchExpressions": [kind], "matchFields": [named("node-a")]}
    assert affinity[required]["nodeSelectorTerms"] == [joint]


def test_an_empty_list_of_the_template_removes_nothing() -> None:
    pod = with_template(SPEC, {"env": None, "volumeMounts": None}, volumes=None)
    assert {m["name"] for m in mounts(pod).values()} == set(volumes(pod))
    assert "HOME" in variables(pod)


def test_the_sweeps_user_and_root_go_before_those_of_the_template() -> None:
    loose = {"securityContext": {"runAsUser": 1, "readOnlyRootFilesystem": False}}
    spec = SPEC.model_copy(update={"user": 3_000, "read_only_root": True})
    pod = with_template(spec, loose, securityContext={"runAsUser": 2_000, "fsGroup": 7})
    context = container(pod)["securityContext"]
    assert (context["runAsUser"], context["readOnlyRootFilesystem"]) == (3_000, True)
    assert pod["spec"]["securityContext"]["runAsUser"] == 3_000
    assert pod["spec"]["securityContext"]["fsGroup"] == 7


def test_each_lease_has_one_pod_name_and_no_two_trials_share_one() -> None:
    assert replace(FACTS, attempt=2).name == FACTS.name
    others = (replace(FACTS, epoch=3), replace(FACTS, number=4), replace(FACTS, identity="run-4"))
    assert len({FACTS.name, *(other.name for other in others)}) == 4


@given(st.text(min_size=1, max_size=120))
def test_names_and_labels_are_what_kubernetes_takes(sweep: str) -> None:
    facts = replace(FACTS, sweep=sweep)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", facts.name)
    for value in facts.labels.values():
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value)


def test_sweeps_that_look_alike_have_labels_of_their_own() -> None:
    assert labels_of_sweep("a b") != labels_of_sweep("a+b")
    assert labels_of_sweep("x" * 64) != labels_of_sweep("x" * 65)
    assert labels_of_sweep("digits-1") == {"hermes-ops/sweep": "digits-1"}


@pytest.mark.parametrize(
    ("under", "over", "both"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        ({"v": [{"name": "x", "p": 1}]}, {"v": [{"name": "x", "q": 2}]}, {"v": [
            {"name": "x", "p": 1, "q": 2}]}),
        ({"m": [{"name": "t", "mountPath": "/a"}]}, {"m": [{"name": "t", "mountPath": "/b"}]},
         {"m": [{"name": "t", "mountPath": "/a"}, {"name": "t", "mountPath": "/b"}]}),
    ],
)  # fmt: skip
def test_layers_are_merged_by_key(
    under: dict[str, Any], over: dict[str, Any], both: dict[str, Any]
) -> None:
    assert merged(under, over) == both


def test_a_claim_of_the_node_is_mounted_at_the_checkpoints_and_the_node_is_a_condition() -> None:
    facts = replace(FACTS, nodes=("node-a",), inside="digits-1/trials/3", checkpoint_claim="disk-a")
    pod = manifest(SPEC, facts)
    assert mounts(pod)["/hermes/trial/checkpoints"] == {
        "name": "checkpoints",
        "mountPath": "/hermes/trial/checkpoints",
        "subPath": "digits-1/trials/3",
    }
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "disk-a"}
    assert volumes["trials"]["persistentVolumeClaim"] == {"claimName": "trials"}
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity.pop("requiredDuringSchedulingIgnoredDuringExecution")["nodeSelectorTerms"]
    assert term == {"matchFields": [named("node-a")]}
    assert affinity == {}
