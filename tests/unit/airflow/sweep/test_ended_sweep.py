from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CLOSED_TAG,
    CONFIG_XCOM,
    REACHED_TAG,
    SEGMENT_KEY,
    SWEEP_KEY,
    CloseRecord,
    SegmentRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep.ended_sweep import (
    NUMBERS_XCOM,
    BudgetChanges,
    EndedSweep,
    with_trials,
)
from hermes_ops.config import parse
from hermes_ops.errors import ConfigError, HermesError, NotPermitted, Unavailable
from hermes_ops.search import SAMPLERS
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    lease,
    pending,
    row,
    segment,
    sweep_file,
    sweep_record,
    sweep_with,
    waiting,
)

PLAN = TaskKey("hermes_sweep", SWEEP, "plan")
TPE = {
    "algorithm": "tpe",
    "startup_trials": 2,
    "max_trials": 8,
    "space": {"rate": {"type": "uniform", "low": 0.0, "high": 1.0}},
}


ENDED = "2026-11-25T14:00:00Z"


@dataclass
class Services:
    """Airflow and MLflow after a sweep's end: the records there, and what is done to them."""

    states: dict[int, str]
    state: str = "success"
    plan_state: str = "success"
    records: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    gpu_seconds: float = 10.0
    set_aside_gpu_seconds: float = 0.0
    cleared: list[Any] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=lambda: {CLOSED_TAG: "enough"})
    parent_tags: dict[str, str] = field(default_factory=dict)
    reopened: dict[str, list[str]] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    xcoms: dict[str, Any] = field(default_factory=lambda: {NUMBERS_XCOM: [], CONFIG_XCOM: {}})
    renewed: list[str] = field(default_factory=list)
    may_edit: bool = True
    may_write_xcoms: bool = True

    @property
    def artifacts(self) -> Any:
        return SimpleNamespace(write=self._write)

    def _write(self, run: str, path: str, data: bytes) -> None:
        self.stored[path] = data.decode()

    def dag_run(self, dag_id: str, run_id: str) -> Any:
        return {"state": self.state, "end_date": ENDED}

    def task_instances(self, dag_id: str, run_id: str) -> Any:
        trials = [{"task_id": "trial", "map_index": n, "state": s} for n, s in self.states.items()]
        return [{"task_id": "plan", "map_index": -1, "state": self.plan_state}, *trials]

    def get_state(self, task: Any, key: str) -> Any:
        return self.records.get((task.task_id, task.map_index, key))

    def put_state(self, task: Any, key: str, value: Any) -> None:
        assert not self.cleared, "the run has gone on before everything was written"
        self.records[task.task_id, task.map_index, key] = value

    def confirm_edit(self, task: Any) -> None:
        assert task.task_id.rpartition(".")[2] == PLAN.task_id
        if not self.may_edit:
            raise NotPermitted("Airflow refused it (403): Forbidden")

    def xcom(self, task: Any, key: str) -> Any:
        assert task == PLAN
        if not self.may_write_xcoms:
            raise NotPermitted("Airflow refused it (403): Forbidden")
        return self.xcoms.get(key)

    def add_xcom(self, task: Any, key: str, value: Any) -> None:
        assert not self.cleared, "the run has gone on before everything was written"
        self.xcoms[key] = value

    def renew_xcom(self, task: Any, key: str, value: Any) -> None:
        assert self.xcoms[key] == value
        self.renewed.append(key)

    def clear(self, dag_id: str, run_id: str, tasks: Any) -> None:
        self.cleared = list(tasks)

    def trials(self, ref: Any) -> Any:
        tags = {"hermes.gpu_seconds": str(self.gpu_seconds), "hermes.reason": "enough"}
        return [SimpleNamespace(number=n, run_id=f"run-{n}", tags=tags) for n in self.states]

    def every_run(self, ref: Any) -> Any:
        before = {"hermes.gpu_seconds": str(self.set_aside_gpu_seconds)}
        return None, (*self.trials(ref), SimpleNamespace(number=0, run_id="old", tags=before))

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(tags=self.tags)

    def reopen(self, run_id: str, drop: list[str], tags: dict[str, str] | None = None) -> None:
        assert not self.cleared, "the run has gone on before everything was written"
        self.reopened[run_id] = drop
        apart = ("hermes.deadline", "hermes.extended")
        others = {k: v for k, v in (tags or {}).items() if k not in apart}
        assert others == ({"hermes.continued": ENDED} if run_id == "parent" else {})
        self.parent_tags |= tags or {}


