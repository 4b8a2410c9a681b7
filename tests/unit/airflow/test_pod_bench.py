"""The world in which `make bench-k8s` measures the controller: made small, without a cluster."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine

from bench.pod_driver import DriverCase
from bench.pod_rounds import WARM, Round, Rounds, Run
from bench.pod_trials import StubCurveFeed, World
from bench.pod_world import Fleet, Rows
from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.controller import Controller
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.core.model import Phase
from tests.unit.airflow.builders import Journal

CASE = DriverCase("ns", pods=4, waiting=20, preempted=4, policy="hermes", rounds=6, ends=1)

Pod = tuple[str, int, int]


@dataclass
class FakeFleet:
    """Pods that run, and what is told of the cluster's API."""

    running: set[Pod] = field(default_factory=set)
    asked: int = 0

    def nodes(self, gpus: int) -> tuple[str, ...]:
        return tuple(f"node-{gpu // 2}" for gpu in range(gpus))

    def run(self, sweep: str, number: int, epoch: int, node: str) -> None:
        self.running.add((sweep, number, epoch))

    def run_all(self, pods: Any) -> None:
        for pod in pods:
            self.run(*pod)

    def end(self, sweep: str, number: int, epoch: int) -> None:
        self.running.remove((sweep, number, epoch))

    def is_being_deleted(self, sweep: str, number: int, epoch: int) -> bool:
        return (sweep, number, epoch) in self.running

    def calls(self) -> dict[str, int]:
        self.asked += 1
        return {"list": 1 if self.asked > 1 else 0, "watch": self.asked}

    def count(self) -> int:
        return len(self.running)


class Outside(Journal):
    """Airflow's interface before a real database; the rest is written down."""

    rows: Any = None

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        with self.rows.engine.begin() as connection:
            self.rows.put(connection, task.run_id, task.map_index, key, value)

    def ensure_sweep(self, name: str, sweep: str, text: str) -> Any:
        return SimpleNamespace(parent_run_id="parent", experiment_id="1")


class Alone:
    """The leader of a pool that nobody else wants."""

    def acquire(self, _: Any) -> bool:
        return True

    def holds(self) -> bool:
        return True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database with those of Airflow's own tables that are read or written."""
    from airflow.models.trigger import Trigger  # task_instance refers to it

    found = create_engine(f"sqlite:///{tmp_path / 'airflow.db'}")
    read: Any = Metadata(found)
    written, trigger = Rows(found, "gpus")._tables, Trigger
    everything: Any = trigger.__table__
    wanted = {t.name: t for t in (read._dag, read._note, *written.values())}
    everything.metadata.create_all(found, tables=list(wanted.values()))
    with found.begin() as connection:
        pool = {"pool": "gpus", "slots": 1, "include_deferred": True}
        connection.execute(written["pool"].insert().values(**pool))
    yield found
    found.dispose()


def run_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, list[Round]]:
    """The controller in that world until the last round, which waits for nothing."""
    outside: Any = Outside()
    outside.rows = Rows(engine, "gpus")
    fleet: Any = FakeFleet()
    curves: Any = StubCurveFeed()
    applier = outside.applier()
    applier.metadata = Metadata(engine)
    cluster = AirflowCluster("gpus", applier.metadata, curves, applier, applier.decisions)
    leadership: Any = Alone()
    PolicySettings(CASE.policy, {"guard_k": 0}).write(PolicySettings.file())
    controller = Controller(cluster, leadership, PolicySettings.file())
    monkeypatch.setattr(AirflowCluster, "wait", lambda *_: None)
    world = World(CASE, outside.rows, fleet, curves, random.Random(1))
    sweeps = world.make(outside)
    run = Run(world, controller, sweeps[0], calls=[fleet.calls()])
    rounds = Rounds(run.after)
    controller.monitor = applier.monitor = rounds
    assert controller.run() == 0
    return run, rounds.kept


def test_the_world_of_the_benchmark_begins_as_its_case_says_and_goes_on_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = run_of(engine, monkeypatch)
    assert len(kept) == WARM + CASE.rounds
    assert sum(r.actions for r in kept) >= len(kept) - 2  # one ends in each round, another begins
    trials = [t for sweep in run.controller.cluster.sweeps.values() for t in sweep.trials]
    phases = Counter(t.phase for t in trials)
    assert len(trials) == CASE.pods + CASE.waiting
    assert phases[Phase.ENDED] >= CASE.rounds
    assert phases[Phase.RUNNING] + phases[Phase.STARTING] + phases[Phase.STOPPING] <= CASE.pods
    fleet: Any = run.world.fleet
    pods = {(sweep.id, t.number, t.lease.epoch)
            for sweep in run.controller.cluster.sweeps.values() for t in sweep.trials
            if t.lease is not None and t.is_under_way}  # fmt: skip
    assert pods <= fleet.running


def test_the_figures_tell_the_loop_its_parts_and_what_was_asked_of_the_cluster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = run_of(engine, monkeypatch)
    found = run.figures(kept)
    assert found["loop_ms"]["n"] == CASE.rounds
    parts = ("observe_ms", "decide_ms", "apply_ms")
    assert all(0 < found[part]["median"] < found["loop_ms"]["max"] for part in parts)
    assert (found["lists_at_start"], found["lists_a_minute"]) == (1, 0.0)
    assert found["watches_a_minute"] > 0
    assert found["orphan_deleted_after_s"] is not None


def test_calls_are_counted_by_the_servers_own_metrics_of_pods_in_a_namespace() -> None:
    lines = [
        'apiserver_request_total{code="200",resource="pods",scope="namespace",verb="LIST"} 3',
        'apiserver_request_total{code="410",resource="pods",scope="namespace",verb="LIST"} 1',
        'apiserver_request_total{code="200",resource="pods",scope="cluster",verb="LIST"} 50',
        'apiserver_request_total{code="200",resource="nodes",scope="namespace",verb="LIST"} 50',
        'apiserver_request_total{code="200",resource="pods",scope="namespace",verb="WATCH"} 2',
        'apiserver_request_total{code="200",resource="pods",scope="namespace",verb="POST"} 50',
        'apiserver_request_duration{resource="pods",scope="namespace",verb="WATCH"} 50',
    ]
    answer = SimpleNamespace(data="\n".join(lines).encode())
    api = SimpleNamespace(api_client=SimpleNamespace(call_api=lambda *_, **__: answer))
    spec: Any = None
    assert Fleet("ns", spec, api).calls() == {"list": 4, "watch": 2}
