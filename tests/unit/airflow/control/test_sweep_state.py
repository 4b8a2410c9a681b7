from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control import sweep_state
from hermes_ops.airflow.control.sweep_state import RunningSweeps, SweepSpec, SweepState, owner
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.metadata_rows import RunRow, TaskInstanceRow
from hermes_ops.airflow.records import CloseRecord, encode
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.core.model import Phase
from hermes_ops.errors import ConfigError
from hermes_ops.search.interface import Observation
from tests.unit.airflow.builders import (
    lease,
    pending,
    row,
    run_row,
    running,
    segment,
    sweep_with,
    waiting,
)

NAN, INF = float("nan"), float("inf")
SPACE = {"rate": {"type": "loguniform", "low": 0.001, "high": 0.1}}
TPE = {"algorithm": "tpe", "seed": 7, "max_trials": 8, "space": SPACE}
POD = {"command": ["python", "train.py", "{rate}"], "run_in": "pod"}
MANY = {"algorithm": "random", "seed": 7, "max_trials": 1_000, "space": SPACE}


class Tables:
    """Airflow's rows and records of one run."""

    def __init__(
        self, records: dict[tuple[str, int], dict[str, Any]], *rows: TaskInstanceRow
    ) -> None:
        self.stored, self.rows = records, rows

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        return self.stored

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        return self.rows if task == "trial" else ()


def plan() -> SweepSpec:
    found = SweepSpec.from_run(run_row())
    assert found is not None
    return found


def test_a_killed_controller_finds_the_same_state_again() -> None:
    stored = {
        ("plan", -1): {"hermes_close": encode(CloseRecord("no money"))},
        ("trial", 0): {"hermes_lease": encode(lease()), "hermes_segment": encode(segment())},
    }
    tables: Any = Tables(stored, row(0, "running"), row(1))
    first, second = (SweepState.fetch(plan(), tables, {}) for _ in range(2))
    assert first.trials == second.trials
    assert [t.phase for t in first.trials] == [Phase.RUNNING, Phase.PENDING]
    assert first.close == CloseRecord("no money")
    assert (first.open_trials, first.failed_trials) == (1, 0)


def test_a_record_of_another_shape_is_no_sweep() -> None:
    assert SweepSpec.from_run(replace(run_row(), sweep={"config": {}})) is None


def test_a_configuration_that_is_not_valid_is_refused() -> None:
    broken = {**run_row().sweep, "config": {"name": "digits"}}
    with pytest.raises(ConfigError):
        SweepSpec.from_run(replace(run_row(), sweep=broken))


def test_a_trial_that_has_not_begun_is_offered_once_airflow_would_take_it() -> None:
    world = sweep_with(pending(0), TrialRecords(row(1, None), None, None, None), waiting(2))
    assert [j.id for j in world.jobs(1.0)] == ["digits-1/0", "digits-1/2"]


def test_the_sampler_is_told_of_every_trial_that_has_a_configuration() -> None:
    done = TrialRecords(
        row(0, "success"), lease(config={"rate": 0.1}), None, segment(final="finished")
    )
    lost = replace(done, row=row(1, "failed"))
    silent = replace(done, row=row(2, "success"))
    world = sweep_with(done, lost, silent, running(3, 0), pending(4))
    points = ((1, 0.5, 1), (2, NAN, 2), (3, 0.25, 3), (4, INF, 4))
    world.curves = {0: points, 1: points, 3: points[:1]}
    assert world.history() == [
        Observation(0, {"rate": 0.1}, 0.25, "finished"),
        Observation(1, {"rate": 0.1}, 0.25, "failed"),
        Observation(2, {"rate": 0.1}, None, "failed"),
        Observation(3, {"rate": 0.1}, 0.5, "running"),
    ]


def test_a_maximised_objective_is_told_as_a_loss() -> None:
    world = sweep_with(running(0, 0), objective={"metric": "score", "direction": "maximize"})
    world.curves = {0: ((1, 0.5, 1), (2, 0.75, 2))}
    assert [o.loss for o in world.history()] == [-0.75]
    world.curves = {0: ((1, NAN, 1), (2, INF, 2), (3, 0.75, 3), (4, -INF, 4))}
    assert [o.loss for o in world.history()] == [-0.75]


def test_a_trial_that_diverged_is_told_as_failed_before_airflow_has_its_tasks_state() -> None:
    over = segment(running=False, final="failed", cause="diverged")
    world = sweep_with(TrialRecords(row(0, "running"), lease(), None, over))
    world.curves = {0: ((1, 0.01, 0), (2, float("nan"), 1))}
    assert world.history() == [Observation(0, {"rate": 0.1}, 0.01, "failed")]


def test_the_same_history_gives_the_same_configuration() -> None:
    assert sweep_with(running(0, 0)).draw(1) == sweep_with(running(0, 0)).draw(1)
    assert sweep_with(pending(0)).draw(1) != sweep_with(pending(0)).draw(2)


def test_a_policy_sees_the_configuration_of_every_trial_that_has_one() -> None:
    world = sweep_with(running(0, 0), waiting(1), search=TPE)
    assert [j.configuration for j in world.jobs(1.0)] == [(("rate", 0.1),)] * 2


def test_a_pending_trial_of_a_random_search_shows_the_configuration_it_will_be_opened_with() -> (
    None
):
    world = sweep_with(running(0, 0), pending(1), pending(2))
    shown = [dict(j.configuration) for j in world.jobs(1.0)]
    assert shown[1:] == [world.draw(1), world.draw(2)]


