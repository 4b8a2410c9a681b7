"""The chart on a real cluster: what it renders, and the installation that the documentation says.

Where there is no docker and no registry, scripts/docker.py stands in for both.
"""

from __future__ import annotations

import base64
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_ops.stack import airflow_settings

pytestmark = pytest.mark.k8s

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/hermes-ops"
PAGE = (ROOT / "docs/kubernetes.md").read_text()
SCRIPTS = Path(__file__).parent / "scripts"
NAMESPACE = "hermes"
# A helm that knows no cluster takes one of its own time, which may be older than the chart's.
TEMPLATE = f"helm template hermes {CHART} --kube-version 1.34.0"
INSTALL_S = 1_800
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


def docker_works() -> bool:
    """A client without its daemon is none."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def programs(
    kubeconfig: None, cluster_command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment in which helm, kubectl and docker are found."""
    path = os.environ["PATH"]
    if cluster_command:
        said = subprocess.run([*cluster_command, "env"], capture_output=True, text=True, check=True)
        found = re.search(r"^export PATH=(.*):\$PATH$", said.stdout, re.MULTILINE)
        path = f"{found[1]}:{path}" if found else path
    if not docker_works():
        folder = tmp_path_factory.mktemp("docker")
        stand_in = folder / "docker"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {SCRIPTS / "docker.py"} "$@"\n')
        stand_in.chmod(0o755)
        path = f"{folder}:{path}"
    return {**os.environ, "PATH": path}


@pytest.fixture
def sh(programs: dict[str, str]) -> Any:
    """Runs one command line; its output, or a failure with all that it said."""

    def run(line: str, *, text: str = "", cwd: Path = ROOT, timeout_s: float = 120) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            input=text, capture_output=True, text=True, env=programs, cwd=cwd, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}"
        assert "would violate PodSecurity" not in done.stderr, done.stderr
        return done.stdout

    return run


# -- what it renders -----------------------------------------------------------------------------


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


# -- the installation that the documentation says ------------------------------------------------


