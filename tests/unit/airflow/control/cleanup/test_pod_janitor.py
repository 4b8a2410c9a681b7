"""The controller's looks at pods: when, at which, and what trouble may do."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.cleanup.pod_janitor import PERIOD_S, Opened, PodJanitor
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import pod_file
from hermes_ops.airflow.metadata_rows import RunRow
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes import PodView, Rejected
from hermes_ops.kubernetes.orphan_pods import CLEARING_S, ORPHAN_GRACE_S
from tests.unit.airflow.builders import SWEEP, lease, row, running, segment, sweep_with, waiting
from tests.unit.airflow.control.controllers import Database, controller_of

POD = PodView(
    name="p", uid="u", version="1", phase="Running", owner="1", epoch=1, sweep=SWEEP, trial=0
)


@dataclass
class FakePods:
    """One cluster; keeps what was asked of it."""

    pods: list[PodView] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    deleted: list[tuple[str, int]] = field(default_factory=list)
    away: dict[str, Exception] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def open(self) -> Opened:
        def opened(namespace: str) -> Any:
            self.opened.append(namespace)
            return FakeSpace(self, namespace)

        return opened


@dataclass
class FakeSpace:
    """Its pods in one namespace, as if they were watched."""

    cluster: FakePods
    namespace: str

    def current(self) -> list[PodView]:
        self.cluster.listed.append(self.namespace)
        if self.namespace in self.cluster.away:
            raise self.cluster.away[self.namespace]
        return self.cluster.pods

    def delete(self, pod: PodView, grace_s: int) -> bool:
        if pod.name in self.cluster.refused:
            raise Rejected("a webhook denied the request")
        self.cluster.deleted.append((pod.name, grace_s))
        return True

    def stop(self) -> None:
        self.cluster.left.append(self.namespace)


def of_pods(*trials: TrialRecords, namespace: str | None = None) -> SweepState:
    section = {"image": "i", "claim": "c"} | ({"namespace": namespace} if namespace else {})
    trial = {"command": ["python"], "directory": "/", "run_in": "pod", "pod": section}
    command = [*trial["command"], "--rate", "{rate}"]
    return sweep_with(*trials, trial={**trial, "command": command})


@pytest.fixture
def cluster() -> FakePods:
    return FakePods([POD])


@pytest.fixture
def janitor(cluster: FakePods) -> PodJanitor:
    return PodJanitor(cluster.open)


def look(
    janitor: PodJanitor, now_s: float, *sweeps: SweepState, unread: tuple[str, ...] = ()
) -> None:
    janitor.run_if_due(sweeps, now_s, unread)
    if janitor._thread is not None:
        janitor._thread.join()


def test_a_pod_whose_trial_waits_goes_after_its_grace(
    janitor: PodJanitor, cluster: FakePods
) -> None:
    look(janitor, 100.0, of_pods(waiting(0)))
    assert cluster.deleted == []
    look(janitor, 100.0 + ORPHAN_GRACE_S, of_pods(waiting(0)))
    assert cluster.deleted == [("p", 45)]


def test_a_pod_whose_deletion_is_refused_keeps_no_other_pod(
    janitor: PodJanitor, cluster: FakePods, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.pods = [POD, replace(POD, name="q", uid="another")]
    cluster.refused = {"p"}
    for now_s in (100.0, 100.0 + ORPHAN_GRACE_S):
        look(janitor, now_s, of_pods(waiting(0)))
    assert cluster.deleted == [("q", 45)]
    assert "a webhook denied the request" in caplog.text


@pytest.mark.parametrize(
    ("trial", "goes"),
    [
        (running(0, 0), False),
        (TrialRecords(row(0, "up_for_retry"), lease(), None, segment()), False),
        (TrialRecords(row(0, "failed"), lease(), None, segment()), True),
        (TrialRecords(row(0), lease(revoked=True), None, None), True),
        (TrialRecords(row(0), lease(epoch=2), None, segment(running=False)), True),
    ],
    ids=["runs", "its task was killed", "its task failed", "taken back", "another lease"],
)
def test_a_pod_stays_as_long_as_its_lease_and_no_longer(
    janitor: PodJanitor, cluster: FakePods, trial: TrialRecords, goes: bool
) -> None:
    for now_s in (100.0, 100.0 + ORPHAN_GRACE_S):
        look(janitor, now_s, of_pods(trial))
    assert bool(cluster.deleted) is goes


def test_the_pods_of_a_sweep_that_has_ended_go_and_then_nothing_more_is_asked(
    janitor: PodJanitor, cluster: FakePods
) -> None:
    look(janitor, 100.0, of_pods(running(0, 0)))
    look(janitor, 110.0)
    look(janitor, 110.0 + ORPHAN_GRACE_S)
    assert cluster.deleted == [("p", 45)]
    cluster.pods = []
    look(janitor, 160.0)
    asked = len(cluster.listed)
    look(janitor, 180.0)
    assert len(cluster.listed) == asked
    assert cluster.left == ["default"]


def test_the_pods_of_a_sweep_that_cannot_be_read_stay_and_are_looked_at_again_once_it_can(
    janitor: PodJanitor, cluster: FakePods
) -> None:
    look(janitor, 100.0, of_pods(running(0, 0)))
    for now_s in (110.0, 130.0, 150.0):
        look(janitor, now_s, unread=(SWEEP,))
    assert cluster.deleted == []
    for now_s in (170.0, 170.0 + ORPHAN_GRACE_S):
        look(janitor, now_s, of_pods(waiting(0)))
    assert cluster.deleted == [("p", 45)]


def test_the_look_at_pods_is_told_which_sweeps_could_not_be_read(tmp_path: Path) -> None:
    run = of_pods(running(0, 0)).spec.run
    database = Database(run)
    cluster = controller_of(database, tmp_path / "view").cluster
    told: list[tuple[list[str], list[str]]] = []
    idle: Any = SimpleNamespace(run_if_due=lambda *_: None)
    cluster._janitor = cluster._state_retention = cluster._plan_value_retention = idle
    looks: Any = SimpleNamespace(
        run_if_due=lambda sweeps, _, unread: told.append(([s.id for s in sweeps], [*unread]))
    )
    cluster._pod_janitor = looks
    cluster.observe()
    cluster._run_upkeep()

    def fail(run: RunRow, task: str) -> Any:
        raise Unavailable("the statement took too long")

    database.trials = fail  # type: ignore[method-assign]
    cluster.observe()
    cluster._run_upkeep()
    assert told == [([SWEEP], []), ([], [SWEEP])]


def test_a_namespace_is_opened_once_and_watched_as_long_as_a_sweep_has_its_pods_there(
    janitor: PodJanitor, cluster: FakePods
) -> None:
    for now_s in (100.0, 120.0):
        look(janitor, now_s, of_pods(running(0, 0)))
    assert (cluster.opened, cluster.left) == (["default"], [])
    pod_file().parent.mkdir(parents=True, exist_ok=True)
    pod_file().write_text("namespace: trials")
    look(janitor, 140.0, of_pods(running(0, 0)))
    assert (cluster.opened, cluster.left) == (["default", "trials"], ["default"])


def test_strangers_pods_stay(janitor: PodJanitor, cluster: FakePods) -> None:
    cluster.pods = [replace(POD, sweep="another")]
    for now_s in (100.0, 200.0):
        look(janitor, now_s, of_pods(waiting(0)))
    assert cluster.deleted == []


def test_a_pod_that_was_to_delete_checkpoints_goes_though_its_task_was_killed(
    janitor: PodJanitor, cluster: FakePods, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.pods = [replace(POD, sweep="", trial=-1, epoch=0, deletes_checkpoints=True)]
    look(janitor, 100.0, of_pods(running(0, 0)))
    for now_s in (110.0, 99.0 + CLEARING_S):  # the sweep has ended meanwhile
        look(janitor, now_s)
    assert cluster.deleted == []
    with caplog.at_level(logging.WARNING):
        look(janitor, 100.0 + CLEARING_S)
    assert cluster.deleted == [("p", 45)]
    assert "Pod p deletes checkpoints" in caplog.text
    cluster.pods = []
    look(janitor, 120.0 + CLEARING_S)
    assert cluster.left == ["default"]


def test_nothing_is_asked_of_a_cluster_for_trials_that_are_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # its import would fail
    janitor = PodJanitor()
    look(janitor, 100.0, sweep_with(running(0, 0)))
    assert janitor._thread is None


def test_the_cluster_is_asked_once_a_period_and_when_a_grace_is_over(
    janitor: PodJanitor, cluster: FakePods
) -> None:
    cluster.pods = []
    for now_s in (100.0, 101.0, 99.0 + PERIOD_S):
        look(janitor, now_s, of_pods(waiting(0)))
    assert len(cluster.listed) == 1
    cluster.pods = [POD]
    for now_s in (103.0 + PERIOD_S, 134.0, 102.9 + PERIOD_S + ORPHAN_GRACE_S):
        look(janitor, now_s, of_pods(waiting(0)))
    assert cluster.deleted == []
    look(janitor, 103.0 + PERIOD_S + ORPHAN_GRACE_S, of_pods(waiting(0)))
    assert cluster.deleted == [("p", 45)]


def test_a_look_that_hangs_holds_nothing_up(cluster: FakePods) -> None:
    import threading

    free = threading.Event()

    def hangs() -> Opened:
        free.wait(60.0)
        return cluster.open()

    janitor = PodJanitor(hangs)
    for now_s in (100.0, 200.0):
        janitor.run_if_due([of_pods(waiting(0))], now_s)
    assert cluster.listed == []
    free.set()
    assert janitor._thread is not None
    janitor._thread.join()
    assert cluster.listed == ["default"]


@pytest.mark.parametrize(
    "trouble", [Unavailable("no answer"), HermesError("no right"), TypeError("of the client's")]
)
def test_trouble_of_a_namespace_is_said_once_and_the_others_are_looked_at(
    janitor: PodJanitor, cluster: FakePods, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    cluster.away = {"a": trouble}
    there, here = of_pods(waiting(0), namespace="a"), of_pods(waiting(0), namespace="b")
    there = replace(there, spec=replace(there.spec, run=replace(there.spec.run, run_id="other")))
    with caplog.at_level(logging.WARNING):
        for now_s in (100.0, 115.0, 131.0):
            look(janitor, now_s, there, here)
    assert cluster.deleted == [("p", 45)]
    assert cluster.listed == ["a", "b"] * 3
    assert [str(trouble) in r.getMessage() for r in caplog.records].count(True) == 1


def test_a_mistake_in_the_defaults_is_said_once(
    janitor: PodJanitor, cluster: FakePods, caplog: pytest.LogCaptureFixture
) -> None:
    pod_file().parent.mkdir(parents=True, exist_ok=True)
    pod_file().write_text("imago: x")
    for now_s in (100.0, 200.0):
        look(janitor, now_s, of_pods(waiting(0)))
    assert cluster.listed == []
    assert len(caplog.records) == 1
    pod_file().write_text("namespace: trials")
    look(janitor, 300.0, of_pods(waiting(0)))
    assert cluster.listed == ["trials"]
