"""A Kubernetes cluster for benchmarks, with the objects that trials need.

KUBECONFIG names one, HERMES_TEST_IMAGE an image of helm/images/trial that its nodes find. Without
them the command in HERMES_TEST_CLUSTER (`up`, `load`, `base-image`, `down`) starts a cluster, and
the image is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.measure import ROOT, NotMeasuredError
from hermes_ops.kubernetes import connect
from hermes_ops.stack.lifecycle import signals_ignored

CLAIM = "trials"
SCRIPTS = "/scripts"
IMAGE_INPUTS = (
    "hermes_ops/trial",
    "hermes_ops/references.py",
    "helm/images/trial",
    "requirements.lock",
)
OF_PIP = ("/etc/ssl/certs", "/etc/pip.conf")
BUILD_TIMEOUT_S, UP_TIMEOUT_S = 900.0, 300.0


@contextlib.contextmanager
def cluster(nodes: int, gpus: int) -> Iterator[None]:
    """Set KUBECONFIG, if it is not set, to a cluster that ends with the block.

    :param gpus: of each node
    """
    if os.environ.get("KUBECONFIG"):
        yield
        return
    command = _command()
    _run(*command, "down", timeout_s=UP_TIMEOUT_S)  # what was cut off has left
    shape = ("--nodes", str(nodes), "--gpus", str(gpus))
    said = _run(*command, "up", *shape, timeout_s=UP_TIMEOUT_S)
    found = re.search(r"^export KUBECONFIG=(.*)$", said, re.MULTILINE)
    if found is None:
        raise NotMeasuredError(f"{shlex.join(command)} up names no KUBECONFIG: {said}")
    os.environ["KUBECONFIG"] = shlex.split(found[1])[0]
    try:
        yield
    finally:
        del os.environ["KUBECONFIG"]
        with signals_ignored():
            _run(*command, "down", timeout_s=UP_TIMEOUT_S)


def trial_image(packages: str = "plain") -> str:
    """Load the trial image, with a list of packages of helm/images/trial, on every node."""
    if named := os.environ.get("HERMES_TEST_IMAGE"):
        return named
    command, tag = _command(), f"localhost/hermes-trial:{packages}-{_digest()}"
    if not _is_built(tag):
        _build(command, packages, tag)
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/trial.tar"
        _run("buildah", "push", tag, f"docker-archive:{archive}:{tag}", timeout_s=BUILD_TIMEOUT_S)
        _run(*command, "load", archive, timeout_s=BUILD_TIMEOUT_S)
    return tag


def _is_built(tag: str) -> bool:
    """Return whether an earlier run has left the image; its tag is a digest of its content."""
    look = ["buildah", "inspect", "--type", "image", tag]
    return subprocess.run(look, capture_output=True, check=False).returncode == 0


def _build(command: tuple[str, ...], packages: str, tag: str) -> None:
    _run(*command, "base-image", timeout_s=BUILD_TIMEOUT_S)
    build = ["buildah", "build", "--isolation", "chroot", "--network", "host"]
    build += ["--build-arg", "PYTHON_IMAGE=localhost/python:3.11-slim-bookworm"]
    build += ["--build-arg", f"PACKAGES={packages}"]
    build += [f"--volume={p}:{p}:ro" for p in OF_PIP if Path(p).exists()]
    build += ["-f", str(ROOT / "helm/images/trial/Dockerfile"), "-t", tag, str(ROOT)]
    _run(*build, timeout_s=BUILD_TIMEOUT_S)


@contextlib.contextmanager
def namespace() -> Iterator[tuple[Any, str]]:
    """Yield the cluster's API, and a namespace under the restricted pod security standard."""
    api, name = connect(), f"hermes-{uuid.uuid4().hex[:8]}"
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create_namespace({"metadata": {"name": name, "labels": level}})
    try:
        yield api, name
    finally:
        with signals_ignored():
            api.delete_namespace(name)


def takes_pods(api: Any, name: str) -> bool:  # noqa: ANN401 - the client has no types
    """Return whether the namespace has its service account, which is created a little later."""
    return bool(api.list_namespaced_service_account(name).items)


@contextlib.contextmanager
def volume(api: Any, name: str, folder: Path, scripts: Iterable[Path]) -> Iterator[None]:  # noqa: ANN401 - the client has no types
    """Create the scripts, and a claim whose volume is the folder, in that namespace."""
    texts = {script.name: script.read_text() for script in scripts}
    with claimed(api, name, CLAIM, folder):
        api.create_namespaced_config_map(name, {"metadata": {"name": "scripts"}, "data": texts})
        yield


@contextlib.contextmanager
def claimed(
    api: Any,  # noqa: ANN401 - the client has no types
    namespace: str,
    name: str,
    folder: Path,
    *,
    mode: str = "ReadWriteMany",
    node: str | None = None,
) -> Iterator[None]:
    """Create a claim whose volume is the folder, on one node if it is named."""
    modes, size = {"accessModes": [mode], "storageClassName": ""}, {"storage": "1Gi"}
    spec: dict[str, Any] = {**modes, "hostPath": {"path": str(folder), "type": "Directory"}}
    if node is not None:
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}
    own = f"{namespace}-{name}"
    api.create_persistent_volume({"metadata": {"name": own}, "spec": {**spec, "capacity": size}})
    wanted = {**modes, "volumeName": own, "resources": {"requests": size}}
    api.create_namespaced_persistent_volume_claim(
        namespace, {"metadata": {"name": name}, "spec": wanted}
    )
    try:
        yield
    finally:
        with signals_ignored():
            api.delete_persistent_volume(own)


def defaults(image: str, name: str) -> dict[str, Any]:
    """Return the installation's defaults for pods (`pod.yaml`) in that namespace."""
    return {
        "image": image,
        "namespace": name,
        "claim": CLAIM,
        "limits": {"memory": "256Mi"},
        "requests": {"cpu": "50m"},
        "volumes": [{"mount": SCRIPTS, "config_map": "scripts"}],
    }


def _command() -> tuple[str, ...]:
    found = tuple(shlex.split(os.environ.get("HERMES_TEST_CLUSTER", "")))
    if not found:
        raise NotMeasuredError(
            "no cluster: set KUBECONFIG (and HERMES_TEST_IMAGE), or HERMES_TEST_CLUSTER to a "
            "command for one"
        )
    return found


def _run(*command: str, timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise NotMeasuredError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _digest() -> str:
    """Return a digest of the content of the image."""
    whole = hashlib.sha256()
    for name in IMAGE_INPUTS:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                whole.update(file.read_bytes())
    return whole.hexdigest()[:12]
