from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.pool_file import publish, read_view, view_path
from hermes_ops.airflow.control.quota_settings import QuotaInForce, QuotaSettings
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.explanation import (
    notice_lines,
    ownership,
    queue_document,
    queue_lines,
    quota_lines,
    scaling_line,
)
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.core.gpu_time import GpuTime
from hermes_ops.core.model import Gpu, Grant, JobId, Plan, Reason, Snapshot, Term
from tests.unit.airflow.builders import (
    SWEEP,
    flag,
    lease,
    pending,
    row,
    running,
    segment,
    sweep_file,
    sweep_with,
    waiting,
)


def published(*points: tuple[int, float, int], direction: str = "minimize") -> None:
    world = sweep_with(running(0, 0), waiting(1), pending(2),
                 objective={"metric": "score", "direction": direction})  # fmt: skip
    world.curves = {0: points}
    first, second = JobId(f"{SWEEP}/0"), JobId(f"{SWEEP}/1")
    reason = Reason("it leads", (Term("gain", float("inf")),), second, "a gain of 2")
    plan = Plan(ranking=(first, second), reasons={first: reason})
    publish("gpus", Snapshot(7.0, (Gpu(0),), tuple(world.jobs(110.0))), plan, {SWEEP: world}, "p")


def test_a_view_comes_back_as_it_was_published() -> None:
    published((1, 0.5, 101_000), (2, 0.25, 102_000))
    view = read_view("gpus")
    assert view is not None
    assert (view["time_s"], view["policy"], view["gpus"]) == (7.0, "p", [0])
    facts = {"trials": 3, "ended": 0, "open": 2, "closing": None}
    assert view["sweeps"] == {SWEEP: {**facts, "not_preemptible": {}, "advice": {}}}
    first, second, third = view["jobs"]
    assert (first["id"], first["phase"], first["gpus"]) == (f"{SWEEP}/0", "running", [0])
    assert (first["step"], first["value"], first["rank"]) == (2, 0.25, 1)
    assert (first["reason"], first["runner_up"]) == ("it leads", f"{SWEEP}/1")
    assert (second["rank"], second["value"], third["rank"]) == (2, None, None)


def test_a_maximised_value_is_shown_as_the_user_knows_it() -> None:
    published((1, 0.875, 101_000), direction="maximize")
    view = read_view("gpus")
    assert view is not None
    assert view["jobs"][0]["value"] == 0.875


def test_a_view_is_strict_json_whatever_the_numbers_are() -> None:
    published((1, float("nan"), 101_000))
    found = json.loads(view_path("gpus").read_text(), parse_constant=pytest.fail)
    assert found["jobs"][0]["value"] == "nan"
    assert found["jobs"][0]["terms"] == {"gain": "inf"}


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_no_view_or_a_damaged_one_is_none(text: str | None) -> None:
    if text is not None:
        view_path("gpus").write_text(text)
    assert read_view("gpus") is None


def test_a_trial_that_cannot_be_preempted_is_named_with_the_reason_once_it_is_known() -> None:
    stuck: dict[str, Any] = {"preemptible": False, "preemptible_reason": "it writes no checkpoint"}
    trials = [
        replace(running(0, 0), segment=segment(gpus=(0,), step=2, **stuck)),
        replace(running(1, 1), segment=segment(gpus=(1,), step=0, **stuck)),
        running(2, 2),
        replace(waiting(3), segment=segment(running=False, step=2, **stuck)),
        replace(running(4, 4), segment=segment(gpus=(4,), step=20, **stuck)),  # its last lines
    ]
    assert not_preemptible_of(*trials) == {"0": "it writes no checkpoint"}
    fixed = sweep_file()["trial"] | {"preemptible": False}
    reason = "trial.preemptible is false in the sweep file"
    assert not_preemptible_of(running(0, 0), trial=fixed) == {"0": reason}


def test_a_trial_that_gets_fewer_gpus_after_a_failure_is_named_with_the_reason() -> None:
    spec = sweep_file()["trial"] | {"gpus": {"min": 1, "max": 4}, "workers": "one_per_gpu"}
    failed = [
        replace(running(n, n), segment=segment(gpus=(n,), failed_size=size))
        for n, size in enumerate((3, 2, None))
    ]
    why = "it has failed, or could not be started"
    named = {"0": f"2 GPUs, as on 3 {why}", "1": f"1 GPU, as on 2 {why}"}
    assert facts_of(*failed, trial=spec)["limited"] == named
    two = spec | {"gpus": {"min": 2, "max": 4}}
    assert "limited" not in facts_of(failed[1], failed[2], trial=two)


def test_what_is_said_of_values_that_are_not_read_is_in_the_view() -> None:
    unread = replace(running(1, 1), segment=segment(gpus=(1,), advice="no value of 'x'"))
    assert facts_of(running(0, 0), unread)["advice"] == {"1": "no value of 'x'"}


def not_preemptible_of(*trials: TrialRecords, **changes: Any) -> Any:
    return facts_of(*trials, **changes)["not_preemptible"]


