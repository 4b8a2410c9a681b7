"""The installation that the documentation says, on a real cluster.

Where there is no docker and no registry, scripts/docker.py stands in for both.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.kubernetes import labels_of_sweep
from hermes_ops.stack import airflow_service
from tests.integration import harness
from tests.integration.samplers import sampling
from tests.k8s import faults
from tests.k8s.conftest import Cluster, PodSampler

pytestmark = pytest.mark.k8s

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kubernetes.md").read_text()
SCRIPTS = Path(__file__).parent / "scripts"
NAMESPACE, TRIALS = "hermes", "hermes-trials"
CONTROLLER = f"kubectl -n {NAMESPACE} exec deploy/hermes-controller -c controller --"
INSTALL_S = 1_800


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
        began_s = time.monotonic()
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
        print(f"\n{time.monotonic() - began_s:.0f} s: {line}")
        return done.stdout

    tag = "docker.io/library/postgres:17.6-bookworm"
    run(f"docker build -f {SCRIPTS / 'postgresql.Dockerfile'} -t {tag} . && docker push {tag}")
    yield [run(line) for line in COMMANDS]
    run(f"helm uninstall hermes --namespace {NAMESPACE} --wait")
    run(f"kubectl delete namespace {NAMESPACE} {TRIALS}")
    run("kubectl delete pv --selector app.kubernetes.io/instance=hermes")


@pytest.mark.installation
def test_the_ten_commands_end_with_a_finished_sweep(installed: list[str], sh: Any) -> None:
    assert "Phase:          Succeeded" in installed[7]
    listed = sh(f"{CONTROLLER} hermes sweep list --json")
    states = {row["dag_run_id"].split("-")[0]: row["state"] for row in json.loads(listed)}
    assert states == {"helm": "success", "sgd": "success"}


def objects(sh: Any, kind: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    found = json.loads(sh(f"kubectl -n {namespace} get {kind} -o json"))
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


def controllers(sh: Any) -> list[str]:
    """The controllers' pods."""
    return [
        p["metadata"]["name"]
        for p in objects(sh, "pods")
        if p["metadata"]["labels"].get("app.kubernetes.io/component") == "controller"
        and "deletionTimestamp" not in p["metadata"]
    ]


def told_by(sh: Any, pod: str) -> str:
    """What a controller tells Prometheus, through the API server's proxy."""
    return str(
        sh(f"kubectl get --raw /api/v1/namespaces/{NAMESPACE}/pods/{pod}:9464/proxy/metrics")
    )


def metrics(sh: Any) -> dict[str, str]:
    """What each controller tells Prometheus, by its pod."""
    return {pod: told_by(sh, pod) for pod in controllers(sh)}


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
        ("airflow", f"create pods -n {TRIALS}", True),
        ("airflow", f"get pods/log -n {TRIALS}", True),
        ("airflow", f"list events -n {TRIALS}", True),
        ("airflow", f"get secrets -n {TRIALS}", False),
        ("airflow", f"create pods -n {NAMESPACE}", False),
        ("airflow", f"get secrets -n {NAMESPACE}", False),
        ("airflow", "list nodes", False),
        ("airflow", "create pods -n default", False),
        ("controller", f"delete pods -n {TRIALS}", True),
        ("controller", f"delete pods -n {NAMESPACE}", False),
        ("controller", f"create pods -n {TRIALS}", False),
        ("controller", f"get secrets -n {NAMESPACE}", False),
        ("share-volume", "create persistentvolumes", False),
        ("trials", f"get secrets -n {TRIALS}", False),
        ("trials", f"list pods -n {TRIALS}", False),
        ("default", f"list pods -n {NAMESPACE}", False),
    ],
)
def test_nobody_may_more_than_he_needs(
    installed: list[str], programs: dict[str, str], account: str, question: str, allowed: bool
) -> None:
    name = account if account == "default" else f"hermes-{account}"
    of = TRIALS if account == "trials" else NAMESPACE
    who = f"--as=system:serviceaccount:{of}:{name}"
    line = ["kubectl", "auth", "can-i", *question.split(), who]
    said = subprocess.run(line, env=programs, capture_output=True, text=True, check=False)
    assert said.stdout.strip() == ("yes" if allowed else "no")