def ended(states: dict[int, str], final: dict[int, str] | None = None, **changes: Any) -> Services:
    services = Services(states)
    services.records["plan", -1, SWEEP_KEY] = sweep_record(**changes)
    services.records["plan", -1, CLOSE_KEY] = encode(CloseRecord("enough"))
    for number, word in (final or {}).items():
        record = segment(running=False, final=word, step=7, failures=3)
        services.records["trial", number, SEGMENT_KEY] = encode(record)
    return services


def found(services: Any) -> EndedSweep:
    return EndedSweep.find(services, services, PLAN)


def record_of(services: Services) -> SweepRecord:
    record = decode(SweepRecord, services.records["plan", -1, SWEEP_KEY])
    assert record is not None
    return record


def test_a_sweep_is_extended_by_its_plan_with_one_finished_trial_touched() -> None:
    services = ended(dict.fromkeys(range(7), "success") | {7: "failed"})
    assert found(services).extend(4, BudgetChanges()) == 12
    assert services.cleared == ["plan", ("trial", 6), "report"]
    record = record_of(services)
    assert (record.trials, record.touched) == (12, (6,))
    assert record.config["search"]["max_trials"] == 12
    assert decode(CloseRecord, services.records["plan", -1, CLOSE_KEY]) is None
    assert services.reopened == {"parent": [CLOSED_TAG]}
    assert "max_trials: 12" in services.stored["sweep.yaml"]
    ((first, _),) = json.loads(services.parent_tags["hermes.extended"])
    assert first == 8


def test_in_a_group_its_own_plan_and_report_are_cleared_and_read() -> None:
    services = ended(dict.fromkeys(range(8), "success"))
    for key in (SWEEP_KEY, CLOSE_KEY):
        services.records["group.plan", -1, key] = services.records.pop(("plan", -1, key))
    asked: Any = services
    sweep = EndedSweep.find(asked, asked, TaskKey("training", "manual:1", "group.plan"))
    assert sweep.sweep == "training:group:manual:1"
    assert sweep.extend(1, BudgetChanges()) == 9
    assert services.cleared == ["group.plan", ("trial", 7), "group.report"]
    assert services.records["group.plan", -1, SWEEP_KEY]["trials"] == 9


def test_a_sweep_in_a_run_that_goes_on_is_told_of_the_run() -> None:
    asked: Any = ended({0: "success"})
    asked.state = "running"
    told = (
        r"the run 'manual:1' of the DAG 'training', which .*'training:group:manual:1'.* is part of"
    )
    with pytest.raises(HermesError, match=told):
        EndedSweep.find(asked, asked, TaskKey("training", "manual:1", "group.plan"))


def test_extending_again_after_a_call_that_was_cut_off_adds_the_trials_once() -> None:
    services = ended(dict.fromkeys(range(8), "success"))
    found(services).extend(4, BudgetChanges())
    services.cleared = []  # the last request was lost
    assert found(services).extend(4, BudgetChanges()) == 12


def test_resuming_takes_up_what_was_stopped_and_leaves_what_finished_or_was_judged() -> None:
    states = {0: "success", 1: "skipped", 2: "skipped", 3: "failed", 4: "skipped"}
    final = {0: "finished", 1: "cancelled", 2: "stopped_early", 3: "failed"}
    services = ended(states, final)
    assert found(services).resume(BudgetChanges(), failed=False) == (1, 4)
    assert services.cleared == [("trial", 1), ("trial", 4), "report"]
    again = decode(SegmentRecord, services.records["trial", 1, SEGMENT_KEY])
    assert again is not None
    assert (again.final, again.running, again.step) == (None, False, 7)
    untouched = decode(SegmentRecord, services.records["trial", 2, SEGMENT_KEY])
    assert untouched is not None
    assert untouched.final == "stopped_early"
    assert services.reopened["run-1"] == ["hermes.reason"]
    assert {"run-0", "run-2", "run-3"}.isdisjoint(services.reopened)


