"""The values for Airflow's own chart in the documentation, against what each part of it needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/kubernetes.md").read_text()
SECTION = PAGE[PAGE.index("**Airflow**: `airflow.enabled: false`") :]
TEMPLATES = ROOT / "helm/hermes-ops/templates"

EVERYWHERE = {"env", "volumes", "volumeMounts"}
"""Values of that chart which hold for all Airflow containers, the pod template's included: so says
its values.yaml, and files/pod-template-file.kubernetes-helm-yaml includes all three."""
KNOWN = EVERYWHERE | {"executor", "images", "uid"}

STATE, MLFLOW = "HERMES_HOME", "MLFLOW_TRACKING_URI"
RULES = {"HERMES_RUN_IN", "HERMES_POD_DEFAULTS", "HERMES_POD_RULES"}
TASKS = {STATE, MLFLOW, *RULES}
NEEDS = {
    "scheduler": TASKS,
    "workers": TASKS,
    "triggerer": TASKS,
    "API server": {STATE, MLFLOW},
    "DAG processor": RULES,
}

OF_THE_CONTROLLER = {
    "HERMES_AIRFLOW_URL", "HERMES_AIRFLOW_USER", "HERMES_AIRFLOW_PASSWORD_FILE",
    "HERMES_AIRFLOW_TOKEN", "HERMES_AIRFLOW_TOKEN_FILE", "HERMES_POLICY", "HERMES_POLICY_OPTIONS",
    "HERMES_METRICS_HOST", "HERMES_METRICS_PORT",
}  # fmt: skip
OPTIONAL = {
    "HERMES_POOL",  # the page's first pool, and the packaged DAG's
    "HERMES_NODES",  # claims of nodes
    "HERMES_HOST",  # processes on machines without a name of their own
    "HERMES_TRIAL_ENVIRONMENT",  # processes
    "HERMES_MACHINE",  # machines without Kubernetes
    "HERMES_MACHINES",
}


def fence(language: str, holding: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    return str(next(text for text in found if holding in text))


VALUES: dict[str, Any] = yaml.safe_load(fence("yaml", "executor: LocalExecutor"))
ENVIRONMENT = {entry["name"]: entry["value"] for entry in VALUES["env"]}
MOUNTS = {mount["name"]: mount for mount in VALUES["volumeMounts"]}


def test_only_values_are_used_that_all_containers_of_airflows_chart_have() -> None:
    assert set(VALUES) == KNOWN
    assert "LocalExecutor # or KubernetesExecutor" in fence("yaml", "executor:")


@pytest.mark.parametrize("part", NEEDS)
def test_each_part_of_airflow_gets_what_its_code_reads(part: str) -> None:
    assert NEEDS[part] <= ENVIRONMENT.keys()
    row = next(line for line in SECTION.splitlines() if line.startswith(f"| {part}"))
    package, state, tracking, rules, _ = (cell.strip() for cell in row.split("|")[2:-1])
    said = {STATE: state, MLFLOW: tracking, "HERMES_RUN_IN": rules}
    assert package == "yes"
    assert {name for name, cell in said.items() if cell} == NEEDS[part] & said.keys()


def test_what_the_variables_name_is_mounted_from_what_hermes_chart_makes() -> None:
    assert {v["name"] for v in VALUES["volumes"]} == MOUNTS.keys()
    assert MOUNTS["hermes"]["mountPath"] == ENVIRONMENT[STATE]
    assert not MOUNTS["hermes"].get("readOnly"), "workers write the trials' folders"
    folder = MOUNTS["hermes-trials"]["mountPath"]
    assert {ENVIRONMENT[n].rpartition("/")[0] for n in RULES - {"HERMES_RUN_IN"}} == {folder}
    sources = {v["name"]: v for v in VALUES["volumes"]}
    assert sources["hermes"]["persistentVolumeClaim"] == {"claimName": "hermes-home"}
    assert sources["hermes-trials"]["configMap"] == {"name": "hermes-trials"}
    assert '"storage" "-home"' in (TEMPLATES / "storage.yaml").read_text()
    made = (TEMPLATES / "configmaps.yaml").read_text()
    for name in ("HERMES_POD_DEFAULTS", "HERMES_POD_RULES"):
        assert f"{ENVIRONMENT[name].rpartition('/')[2]}: |" in made
    outside = made[: made.index('"trials" "-trials"')]
    assert outside.count("{{- if") == outside.count("{{- end"), "made without Airflow too"


def test_the_user_is_that_of_the_controller_and_the_trials() -> None:
    helper, own = (TEMPLATES / "_helpers.tpl").read_text(), TEMPLATES / "controller.yaml"
    assert "runAsUser: {{ index . 2 }}" in helper
    assert re.search(
        rf'include "hermes\.\w+" \(list \. \S+ {VALUES["uid"]} true\)', own.read_text()
    )
    assert f'"user" {VALUES["uid"]}' in (TEMPLATES / "configmaps.yaml").read_text()


def test_no_part_of_airflow_gets_the_controllers_own_variables() -> None:
    assert not OF_THE_CONTROLLER & ENVIRONMENT.keys()


def variables_read(folder: Path) -> set[str]:
    """Return every `HERMES_…` that stands in the code as a text of its own."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^HERMES_[A-Z_]+[A-Z]$", node.value))
    return found


# What a trial finds in its own environment.
SET_BY_HERMES = {
    "HERMES_SWEEP", "HERMES_TRIAL", "HERMES_GPUS", "HERMES_CHECKPOINT_DIR", "HERMES_METRICS_FILE",
    "HERMES_OBJECTIVE", "HERMES_DIRECTION", "HERMES_MAX_EPOCHS", "HERMES_BEGAN_ANEW",
    "HERMES_TENSORBOARD_DIR", "HERMES_SECRETS", "HERMES_KEEP_CHECKPOINTS",
    "HERMES_CHECKPOINT_STORE", "HERMES_OTHER_METRICS", "HERMES_SCALE_LEARNING_RATE",
    "HERMES_RESIZE",
}  # fmt: skip


def test_a_new_variable_of_airflows_parts_is_given_to_them_or_known_to_be_optional() -> None:
    """Fails for a variable that nobody has thought of for these values."""
    read = variables_read(ROOT / "hermes_ops/airflow") | variables_read(ROOT / "hermes_ops/config")
    read -= SET_BY_HERMES
    assert read - OF_THE_CONTROLLER - OPTIONAL <= ENVIRONMENT.keys()


def test_the_rights_are_those_that_hermes_chart_gives_its_own_airflow() -> None:
    commands = fence("sh", "create role airflow")
    found = re.search(r"--verb=(\S+) --resource=(\S+)", commands)
    assert found is not None
    assert set(found[1].split(",")) == {"create", "get", "list", "patch", "delete"}
    assert set(found[2].split(",")) == {"pods", "pods/log"}
    own = (TEMPLATES / "rbac.yaml").read_text()
    assert "resources: [pods], verbs: [create, get, list, patch, delete]" in own
    for account in ("scheduler", "triggerer", "worker"):
        assert f"--serviceaccount=hermes:airflow-{account}" in commands


def test_the_image_takes_plugin_and_dag_from_where_the_package_has_them() -> None:
    build = fence("dockerfile", "FROM apache/airflow")
    assert (ROOT / "dags/hermes_sweep.py").exists()
    assert list((ROOT / "plugins").glob("*.py"))
    wheel = (ROOT / "pyproject.toml").read_text()
    for folder in ("dags", "plugins"):
        assert f'"{folder}" = "hermes_ops/share/{folder}"' in wheel
        assert f'"$share"/{folder}/' in build
