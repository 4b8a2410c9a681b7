"""Sweeps of pods in an Airflow whose tasks are pods themselves, by KubernetesExecutor.

The executor's pods have what docs/kubernetes.md says that they need. They share the network of
their node, which is this machine's: services of a stack listen on loopback. Their Airflow is that
of this checkout, mounted into the trial image: the Airflow image takes minutes to build, and
test_installation.py does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import pod_cluster
from hermes_ops.stack.preflight import free_port
from tests.integration import harness
from tests.integration.conftest import UP_TIMEOUT_S, Stack
from tests.k8s import faults
from tests.k8s.conftest import ROOT, Cluster, PodLab, preempted_with_the_same_curve

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(1_500)]

PACKAGES = sysconfig.get_path("purelib")
ACCOUNT = "airflow-worker"
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods"],
     "verbs": ["create", "get", "list", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]  # fmt: skip
RATES, EPOCHS, PAUSE_S, SLOTS = [0.02, 0.03, 0.9], 30, 1.0, 2
SWEEP_S = 600.0


@dataclass
class Executor:
    """Where Airflow's tasks are pods, and the ports of the services that they ask."""

    namespace: str
    airflow_port: int
    mlflow_port: int


def template(
    executor: Executor, image: str, home: Path, variables: dict[str, str]
) -> dict[str, Any]:
    """The executor's pod template: Airflow, its DAGs, the state folder, the services' addresses."""
    bundle = {
        "name": "hermes",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(ROOT / "dags")},
    }
    settings = {
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL":
            f"http://127.0.0.1:{executor.airflow_port}/execution/",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__XCOM_BACKEND": "hermes_ops.airflow.trial.links.StandingXCom",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",  # as the official chart's pods have it
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home / "airflow/logs"),
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "HERMES_HOME": str(home),
        "PYTHONPATH": f"{PACKAGES}:{ROOT}",
        **variables,
    }  # fmt: skip
    folders = {"home": str(home), "packages": PACKAGES, "checkout": str(ROOT)}
    container = {
        "name": "base",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": k, "value": v} for k, v in settings.items()],
        "volumeMounts": [
            {"name": name, "mountPath": path, "readOnly": name != "home"}
            for name, path in folders.items()
        ],
        "securityContext": {"runAsUser": 0},  # whose the stack's state folder is
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    }
    volumes = [
        {"name": name, "hostPath": {"path": path, "type": "Directory"}}
        for name, path in folders.items()
    ]
    spec = {
        "hostNetwork": True, "restartPolicy": "Never", "serviceAccountName": ACCOUNT,
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "task"}, "spec": spec}


@contextlib.contextmanager
def executor_namespace(cluster: Cluster) -> Iterator[Executor]:
    """A namespace for Airflow's tasks, whose account has its rights in that of the trials alone."""
    name = f"{cluster.namespace}-tasks"
    cluster.api.create_namespace({"metadata": {"name": name}})
    cluster.api.create_namespaced_service_account(name, {"metadata": {"name": ACCOUNT}})
    yield Executor(name, free_port(), free_port())
    cluster.api.delete_namespace(name)


def grant(cluster: Cluster, executor: Executor, sh: Any) -> None:
    meta = {"name": ACCOUNT, "namespace": cluster.namespace}
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": RIGHTS}
    binding = {
        "apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": meta,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": executor.namespace}],
    }  # fmt: skip
    sh("kubectl apply -f -", text=yaml.safe_dump_all([role, binding]))


@pytest.fixture(scope="module")
def kubernetes_lab(
    cluster: Cluster, image: str, home: Path, sh: Any, tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PodLab]:  # fmt: skip
    """A stack of `hermes up` with KubernetesExecutor: only its own services are on this machine."""
    (home / "pod.yaml").write_text(yaml.safe_dump(pod_cluster.defaults(image, cluster.namespace)))
    with executor_namespace(cluster) as executor:
        grant(cluster, executor, sh)
        repository, _, tag = image.rpartition(":")
        settings = {
            "worker_container_repository": repository, "worker_container_tag": tag,
            "namespace": executor.namespace, "pod_template_file": str(home / "task-pod.yaml"),
            "in_cluster": "False", "config_file": os.environ["KUBECONFIG"],
        }  # fmt: skip
        own = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        (home / "hermes.toml").write_text("\n".join([
            "[airflow.core]", 'executor = "KubernetesExecutor"',
            "[airflow.kubernetes_executor]", *own,
        ]))  # fmt: skip
        stack = Stack(home)
        ports = ("--airflow-port", str(executor.airflow_port),
                 "--mlflow-port", str(executor.mlflow_port))  # fmt: skip
        said = stack.hermes("up", "--slots", str(SLOTS), *ports, timeout_s=UP_TIMEOUT_S)
        assert said.returncode == 0, said.stdout + said.stderr
        variables = {k: v for k, v in stack.environment.items() if k.startswith("MLFLOW_")}
        (home / "task-pod.yaml").write_text(
            yaml.safe_dump(template(executor, image, home, variables))
        )
        made = PodLab(stack, tmp_path_factory.mktemp("sweeps"), cluster)
        try:
            yield made
        finally:
            made.close()
            stopped = stack.down()
            (home / "hermes.toml").unlink()
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr


@pytest.mark.parametrize("deferrable", [True, False], ids=["triggerer", "task"])
def test_trials_of_tasks_that_are_pods_are_preempted_and_resumed(
    kubernetes_lab: PodLab, deferrable: bool
) -> None:
    pod = {"deferrable": deferrable}
    content = kubernetes_lab.pod_sweep("executor", RATES, EPOCHS, PAUSE_S, pod=pod)
    with kubernetes_lab.policy("hermes", guard_k=0), kubernetes_lab.sampled_pods() as sampler:
        sweep = kubernetes_lab.start(content)
        sweep.await_end(SWEEP_S)
    assert sweep.state == "success", sweep.log("plan", -1)
    assert sweep.states() == dict.fromkeys(range(len(RATES)), "finished")
    assert preempted_with_the_same_curve(sweep, RATES, EPOCHS)
    assert (sampler.twice, sampler.most_gpus <= SLOTS) == ([], True)
    for number in range(len(RATES)):
        faults.never_twice(sweep, number)
        assert len(sweep.runs()[number]) == 1
    harness.await_(lambda: not kubernetes_lab.cluster.pods(sweep=sweep.id), faults.NO_POD_S)


def test_a_sweep_of_processes_is_refused_though_its_plans_pod_is_told_localexecutor(
    kubernetes_lab: PodLab,
) -> None:
    sweep = kubernetes_lab.start(harness.stub("processes", [0.5], 2, 0.1))
    sweep.await_end(SWEEP_S)
    assert sweep.state == "failed"
    log = sweep.log("plan", -1)
    assert "KubernetesExecutor runs the trials' tasks" in log
    assert "`run_in: pod`" in log
    warned = kubernetes_lab.hermes(
        "sweep", "check", str(kubernetes_lab.file(harness.stub("processes", [0.5], 2, 0.1)))
    )
    assert "KubernetesExecutor runs the trials' tasks" in warned.stdout