def fence(language: str, after: str) -> str:
    part = PAGE[PAGE.index(after) :]
    found = re.search(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


COMMANDS = fence("sh", "Then ten commands").splitlines()


def test_the_documentation_says_ten_commands() -> None:
    assert len(COMMANDS) == 10


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, with my-values.yaml as the documentation shows it."""
    target = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith("examples/traces"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "my-values.yaml").write_text(fence("yaml", "From an empty cluster"))
    return target


@pytest.fixture(scope="module")
def installed(programs: dict[str, str], checkout: Path) -> Iterator[list[str]]:
    """What the ten commands said."""

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            capture_output=True, text=True, env=programs, cwd=checkout, timeout=INSTALL_S,
            check=False,
        )  # fmt: skip
        state = ""
        if done.returncode:
            look = f"kubectl -n {NAMESPACE} get pods -o wide; kubectl -n {NAMESPACE} get events"
            state = subprocess.run(["bash", "-c", look], env=programs, capture_output=True,
                                   text=True, check=False).stdout  # fmt: skip
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr[-4000:]}\n{state}"
        return done.stdout

    tag = "docker.io/library/postgres:17.6-bookworm"
    run(f"docker build -f {SCRIPTS / 'postgresql.Dockerfile'} -t {tag} . && docker push {tag}")
    yield [run(line) for line in COMMANDS]
    run(f"helm uninstall hermes --namespace {NAMESPACE} --wait")
    run(f"kubectl delete namespace {NAMESPACE}")


@pytest.mark.installation
def test_the_ten_commands_end_with_a_finished_sweep(installed: list[str], sh: Any) -> None:
    assert "Phase:          Succeeded" in installed[7]
    listed = sh(
        f"kubectl -n {NAMESPACE} exec deploy/hermes-controller -c controller -- "
        "hermes sweep list --json"
    )
    states = {row["dag_run_id"].split("-")[0]: row["state"] for row in json.loads(listed)}
    assert states == {"helm": "success", "sgd": "success"}


def objects(sh: Any, kind: str) -> list[dict[str, Any]]:
    found = json.loads(sh(f"kubectl -n {NAMESPACE} get {kind} -o json"))
    return list(found["items"])


@pytest.mark.installation
def test_every_part_is_ready_and_has_not_been_restarted(installed: list[str], sh: Any) -> None:
    for item in (*objects(sh, "deployments"), *objects(sh, "statefulsets")):
        assert item["status"].get("readyReplicas") == item["spec"]["replicas"], item["metadata"]
    pods = [p for p in objects(sh, "pods") if "hermes-migrate" not in p["metadata"]["name"]]
    restarts = {
        p["metadata"]["name"]: s["restartCount"]
        for p in pods
        for s in p["status"].get("containerStatuses", ())
        if s["restartCount"]
    }
    assert restarts == {}


def metrics(sh: Any) -> dict[str, str]:
    """What each controller's pod tells Prometheus, through the API server's proxy."""
    names = [
        p["metadata"]["name"]
        for p in objects(sh, "pods")
        if p["metadata"]["labels"].get("app.kubernetes.io/component") == "controller"
    ]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{{}}:9464/proxy/metrics"
    return {name: sh(f"kubectl get --raw {path.format(name)}") for name in names}


@pytest.mark.installation
def test_the_controller_answers_prometheus(installed: list[str], sh: Any) -> None:
    (text,) = metrics(sh).values()
    assert 'hermes_leading{pool="gpus"} 1.0' in text
    assert 'hermes_gpus{pool="gpus"} 4.0' in text
    started = re.search(r'hermes_decisions_total\{action="start",pool="gpus"\} (\d+)', text)
    assert started is not None
    assert int(started[1]) >= 8


@pytest.mark.installation
@pytest.mark.parametrize(
    ("account", "question", "allowed"),
    [
        ("airflow", "create pods", True),
        ("airflow", "get pods/log", True),
        ("airflow", "get secrets", False),
        ("airflow", "list nodes", False),
        ("airflow", "create pods --namespace default", False),
        ("controller", "delete pods", True),
        ("controller", "create pods", False),
        ("controller", "get secrets", False),
        ("trials", "get secrets", False),
        ("trials", "list pods", False),
        ("default", "list pods", False),
    ],
)
def test_nobody_may_more_than_he_needs(
    installed: list[str], programs: dict[str, str], account: str, question: str, allowed: bool
) -> None:
    name = account if account == "default" else f"hermes-{account}"
    who = f"--as=system:serviceaccount:{NAMESPACE}:{name}"
    line = ["kubectl", "-n", NAMESPACE, "auth", "can-i", *question.split(), who]
    said = subprocess.run(line, env=programs, capture_output=True, text=True, check=False)
    assert said.stdout.strip() == ("yes" if allowed else "no")


@pytest.mark.installation
def test_airflow_is_set_as_hermes_up_sets_it(installed: list[str], sh: Any) -> None:
    said = sh(f"kubectl -n {NAMESPACE} get configmap hermes-airflow -o json")
    parsed = configparser.ConfigParser()
    parsed.read_string(json.loads(said)["data"]["airflow.cfg"])
    for section, values in airflow_settings._timing().items():
        found = {k: parsed[section].get(k) for k in values}
        assert found == values, section


def secrets(sh: Any) -> dict[str, dict[str, str]]:
    return {s["metadata"]["name"]: s["data"] for s in objects(sh, "secrets")
            if s["type"] == "Opaque"}  # fmt: skip


@pytest.mark.installation
def test_an_upgrade_keeps_every_secret_and_one_of_two_controllers_leads(
    installed: list[str], sh: Any, checkout: Path
) -> None:
    before = secrets(sh)
    assert base64.b64decode(before["hermes-airflow"]["admin-password"])
    sh(
        f"helm upgrade hermes helm/hermes-ops -n {NAMESPACE} --values my-values.yaml "
        "--set controller.replicas=2 --wait --timeout 15m",
        cwd=checkout, timeout_s=1_000,
    )  # fmt: skip
    assert secrets(sh) == before
    texts = metrics(sh).values()
    assert len(texts) == 2
    assert sum('hermes_leading{pool="gpus"} 1.0' in text for text in texts) == 1
