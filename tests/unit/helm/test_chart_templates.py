"""What the chart renders; helm is needed, a cluster is not."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_ops.config import pod_spec
from hermes_ops.config.fields import OF_ONE_TRIAL
from hermes_ops.config.installation import PodRules
from hermes_ops.config.pod import GPU_RESOURCE
from hermes_ops.errors import ConfigError
from hermes_ops.policies import live_policies

CHART = Path(__file__).parents[3] / "helm/hermes-ops"
DIGEST = f"sha256:{'0a' * 32}"
EXTERNAL = {
    "postgresql": {"enabled": False},
    "airflow": {"databaseSecret": "airflow-db"},
    "mlflow": {"databaseSecret": "mlflow-db"},
}

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


@pytest.fixture(scope="module")
def helm() -> str:
    """helm, of the PATH or of the command that starts the cluster of the other tests."""
    if found := shutil.which("helm"):
        return found
    cluster = shlex.split(os.environ.get("HERMES_TEST_CLUSTER", ""))
    if cluster:
        said = subprocess.run([*cluster, "env"], capture_output=True, text=True, check=True).stdout
        path = re.search(r"^export PATH=(.*):\$PATH$", said, re.MULTILINE)
        if path and (found := shutil.which("helm", path=path[1])):
            return found
    pytest.skip("helm is not installed")


@pytest.fixture(scope="module")
def render(helm: str) -> Render:
    """The objects that values render to, of a release `hermes` in the namespace `hermes`."""

    def run(values: dict[str, Any] | None = None, namespace: str = "hermes") -> Objects:
        done = templated(helm, values or {}, namespace)
        assert done.returncode == 0, done.stderr
        return [o for o in yaml.safe_load_all(done.stdout) if o]

    return run


def templated(
    helm: str, values: dict[str, Any], namespace: str = "hermes", release: str = "hermes"
) -> subprocess.CompletedProcess[str]:
    command = [helm, "template", release, str(CHART), "--namespace", namespace]
    return subprocess.run(
        [*command, "--kube-version", "1.34.0", "--values", "-"],
        input=json.dumps(values), capture_output=True, text=True, check=False,
    )  # fmt: skip


def refusal(helm: str, values: dict[str, Any]) -> str:
    """What helm says of values that the chart refuses."""
    done = templated(helm, values)
    assert done.returncode != 0
    return done.stderr


def one(objects: Objects, kind: str, name: str, namespace: str = "hermes") -> dict[str, Any]:
    (found,) = (
        o for o in objects
        if o["kind"] == kind and o["metadata"]["name"] == name
        and o["metadata"].get("namespace", namespace) == namespace
    )  # fmt: skip
    return found


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """The pod specs of all workloads, by name."""
    found = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in objects
             if o["kind"] in ("Deployment", "StatefulSet", "Job")}  # fmt: skip
    return {**found, **{o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Pod"}}


def variables(spec: dict[str, Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value") for c in spec["containers"] for v in c.get("env", ())}


def trials(objects: Objects) -> tuple[Any, Any]:
    """The defaults and the rules of trials' pods, as the chart gives them to Airflow."""
    data = one(objects, "ConfigMap", "hermes-trials")["data"]
    rules = PodRules.model_validate(yaml.safe_load(data["rules.yaml"]))
    return pod_spec(yaml.safe_load(data["pod.yaml"]), "pod.yaml"), rules


def bound(objects: Objects, namespace: str) -> dict[str, set[str]]:
    """What each service account may do in a namespace, by the roles that are bound there."""
    found: dict[str, set[str]] = {}
    for binding in objects:
        if binding["kind"] != "RoleBinding" or binding["metadata"]["namespace"] != namespace:
            continue
        role = one(objects, "Role", binding["roleRef"]["name"], namespace)
        may = {f"{v} {r}" for rule in role["rules"] for r in rule["resources"]
               for v in rule["verbs"]}  # fmt: skip
        for subject in binding["subjects"]:
            found.setdefault(subject["name"], set()).update(may)
    return found


# -- what values may be --------------------------------------------------------------------------


def test_a_policy_that_no_pool_can_run_is_refused_with_those_that_one_can(helm: str) -> None:
    message = refusal(helm, {"policy": {"name": "frontruner"}})
    allowed = re.search(r"policy.name: frontruner .*allowed: (.*)\. Name one", message)
    assert allowed is not None, message
    assert tuple(allowed[1].split(", ")) == tuple(n for n in live_policies() if "_" not in n)
    assert "gandiva is no policy of a pool" in refusal(helm, {"policy": {"name": "gandiva"}})


