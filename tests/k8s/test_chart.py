"""What the chart renders, on a real cluster that takes or refuses it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_ops.airflow.trial.pods import prepare
from hermes_ops.config import PodRules, check_pod, pod_spec
from hermes_ops.kubernetes import PodRequest, check_manifest, manifest

pytestmark = pytest.mark.k8s

CHART = Path(__file__).parents[2] / "helm/hermes-ops"
# A helm that knows no cluster takes one of its own time, which may be older than the chart's.
TEMPLATE = f"helm template hermes {CHART} --kube-version 1.34.0"
MONITORING = {"ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"}


def definition(kind: str, plural: str) -> dict[str, Any]:
    """A kind of the Prometheus operator, with any content."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{
                "name": "v1", "served": True, "storage": True,
                "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }],
        },
    }  # fmt: skip


MATRIX = {
    "defaults": {},
    "everything": {
        "poolSync": {"enabled": True, "selector": "gpu=a100"},
        "prune": {"enabled": True, "olderThan": "8w", "keepBest": True},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"team": "ml"}},
                    "rules": {"enabled": True, "labels": {"release": "prometheus"}},
                    "dashboard": {"enabled": True}},
        "controller": {"replicas": 2, "nodeSelector": {"role": "system"},
                       "tolerations": [{"key": "system", "operator": "Exists"}]},
        "airflow": {"apiServer": {"replicas": 2}, "config": {"core": {"parallelism": "99"},
                                                              "smtp": {"password": "50%"}}},
        "imagePullSecrets": ["registry"],
        "trials": {"pod": {"limits": {"memory": "8Gi"}, "user": 2000}},
        "networkPolicy": {"ingressNamespaces": ["ingress"], "metricsNamespaces": ["monitoring"]},
        "mlflow": {"auth": {"enabled": True}},
    },
    "databases that are there": {
        "postgresql": {"enabled": False},
        "airflow": {"databaseSecret": "airflow-db", "databaseRole": "hermes"},
        "mlflow": {"databaseSecret": "mlflow-db"},
    },
    "an MLflow that is there": {"mlflow": {"enabled": False, "url": "http://mlflow.ml:5000"}},
    "an Airflow that is there": {
        "airflow": {"enabled": False},
        "existingAirflow": {"url": "http://airflow:8080", "passwordSecret": "p",
                            "databaseSecret": "d", "poolPasswordSecret": "pool"},
        "poolSync": {"enabled": True},
    },
    "the controller alone": {
        "airflow": {"enabled": False}, "postgresql": {"enabled": False},
        "existingAirflow": {"url": "http://airflow:8080", "passwordSecret": "p",
                            "databaseSecret": "d"},
        "mlflow": {"enabled": False, "url": "http://mlflow.ml:5000"},
        "storage": {"existingClaim": "shared"},
    },
    "trials beside the release": {
        "trials": {"namespace": {"enabled": False}, "allowed": {"secrets": ["wandb"]}},
        "images": {"airflow": {"digest": f"sha256:{'0a' * 32}"}},
    },
    "bare": {
        "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
        "fullnameOverride": "sweeps", "storage": {"storageClass": "fast"},
    },
}  # fmt: skip


def test_helm_lint_finds_nothing(sh: Any) -> None:
    assert "0 chart(s) failed" in sh(f"helm lint --strict {CHART}")


@pytest.mark.parametrize(
    ("typo", "named"),
    [
        ("contoller.replicas=2", "contoller"),
        ("airflow.scheduler.resource.limits.cpu=1", "resource"),
        ("pool.slot=4", "slot"),
        ("trials.pod.memory=4Gi", "memory"),
    ],
)
def test_helm_refuses_a_typo(sh: Any, typo: str, named: str) -> None:
    with pytest.raises(AssertionError, match=f"additional properties '{named}' not allowed"):
        sh(f"{TEMPLATE} --set {typo}")


@pytest.fixture(scope="module")
def restricted(programs: dict[str, str]) -> Iterator[str]:
    """A namespace that warns of every pod which is not restricted, and the kinds of monitoring."""
    name = "hermes-rendering"
    labels = "pod-security.kubernetes.io/{enforce,warn}=restricted"
    lines = (
        f"kubectl create namespace {name} && kubectl label namespace {name} {labels}",
        f"kubectl create namespace {name}-trials",  # what is rendered into it asks for it
        *(
            f"echo {shlex.quote(json.dumps(definition(kind, plural)))} | kubectl apply -f - && "
            f"kubectl wait --for=condition=established crd/{plural}.monitoring.coreos.com"
            for kind, plural in MONITORING.items()
        ),
    )
    for line in lines:
        subprocess.run(["bash", "-ec", line], env=programs, check=True)
    yield name
    gone = ["kubectl", "delete", "namespace", name, f"{name}-trials", "--wait=false"]
    subprocess.run(gone, env=programs, check=True)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_cluster_takes_every_rendering(sh: Any, restricted: str, values: Any) -> None:
    said = sh(
        f"{TEMPLATE} --namespace {restricted} --values - | kubectl apply --dry-run=server -f -",
        text=yaml.safe_dump(values),
    )
    assert "deployment.apps/" in said


# -- trials in a namespace of their own ----------------------------------------------------------

SCRIPT = """
import os
print("token", os.path.exists("/var/run/secrets/kubernetes.io"), flush=True)
print("loss=0.5", flush=True)
"""


