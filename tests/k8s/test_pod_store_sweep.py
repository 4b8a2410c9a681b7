"""Checkpoints in a bucket alone: a pod's own end with it, and the next pod takes the bucket's."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench import pod_cluster
from hermes_ops.stack.layout import Layout
from tests.bucket import Bucket
from tests.integration import harness
from tests.integration.samplers import sampling
from tests.k8s.conftest import Cluster, PodLab, airflow_beside, preempted_with_the_same_curve

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(1500)]

RATES = [0.01, 0.02, 0.03, 0.04, 0.6, 0.7, 0.8, 0.9]  # the last ones fall fastest
EPOCHS, PAUSE_S, SWEEP_S = 16, 0.8, 600.0
GPUS = 4
RATE, LONG, SLOW_S = 0.5, 24, 1.2  # slow enough that most checkpoints are copied
KEEP_S = 20
MOUNT = "/hermes/trial/checkpoints"
FETCHED = r"its checkpoint of step \d+ comes from the store"


@dataclass
class Seen:
    """The pods, and what lay on the volume that they share of checkpoints, each 0.3 s."""

    cluster: Cluster
    sweeps: Path
    pods: dict[str, Any] = field(default_factory=dict)
    shared: set[Path] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        while not self.stop.wait(0.3):
            self.pods |= {p["metadata"]["name"]: p for p in self.cluster.pods()}
            with contextlib.suppress(FileNotFoundError):  # a folder that was just removed
                self.shared |= set(self.sweeps.glob("*/trials/*/checkpoints/*"))


@pytest.fixture(scope="module")
def store_lab(
    cluster: Cluster,
    image_with_s3: str,
    pod_bucket: Bucket,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PodLab]:
    """Airflow with the bucket's keys; pods get them by a Secret, and keep checkpoints in memory."""
    home = Path(tmp_path_factory.mktemp("stored"))
    (home / "sweeps").mkdir()
    defaults = pod_cluster.defaults(image_with_s3, cluster.namespace)
    defaults |= {"claim": "stored-trials", "secrets": ["bucket"]}
    defaults["volumes"].append({"mount": MOUNT, "memory": "16Mi"})
    folder = tmp_path_factory.mktemp("sweeps")
    shared = pod_cluster.claimed(cluster.api, cluster.namespace, "stored-trials", home / "sweeps")
    with pytest.MonkeyPatch.context() as patch, shared:
        for name, value in pod_bucket.variables.items():
            patch.setenv(name, value)
        patch.setenv("HERMES_TRIAL_ENVIRONMENT", "AWS_*")
        with airflow_beside(cluster, home, folder, defaults, GPUS) as made:
            yield made


@pytest.fixture(scope="module")
def seen(store_lab: PodLab) -> Iterator[Seen]:
    with sampling(Seen(store_lab.cluster, store_lab.home / "sweeps")) as sampler:
        yield sampler


@pytest.fixture(scope="module", params=[False, True], ids=["worker", "triggerer"])
def told(store_lab: PodLab, pod_bucket: Bucket, seen: Seen, request: pytest.FixtureRequest) -> Any:
    """The sweep, its pods held by workers or not; the bucket held copies of it meanwhile."""
    store, pod = {"store": pod_bucket.url}, {"deferrable": request.param}
    content = store_lab.pod_sweep("stored", RATES, EPOCHS, PAUSE_S, checkpoints=store, pod=pod)
    with store_lab.policy("hermes", guard_k=0):
        sweep = store_lab.start(content)
        harness.await_(lambda: pod_bucket.held(sweep.id), 240.0)
        sweep.await_end(SWEEP_S)
    return sweep


def test_every_trial_with_its_checkpoints_in_a_bucket_is_finished_and_all_accounts_agree(
    told: Any,
) -> None:
    numbers, tasks = range(len(RATES)), told.tasks()
    assert told.state == "success"
    assert told.states() == dict.fromkeys(numbers, "finished")
    assert {(tasks["trial", n]["state"], tasks["trial", n]["try_number"]) for n in numbers} == {
        ("success", 1)
    }
    for number in numbers:
        outcomes = [part["outcome"] for part in told.segments(number)]
        assert outcomes == ["preempted"] * (len(outcomes) - 1) + ["finished"]
        assert told.tag(number, "hermes.segments") == str(len(outcomes))
        assert told.tag(number, "hermes.preemptions") == str(len(outcomes) - 1)


def test_a_trial_preempted_with_a_bucket_has_the_curve_of_one_never_stopped(told: Any) -> None:
    for number in preempted_with_the_same_curve(told, RATES, EPOCHS):
        parts = told.segments(number)
        assert [p["first_step"] for p in parts[1:]] == [p["last_step"] for p in parts[:-1]]


def test_each_further_pod_of_a_trial_trains_on_from_what_it_took_from_the_bucket(
    told: Any,
) -> None:
    resumed = [pair for number in range(len(RATES)) for pair in went_on(told, number)]
    assert resumed
    for done, first in resumed:
        assert first > 1
        assert done <= first <= done + 1