def test_a_policy_of_a_package_is_taken_where_the_values_say_that_it_is_one(
    render: Render,
) -> None:
    objects = render({"policy": {"name": "shortest", "ofPackage": True}})
    assert variables(pods(objects)["hermes-controller"])["HERMES_POLICY"] == "shortest"


@pytest.mark.parametrize("name", [*OF_ONE_TRIAL, "HERMES_HOME", "hermes_pool", "no-name", "1ST"])
def test_a_variable_that_no_pod_may_set_is_refused_before_an_install(helm: str, name: str) -> None:
    pod = {"environment": {"DEBUG": "1", name: "x"}}
    message = refusal(helm, {"trials": {"pod": pod}})
    assert "trials.pod.environment" in message
    assert name in message
    with pytest.raises(ConfigError):
        pod_spec(pod, "pod.yaml")


@pytest.mark.parametrize(
    ("pod", "found"),
    [
        ({"limits": {"nvidia.com/gpu": "1"}}, "trials.pod.limits: nvidia.com/gpu"),
        ({"requests": {"nvidia.com/MIG-1g.5gb": "1"}}, "trials.pod.requests: nvidia.com/MIG-1g"),
        ({"limits": {"gpu.intel.com/i915": "1"}}, "trials.pod.limits: gpu.intel.com/i915"),
        ({"volumes": [{"mount": "/a", "claim": "a"}, {"mount": "/b"}]}, "[1]: found no source"),
        ({"volumes": [{"mount": "/a", "claim": "a", "secret": "b"}]}, "found claim and secret"),
    ],
    ids=str,
)
def test_what_the_plan_of_every_sweep_would_refuse_is_refused_before_an_install(
    helm: str, pod: dict[str, Any], found: str
) -> None:
    assert found in refusal(helm, {"trials": {"pod": pod}})
    with pytest.raises(ConfigError):
        pod_spec(pod, "pod.yaml")


def test_a_volume_with_one_source_reaches_the_pods_of_trials(render: Render) -> None:
    sources: list[dict[str, Any]] = [
        {"claim": "a"},
        {"config_map": "b"},
        {"secret": "c"},
        {"memory": "1Gi"},
    ]
    volumes: list[dict[str, Any]] = [
        {"mount": f"/{n}", **source} for n, source in enumerate(sources)
    ]
    volumes[0] |= {"config_map": None, "memory": None}  # not named
    defaults, _ = trials(render({"trials": {"pod": {"volumes": volumes}}}))
    named = [v.model_dump(exclude_none=True).keys() for v in defaults.volumes]
    assert [sorted(names - {"mount", "read_only"}) for names in named] == [*map(sorted, sources)]


def test_the_chart_knows_a_gpu_by_the_names_by_which_a_sweep_file_does() -> None:
    checks = (CHART / "templates/_checks.tpl").read_text()
    assert GPU_RESOURCE.pattern.replace("\\", "\\\\") in checks


NAMES = frozenset({"name", "namespace", "claimName", "secretName", "storageClassName", "cidr"})
LISTS = frozenset({"args", "command", "values"})
TEXTS = frozenset({"labels", "matchLabels", "annotations"})


def no_texts(found: Any, where: str = "", is_text: bool = False) -> Iterator[str]:
    """Yield where Kubernetes takes a text and something else stands."""
    if isinstance(found, dict):
        for key, value in found.items():
            is_name = key in NAMES | LISTS or where.rpartition(".")[2] in TEXTS
            yield from no_texts(value, f"{where}.{key}", is_name)
    elif isinstance(found, list):
        for item in found:
            yield from no_texts(item, where, is_text and where.rpartition(".")[2] in LISTS)
    elif is_text and not isinstance(found, str):
        yield where