def test_a_sweep_whose_record_was_deleted_is_told_as_such() -> None:
    services = ended({0: "success"})
    del services.records["plan", -1, SWEEP_KEY]
    with pytest.raises(HermesError, match="has been deleted from Airflow's state store"):
        found(services)


def test_a_resumed_sweep_has_the_xcoms_of_its_plan_that_airflow_has_deleted() -> None:
    services = ended({0: "success", 1: "skipped"}, {1: "cancelled"})
    del services.xcoms[CONFIG_XCOM]
    found(services).resume(BudgetChanges(), failed=False)
    assert services.xcoms[CONFIG_XCOM]["name"] == "digits"
    assert services.renewed == [NUMBERS_XCOM]
    services = ended({0: "success", 1: "skipped"}, {1: "cancelled"})
    services.xcoms = {}
    found(services).resume(BudgetChanges(), failed=False)
    assert services.xcoms[NUMBERS_XCOM] == list(range(8))


def test_trials_that_failed_are_resumed_when_told_with_all_their_tries() -> None:
    services = ended({0: "success", 1: "failed"}, {0: "finished", 1: "failed"})
    assert found(services).resume(BudgetChanges(), failed=True) == (1,)
    again = decode(SegmentRecord, services.records["trial", 1, SEGMENT_KEY])
    assert again is not None
    assert (again.final, again.failures) == (None, 0)


@pytest.mark.parametrize(
    ("state", "word", "kept"), [("failed", "failed", None), ("skipped", "cancelled", 4)]
)
def test_a_trial_that_failed_is_resumed_with_all_its_sizes_and_one_that_was_stopped_without_those(
    state: str, word: str, kept: int | None
) -> None:
    services = ended({0: "success", 1: state})
    failed = segment(running=False, final=word, step=7, failures=1, failed_size=4)
    services.records["trial", 1, SEGMENT_KEY] = encode(failed)
    assert found(services).resume(BudgetChanges(), failed=True) == (1,)
    again = decode(SegmentRecord, services.records["trial", 1, SEGMENT_KEY])
    assert again is not None
    assert again.failed_size == kept


def test_a_resumed_trial_waits_for_a_lease_with_its_old_configuration() -> None:
    resumed = segment(running=False, ended_s=110.0)
    trial = TrialRecords(row(1), lease(), None, resumed)
    (job,) = sweep_with(trial).jobs(200.0)
    assert job.phase.value == "waiting"
    assert dict(job.configuration) == {"rate": 0.1}


def test_nothing_to_resume_is_said_with_what_else_there_is() -> None:
    services = ended({0: "success", 1: "failed"}, {0: "finished", 1: "failed"})
    with pytest.raises(HermesError, match=r"--failed.*sweep extend"):
        found(services).resume(BudgetChanges(), failed=False)
    assert services.cleared == []


@pytest.mark.parametrize(
    ("budget", "fact"), [({"gpu_seconds": 40}, "--gpu-seconds"), ({"failed_trials": 1}, "--failed")]
)
def test_a_budget_that_is_spent_is_refused_before_anything_is_written(
    budget: dict[str, Any], fact: str
) -> None:
    states = {0: "success", 1: "failed", 2: "skipped", 3: "skipped"}
    services = ended(states, budget=budget)
    before = dict(services.records)
    with pytest.raises(HermesError, match=fact):
        found(services).extend(1, BudgetChanges())
    with pytest.raises(HermesError, match=fact):
        found(services).resume(BudgetChanges(), failed=False)
    assert (services.records, services.cleared) == (before, [])


def test_what_a_trial_used_before_it_began_from_scratch_counts_for_a_spent_budget() -> None:
    services = ended({0: "success", 1: "skipped"}, budget={"gpu_seconds": 100})
    assert found(services).resume(BudgetChanges(), failed=False) == (1,)
    services.set_aside_gpu_seconds, services.cleared = 80.0, []
    with pytest.raises(HermesError, match="have used 100 GPU-seconds"):
        found(services).resume(BudgetChanges(), failed=False)
    assert services.cleared == []


