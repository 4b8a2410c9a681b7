"""A pool of two machines: Airflow's Celery or Edge executor, and a worker with a home on each.

Both machines are this one; a worker that is killed with its process group stands for a machine that
is lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.machines import CELERY, EDGE, PYTHON, MachinesStack, Worker, machines_stack
from bench.postgres import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(1500)]

celery = pytest.mark.parametrize("machines", [CELERY], indirect=True, scope="module")
each_executor = pytest.mark.parametrize("machines", [CELERY, EDGE], indirect=True, scope="module")

SLOW_S = 600.0  # until a condition holds on a machine with many other tests
EPOCHS = 1_000


@pytest.fixture(scope="module")
def machines(
    request: pytest.FixtureRequest,
    postgres: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MachinesStack]:
    """Machine `a` with a GPU and machine `b` with two, under that executor."""
    missing = [n for n in ("redis-server", str(PYTHON)) if not shutil.which(n)]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not installed: {', '.join(missing)} (see .ci/run and the Makefile)")
    folder = tmp_path_factory.mktemp("machines")
    with machines_stack(folder, postgres, {"a": 1, "b": 2}, request.param) as running:
        yield running


@pytest.fixture(scope="module")
def lab(
    machines: MachinesStack, harness: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    own = harness.Lab(machines, tmp_path_factory.mktemp("sweeps"))
    yield own
    own.close()


@pytest.fixture
def slow(harness: Any, tmp_path: Path) -> Iterator[Path]:
    """A file: trials pause in each epoch until it is removed."""
    file: Path = harness.slow_file(tmp_path)
    yield file
    file.unlink(missing_ok=True)


def jobs(machines: MachinesStack, sweep: Any) -> dict[int, dict[str, Any]]:
    """The trials of a sweep as the controller shows them."""
    found = (j for j in machines.view().get("jobs", ()) if j["id"].startswith(f"{sweep.id}/"))
    return {int(j["id"].rpartition("/")[2]): j for j in found}


def trained_on(machines: MachinesStack, sweep: Any, number: int) -> list[str]:
    names = ("a", "b", "default")
    return [n for n in names if machines.trial_folder(n, sweep.id, number).exists()]


def is_away(machines: MachinesStack, name: str) -> bool:
    return "away_since_s" in machines.view().get("machines", {}).get(name, {})


def slots(lab: Any) -> int:
    return int(lab.airflow.get("/api/v2/pools/gpus").json()["slots"])


def started(lab: Any, harness: Any, name: str, trials: int, slow: Path) -> Any:
    """A sweep whose trials last until the file `slow` is removed."""
    return lab.start(harness.stub(name, harness.alike(trials), EPOCHS, 0.5, slow_while=slow))


def await_running(machines: MachinesStack, harness: Any, sweep: Any, trials: int) -> None:
    def have_trained() -> bool:
        shown = jobs(machines, sweep).values()
        return len([j for j in shown if j["phase"] == "running" and j["step"] > 1]) == trials

    harness.await_(have_trained, SLOW_S)


def assert_finished_without_a_gap(sweep: Any) -> None:
    """Each trial has the curve of one that was never stopped."""
    assert sweep.await_end(SLOW_S) == "success"
    assert set(sweep.states().values()) == {"finished"}
    for number, runs in sweep.runs().items():
        sweep.assert_whole(number, float(runs[0]["params"]["rate"]), EPOCHS)


@pytest.fixture
def worker_b(machines: MachinesStack, lab: Any, harness: Any) -> Iterator[Worker]:
    """Machine `b`, which is there before and after the test."""
    worker = machines.workers["b"]
    yield worker
    if not worker.is_running:
        worker.start()
    harness.await_(lambda: not is_away(machines, "b") and slots(lab) == 3, SLOW_S)


@each_executor
def test_a_machine_that_dies_gives_its_trials_back_when_it_returns(
    machines: MachinesStack,
    lab: Any,
    harness: Any,
    slow: Path,
    worker_b: Worker,
) -> None:
    sweep = started(lab, harness, "dies", 3, slow)
    await_running(machines, harness, sweep, 3)
    worker_b.kill()
    harness.await_(lambda: is_away(machines, "b"), SLOW_S)
    harness.await_(lambda: slots(lab) == 1, SLOW_S)  # once Airflow has given up the lost tasks
    shown = jobs(machines, sweep)
    lost = [n for n, j in shown.items() if j["nodes"] == ["b"]]
    assert len(lost) == 2
    assert sum(j["phase"] == "running" for j in shown.values()) == 1
    said = lab.hermes("explain", f"{sweep.id}/{lost[0]}").stdout
    assert "Its machine is away: b since" in said
    worker_b.start()
    await_running(machines, harness, sweep, 3)
    slow.unlink()
    assert_finished_without_a_gap(sweep)


@celery
def test_a_trial_whose_worker_is_killed_before_it_has_begun_starts_once_the_machine_is_back(
    machines: MachinesStack,
    lab: Any,
    harness: Any,
    slow: Path,
    worker_b: Worker,
) -> None:
    for child in psutil.Process(worker_b.pid).children(recursive=True):
        child.suspend()  # the worker takes tasks, and none of them begins
    sweep = started(lab, harness, "queued", 3, slow)

    def queued() -> list[int]:
        tasks = sweep.tasks().items()
        return [n for (_, n), t in tasks if t["queue"] == "gpu-b" and t["state"] == "queued"]

    harness.await_(lambda: len(queued()) == 2, SLOW_S)
    worker_b.kill()
    harness.await_(lambda: is_away(machines, "b"), SLOW_S)
    worker_b.start()
    await_running(machines, harness, sweep, 3)
    slow.unlink()
    assert_finished_without_a_gap(sweep)


@celery
def test_a_sweep_that_is_stopped_ends_though_a_machine_dies_while_its_trials_stop(
    machines: MachinesStack, lab: Any, harness: Any, worker_b: Worker
) -> None:
    content = harness.config("stops", {"rate": harness.alike(3)}, "stubborn.py")
    content["trial"]["command"] = ["python", "stubborn.py"]
    content["trial"]["environment"] = {"RATE": "{rate}"}
    sweep = lab.start(content)
    await_running(machines, harness, sweep, 3)
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    harness.await_(
        lambda: not jobs(machines, sweep), SLOW_S
    )  # those of a closing sweep are left out
    worker_b.kill()
    sweep.await_end(SLOW_S)
    assert set(sweep.states().values()) == {"cancelled"}


@celery
def test_a_worker_of_another_machine_refuses_the_lease_and_the_trial_is_queued_again(
    machines: MachinesStack,
    lab: Any,
    harness: Any,
    slow: Path,
    worker_b: Worker,
) -> None:
    worker_b.close()
    environment = {**worker_b.environment, "HERMES_MACHINE": "a"}
    wrong = Worker("b", worker_b.home, worker_b.command, environment)
    wrong.start()
    try:
        sweep = started(lab, harness, "wrong", 3, slow)
        refused = "have the worker of a take the queue gpu-a alone"

        def is_refused() -> bool:
            logs = (worker_b.home / "logs").rglob("attempt=*.log")
            return any(refused in log.read_text() for log in logs if sweep.id in str(log))

        harness.await_(is_refused, SLOW_S)
    finally:
        wrong.close()
    worker_b.start()
    await_running(machines, harness, sweep, 3)
    slow.unlink()
    assert_finished_without_a_gap(sweep)


@each_executor
def test_trials_that_are_preempted_go_on_on_their_machine_in_its_own_home(
    machines: MachinesStack, lab: Any, harness: Any, slow: Path
) -> None:
    rates = [0.001, 0.002, 0.003, 1.0, 2.0]
    with lab.policy("hermes", threshold=3, guard_k=0, guard_quanta=1000):
        sweep = lab.start(harness.stub("two", rates, EPOCHS, 0.5, slow_while=slow))
        harness.await_(
            lambda: any(j["preemptions"] for j in jobs(machines, sweep).values()), SLOW_S
        )
        slow.unlink()
        assert_finished_without_a_gap(sweep)
    places = {n: trained_on(machines, sweep, n) for n in range(len(rates))}
    assert {len(names) for names in places.values()} == {1}
    assert {names[0] for names in places.values()} == {"a", "b"}
    queues = {n: sweep.tasks()["trial", n]["queue"] for n in places}
    assert queues == {n: f"gpu-{names[0]}" for n, names in places.items()}
