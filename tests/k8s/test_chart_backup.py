"""A release's databases, claims and Secrets are backed up and restored by docs/backup.md.

The servers' image is a stand-in that has nothing but PostgreSQL and tar: of the chart only what
holds data runs. What sweeps make of it is tested without a cluster (tests/integration/).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backup.md").read_text()
SCRIPTS = Path(__file__).parent / "scripts"
OLD, NEW, TRIALS = "backed-up", "restored", "backed-up-trials"
REPOSITORY, TAG = "docker.io/library/postgres", "17.6-bookworm"
STEP_S = 600


def block(heading: str, language: str = "sh") -> str:
    found = re.search(rf"^##+ {heading}\n.*?^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    assert found is not None
    return found[1]


def named(commands: str, folder: Path) -> str:
    """The commands for the namespaces and the folder of this test.

    The servers cannot become ready, so nothing waits for them; hooks are servers' work too.
    """
    commands = commands.replace("hermes-trials", TRIALS)
    commands = commands.replace("(namespace:) hermes$", f"(namespace:) {OLD}$")
    commands = re.sub(r"namespace(:?) hermes\b", rf"namespace\1 {OLD}", commands)
    commands = re.sub(r"(namespace:?|\\1) again\b", rf"\1 {NEW}".replace(r"\\", "\\"), commands)
    commands = commands.replace(" --wait --timeout 15m", " --no-hooks")
    commands = commands.replace("helm install hermes", "helm install --no-hooks hermes")
    for name in ("claims.yaml", "my-values.yaml"):
        commands = commands.replace(name, str(folder / name))
    return commands.replace("/backup/cluster", str(folder / "backup"))


@pytest.fixture
def release(sh: Any, tmp_path: Path) -> Iterator[str]:
    """The namespace of a release; both are removed at the end."""
    image = f"{REPOSITORY}:{TAG}"
    sh(f"docker build -f {SCRIPTS / 'postgresql.Dockerfile'} -t {image} .", timeout_s=STEP_S)
    sh(f"docker push {image}", timeout_s=STEP_S)
    stand_in = {"repository": REPOSITORY, "tag": TAG}
    values: dict[str, Any] = {"images": {"airflow": stand_in, "mlflow": stand_in}}
    values |= {"storage": {"size": "1Gi"}, "mlflow": {"artifacts": {"size": "1Gi"}}}
    values |= {"postgresql": {"size": "1Gi"}}
    (tmp_path / "my-values.yaml").write_text(json.dumps(values))
    pod = block("On Kubernetes", "yaml")
    pod = pod.replace("registry.example/hermes-ops/airflow:0.1.0", image)
    (tmp_path / "claims.yaml").write_text(pod)
    sh(f"kubectl create namespace {OLD}")
    sh(f"helm install --no-hooks hermes helm/hermes-ops -n {OLD} -f {tmp_path / 'my-values.yaml'}")
    sh(f"kubectl -n {OLD} rollout status statefulset/hermes-postgresql --timeout 5m",
       timeout_s=STEP_S)  # fmt: skip
    yield OLD
    for namespace in (OLD, NEW):
        sh(f"helm uninstall hermes -n {namespace} --no-hooks --ignore-not-found")
    sh(
        f"kubectl delete namespace --ignore-not-found {OLD} {TRIALS} {NEW} {NEW}-trials",
        timeout_s=STEP_S,
    )


def psql(sh: Any, namespace: str, role: str, query: str) -> str:
    """What a role is told by its own database, over the network and with its password."""
    where = f"kubectl -n {namespace} exec -i hermes-postgresql-0 -- sh -c"
    user = "hermes_controller" if role == "controller" else role
    database = "airflow" if role == "controller" else role
    program = (
        f"PGPASSWORD=$(cat /run/secrets/postgresql/{role}) "
        f"$(ls /usr/lib/postgresql/*/bin/psql) -X -q -A -t -v ON_ERROR_STOP=1 -h 127.0.0.1 "
        f"-U {user} {database}"
    )
    return str(sh(f"{where} '{program}'", text=query)).strip()


def test_a_release_is_restored_into_another_namespace(
    release: str, sh: Any, tmp_path: Path
) -> None:
    for role in ("airflow", "mlflow"):
        psql(sh, OLD, role, f"CREATE TABLE kept (x text); INSERT INTO kept VALUES ('{role}')")
    psql(sh, OLD, "airflow", "GRANT SELECT ON kept TO hermes_controller")
    key = "kubectl -n {} get secret hermes-airflow -o jsonpath='{{.data.fernet-key}}'"
    pod = tmp_path / "claims.yaml"
    inside = (
        f"kubectl -n {{}} apply -f {pod} && kubectl -n {{}} wait pod/claims --for condition=Ready"
    )
    sh(inside.format(OLD, OLD), timeout_s=STEP_S)
    write = "mkdir -p home/sweeps/s artifacts/1 && echo checkpoint > home/sweeps/s/state && "
    write += "echo model > artifacts/1/model && chmod 600 home/sweeps/s/state"
    sh(f"kubectl -n {OLD} exec claims -- sh -c 'cd /claims && {write}'")
    sh(f"kubectl -n {OLD} delete pod claims --now", timeout_s=STEP_S)

    sh(named(block("Back up a release"), tmp_path), timeout_s=STEP_S)
    sh(f"kubectl -n {OLD} scale deployment --all --replicas 0")
    sh(named(block("Restore into a new namespace or cluster"), tmp_path), timeout_s=STEP_S)

    assert sh(key.format(NEW)) == sh(key.format(OLD))
    assert psql(sh, NEW, "airflow", "SELECT x FROM kept") == "airflow"
    assert psql(sh, NEW, "mlflow", "SELECT x FROM kept") == "mlflow"
    assert psql(sh, NEW, "controller", "SELECT x FROM kept") == "airflow"
    sh(inside.format(NEW, NEW), timeout_s=STEP_S)
    told = sh(f"kubectl -n {NEW} exec claims -- sh -c 'cd /claims && cat home/sweeps/s/state "
              "artifacts/1/model && stat -c %a home/sweeps/s/state'")  # fmt: skip
    assert told.split() == ["checkpoint", "model", "600"]
    scaled = sh(f"kubectl -n {NEW} get deployment -o jsonpath='{{.items[*].spec.replicas}}'")
    assert set(scaled.split()) == {"1"}  # the last command has started everything again
