"""What the chart renders, on a real cluster that takes or refuses it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.k8s

CHART = Path(__file__).parents[2] / "helm/hermes-ops"
# A helm that knows no cluster takes one of its own time, which may be older than the chart's.
TEMPLATE = f"helm template hermes {CHART} --kube-version 1.34.0"
MONITORS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors"},
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
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"team": "ml"}},
                    "dashboard": {"enabled": True}},
        "controller": {"replicas": 2, "nodeSelector": {"role": "system"},
                       "tolerations": [{"key": "system", "operator": "Exists"}]},
        "airflow": {"apiServer": {"replicas": 2}, "config": {"core": {"parallelism": "99"},
                                                              "smtp": {"password": "50%"}}},
        "imagePullSecrets": ["registry"],
        "trials": {"pod": {"limits": {"memory": "8Gi"}, "user": 2000}},
        "networkPolicy": {"ingressNamespaces": ["ingress"], "metricsNamespaces": ["monitoring"]},
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
    """A namespace that warns of every pod which is not restricted, and ServiceMonitors."""
    name = "hermes-rendering"
    labels = "pod-security.kubernetes.io/{enforce,warn}=restricted"
    lines = (
        f"kubectl create namespace {name} && kubectl label namespace {name} {labels}",
        f"echo {shlex.quote(json.dumps(MONITORS))} | kubectl apply -f - && "
        "kubectl wait --for=condition=established crd/servicemonitors.monitoring.coreos.com",
    )
    for line in lines:
        subprocess.run(["bash", "-ec", line], env=programs, check=True)
    yield name
    gone = ["kubectl", "delete", "namespace", name, "--wait=false"]
    subprocess.run(gone, env=programs, check=True)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_cluster_takes_every_rendering(sh: Any, restricted: str, values: Any) -> None:
    said = sh(
        f"{TEMPLATE} --namespace {restricted} --values - | "
        f"kubectl apply --dry-run=server --namespace {restricted} -f -",
        text=yaml.safe_dump(values),
    )
    assert "deployment.apps/" in said