@pytest.mark.installation
def test_airflow_is_set_as_hermes_up_sets_it(installed: list[str], sh: Any) -> None:
    said = sh(f"kubectl -n {NAMESPACE} get configmap hermes-airflow -o json")
    parsed = configparser.ConfigParser()
    parsed.read_string(json.loads(said)["data"]["airflow.cfg"])
    for section, values in airflow_service._timing().items():
        found = {k: parsed[section].get(k) for k in values}
        assert found == values, section


def secrets(sh: Any) -> dict[str, dict[str, str]]:
    return {s["metadata"]["name"]: s["data"] for s in objects(sh, "secrets")
            if s["type"] == "Opaque"}  # fmt: skip


# -- an upgrade and a rollback under running sweeps ----------------------------------------------

RATES, EPOCHS, PAUSE_S, GPUS = [0.5, 0.52, 0.54, 0.56], 330, 1.0, 4
"""Half of the trials wait; one trains for longer than both changes take together."""
SWEEPS_S = 1_800.0
PARTS = {
    "controller", "api-server", "scheduler", "dag-processor", "triggerer", "mlflow", "postgresql",
}  # fmt: skip
LESS = {"resources": {"requests": {"cpu": "50m"}}}
"""A value of every part, so that each of them is restarted."""
OTHER_VALUES = {
    "controller": LESS, "mlflow": LESS, "postgresql": LESS,
    "airflow": dict.fromkeys(("apiServer", "scheduler", "dagProcessor", "triggerer"), LESS),
}  # fmt: skip


@dataclass(frozen=True)
class Installation:
    """What `harness.Lab` asks of a stack, of the installation; a copy of its sweeps' folders."""

    home: Path
    airflow_url: str
    mlflow_url: str