def test_a_deadline_that_has_passed_is_refused_until_there_is_a_later_one() -> None:
    services = ended({0: "skipped", 1: "success"}, deadline="2020-01-01T00:00:00Z")
    before = dict(services.records)
    with pytest.raises(HermesError, match="--deadline"):
        found(services).resume(BudgetChanges(), failed=False)
    assert (services.records, services.cleared) == (before, [])
    assert found(services).resume(BudgetChanges(deadline="2h"), failed=False) == (0,)
    assert record_of(services).config["deadline"] == "2h"
    assert float(services.parent_tags["hermes.deadline"]) > 1.7e9


def test_a_spent_budget_may_be_raised() -> None:
    services = ended({0: "skipped", 1: "failed"}, budget={"gpu_seconds": 20, "failed_trials": 1})
    assert found(services).resume(BudgetChanges(gpu_seconds=99, failed_trials=2), failed=False) == (
        0,
    )
    budget = record_of(services).config["budget"]
    assert (budget["gpu_seconds"], budget["failed_trials"]) == (99, 2)


def test_a_target_that_was_reached_is_no_target_any_more() -> None:
    objective = {"metric": "val_loss", "target": 0.5}
    services = ended({0: "success", 1: "skipped"}, {0: "finished"}, objective=objective)
    found(services).extend(1, BudgetChanges())
    assert record_of(services).config["objective"]["target"] == 0.5
    services.cleared = []
    services.tags = {REACHED_TAG: "trial 0 reached it"}
    found(services).resume(BudgetChanges(), failed=False)
    assert record_of(services).config["objective"]["target"] is None
    assert services.reopened["parent"] == [REACHED_TAG]


def test_a_budget_that_no_sweep_file_may_have_is_refused() -> None:
    services = ended({0: "skipped"})
    with pytest.raises(ConfigError, match="gpu_seconds"):
        found(services).resume(BudgetChanges(gpu_seconds=-1), failed=False)
    assert services.cleared == []


@pytest.mark.parametrize(("state", "fact"), [("running", "sweep stop"), ("queued", "not ended")])
def test_a_sweep_that_runs_is_neither_extended_nor_resumed(state: str, fact: str) -> None:
    services = ended({0: "skipped"})
    services.state = state
    with pytest.raises(HermesError, match=fact):
        found(services)


def test_a_sweep_that_was_never_planned_or_is_a_grid_is_refused() -> None:
    services = ended({0: "success"})
    services.plan_state = "failed"
    del services.records["plan", -1, SWEEP_KEY]
    with pytest.raises(HermesError, match="never planned"):
        found(services)
    space = {"rate": {"type": "choice", "values": [1, 2]}}
    grid = {"algorithm": "grid", "max_trials": 2, "space": space}
    with pytest.raises(HermesError, match="grid"):
        found(ended({0: "success", 1: "success"}, search=grid)).extend(1, BudgetChanges())


def test_a_sweep_is_not_extended_beyond_the_configurations_of_a_package_s_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = SimpleNamespace(size=3)
    monkeypatch.setitem(SAMPLERS, "design", lambda settings: sampler)
    space = {"rate": {"type": "choice", "values": [1, 2]}}
    search = {"algorithm": "design", "max_trials": 2, "space": space}
    services = ended({0: "success", 1: "success"}, search=search)
    with pytest.raises(HermesError, match="'design' has 3 configurations, and the sweep has 2"):
        found(services).extend(2, BudgetChanges())
    assert services.cleared == []
    assert found(services).extend(1, BudgetChanges()) == 3


def test_a_config_of_more_trials_keeps_everything_else() -> None:
    config = parse(sweep_file(), source="test", base=None)
    assert with_trials(config, 8) == config
    assert with_trials(config, 3) == config
    more = with_trials(config, 20)
    assert more.trial_count == 20
    assert more.search.to_sampler().ask(7, ()) == config.search.to_sampler().ask(7, ())


def touched_book(state: str | None, *others: TrialRecords) -> SweepState:
    done = TrialRecords(row(0, state), lease(), None, segment(running=False, final="finished"))
    found = sweep_with(done, *others)
    record = SweepRecord(found.spec.record.config, 2, "trial", "parent", "7", "digits", (0,))
    return SweepState(_with_record(found.spec, record), found.trials, None)


