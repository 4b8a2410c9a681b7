from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.cleanup import janitor
from hermes_ops.airflow.prune.candidates import (
    PruneRules,
    candidates,
    entry_of,
    is_gone,
    judge,
    spared_runs,
)
from hermes_ops.airflow.prune.removal import RESUMED, PruneEntry, PruneJournal, Removal, log_folder
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking.deletion import RunsOfSweep
from hermes_ops.tracking.runs import SweepRef, SweepRun
from hermes_ops.trial.checkpoint_store.store import safe_name
from tests.unit.airflow.builders import NO_SWEEP_FILES, sweep_record

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
OLD = "2020-01-01T00:00:00Z"


class KilledError(BaseException):
    """The process has been killed: nothing after this happens."""


@dataclass
class World:
    """Airflow, MLflow and a state folder with sweeps; dies before the step `dies_at`."""

    home: Path
    states: dict[str, str] = field(default_factory=dict)  # of DAG runs
    active: set[str] = field(default_factory=set)  # MLflow runs that are shown
    trash: set[str] = field(default_factory=set)
    records: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    dies_at: int | None = None
    seen: list[tuple[bool, int]] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # sweeps that Airflow does not show
    forbidden: set[str] = field(default_factory=set)  # DAGs whose runs may not be deleted
    asked: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # sweep.yaml of runs in MLflow

    @property
    def deletion(self) -> Any:
        return self

    @property
    def artifacts(self) -> Any:
        return SimpleNamespace(fetch=self._read)

    def _read(self, run_id: str, path: str) -> bytes:
        if run_id not in self.files:
            raise HermesError("no such file")
        return self.files[run_id]

    def make(self, sweep: str, state: str = "success", trials: int = 2) -> Path:
        """A sweep with its DAG run, its MLflow runs, its folder and its logs."""
        self.states[sweep] = state
        self.active |= {f"{sweep}/own", *(f"{sweep}/{n}" for n in range(trials))}
        self.records[sweep] = sweep_record()
        folder = self.home / "sweeps" / safe_name(sweep)
        for number in range(trials):
            checkpoints = folder / "trials" / str(number) / "checkpoints"
            checkpoints.mkdir(parents=True)
            (checkpoints / "model.bin").write_bytes(b"x" * 5_000)
        log = log_folder(self.home / "logs", "hermes_sweep", sweep)
        log.mkdir(parents=True)
        (log / "attempt=1.log").write_text("said")
        return folder

    def removal(self) -> Removal:
        own: Any = self
        return Removal(own, own, self.home, self.home / "logs", self._collect)

    def step(self) -> None:
        self.steps += 1
        if self.dies_at is not None and self.steps > self.dies_at:
            raise KilledError

    # Airflow

    def all_made_by(self, operator: str) -> Any:
        for sweep in self.states.keys() - self.hidden:
            yield {"dag_id": "hermes_sweep", "dag_run_id": sweep, "task_id": "plan",
                   "start_date": OLD}  # fmt: skip

    def dag_run(self, dag_id: str, run_id: str) -> Any:
        state = self.states.get(run_id)
        return None if state is None else {"state": state, "end_date": OLD}

    def get_state(self, task: TaskKey, key: str) -> Any:
        return self.records.get(task.run_id)

    def may_delete_runs(self, dag_id: str) -> bool:
        self.asked.append(dag_id)
        return dag_id not in self.forbidden

    def delete_dag_run(self, dag_id: str, run_id: str) -> bool:
        self.step()
        if self.states.get(run_id) == "running":
            return False
        self.states.pop(run_id, None)
        return True

    # MLflow

    def sweeps(self) -> Any:
        return tuple(
            SweepRun(SweepRef(s, "1", f"{s}/own"), s, "finished", "FINISHED",
                     {"hermes.best_trial": "1", "hermes.name": "digits"}, 0, 1)
            for s in sorted({run.partition("/")[0] for run in self.active})
        )  # fmt: skip

    def runs_of(self, sweep: str) -> RunsOfSweep:
        known = sorted(r for r in self.active | self.trash if r.startswith(f"{sweep}/"))
        trials = tuple((int(r.rpartition("/")[2]), r) for r in known if not r.endswith("own"))
        return RunsOfSweep(tuple(r for r in known if r.endswith("own")), trials, (), ("1",))

    def models_of(self, experiments: Any, runs: Any) -> Any:
        return ()

    def delete_run(self, run_id: str) -> None:
        self.step()
        if run_id in self.active:
            self.active.remove(run_id)
            self.trash.add(run_id)

    def _collect(self, runs: list[str], models: list[str]) -> None:
        for run in runs:
            self.step()
            assert run not in self.active, "it is not in the trash"
            self.trash.discard(run)