def test_names_that_look_like_numbers_stay_names(render: Render) -> None:
    auth = {"enabled": True, "existingSecret": "33", "trialsSecret": "44"}
    values = {
        "nameOverride": "12",
        "imagePullSecrets": ["123"],
        "pool": {"name": "2026"},
        "poolSync": {"enabled": True, "selector": "gpu in (a, b),!spot"},
        "prune": {"enabled": True},
        "storage": {"existingClaim": "77", "storageClass": "78"},
        "trials": {"namespace": {"name": "2027"}},
        "mlflow": {"auth": auth, "databaseSecret": "5", "artifacts": {"storageClass": "1e3"}},
        "postgresql": {"storageClass": "79"},
        "networkPolicy": {
            "ingressNamespaces": ["1e3"],
            "metricsNamespaces": ["2028"],
            "dns": {"namespace": "53", "addresses": ["::1/128"]},
        },
    }
    away = {
        "postgresql": {"enabled": False},
        "airflow": {"enabled": False},
        "existingAirflow": {"url": "http://a", "passwordSecret": "1", "databaseSecret": "2",
                            "poolPasswordSecret": "3"},
    }  # fmt: skip
    for objects in (render(values, "2026"), render({**values, **away}, "2026")):
        assert [w for o in objects for w in no_texts(o, o["kind"])] == []


def test_the_sweep_of_helm_test_is_of_the_pool_whatever_its_name(render: Render) -> None:
    objects = render({"pool": {"name": "2026"}})
    sweep = one(objects, "ConfigMap", "hermes-test")["data"]["sweep.yaml"]
    assert yaml.safe_load(sweep)["pool"] == "2026"


def test_a_setting_of_airflow_may_have_several_lines_or_none(render: Render) -> None:
    text = "first\nsecond: 50%\n\nlast"
    logging = {"namespace_levels": ""}
    objects = render({"airflow": {"config": {"core": {"mine": text}, "logging": logging}}})
    found = configparser.ConfigParser()
    found.read_string(one(objects, "ConfigMap", "hermes-airflow")["data"]["airflow.cfg"])
    assert found["core"]["mine"] == text
    assert found["core"]["executor"] == "LocalExecutor"
    assert found["logging"]["namespace_levels"] == ""


def test_the_dashboard_needs_no_label(render: Render) -> None:
    no_label = {"enabled": True, "labels": {"grafana_dashboard": None}}
    objects = render({"metrics": {"dashboard": no_label}})
    labels = one(objects, "ConfigMap", "hermes-dashboard")["metadata"]["labels"]
    assert "grafana_dashboard" not in labels


# -- where trials run ----------------------------------------------------------------------------


def test_every_part_that_reads_or_plans_sweeps_is_told_that_trials_are_pods(
    render: Render,
) -> None:
    objects = render({"poolSync": {"enabled": True}})
    parts = pods(objects)
    names = ("api-server", "scheduler", "dag-processor", "triggerer", "controller", "test")
    for part in (f"hermes-{name}" for name in names):
        set_ = variables(parts[part])
        assert set_["HERMES_RUN_IN"] == "pod", part
        assert set_["HERMES_POD_RULES"] == "/etc/hermes/rules.yaml", part
        mounted = {m["mountPath"] for m in parts[part]["containers"][0]["volumeMounts"]}
        assert "/etc/hermes" in mounted, part


def test_everything_of_the_chart_has_the_common_labels_and_no_selector_has_them(
    render: Render,
) -> None:
    own = {"cost-center": "7", "sidecar.istio.io/inject": "false"}
    on = {"enabled": True}
    values = {"prune": on, "poolSync": on, "metrics": {"serviceMonitor": on, "dashboard": on}}
    for found in render({**values, "commonLabels": own}):
        labelled = [found]
        spec = found.get("spec", {})
        if found["kind"] in ("Deployment", "StatefulSet", "Job"):
            labelled.append(spec["template"])
        if found["kind"] == "CronJob":
            labelled.append(spec["jobTemplate"]["spec"]["template"])
        for part in labelled:
            assert own.items() <= part["metadata"]["labels"].items(), found["metadata"]["name"]
        assert "cost-center" not in json.dumps(spec.get("selector", spec.get("podSelector", {})))


def limited(spec: dict[str, Any]) -> bool:
    """Whether a pod says all that a ResourceQuota may require of it."""
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    kinds = [c["resources"].get(kind, {}) for c in containers for kind in ("requests", "limits")]
    return all({"cpu", "memory"} <= set(kind) for kind in kinds)