def _with_record(plan: Any, record: SweepRecord) -> Any:
    from dataclasses import replace

    return replace(plan, record=record)


def test_the_touched_trials_task_is_given_back_its_state_once_the_sweep_is_whole() -> None:
    journal = Journal()
    journal.applier().settle(touched_book(None), 200.0)
    assert journal.of("mark") == []
    journal.applier().settle(touched_book("scheduled", pending(1)), 200.0)
    assert journal.of("mark") == [("mark", [0], "success")]
    ((_, _, key, record),) = journal.of("put")
    assert (key, record["trials"], record["touched"]) == (SWEEP_KEY, 2, [])
    journal.forget()
    journal.applier().settle(touched_book("success", pending(1)), 200.0)
    assert journal.of("mark") == []


def test_a_touched_trial_that_never_began_is_not_offered_to_the_policy() -> None:
    found = touched_book("success", pending(1))
    never = SweepState(found.spec, (pending(0), pending(1)), None)
    assert [j.phase.value for j in never.jobs(200.0)] == ["pending"]
    assert [j.id for j in never.jobs(200.0)] == [f"{SWEEP}/1"]


def test_a_learning_search_waits_until_the_results_of_its_sweep_are_known() -> None:
    done = TrialRecords(row(0, "success"), lease(), None, segment(running=False, final="finished"))
    learning = sweep_with(done, pending(1), search=TPE)
    learning.curves_read = False
    with pytest.raises(Unavailable, match="not been read"):
        learning.draw(1)
    learning.curves_read = True
    assert set(learning.draw(1)) == {"rate"}
    fresh = sweep_with(pending(0), search=TPE)
    fresh.curves_read = False
    assert set(fresh.draw(0)) == {"rate"}
    drawn = sweep_with(done, waiting(1))
    drawn.curves_read = False
    assert set(drawn.draw(1)) == {"rate"}


def test_a_sweep_that_is_stopped_twice_for_one_reason_says_it_twice() -> None:
    journal = Journal()
    applier = journal.applier()
    close = CloseRecord("enough")
    applier.settle(sweep_with(close=close), 200.0)
    applier.forget(SWEEP)
    applier.settle(sweep_with(close=close), 300.0)
    assert [c for c in journal.of("tag") if CLOSED_TAG in c[2]] == [
        ("tag", "parent", {CLOSED_TAG: "enough"})
    ] * 2


def test_a_sweep_of_processes_is_not_continued_where_trials_are_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explicit = {"command": ["python", "train.py"], "directory": "/", "run_in": "process"}
    services = ended({0: "success", 1: "skipped"}, {1: "cancelled"}, trial=explicit)
    before = dict(services.records)
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    with pytest.raises(ConfigError, match="run_in: found process; allowed: pod"):
        found(services).resume(BudgetChanges(), failed=False)
    with pytest.raises(ConfigError, match="run_in: found process; allowed: pod"):
        found(services).extend(2, BudgetChanges())
    assert (services.cleared, services.records) == ([], before)


@pytest.mark.parametrize(
    "go_on",
    [
        lambda sweep: sweep.extend(1, BudgetChanges()),
        lambda sweep: sweep.resume(BudgetChanges(), failed=False),
    ],
    ids=["extend", "resume"],
)
def test_who_may_not_clear_its_tasks_changes_nothing_of_a_sweep_in_mlflow_neither(
    go_on: Callable[[EndedSweep], object],
) -> None:
    services = ended({0: "success", 1: "skipped"}, {1: "cancelled"})
    services.may_edit = False
    before = dict(services.records)
    with pytest.raises(NotPermitted):
        go_on(found(services))
    assert services.records == before
    assert (services.reopened, services.stored, services.cleared) == ({}, {}, [])


def test_who_may_clear_tasks_but_write_no_xcoms_resumes_a_sweep() -> None:
    services = ended({0: "success", 1: "skipped"}, {1: "cancelled"})
    services.may_write_xcoms = False
    assert found(services).resume(BudgetChanges(), failed=False) == (1,)
    assert services.cleared == [("trial", 1), "report"]