def went_on(sweep: Any, number: int) -> list[tuple[int, int]]:
    """Each stop's last step, and the first epoch of the pod that fetched that step's checkpoint."""
    tries = range(1, sweep.tasks()["trial", number]["try_number"] + 1)
    log = "\n".join(sweep.log("trial", number, attempt) for attempt in tries)
    before, after = sweep.segments(number)[:-1], re.split(FETCHED, log)[1:]
    assert len(before) == len(after), log
    epochs = [re.search(r"epoch=(\d+) loss=", text) for text in after]  # none: stopped too soon
    return [(b["last_step"], int(e[1])) for b, e in zip(before, epochs, strict=True) if e]


def test_no_checkpoint_ever_lies_on_the_volume_that_the_pods_share(told: Any, seen: Seen) -> None:
    assert seen.pods
    for pod in seen.pods.values():
        mounts = pod["spec"]["containers"][0]["volumeMounts"]
        (name,) = (m["name"] for m in mounts if m["mountPath"] == MOUNT)
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == name)
        assert volume["emptyDir"]["medium"] == "Memory"
    assert seen.shared == set()


def test_nothing_is_left_in_the_bucket_of_trials_that_have_finished(
    told: Any, pod_bucket: Bucket
) -> None:
    assert pod_bucket.held(told.id) == []


class Stopped(NamedTuple):
    """Two sweeps that were stopped in their midst, and what the bucket held of them then.

    One was resumed. The other's copies were gone at `gone_s`, and its end had begun at `ended_s`.
    """

    resumed: Any
    left: dict[str, list[str]]
    ended_s: float
    gone_s: float


@pytest.fixture(scope="module")
def stopped(store_lab: PodLab, pod_bucket: Bucket, seen: Seen) -> Stopped:
    store = {"store": pod_bucket.url}
    brief = {**store, "keep_seconds": KEEP_S}
    kept = store_lab.start(store_lab.pod_sweep("kept", [RATE], LONG, SLOW_S, checkpoints=store))
    over = store_lab.start(store_lab.pod_sweep("brief", [RATE], 900, SLOW_S, checkpoints=brief))
    for sweep in (kept, over):
        await_copy(pod_bucket, sweep)
    for sweep in (kept, over):
        assert store_lab.hermes("sweep", "stop", sweep.id).returncode == 0
    for sweep in (kept, over):
        sweep.await_end(SWEEP_S)
    left = {"kept": pod_bucket.held(kept.id), "brief": pod_bucket.held(over.id)}
    ended = datetime.fromisoformat(over.tasks()["report", -1]["start_date"])
    said = store_lab.hermes("sweep", "resume", kept.id)
    assert said.returncode == 0, said.stdout + said.stderr
    gone_s = harness.await_(lambda: not pod_bucket.held(over.id) and time.time(), 120.0)
    harness.await_(lambda: kept.states() == {0: "finished"}, SWEEP_S)
    kept.await_end(SWEEP_S)
    return Stopped(kept, left, ended.timestamp(), gone_s)


def await_copy(bucket: Bucket, sweep: Any) -> None:
    """Wait until its one trial has trained for some epochs and has a whole copy in the bucket."""

    def copied() -> bool:
        return sweep.lines(0) >= 4 and any("/copies/" in key for key in bucket.held(sweep.id))

    harness.await_(copied, 240.0)


def test_one_copy_of_a_trial_that_may_go_on_stays_in_the_bucket_until_its_time_is_over(
    stopped: Stopped,
) -> None:
    for name, left in stopped.left.items():
        assert sorted(key.rpartition("/")[0] for key in left) == ["0/copies", "0/files"], name
    assert stopped.gone_s >= stopped.ended_s + KEEP_S


def test_a_sweep_that_is_resumed_goes_on_from_the_bucket_and_leaves_nothing_there(
    stopped: Stopped, pod_bucket: Bucket
) -> None:
    sweep = stopped.resumed
    ((done, first),) = went_on(sweep, 0)
    assert 1 < done <= first <= done + 1
    sweep.assert_whole(0, RATE, LONG)
    assert pod_bucket.held(sweep.id) == []


def test_the_keys_are_in_no_log_no_run_and_no_pod_but_in_the_secret_and_the_stacks_own_file(
    told: Any, stopped: Stopped, store_lab: PodLab, pod_bucket: Bucket, seen: Seen
) -> None:
    keys = [pod_bucket.key.encode(), pod_bucket.secret.encode()]
    files = [path for path in store_lab.home.rglob("*") if path.is_file()]
    assert {"airflow.db", "mlflow.db"} <= {path.name for path in files}
    holding = [path for path in files if any(key in path.read_bytes() for key in keys)]
    assert holding == [Layout(store_lab.home).programs]
    assert holding[0].stat().st_mode & 0o077 == 0
    for pod in seen.pods.values():
        assert pod["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        assert not [key for key in keys if key in json.dumps(pod).encode()]