def test_a_quota_on_limits_and_nodes_with_taints_refuse_no_pod_whose_values_cannot_be_set(
    render: Render,
) -> None:
    taint = {"key": "dedicated", "operator": "Exists"}
    objects = render({"controller": {"tolerations": [taint]}})
    for name in ("hermes-test", "hermes-share-volume"):
        spec = pods(objects)[name]
        assert limited(spec), name
        assert spec["tolerations"] == [taint], name
    sweep = yaml.safe_load(one(objects, "ConfigMap", "hermes-test")["data"]["sweep.yaml"])
    assert limited({"containers": [{"resources": sweep["trial"]["pod"]}]})


def test_the_sweep_of_helm_test_has_pods_too(render: Render) -> None:
    sweep = yaml.safe_load(one(render(), "ConfigMap", "hermes-test")["data"]["sweep.yaml"])
    assert sweep["trial"]["run_in"] == "pod"
    assert set(sweep["trial"]["pod"]) <= {"image", "requests", "limits"}


def test_trials_have_a_restricted_namespace_of_their_own_by_default(render: Render) -> None:
    objects = render()
    namespace = one(objects, "Namespace", "hermes-trials", "hermes-trials")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    defaults, _ = trials(objects)
    assert (defaults.namespace, defaults.claim) == ("hermes-trials", "hermes-trials")
    account = one(objects, "ServiceAccount", defaults.service_account, "hermes-trials")
    assert account["automountServiceAccountToken"] is False
    kinds = {o["kind"] for o in objects if o["metadata"].get("namespace") == "hermes-trials"}
    assert "Secret" not in kinds


def test_only_airflow_and_the_controller_have_rights_on_pods_and_only_where_trials_are(
    render: Render,
) -> None:
    objects = [o for o in render() if "helm.sh/hook" not in o["metadata"].get("annotations", {})]
    assert bound(objects, "hermes") == {}
    assert bound(objects, "hermes-trials") == {
        "hermes-airflow": {"create pods", "get pods", "list pods", "patch pods", "delete pods",
                           "get pods/log", "list events"},
        "hermes-controller": {"list pods", "watch pods", "delete pods"},
    }  # fmt: skip
    assert [o["kind"] for o in objects if o["kind"].startswith("ClusterRole")] == []


def test_the_sync_of_the_pool_sees_the_trials_pods_on_cordoned_nodes(render: Render) -> None:
    values = {"poolSync": {"enabled": True}, "trials": {"namespace": {"name": "training"}}}
    objects = render(values)
    assert bound(objects, "training")["hermes-pool-sync"] == {"list pods"}
    assert "--namespace=training" in pods(objects)["hermes-pool-sync"]["containers"][0]["args"]


@pytest.mark.parametrize(
    "resource", ["amd.com/gpu", "nvidia.com/mig-1g.5gb", "huawei.com/Ascend910"]
)
def test_trials_ask_for_the_resource_that_the_pool_counts(render: Render, resource: str) -> None:
    sync = {"enabled": True, "resource": resource}
    assert trials(render({"poolSync": sync}))[0].gpu_resource == resource
    other = {"pod": {"gpu_resource": "nvidia.com/gpu.shared"}}
    found, _ = trials(render({"poolSync": sync, "trials": other}))
    assert found.gpu_resource == "nvidia.com/gpu.shared"


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({}, {"k8s-app": "kube-dns"}),
        ({"app": "coredns"}, {"app": "coredns"}),
        ({"app": "coredns", "k8s-app": None}, {"app": "coredns"}),
    ],
)
def test_the_pods_of_the_dns_server_have_the_labels_that_are_named_and_no_other(
    render: Render, named: dict[str, Any], labels: dict[str, str]
) -> None:
    objects = render({"networkPolicy": {"dns": {"podLabels": named}}})
    policy = one(objects, "NetworkPolicy", "hermes-trials", "hermes-trials")["spec"]
    assert policy["egress"][0]["to"][0]["podSelector"] == {"matchLabels": labels}


@pytest.mark.parametrize(("named", "ports"), [(5353, {53, 5353}), (53, {53}), (None, {53})])
def test_trials_reach_the_dns_server_on_the_port_of_its_pods(
    render: Render, named: int | None, ports: set[int]
) -> None:
    """A policy sees a connection after the Service's port has become that of the pod."""
    objects = render({"networkPolicy": {"dns": {"port": named}}})
    policy = one(objects, "NetworkPolicy", "hermes-trials", "hermes-trials")["spec"]
    found = [(p["protocol"], p["port"]) for p in policy["egress"][0]["ports"]]
    assert sorted(found) == sorted((kind, port) for kind in ("UDP", "TCP") for port in ports)