def test_a_pending_trial_of_a_search_that_learns_shows_none() -> None:
    assert [j.configuration for j in sweep_with(pending(0), search=TPE).jobs(1.0)] == [()]


def test_a_round_looks_up_a_few_configurations_and_the_next_one_goes_on() -> None:
    few = sweep_state.DRAWS_PER_ROUND
    world = sweep_with(*(pending(n) for n in range(2 * few + 1)), search=MANY)
    known = [sum(bool(j.configuration) for j in world.jobs(1.0)) for _ in range(4)]
    assert known == [few, 2 * few, 2 * few + 1, 2 * few + 1]


def test_trials_far_behind_are_not_looked_up() -> None:
    world = sweep_with(
        pending(sweep_state.DRAWN_AHEAD - 1), pending(sweep_state.DRAWN_AHEAD), search=MANY
    )
    assert [bool(j.configuration) for j in world.jobs(1.0)] == [True, False]


def test_a_budget_of_wall_clock_time_is_the_trials_deadline() -> None:
    (timed,) = sweep_with(pending(0), budget={"wall_clock_seconds": 600.0}).jobs(1.0)
    (free,) = sweep_with(pending(0)).jobs(1.0)
    assert (timed.deadline_s, free.deadline_s) == (50.0 + 600.0, None)


@pytest.mark.parametrize(
    ("deadline", "expected_s"),
    [("5m", 50.0 + 300.0), ("1h", 50.0 + 600.0), ("1970-01-01T00:02:00Z", 120.0)],
)
def test_the_trials_deadline_is_the_sweep_s_or_its_budget_s(
    deadline: str, expected_s: float
) -> None:
    budget = {"wall_clock_seconds": 600.0}
    (job,) = sweep_with(pending(0), budget=budget, deadline=deadline).jobs(1.0)
    assert job.deadline_s == expected_s


@pytest.mark.parametrize(
    ("triggered_by", "named", "dag_owners", "expected"),
    [
        ("ann", None, "airflow", "ann"),
        ("ann", "eve", "airflow", "ann"),  # the file of a run that she has triggered is hers
        ("", "eve", "airflow", "eve"),
        ("", None, "bob, carl", "bob"),
        ("", None, "", ""),
    ],
)
def test_a_sweep_is_its_triggering_users_and_else_its_files_or_its_dags(
    triggered_by: str, named: str | None, dag_owners: str, expected: str
) -> None:
    run = replace(run_row(), triggered_by=triggered_by, dag_owners=dag_owners)
    assert owner(run, named) == expected


@pytest.mark.parametrize("dag_owners", ["eve, bob", "bob, eve", "bob,eve"])
def test_a_scheduled_sweep_keeps_its_owner_though_airflow_writes_the_dags_owners_in_any_order(
    dag_owners: str,
) -> None:
    assert owner(replace(run_row(), triggered_by="", dag_owners=dag_owners), None) == "bob"


@pytest.mark.parametrize(
    ("nightly", "triggered_by", "named", "expected"),
    [
        (False, "ann", None, "normal"),
        (True, "", None, "nightly"),
        (True, "", "interactive", "interactive"),
        (True, "ann", None, "normal"),
        (False, "", "gold", "gold"),
    ],
)
def test_a_scheduled_night_is_of_the_class_nightly_unless_its_file_says_another(
    nightly: bool, triggered_by: str, named: str | None, expected: str
) -> None:
    row = run_row(**{"class": named})
    run = replace(row, triggered_by=triggered_by, sweep={**row.sweep, "nightly": nightly})
    spec = SweepSpec.from_run(run)
    assert spec is not None
    assert spec.facts.priority_class == expected


def test_trials_change_their_team_with_the_quota_in_force() -> None:
    runs = (replace(run_row(), triggered_by="ann"),)
    metadata: Any = Tables({}, row(0))
    metadata.sweeps = lambda: runs
    sweeps = RunningSweeps("gpus")

    def facts() -> tuple[str, str]:
        sweeps.refresh(metadata)
        (job,) = SweepState.fetch(sweeps.specs[runs[0].sweep_id], metadata, {}).jobs(100.0)
        return job.user, job.virtual_cluster

    assert facts() == ("ann", "")
    sweeps.assign_teams(parse_quota({"teams": [{"name": "vision", "users": ["ann"]}]}, "a test"))
    assert facts() == ("ann", "vision")
    sweeps.assign_teams(parse_quota({"teams": [{"name": "vision", "users": ["bob"]}]}, "a test"))
    assert facts() == ("ann", "")


@pytest.mark.parametrize(("changes", "most_tasks", "limit"), [
    ({}, 1, 1), ({"budget": {"max_parallel": 1}}, 2, 1), ({"budget": {"max_parallel": 3}}, 2, 2),
    ({}, 8, None), ({}, 0, None), ({"trial": POD}, 1, None),
])  # fmt: skip
def test_a_sweep_trains_no_more_trials_at_once_than_airflow_starts_tasks_of_its_run(
    changes: dict[str, Any], most_tasks: int, limit: int | None
) -> None:
    spec = SweepSpec.from_run(replace(run_row(**changes), most_tasks=most_tasks))
    assert spec is not None
    assert spec.config.budget.max_parallel == limit
