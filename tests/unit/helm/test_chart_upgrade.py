"""What the chart renders where a release is there already; helm is needed, a cluster is not."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "helm/hermes-ops"
NAMESPACE = "hermes"
KINDS = {
    "v1": {"secrets": "Secret", "persistentvolumeclaims": "PersistentVolumeClaim"},
    "apps/v1": {"statefulsets": "StatefulSet"},
}
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}

Objects = dict[str, dict[str, Any]]
Upgrade = Callable[..., subprocess.CompletedProcess[str]]


def discovery(version: str) -> dict[str, Any]:
    resources = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
        for name, kind in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers like the API of a cluster that has these objects, by path."""

    objects: Objects

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        found = self.objects.get(path)
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in KINDS:
            found = discovery(version)
        body = json.dumps(found or NOT_FOUND).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def upgrade(tmp_path: Path) -> Iterator[Upgrade]:
    """Render the chart as `helm upgrade` does, against a cluster with some objects."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    handler = type("Cluster", (Handler,), {"objects": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = tmp_path / "kubeconfig"
    named = {"cluster": "c", "user": "u"}
    address = f"http://127.0.0.1:{server.server_address[1]}"
    kubeconfig.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "contexts": [{"name": "c", "context": named}],
        "users": [{"name": "u", "user": {}}],
    }))  # fmt: skip

    def run(
        objects: Objects, values: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        handler.objects = objects  # type: ignore[attr-defined]
        command = [helm, "template", "hermes", str(CHART), "--namespace", NAMESPACE]
        return subprocess.run(
            [*command, "--is-upgrade", "--dry-run=server", "--kube-version", "1.34.0",
             "--values", "-"],
            input=json.dumps(values or {}), capture_output=True, text=True, check=False,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)},
        )  # fmt: skip

    yield run
    server.shutdown()
    server.server_close()


def database(size: str, storage_class: str | None = None) -> Objects:
    """The StatefulSet of a release's database."""
    claim: dict[str, Any] = {"resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/hermes-postgresql"
    metadata = {"name": "hermes-postgresql", "namespace": NAMESPACE}
    return {path: {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata,
        "spec": {"volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}]},
    }}  # fmt: skip


@pytest.mark.parametrize("size", ["20Gi", "5Gi", "10G"])
def test_another_size_of_the_database_is_refused_before_anything_is_changed(
    upgrade: Upgrade, size: str
) -> None:
    done = upgrade(database("10Gi"), {"postgresql": {"size": size}})
    assert done.returncode != 0
    assert f"postgresql.size: {size}, and the StatefulSet hermes-postgresql was made with 10Gi" in (
        done.stderr
    )
    assert "docs/kubernetes.md#a-larger-database" in done.stderr


@pytest.mark.parametrize(
    ("there", "value"),
    [("10Gi", "10Gi"), ("1Gi", "1024Mi"), ("1536Mi", "1.5Gi"), ("2500M", "2.5G")],
)
def test_the_same_size_of_the_database_in_other_words_is_no_change(
    upgrade: Upgrade, there: str, value: str
) -> None:
    done = upgrade(database(there), {"postgresql": {"size": value}})
    assert done.returncode == 0, done.stderr


def test_another_storage_class_of_the_database_is_refused(upgrade: Upgrade) -> None:
    done = upgrade(database("10Gi", "slow"), {"postgresql": {"storageClass": "fast"}})
    assert 'postgresql.storageClass: "fast"' in done.stderr
    assert 'made with "slow"' in done.stderr
    same = upgrade(database("10Gi", "slow"), {"postgresql": {"storageClass": "slow"}})
    assert same.returncode == 0, same.stderr


def test_passwords_and_keys_of_a_release_stay_at_an_upgrade(upgrade: Upgrade) -> None:
    known = {"fernet-key": "f", "api-secret": "a", "jwt-secret": "j", "admin-password": "p"}
    coded = {key: base64.b64encode(text.encode()).decode() for key, text in known.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "data": coded,
              "metadata": {"name": "hermes-airflow", "namespace": NAMESPACE}}  # fmt: skip
    done = upgrade({f"/api/v1/namespaces/{NAMESPACE}/secrets/hermes-airflow": secret})
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    (kept,) = (
        found["stringData"] for found in objects
        if found["kind"] == "Secret" and found["metadata"]["name"] == "hermes-airflow"
    )  # fmt: skip
    assert kept == known