def test_an_upgrade_with_the_values_of_an_earlier_chart_keeps_the_log_in(render: Render) -> None:
    """`--reuse-values` knows no default that is new, as if it were null."""
    objects = render({"mlflow": {"auth": {"enabled": True, "user": None}}})
    found = variables(pods(objects)["hermes-controller"])
    assert found["MLFLOW_TRACKING_USERNAME"] == "hermes"


def test_an_mlflow_that_is_already_there_is_asked_with_its_log_in(render: Render) -> None:
    auth = {"enabled": True, "user": "svc", "existingSecret": "log-in", "trialsSecret": "trials"}
    mlflow = {"enabled": False, "url": "https://mlflow.example", "auth": auth}
    objects = render({"mlflow": mlflow})
    for name in ("hermes-controller", "hermes-scheduler", "hermes-triggerer"):
        (container,) = pods(objects)[name]["containers"]
        found = {v["name"]: v for v in container["env"]}
        assert found["MLFLOW_TRACKING_USERNAME"]["value"] == "svc"
        secret = found["MLFLOW_TRACKING_PASSWORD"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "log-in", "key": "hermes-password"}
    assert trials(objects)[0].secrets == ("trials",)
    names = [o["metadata"]["name"] for o in objects if o["kind"] == "Secret"]
    assert not [name for name in names if "mlflow" in name]


@pytest.mark.parametrize("release", ["2fast", "team.sweeps"])
def test_a_release_after_which_no_service_can_be_named_is_refused(helm: str, release: str) -> None:
    done = templated(helm, {}, release=release)
    assert done.returncode != 0
    assert f"the release's name {release}" in done.stderr
    assert "set fullnameOverride" in done.stderr
    assert templated(helm, {"fullnameOverride": "fast"}, release=release).returncode == 0


def test_a_namespace_of_trials_with_too_long_a_name_is_refused(helm: str) -> None:
    done = templated(helm, {}, namespace="n" * 60)
    assert "trials.namespace.name" in done.stderr
    assert "63 characters" in done.stderr
    short = {"trials": {"namespace": {"name": "trials"}}}
    assert templated(helm, short, namespace="n" * 60).returncode == 0


def test_a_default_of_trials_pods_that_is_written_as_empty_stays_empty(render: Render) -> None:
    environment = {"MLFLOW_TRACKING_URI": "", "A": "1"}
    pod = {"claim": "mine", "claim_folder": "", "deferrable": False, "environment": environment}
    found, _ = trials(render({"trials": {"pod": pod}}))
    assert (found.claim, found.claim_folder, found.deferrable) == ("mine", "", False)
    assert found.environment == environment
    found, _ = trials(render({"trials": {"pod": {"environment": {"A": "1"}}}}))
    assert sorted(found.environment) == ["A", "MLFLOW_TRACKING_URI"]
    assert found.claim_folder == "sweeps"


def test_the_platforms_template_of_trials_pods_is_where_every_part_of_airflow_looks_for_it(
    render: Render,
) -> None:
    spec = {"runtimeClassName": "nvidia", "securityContext": {"fsGroup": 1000}}
    metadata = {"annotations": {"sidecar.istio.io/inject": "false"}}
    objects = render({"trials": {"template": {"metadata": metadata, "spec": spec}}})
    defaults, _ = trials(objects)
    where, _, name = str(defaults.template_file).rpartition("/")
    template = yaml.safe_load(one(objects, "ConfigMap", "hermes-trials")["data"][name])
    assert template == {"metadata": metadata, "spec": spec}
    for part in ("scheduler", "triggerer", "controller"):
        mounts = pods(objects)[f"hermes-{part}"]["containers"][0]["volumeMounts"]
        assert where in {m["mountPath"] for m in mounts}, part


def test_without_a_template_of_the_platform_trials_pods_have_none(render: Render) -> None:
    for values in ({}, {"trials": {"template": None}}):
        objects = render(values)
        assert trials(objects)[0].template_file is None
        assert set(one(objects, "ConfigMap", "hermes-trials")["data"]) == {"pod.yaml", "rules.yaml"}


def test_two_templates_of_trials_pods_are_refused(helm: str) -> None:
    two = {"pod": {"template_file": "/opt/pod.yaml"}, "template": {"spec": {"hostname": "a"}}}
    assert "set one of them" in refusal(helm, {"trials": two})