@contextlib.contextmanager
def forwarded(programs: dict[str, str], service: str, port: int) -> Iterator[str]:
    """The address of a service, as long as the pod behind it lives."""
    line = ["kubectl", "-n", NAMESPACE, "port-forward", f"svc/{service}", f":{port}"]
    with subprocess.Popen(line, env=programs, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found is not None
            yield f"http://localhost:{found[1]}"
        finally:
            process.terminate()


@contextlib.contextmanager
def reached(programs: dict[str, str], sh: Any, folder: Path) -> Iterator[harness.Lab]:
    """The installation's Airflow and MLflow, as the documentation says to reach them."""
    password = base64.b64decode(secrets(sh)["hermes-airflow"]["admin-password"]).decode()
    (folder / "secrets").mkdir(exist_ok=True)
    (folder / "secrets/admin.password").write_text(password)
    with contextlib.ExitStack() as stack:
        airflow = stack.enter_context(forwarded(programs, "hermes-airflow", 8080))
        mlflow = stack.enter_context(forwarded(programs, "hermes-mlflow", 5000))
        lab = harness.Lab(Installation(folder, airflow, mlflow), folder)
        stack.callback(lab.close)
        yield lab


def steps(sh: Any, sweep: str) -> int:
    """How many steps the sweep's trials have reported."""
    line = f"cat /hermes/sweeps/{sweep}/trials/*/metrics.jsonl | wc -l"
    return int(sh(f"{CONTROLLER} sh -c {shlex.quote(line)}"))


def pods_of_parts(sh: Any) -> dict[str, set[str]]:
    """The pods of each part; waits until those that are to go are gone."""

    def settled() -> Any:
        found: dict[str, set[str]] = {}
        for pod in (p["metadata"] for p in objects(sh, "pods")):
            part = pod["labels"].get("app.kubernetes.io/component")
            if part in PARTS:
                found.setdefault(part, set()).add(pod["uid"] + pod.get("deletionTimestamp", ""))
        return all(len(pods) == 1 for pods in found.values()) and found

    return dict(harness.await_(settled, 120.0, 1.0))


def training(sh: Any) -> dict[str, str]:
    """The sweep of each pod in which a trial trains, by the pod's uid."""
    return {
        pod["metadata"]["uid"]: pod["metadata"]["labels"]["hermes-ops/sweep"]
        for pod in objects(sh, "pods", TRIALS)
        if "hermes-ops/trial" in pod["metadata"].get("labels", {})
        and pod["status"].get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
    }


def await_steps(sh: Any, sweep: str, more_than: int, timeout_s: float) -> None:
    harness.await_(lambda: steps(sh, sweep) > more_than, timeout_s, 1.0)


def changed(sh: Any, sweeps: list[str], change: str, **how: Any) -> None:
    """Change the release: every part is another pod then, and every trial's pod trains on."""
    former, began_s, trained = pods_of_parts(sh), time.monotonic(), training(sh)
    labels = [label for sweep in sweeps for label in labels_of_sweep(sweep).values()]
    assert sorted(trained.values()) == sorted(labels * (GPUS // 2))
    sh(change, timeout_s=INSTALL_S, **how)
    print(f"\n{time.monotonic() - began_s:.0f} s: {change}")
    present = pods_of_parts(sh)
    assert set(former) == set(present) == PARTS
    assert all(former[part].isdisjoint(present[part]) for part in PARTS)
    for sweep in sweeps:
        before = steps(sh, sweep)
        assert before < len(RATES) * EPOCHS, "it ended meanwhile: the test shows nothing"
        await_steps(sh, sweep, before, 120.0)
    assert trained.keys() <= training(sh).keys()


def of_stub(name: str, *, deferrable: bool, epochs: int = EPOCHS) -> Any:
    """A sweep of stub.py as pods on half of the GPUs; no failure of a trial is forgiven."""
    pod = {
        "volumes": [{"mount": "/scripts", "config_map": "stub"}],
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "deferrable": deferrable,
    }
    trial = {"directory": "/scripts", "run_in": "pod", "pod": pod, "max_failures": 0}
    budget = {"max_parallel": GPUS // 2}
    return harness.stub(name, RATES, epochs, PAUSE_S, trial=trial, budget=budget)


@pytest.fixture(scope="module")
def patient(installed: list[str], sh: Any) -> Iterator[None]:
    """The script of `of_stub`, and a policy that preempts nobody: a stop is a fault's doing."""
    script = ROOT / "tests/integration/scripts/stub.py"
    sh(f"kubectl -n {TRIALS} create configmap stub --from-file {script}")
    choose_policy(sh, "fifo")
    yield
    choose_policy(sh, "frontrunner")


def choose_policy(sh: Any, name: str) -> None:
    """Change the pool's policy as Airflow's administrator: the controller's user may not."""
    password = base64.b64decode(secrets(sh)["hermes-airflow"]["admin-password"]).decode()
    file = "/tmp/admin.password"
    user = f"HERMES_AIRFLOW_USER=admin HERMES_AIRFLOW_PASSWORD_FILE={file}"
    line = f"umask 077; cat > {file}; {user} hermes policy {name}; code=$?; rm {file}; exit $code"
    sh(f"{CONTROLLER.replace('exec', 'exec -i')} sh -c {shlex.quote(line)}", text=password)


@pytest.fixture(scope="module")
def upgraded(
    patient: None, programs: dict[str, str], sh: Any, checkout: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[harness.Sweep], PodSampler]]:  # fmt: skip
    """Two sweeps, held by workers and by the triggerer, through an upgrade and back again."""
    folder = tmp_path_factory.mktemp("installation")
    with reached(programs, sh, folder) as lab:
        modes = {"by-workers": False, "by-triggerer": True}
        names = [lab.start(of_stub(n, deferrable=mode)).id for n, mode in modes.items()]
    for name in names:
        await_steps(sh, name, GPUS, 240.0)
    harness.await_(lambda: len(training(sh)) == GPUS, 120.0, 1.0)
    with sampling(PodSampler(Cluster((), TRIALS))) as sampler:
        how = f"hermes helm/hermes-ops -n {NAMESPACE} --wait --timeout 15m"
        upgrade = f"helm upgrade {how} --values my-values.yaml --values -"
        changed(sh, names, upgrade, text=json.dumps(OTHER_VALUES), cwd=checkout)
        changed(sh, names, f"helm rollback hermes -n {NAMESPACE} --wait --timeout 15m")
        with reached(programs, sh, folder) as lab:
            sweeps = [harness.Sweep(lab, name) for name in names]
            for sweep in sweeps:
                sweep.await_end(SWEEPS_S)
            sh(f"{CONTROLLER} tar -C /hermes -cf - sweeps | tar -C {folder} -xf -")
            yield sweeps, sampler


@pytest.mark.installation
@pytest.mark.timeout(3_600)
def test_an_upgrade_and_a_rollback_lose_no_trial_and_spend_no_try(upgraded: Any) -> None:
    for sweep in upgraded[0]:
        assert sweep.state == "success"
        assert sweep.states() == dict.fromkeys(range(len(RATES)), "finished")
        for number in range(len(RATES)):
            assert sweep.tasks()["trial", number]["state"] == "success"
            ended = [s["outcome"] for s in sweep.segments(number)]
            assert ended == ["finished"], sweep.log("trial", number)


@pytest.mark.installation
def test_a_trial_trains_on_through_an_upgrade_with_one_continuous_curve(upgraded: Any) -> None:
    for sweep in upgraded[0]:
        for number, rate in enumerate(RATES):
            sweep.assert_whole(number, rate, EPOCHS)


@pytest.mark.installation
def test_no_trial_runs_twice_during_an_upgrade_and_no_pod_is_left(upgraded: Any) -> None:
    sweeps, sampler = upgraded
    assert sampler.twice == []
    assert 1 <= sampler.most_gpus <= GPUS
    for sweep in sweeps:
        for number in range(len(RATES)):
            faults.never_twice(sweep, number)
    harness.await_(lambda: not sampler.cluster.pods(), faults.NO_POD_S)


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
    harness.await_(lambda: leaders(sh), 120.0, 1.0)
    assert len(metrics(sh)) == 2
    assert len(leaders(sh)) == 1


CUT = """SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND usename = 'hermes_controller'"""


def leaders(sh: Any) -> list[str]:
    """The pods of the controllers that say that they lead; one may not answer."""
    found = []
    for pod in controllers(sh):
        with contextlib.suppress(AssertionError):
            if 'hermes_leading{pool="gpus"} 1.0' in told_by(sh, pod):
                found.append(pod)
    return found


def restarts(sh: Any, pod: str) -> int:
    """How often the pod's containers have been started again."""
    (found,) = (p for p in objects(sh, "pods") if p["metadata"]["name"] == pod)
    return sum(c["restartCount"] for c in found["status"]["containerStatuses"])


@pytest.mark.installation
@pytest.mark.timeout(1_200)
def test_a_leader_whose_database_connection_is_cut_makes_way_and_no_trial_is_stopped(
    patient: None, programs: dict[str, str], sh: Any, tmp_path: Path
) -> None:
    sh(f"kubectl -n {NAMESPACE} scale deploy/hermes-controller --replicas 2")
    sh(f"kubectl -n {NAMESPACE} rollout status deploy/hermes-controller", timeout_s=300)
    with reached(programs, sh, tmp_path) as lab:
        sweep = lab.start(of_stub("leader-cut", deferrable=False, epochs=40))
        harness.await_(lambda: steps(sh, sweep.id) > GPUS, 240.0, 1.0)
        (former,) = harness.await_(lambda: leaders(sh), 120.0, 1.0)
        before, cut_s = restarts(sh, former), time.monotonic()
        psql = f"psql -h /tmp -U postgres -tAc {shlex.quote(CUT)}"
        assert sh(f"kubectl -n {NAMESPACE} exec statefulset/hermes-postgresql -- {psql}").split()
        harness.await_(lambda: {*leaders(sh)} - {former} or restarts(sh, former) > before, 120.0)
        print(f"\nrecovery: {former} has made way {time.monotonic() - cut_s:.1f} s after the cut")
        harness.await_(lambda: restarts(sh, former) > before, 120.0)
        assert len(harness.await_(lambda: leaders(sh), 120.0)) == 1
        assert sweep.await_end(SWEEPS_S) == "success"
        assert sweep.states() == dict.fromkeys(range(len(RATES)), "finished")
        sh(f"{CONTROLLER} tar -C /hermes -cf - sweeps/{sweep.id} | tar -C {tmp_path} -xf -")
        for number in range(len(RATES)):
            assert [s["outcome"] for s in sweep.segments(number)] == ["finished"]
            faults.never_twice(sweep, number)