def facts_of(*trials: TrialRecords, **changes: Any) -> Any:
    world = sweep_with(*trials, **changes)
    publish("gpus", Snapshot(7.0, (Gpu(0),), ()), Plan(), {SWEEP: world}, "p")
    view = read_view("gpus")
    assert view is not None
    return view["sweeps"][SWEEP]


def test_a_view_has_the_owner_of_each_trial_and_what_each_team_holds(tmp_path: Path) -> None:
    quota = QuotaInForce(tmp_path / "quota-gpus.json")
    data = {"teams": [{"name": "vision", "users": ["ann"]}, {"name": "speech", "guaranteed": 2}]}
    QuotaSettings(parse_quota(data, "test")).write(quota.path)
    quota.refresh()
    world = sweep_with(running(0, 0), waiting(1))
    world.spec = replace(world.spec, facts=replace(world.spec.facts, user="ann")).in_team("vision")
    plan = Plan(grants=(Grant(JobId(f"{SWEEP}/0"), (0,)),))
    snapshot = Snapshot(7.0, (Gpu(0),), tuple(world.jobs(110.0)))
    publish("gpus", snapshot, plan, {SWEEP: world}, "p", quota=quota)
    view = read_view("gpus")
    assert view is not None
    assert [ownership(job) for job in view["jobs"]] == [
        "user ann, team vision, its GPUs are borrowed",
        "user ann, team vision",
    ]
    assert quota_lines(view) == [
        "Team vision: 1 GPU held, 1 of them borrowed; 0 guaranteed; 1 trial waits",
        "Team speech: 0 GPUs held, 0 of them borrowed; 1 guaranteed; 0 trials wait",
    ]
    assert "scaled to vision 0, speech 1, others 0" in scaling_line(view)


def test_a_view_has_the_class_of_each_trial_and_who_has_notice_until_when(tmp_path: Path) -> None:
    quota = QuotaInForce(tmp_path / "quota-gpus.json")
    data = {"teams": [{"name": "vision", "users": ["ann"]}]}
    QuotaSettings(parse_quota(data, "test")).write(quota.path)
    quota.refresh()
    world = sweep_with(running(0, 0), waiting(1), pending(2))
    facts = replace(world.spec.facts, user="ann", priority_class="nightly")
    world.spec = replace(world.spec, facts=facts).in_team("vision")
    held, waits = JobId(f"{SWEEP}/0"), JobId(f"{SWEEP}/1")
    reasons = {held: Reason("keeps its GPUs until 00:00:09 UTC, then is preempted: team b")}
    plan = Plan((Grant(held, (0,)),), ranking=(waits,), reasons=reasons, notices=((held, 9.0),))
    snapshot = Snapshot(7.0, (Gpu(0),), tuple(world.jobs(110.0)))
    publish("gpus", snapshot, plan, {SWEEP: world}, "p", quota=quota)
    view = read_view("gpus")
    assert notice_lines(view) == [
        f"Notice: {SWEEP}/0 keeps its GPUs until 00:00:09 UTC, then is preempted: team b"
    ]
    assert queue_lines(view) == [
        f"{SWEEP}/0 running on GPU 0: user ann, team vision, class nightly, borrowed",
        f"{SWEEP}/1 waiting at rank 1: user ann, team vision, class nightly",
        f"{SWEEP}/2 pending: user ann, team vision, class nightly",
    ]
    assert [row["notice_until_s"] for row in queue_document(view)] == [9.0, None, None]


def test_a_trial_that_is_stopping_stays_in_the_queue(tmp_path: Path) -> None:
    quota = QuotaInForce(tmp_path / "quota-gpus.json")
    QuotaSettings(parse_quota({"teams": [{"name": "vision"}]}, "test")).write(quota.path)
    quota.refresh()
    world = sweep_with(TrialRecords(row(0, "running"), lease(), flag(), segment()))
    snapshot = Snapshot(7.0, (Gpu(0),), tuple(world.jobs(110.0)))
    publish("gpus", snapshot, Plan(()), {SWEEP: world}, "p", quota=quota)
    (line,) = queue_lines(read_view("gpus"))
    assert line.startswith(f"{SWEEP}/0 stopping")


def test_a_view_says_how_much_of_their_gpu_hours_users_have_used(tmp_path: Path) -> None:
    quota = QuotaInForce(tmp_path / "quota-gpus.json")
    data = {"teams": [], "users": [{"name": "ann", "gpu_hours_per_day": 8.0}]}
    QuotaSettings(parse_quota(data, "test")).write(quota.path)
    quota.refresh()
    quota.time = GpuTime((("ann", 9_000.0),), (("ann", 9_000.0),), at_s=7.0)
    publish("gpus", Snapshot(7.0, (Gpu(0),), ()), Plan(), {}, "p", quota=quota)
    assert quota_lines(read_view("gpus")) == ["User ann: 2.5 of 8 GPU-hours of this day used"]


def test_without_a_quota_a_view_says_nothing_of_teams() -> None:
    published()
    view = read_view("gpus")
    assert (quota_lines(view), scaling_line(view)) == ([], "")
    assert view is not None
    assert ownership(view["jobs"][0]) == ""