def test_nobody_reaches_trials_and_they_reach_names_mlflow_and_the_world_outside(
    render: Render,
) -> None:
    objects = render()
    policy = one(objects, "NetworkPolicy", "hermes-trials", "hermes-trials")["spec"]
    assert (policy["podSelector"], policy.get("ingress")) == ({}, None)
    dns, mlflow, outside = policy["egress"]
    assert {p["port"] for p in dns["ports"]} == {53}
    assert [p["port"] for p in mlflow["ports"]] == [5000]
    (to,) = mlflow["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "hermes"}
    assert "10.0.0.0/8" in outside["to"][0]["ipBlock"]["except"]
    door = one(objects, "NetworkPolicy", "hermes-mlflow")["spec"]["ingress"][0]["from"]
    assert {"kubernetes.io/metadata.name": "hermes-trials"} in [
        peer.get("namespaceSelector", {}).get("matchLabels") for peer in door
    ]


def test_pods_of_one_trial_on_several_nodes_reach_each_other_and_no_other_pod(
    render: Render,
) -> None:
    objects = render({"pool": {"slots": 4}, "trials": {"severalNodes": True}})
    policies = gang_policies(objects)
    assert sorted(policies) == ["hermes-gang-0", "hermes-gang-1", "hermes-gang-2"]
    for name, policy in policies.items():
        same = {"matchLabels": {"hermes-ops/gang": name.removeprefix("hermes-gang-"),
                                "hermes-ops/gang-service": "hermes-gangs"}}  # fmt: skip
        assert policy["podSelector"] == same
        assert policy["ingress"] == [{"from": [{"podSelector": same}]}]
        assert policy["egress"] == [{"to": [{"podSelector": same}]}]
    service = one(objects, "Service", "hermes-gangs", "hermes-trials")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    defaults, _ = trials(objects)
    assert defaults.gang_service == "hermes-gangs"


def test_two_installations_with_one_namespace_of_trials_open_no_way_between_their_trials(
    render: Render,
) -> None:
    values = {"pool": {"slots": 2}, "trials": {"severalNodes": True}}
    own, other = (
        gang_policies(render({**values, "fullnameOverride": name}))[f"{name}-gang-0"]["podSelector"]
        for name in ("first", "second")
    )
    assert own["matchLabels"] != other["matchLabels"]


def test_the_policies_are_for_the_service_that_the_defaults_of_trials_name(render: Render) -> None:
    objects = render({"trials": {"severalNodes": True, "pod": {"gang_service": "mine"}}})
    labels = gang_policies(objects)["hermes-gang-0"]["podSelector"]["matchLabels"]
    assert labels["hermes-ops/gang-service"] == trials(objects)[0].gang_service == "mine"


def gang_policies(objects: Objects) -> dict[str, Any]:
    return {
        o["metadata"]["name"]: o["spec"]
        for o in objects
        if o["kind"] == "NetworkPolicy" and "-gang-" in o["metadata"]["name"]
    }


def test_nothing_is_opened_for_trials_on_several_nodes_unless_that_is_wanted(
    render: Render,
) -> None:
    objects = render()
    assert not [o for o in objects if "-gang" in o["metadata"]["name"]]
    assert trials(objects)[0].gang_service is None


def test_the_rights_on_volumes_last_as_long_as_the_job_that_needs_them(render: Render) -> None:
    objects = render()
    wide = [o for o in objects if "share-volume" in o["metadata"]["name"]]
    assert {o["kind"] for o in wide} == {
        "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Job"
    }  # fmt: skip
    for item in wide:
        assert "hook-succeeded" in item["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    (role,) = (o for o in wide if o["kind"] == "ClusterRole")
    assert {r for rule in role["rules"] for r in rule["resources"]} == {"persistentvolumes"}


@pytest.mark.parametrize(
    "values",
    [
        {"trials": {"namespace": {"enabled": False}}},
        {"trials": {"pod": {"claim": "shared"}}},
    ],
)
def test_a_claim_that_is_there_needs_no_right_on_volumes(render: Render, values: Any) -> None:
    objects = render(values)
    assert [o for o in objects if "share-volume" in o["metadata"]["name"]] == []
    assert [o for o in objects if o["kind"] == "ClusterRole"] == []
    claim = values["trials"].get("pod", {}).get("claim", "hermes-home")
    assert trials(objects)[0].claim == claim


def test_a_namespace_that_is_there_is_not_made_and_its_other_pods_are_left_alone(
    render: Render,
) -> None:
    objects = render({"trials": {"namespace": {"create": False, "name": "ml"}}})
    assert [o for o in objects if o["kind"] == "Namespace"] == []
    policy = one(objects, "NetworkPolicy", "hermes-trials", "ml")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/managed-by": "hermes-ops"}}
    assert set(bound(objects, "ml")) >= {"hermes-airflow", "hermes-controller"}


def test_a_namespace_is_named_in_one_place_and_is_not_the_releases(helm: str) -> None:
    elsewhere, releases = {"pod": {"namespace": "ml"}}, {"namespace": {"name": "hermes"}}
    assert "trials.namespace.name" in refusal(helm, {"trials": elsewhere})
    assert "trials.namespace.enabled" in refusal(helm, {"trials": releases})


# -- what sweeps may name ------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("values", [{}, EXTERNAL, {"poolSync": {"enabled": True}}])
def test_no_secret_and_no_claim_of_the_release_may_be_named(
    render: Render, own: bool, values: dict[str, Any]
) -> None:
    objects = render({**values, "trials": {"namespace": {"enabled": own}}})
    _, rules = trials(objects)
    secrets = {o["metadata"]["name"] for o in objects if o["kind"] == "Secret"}
    used = set(re.findall(r"'secretName': '([^']+)'", str(objects)))
    for name in {*secrets, *used, "airflow-db", "sh.helm.release.v1.hermes.v1"}:
        assert not rules.allows("secrets", name), name
        assert not rules.allows("pull_secrets", name), name
    for claim in ("hermes-home", "hermes-artifacts", "data-hermes-postgresql-0"):
        assert not rules.allows("claims", claim)
    assert not rules.allows("service_accounts", "hermes-airflow")
    assert not rules.allows("namespaces", "kube-system")
    if not own:
        maps = {o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"}
        assert [m for m in maps if rules.allows("config_maps", m)] == []


def test_what_the_installation_allows_is_in_the_rules(render: Render) -> None:
    allowed = {"secrets": ["wandb"], "claims": None, "configMaps": ["scripts"]}
    values = {"trials": {"allowed": allowed}, "imagePullSecrets": ["registry"]}
    defaults, rules = trials(render(values))
    assert rules.allows("secrets", "wandb")
    assert rules.allows("claims", "any")
    assert not rules.allows("config_maps", "other")
    assert defaults.pull_secrets == ("registry",)
    assert not rules.allows("secrets", "registry")


# -- images --------------------------------------------------------------------------------------


def test_a_digest_goes_before_the_tag_wherever_the_image_is_used(render: Render) -> None:
    images = {"repository": "r/airflow", "tag": "1", "digest": DIGEST}
    values = {"images": {"airflow": images, "mlflow": {"digest": DIGEST},
                         "postgresql": {"digest": DIGEST}}}  # fmt: skip
    objects = render({**values, "poolSync": {"enabled": True}})
    used = {c["image"] for spec in pods(objects).values()
            for c in (*spec["containers"], *spec.get("initContainers", ()))}  # fmt: skip
    assert used == {f"r/airflow@{DIGEST}", f"hermes-ops/mlflow@{DIGEST}", f"postgres@{DIGEST}"}
    assert trials(objects)[0].image == f"r/airflow@{DIGEST}"
    assert "r/airflow:1" not in yaml.safe_dump(objects)


def test_the_trials_image_may_have_a_digest_of_its_own(render: Render) -> None:
    image = f"r/trial@{DIGEST}"
    assert trials(render({"trials": {"pod": {"image": image}}}))[0].image == image


# -- MLflow's log-in -----------------------------------------------------------------------------

AUTH = {"mlflow": {"auth": {"enabled": True}}}


def test_mlflow_asks_to_log_in_and_every_client_of_it_has_a_user(render: Render) -> None:
    objects = render(AUTH)
    mlflow = pods(objects)["hermes-mlflow"]
    (server,) = mlflow["containers"]
    assert server["args"][-2:] == ["--app-name", "basic-auth"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"  # answers without a log-in
    users = one(objects, "Secret", "hermes-mlflow-users")["stringData"]
    assert set(users) == {"admin-password", "hermes-password", "trials-password", "session-key"}
    assert len(set(users.values())) == len(users)
    for part in ("scheduler", "triggerer", "controller", "test"):
        spec = pods(objects)[f"hermes-{part}"]
        (password,) = (v["valueFrom"]["secretKeyRef"] for c in spec["containers"]
                       for v in c["env"] if v["name"] == "MLFLOW_TRACKING_PASSWORD")  # fmt: skip
        assert variables(spec)["MLFLOW_TRACKING_USERNAME"] == "hermes"
        assert (password["name"], password["key"]) == ("hermes-mlflow-users", "hermes-password")
    plain = yaml.safe_dump([o for o in objects if o["kind"] != "Secret"])
    assert [p for p in users.values() if p in plain] == []


def test_no_container_that_asks_mlflow_nothing_has_its_log_in(render: Render) -> None:
    parts = pods(render({**AUTH, "poolSync": {"enabled": True}}))
    containers = [
        (name, c["name"], {v["name"] for v in c.get("env", ())})
        for name, spec in parts.items()
        for c in (*spec["containers"], *spec.get("initContainers", ()))
    ]
    without = {
        (name, c) for name, c, found in containers if "MLFLOW_TRACKING_PASSWORD" not in found
    }
    assert {("hermes-pool-sync", "pool-sync"), ("hermes-migrate-1", "migrate")} <= without
    assert {name for name, c, _ in containers if c == "await-migration"} == {
        name for name, c in without if c == "await-migration"
    }


def test_trials_log_in_as_a_user_of_their_own_by_a_secret_of_their_namespace(
    render: Render,
) -> None:
    own = {**AUTH, "trials": {"pod": {"secrets": ["wandb"]}}}
    objects = render(own)
    users = one(objects, "Secret", "hermes-mlflow-users")["stringData"]
    secret = one(objects, "Secret", "hermes-mlflow-trials", "hermes-trials")["stringData"]
    assert secret == {"MLFLOW_TRACKING_USERNAME": "trials",
                      "MLFLOW_TRACKING_PASSWORD": users["trials-password"]}  # fmt: skip
    defaults, rules = trials(objects)
    assert defaults.secrets == ("hermes-mlflow-trials", "wandb")
    assert set(defaults.environment) == {"MLFLOW_TRACKING_URI"}
    assert not rules.allows("secrets", "hermes-mlflow-users")


def test_log_ins_that_are_there_are_used_and_named_together(render: Render, helm: str) -> None:
    auth = {"enabled": True, "existingSecret": "users", "trialsSecret": "of-trials"}
    objects = render({"mlflow": {"auth": auth}})
    assert [o for o in objects if "mlflow-users" in o["metadata"]["name"]] == []
    assert trials(objects)[0].secrets == ("of-trials",)
    volumes = {v["name"]: v for v in pods(objects)["hermes-mlflow"]["volumes"]}
    assert volumes["users"]["secret"]["secretName"] == "users"
    auth["trialsSecret"] = ""
    assert "trialsSecret" in refusal(helm, {"mlflow": {"auth": auth}})


def test_without_a_log_in_nothing_of_it_is_there(render: Render) -> None:
    text = yaml.safe_dump(render())
    for word in ("basic-auth", "MLFLOW_TRACKING_PASSWORD", "mlflow-users", "mlflow-trials"):
        assert word not in text


def test_mlflows_users_have_the_passwords_of_the_secret_and_only_one_is_an_administrator(
    tmp_path: Path,
) -> None:
    script = CHART / "files/mlflow_users.py"
    environment = {
        "PATH": os.environ["PATH"],
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/a%20b.db",
        "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_USERS_SECRET": str(tmp_path),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "import mlflow.server.auth.sqlalchemy_store as s; from mlflow.server.auth import "
        "auth_config as c; t = s.SqlAlchemyStore(); t.init_db(c.database_uri); print([(u, "
        "t.get_user(u).is_admin, [p for p in ('first', 'other') if t.authenticate_user(u, p * 3 + "
        "u)]) for u in ('admin', 'hermes', 'trials')], c.default_permission)"
    )
    for word in ("first", "other"):
        for user in ("admin", "hermes", "trials"):
            (tmp_path / f"{user}-password").write_text(word * 3 + user)
        done = subprocess.run(
            [sys.executable, "-c", code, str(script)], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == (
            f"[('admin', True, ['{word}']), ('hermes', False, ['{word}']), "
            f"('trials', False, ['{word}'])] EDIT"
        )
