"""A cluster, the trial image on its nodes, and Airflow beside it whose trials are pods in it.

KUBECONFIG names a cluster, HERMES_TEST_IMAGE an image that it can pull (of PACKAGES=s3). Without
them the command in HERMES_TEST_CLUSTER (`up`, `load`, `base-image`, `down`) starts one, and the
images are built.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from bench import pod_cluster
from hermes_ops.kubernetes import connect
from tests.integration import harness
from tests.integration.conftest import Stack
from tests.integration.samplers import sampling
from tests.k8s import faults

if TYPE_CHECKING:
    from tests.bucket import Bucket

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
MOUNTED = [
    ROOT / "tests/integration/scripts/stub.py",
    ROOT / "tests/integration/scripts/workers.py",
    SCRIPTS / "pod_stub.py",
]
GPUS = 4


def run(*command: str, timeout_s: float = 120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Cluster:
    """A real cluster and one namespace of it, under the restricted pod security standard."""

    command: tuple[str, ...]
    namespace: str
    api: Any = field(init=False, default_factory=connect)

    def tool(self, *arguments: str, timeout_s: float = 120) -> str:
        """The command that started the cluster; what only it can do fails without it."""
        assert self.command, "HERMES_TEST_CLUSTER is not set: this fault cannot be made"
        return run(*self.command, *arguments, timeout_s=timeout_s)

    def pods(self, **labels: str) -> list[dict[str, Any]]:
        selector = ",".join(f"hermes-ops/{k}={v}" for k, v in labels.items()) or "hermes-ops/sweep"
        answer = self.api.list_namespaced_pod(
            self.namespace, label_selector=selector, _preload_content=False
        )
        return list(json.loads(answer.data)["items"])

    def running(self, sweep: str) -> dict[str, Any]:
        """The one pod of a sweep of one trial, once its container runs."""

        def started() -> Any:
            up = [p for p in self.pods(sweep=sweep) if p["status"]["phase"] == "Running"]
            return up[0] if up else None

        return dict(harness.await_(started, 180.0))


def gpus_of(pod: dict[str, Any]) -> int:
    resources = pod["spec"]["containers"][0]["resources"]
    return int(resources.get("limits", {}).get("nvidia.com/gpu", 0))


@dataclass
class PodSampler:
    """Looks at the pods of the namespace each 0.3 s."""

    cluster: Cluster
    most_gpus: int = 0
    twice: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        while not self.stop.wait(0.3):
            live = [p for p in self.cluster.pods() if p["status"].get("phase") == "Running"]
            self.most_gpus = max(self.most_gpus, sum(gpus_of(p) for p in live))
            trials = [(p["metadata"]["labels"]["hermes-ops/sweep"],
                       p["metadata"]["labels"]["hermes-ops/trial"]) for p in live]  # fmt: skip
            self.twice += [f"{t}" for t in trials if trials.count(t) > 1]


class PodLab(harness.Lab):
    """Airflow beside the cluster, with sweeps whose trials are pods."""

    def __init__(self, stack: Any, folder: Path, cluster: Cluster) -> None:
        super().__init__(stack, folder)
        self.cluster = cluster

    def pod_sweep(
        self, name: str, rates: list[float], epochs: int, pause: float, **changes: Any
    ) -> Any:
        """A sweep of scripts/pod_stub.py, as `harness.stub` is one of stub.py."""
        pod = changes.pop("pod", {})
        wishes = ("hungry", "greedy", "lying")
        hungry = [f"--{wish}" for wish in wishes if changes.pop(wish, False)]
        content = harness.stub(name, rates, epochs, pause, **changes)
        command = [c if c != "stub.py" else "pod_stub.py" for c in content["trial"]["command"]]
        content["trial"] |= {
            "command": command + hungry, "directory": "/scripts", "run_in": "pod",
        }  # fmt: skip
        if pod:
            content["trial"]["pod"] = pod
        return content

    @contextlib.contextmanager
    def sampled_pods(self) -> Iterator[PodSampler]:
        with sampling(PodSampler(self.cluster)) as sampler:
            yield sampler


@pytest.fixture(scope="session")
def cluster_command() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get("HERMES_TEST_CLUSTER", "")))


@pytest.fixture(scope="session")
def kubeconfig(home: Path) -> Iterator[None]:
    """KUBECONFIG of this process, of a cluster that is started here where there is none.

    Its nodes see what is mounted now, so HERMES_HOME is there before.
    """
    with pod_cluster.cluster(nodes=2, gpus=2):
        yield


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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def image(kubeconfig: None) -> str:
    """The trial image, on every node."""
    return pod_cluster.trial_image()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """HERMES_HOME: its folder `sweeps` is the volume of the pods, a small disk of its own."""
    folder = Path(tmp_path_factory.mktemp("pods"))
    volume = folder / "sweeps"
    volume.mkdir()
    if os.getuid() != 0 or os.environ.get("KUBECONFIG"):  # nodes that are there would not see it
        yield folder
        return
    run("mount", "-t", "tmpfs", "-o", "size=640m,mode=755", "tmpfs", str(volume))
    try:
        yield folder
    finally:
        run("umount", "--lazy", str(volume))


@pytest.fixture(scope="session")
def cluster(image: str, cluster_command: tuple[str, ...], home: Path) -> Iterator[Cluster]:
    """A namespace with the scripts, and a claim whose volume is HERMES_HOME/sweeps."""
    with (
        pod_cluster.namespace() as (api, name),
        pod_cluster.volume(api, name, home / "sweeps", MOUNTED),
    ):
        yield Cluster(cluster_command, name)


@pytest.fixture(scope="session")
def image_with_s3(kubeconfig: None) -> str:
    """The trial image with what a bucket needs, on every node."""
    return pod_cluster.trial_image("s3")


@pytest.fixture(scope="session")
def pod_bucket(cluster: Cluster) -> Iterator[Bucket]:
    """A bucket on this machine, where pods find it too; its keys are in the Secret `bucket`."""
    from tests.bucket import bucket

    nodes = cluster.api.list_node().items
    node = next(a.address for n in nodes for a in n.status.addresses if a.type == "InternalIP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((node, 9))  # sends nothing
        host = towards.getsockname()[0]
    with bucket(host) as made:
        secret = {"metadata": {"name": "bucket"}, "stringData": made.variables}
        cluster.api.create_namespaced_secret(cluster.namespace, secret)
        yield made


@contextlib.contextmanager
def airflow_beside(
    cluster: Cluster, home: Path, folder: Path, defaults: dict[str, Any], slots: int
) -> Iterator[PodLab]:
    """Airflow with so many slots, whose sweeps' pods are in the cluster, by these defaults."""
    (home / "pod.yaml").write_text(yaml.safe_dump(defaults))
    stack = Stack(home)
    said = stack.up(slots=slots)
    assert said.returncode == 0, said.stdout + said.stderr
    made = PodLab(stack, folder, cluster)
    try:
        yield made
    finally:
        made.close()
        stopped = stack.down()
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def preempted_with_the_same_curve(sweep: Any, rates: Sequence[float], epochs: int) -> list[int]:
    """The trials that gave way, of which there must be some; each curve is that of one alone."""
    preempted = [n for n in range(len(rates)) if len(sweep.segments(n)) > 1]
    assert preempted, "the policy preempted nobody: the test shows nothing"
    for number in preempted:
        sweep.assert_whole(number, rates[number], epochs)
    return preempted


@pytest.fixture(scope="session")
def lab(
    cluster: Cluster, image: str, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodLab]:
    """Airflow with four slots, whose sweeps' pods are in the cluster."""
    defaults = pod_cluster.defaults(image, cluster.namespace)
    with airflow_beside(cluster, home, tmp_path_factory.mktemp("sweeps"), defaults, GPUS) as made:
        yield made


@pytest.fixture
def sweep(lab: PodLab, request: pytest.FixtureRequest) -> Any:
    """A sweep of one trial that has trained for some epochs; its parameter: whether deferred."""
    name = request.node.name.removeprefix("test_")[:24].strip("_").replace("_", "-")
    pod = {"deferrable": getattr(request, "param", False)}
    content = lab.pod_sweep(name, [faults.RATE], faults.EPOCHS, faults.PAUSE_S, pod=pod)
    begun = lab.start(content)
    harness.await_(lambda: begun.lines(0) >= 4, faults.START_S)
    return begun