def pruned(world: World) -> None:
    """What `hermes prune --older-than 90d` does: what is unfinished, then what is old enough."""
    removal, airflow = world.removal(), world
    entries = removal.journal.entries()
    own: Any = airflow
    rules = PruneRules(NOW_S, 90 * DAY_S)
    for found in candidates(own, own, world.home, NOW_S - 90 * DAY_S):
        if judge(found.age, rules).goes and found.sweep not in {e.sweep for e in entries}:
            entry = entry_of(own, own, found, own.deletion.runs_of(found.sweep), ())
            if not is_gone(entry, found.folder):
                entries.append(entry)
    gone = [entry for entry in entries if removal.remove(entry) is None]
    removal.finish(gone)


def left_of(world: World, sweep: str) -> list[str]:
    """Where something of a sweep is left."""
    paths = [str(p) for p in world.home.rglob("*") if sweep in p.name]
    runs = [r for r in world.active | world.trash if r.startswith(sweep)]
    return [*paths, *runs, *(r for r in world.states if r == sweep)]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Return what makes each change of the disk a step at which the process may be killed."""

    def count(world: World) -> None:
        for name in ("rename", "replace", "unlink", "rmdir"):
            of = getattr(os, name)

            def stepping(*a: Any, of: Callable[..., Any] = of, **k: Any) -> Any:
                world.step()
                return of(*a, **k)

            monkeypatch.setattr(os, name, stepping)

    return count


def test_an_old_sweep_goes_from_everywhere_and_another_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.make("old")
    kept = world.make("busy", "running")
    before = sorted(left_of(world, "busy"))
    pruned(world)
    assert left_of(world, "old") == []
    assert sorted(left_of(world, "busy")) == before
    assert (kept / "trials" / "1" / "checkpoints" / "model.bin").exists()


def test_after_a_kill_at_any_instant_a_second_pruning_completes_it(
    tmp_path: Path, slow_disk: Callable[[World], None]
) -> None:
    whole = World(tmp_path / "whole")
    with pytest.MonkeyPatch.context():
        whole.make("old")
        slow_disk(whole)
        pruned(whole)
    assert whole.steps > 10
    for dies_at in range(whole.steps):
        world = World(tmp_path / str(dies_at), dies_at=dies_at)
        world.make("old")
        slow_disk(world)
        with pytest.raises(KilledError):
            pruned(world)
        if "old" in world.states:
            assert len(world.active) == 3, "MLflow lost runs of a sweep that Airflow still shows"
            assert (world.home / "sweeps" / "old").is_dir()
        world.dies_at = None
        pruned(world)
        assert left_of(world, "old") == [], f"killed before step {dies_at}"


def test_a_sweep_that_was_resumed_after_a_cut_off_pruning_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, dies_at=0)
    world.make("old")
    with pytest.raises(KilledError):
        pruned(world)
    assert [e.sweep for e in PruneJournal.from_home(tmp_path).entries()] == ["old"]
    world.states["old"], world.dies_at = "running", None
    assert world.removal().remove(PruneJournal.from_home(tmp_path).entries()[0]) == RESUMED
    assert PruneJournal.from_home(tmp_path).entries() == []
    assert len(world.active) == 3


def test_checkpoints_in_a_store_that_does_not_obey_leave_the_sweep_to_the_next_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    folder = world.make("old")
    world.records["old"] = sweep_record(checkpoints={"store": "s3://bucket/x"})
    asked: list[str] = []

    def away(places: list[str], clear: Any) -> bool:
        asked.extend(places)
        return len(asked) > 1

    monkeypatch.setattr(janitor, "_clear", away)
    pruned(world)
    assert folder.exists()
    assert [e.store for e in PruneJournal.from_home(tmp_path).entries()] == ["s3://bucket/x"]
    pruned(world)
    assert asked == ["s3://bucket/x/old"] * 2
    assert left_of(world, "old") == []


def test_links_in_a_sweeps_folder_are_removed_and_not_followed(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    folder = world.make("old")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("mine")
    (folder / "trials" / "0" / "data").symlink_to(precious)
    pruned(world)
    assert (precious / "data").read_text() == "mine"
    assert not folder.exists()


def test_a_folder_that_is_a_link_itself_is_left_alone_and_said(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    folder = world.make("old")
    os.rename(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    reason = world.removal().remove(PruneEntry("old", "hermes_sweep", "old", "plan"))
    assert reason is not None
    assert "is a link" in reason
    assert (tmp_path / "elsewhere" / "trials").is_dir()


def test_a_sweep_that_airflow_has_lost_is_found_by_its_folder_alone_if_it_is_here(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.make("cleaned")
    world.make("of-another-airflow")
    world.states.clear()
    os.rename(tmp_path / "sweeps" / "of-another-airflow", tmp_path / "elsewhere")
    own: Any = world
    assert [c.sweep for c in candidates(own, own, tmp_path, 0.0)] == ["cleaned"]
    pruned(world)
    assert {run.partition("/")[0] for run in world.active} == {"of-another-airflow"}


def test_a_folder_that_nobody_knows_goes_by_its_newest_file(tmp_path: Path) -> None:
    world = World(tmp_path)
    folder = world.make("lost")
    world.states.clear()
    world.active.clear()
    own: Any = world
    (found,) = candidates(own, own, tmp_path, 0.0)
    newest = folder / "trials" / "1" / "checkpoints"
    assert found.age.ended_s == pytest.approx(newest.stat().st_mtime, abs=5)
    os.utime(newest, (NOW_S + DAY_S, NOW_S + DAY_S))
    (found,) = candidates(own, own, tmp_path, 0.0)
    assert not judge(found.age, PruneRules(NOW_S, 0.0)).goes


def test_checkpoints_that_the_sweep_keeps_longer_keep_the_sweep(tmp_path: Path) -> None:
    world = World(tmp_path)
    folder = world.make("stopped")
    (folder / "keep.json").write_text(json.dumps({"until_s": NOW_S + 1, "sweep": "stopped"}))
    pruned(world)
    assert folder.exists()
    (folder / "keep.json").write_text(json.dumps({"until_s": NOW_S, "sweep": "stopped"}))
    pruned(world)
    assert left_of(world, "stopped") == []


def test_the_run_of_a_registered_model_stays_with_the_sweeps_own(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.make("old")
    own: Any = world
    (found,) = candidates(own, own, tmp_path, NOW_S)
    runs = own.deletion.runs_of(found.sweep)
    assert spared_runs(runs, found, {"old/0": "models:/m/1"}, best=False) == {"old/own", "old/0"}
    assert spared_runs(runs, found, {"other": "models:/m/1"}, best=False) == set()
    spared = spared_runs(runs, found, {}, best=True)
    assert spared == {"old/own", "old/1"}
    assert entry_of(own, own, found, runs, spared).runs == ("old/0",)


def test_a_sweep_in_a_group_of_another_dag_leaves_that_dags_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    deleted: list[tuple[TaskKey, str]] = []
    world.delete_state = lambda task, key: deleted.append((task, key))  # type: ignore[attr-defined]
    world.states["monday"] = "success"
    entry = PruneEntry("mine:train:monday", "mine", "monday", "train.plan", "train")
    assert world.removal().remove(entry) is None
    assert world.states == {"monday": "success"}
    assert deleted == [(TaskKey("mine", "monday", "train.plan"), "hermes_sweep")]
    assert is_gone(entry, tmp_path / "sweeps" / "none")
    world.states["monday"] = "running"
    assert world.removal().remove(entry) == RESUMED


@pytest.mark.parametrize("file", NO_SWEEP_FILES.values(), ids=NO_SWEEP_FILES)
def test_whatever_somebody_has_put_in_mlflow_for_a_sweep_file_stops_no_pruning(
    tmp_path: Path, file: bytes
) -> None:
    world = World(tmp_path)
    for sweep in ("forged", "old"):
        world.make(sweep)
    world.states.pop("forged")  # Airflow's rows of it have been cleaned
    world.files["forged/own"] = file
    pruned(world)
    assert not world.active
    assert not left_of(world, "old")


def test_two_prunings_at_once_are_refused(tmp_path: Path) -> None:
    journal = PruneJournal.from_home(tmp_path)
    again = pytest.raises(HermesError, match="another `hermes prune`")
    with journal.locked(), again, journal.locked():
        pytest.fail("both are at work")


def test_a_service_that_is_away_leaves_what_it_holds_to_the_next_pruning(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.make("old")
    of = world.delete_run

    def away(run_id: str) -> None:
        raise Unavailable("MLflow does not answer")

    world.delete_run = away  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        pruned(world)
    world.delete_run = of  # type: ignore[method-assign]
    pruned(world)
    assert left_of(world, "old") == []