def rendered(sh: Any, namespace: str, kinds: set[str], *, hooks: bool = False) -> list[Any]:
    """The objects of these kinds that the defaults render to, hooks or others."""
    line = f"{TEMPLATE} --namespace {namespace} --set storage.size=5Gi"
    found = yaml.safe_load_all(sh(line))
    return [
        o for o in found
        if o and o["kind"] in kinds
        and ("helm.sh/hook" in o["metadata"].get("annotations", {})) is hooks
    ]  # fmt: skip


def may(programs: dict[str, str], account: str, namespace: str, question: str) -> bool:
    line = ["kubectl", "auth", "can-i", *question.split(), "--namespace", namespace,
            f"--as=system:serviceaccount:{account}"]  # fmt: skip
    said = subprocess.run(line, env=programs, capture_output=True, text=True, check=False)
    return said.stdout.strip() == "yes"


def share_volume(sh: Any, namespace: str, folder: Path) -> None:
    """What the chart's Job does, with the rights that it has and no others."""
    (job,) = rendered(sh, namespace, {"Job"}, hooks=True)
    token = sh(f"kubectl create token hermes-share-volume --namespace {namespace}").strip()
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    own = folder / "kubeconfig"
    own.write_text(yaml.safe_dump(config))
    arguments = shlex.join(job["spec"]["template"]["spec"]["containers"][0]["args"])
    module = "hermes_ops.kubernetes.shared_volume"
    sh(f"KUBECONFIG={own} {sys.executable} -P -m {module} {arguments}")


def trial_pod(sh: Any, namespace: str, image: str) -> dict[str, Any]:
    """A trial's pod as a worker makes it of the chart's defaults and rules."""
    maps = rendered(sh, namespace, {"ConfigMap"})
    data = next(m["data"] for m in maps if m["metadata"]["name"] == "hermes-trials")
    defaults = pod_spec(yaml.safe_load(data["pod.yaml"]), "pod.yaml")
    rules = PodRules.model_validate(yaml.safe_load(data["rules.yaml"]))
    own = pod_spec({"image": image, "limits": {"memory": "256Mi"}}, "sweep")
    check_pod(own, defaults, rules, "sweep")
    options = ("--dir", "/hermes/trial", "--epoch", "1", "--objective", "loss", "--grace", "5")
    facts = PodRequest(
        sweep="own", number=0, epoch=1, attempt=1, identity="own", folder="sweeps/own/trials/0",
        arguments=(*options, "--", "python", "-c", SCRIPT), environment={}, gpus=0, grace_s=5.0,
        user=1000,
    )  # fmt: skip
    pod = manifest(own.with_defaults(defaults), facts)
    check_manifest(pod, pod, rules)
    return pod


def test_a_trial_runs_in_a_namespace_of_its_own_and_may_do_nothing_there(
    sh: Any, programs: dict[str, str], restricted: str, image: str, tmp_path: Path
) -> None:
    home, trials = restricted, f"{restricted}-trials"
    level = "pod-security.kubernetes.io/{enforce,warn}=restricted"
    sh(f"kubectl label namespace {trials} {level}")
    roles = {"ServiceAccount", "Role", "RoleBinding"}
    for made in (
        rendered(sh, home, {*roles, "PersistentVolumeClaim"}),
        rendered(sh, home, {*roles, "ClusterRole", "ClusterRoleBinding"}, hooks=True),
    ):
        sh("kubectl apply -f -", text=yaml.safe_dump_all(made))
    volume = f"{trials}-hermes-trials"
    try:
        share_volume(sh, home, tmp_path)
        share_volume(sh, home, tmp_path)  # may be repeated
        spec = json.loads(sh(f"kubectl get pv {volume} -o json"))["spec"]
        if "hostPath" not in spec:
            pytest.skip("the cluster's volumes are not folders of this machine")
        folder = Path(spec["hostPath"]["path"]) / "sweeps/own/trials/0"
        prepare(folder, 1000)
        pod = trial_pod(sh, home, image)
        sh("kubectl apply -f -", text=yaml.safe_dump(pod))
        name = pod["metadata"]["name"]
        done = "--for=jsonpath={.status.phase}=Succeeded"
        of = f"{name} --namespace {trials}"
        look = f"kubectl describe pod {of}; kubectl logs {of}; false"
        sh(f"kubectl wait {done} pod/{of} --timeout=90s || {{ {look}; }}")
        assert "token False" in sh(f"kubectl logs {of}")
        assert json.loads((folder / "result.json").read_text())["outcome"] == "finished"
        account = f"{trials}:{pod['spec']['serviceAccountName']}"
        questions = ("get secrets", "list pods", "create pods", "get configmaps", "list nodes")
        for namespace in (home, trials):
            assert [q for q in questions if may(programs, account, namespace, q)] == []
        airflow = f"{home}:hermes-airflow"
        assert may(programs, airflow, trials, "create pods")
        for question in ("create pods", "get secrets", "get pods"):
            assert not may(programs, airflow, home, question)
        assert not may(programs, airflow, trials, "get secrets")
    finally:
        wide = "clusterrole,clusterrolebinding"
        sh(f"kubectl delete {wide} -l app.kubernetes.io/instance=hermes")
        quiet = "--ignore-not-found --wait=false"
        sh(f"kubectl delete pvc hermes-trials --namespace {trials} {quiet}")
        sh(f"kubectl delete pv {volume} {quiet}")
