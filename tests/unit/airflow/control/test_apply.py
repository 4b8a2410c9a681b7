from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cleanup.sweep_end import due_end, spent_budget
from hermes_ops.airflow.control.decisions import read_tail
from hermes_ops.airflow.control.reconcile import LEASED_WEIGHT, UNOPENED_WEIGHT, WAITING_WEIGHT
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import (
    TrialFolder,
    counted_segments,
    notice_text,
    read_lease,
    read_stop_flag,
)
from hermes_ops.airflow.records import (
    FAILED_TAG,
    HELD_POOL_SLOTS,
    CloseRecord,
    StopFlag,
    encode,
)
from hermes_ops.core.model import Gpu, Grant, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.plan import Action, Resize, Start, Stop
from hermes_ops.core.within_quota import EARLY
from hermes_ops.errors import Refused, Unavailable
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    flag,
    lease,
    pending,
    resizing,
    row,
    running,
    segment,
    starting,
    sweep_with,
    waiting,
)

WHY = Reason("it converges")
NOW_S = 200.0


def job(number: int) -> JobId:
    return JobId(f"{SWEEP}/{number}")


def start(number: int, *gpus: int) -> Start:
    return Start(job(number), gpus, WHY)


def stop(number: int, final: bool = False) -> Stop:
    return Stop(job(number), Reason("another one converges faster"), final)


def carry_out(applier: Applier, world: SweepState, *actions: Action) -> None:
    snapshot = Snapshot(NOW_S, (Gpu(0), Gpu(1)), tuple(world.jobs(NOW_S)))
    grants = tuple(Grant(a.job, a.gpus) for a in actions if isinstance(a, Start))
    ranking = tuple(j.id for j in snapshot.jobs if j.phase is Phase.WAITING)
    plan = Plan(grants, ranking=ranking)
    applier.apply({SWEEP: world}, snapshot, plan, actions, {SWEEP: 0.4})


def kinds(outside: Journal) -> list[tuple[str, Any]]:
    """(what, trial) of each write to Airflow, in order; a put with its key."""
    return [
        (c[2] if c[0] == "put" else c[0], c[1])
        for c in outside.of("put", "rank", "skip", "open", "slots")
    ]  # fmt: skip


@pytest.mark.parametrize("requests", [1, 4])
def test_a_preemption_writes_the_stop_flag_then_the_lease_then_the_rank(requests: int) -> None:
    outside = Journal()
    carry_out(
        outside.applier(requests), sweep_with(running(0, 0), waiting(1)), stop(0), start(1, 0)
    )
    assert kinds(outside) == [("hermes_stop", 0), ("hermes_lease", 1), ("rank", 1)]
    (_, _, _, told), (_, _, _, granted) = outside.of("put")
    assert (granted["epoch"], granted["gpus"], granted["revoked"]) == (2, [0], False)
    assert (told["epoch"], told["final"]) == (1, None)
    assert outside.of("rank") == [("rank", 1, LEASED_WEIGHT, 1)]


def test_a_notice_is_written_once_for_the_lease_and_the_log_and_withdrawn_when_it_is_over() -> None:
    applier, world = Journal().applier(1), sweep_with(running(0, 0))
    snapshot = Snapshot(NOW_S, (Gpu(0),), tuple(world.jobs(NOW_S)))
    reason = {job(0): Reason("keeps its GPUs until 12:00:05 UTC")}
    told = Plan((Grant(job(0), (0,)),), reasons=reason, notices=((job(0), 230.0),))
    folder = TrialFolder.from_sweep(SWEEP, 0)
    for _ in range(2):
        applier.apply({SWEEP: world}, snapshot, told, (), {SWEEP: 0.4})
    assert notice_text(folder, 1) == "Notice: it keeps its GPUs until 12:00:05 UTC"
    assert notice_text(folder, 2) == ""
    assert [(d["action"], d["trial"]) for d in read_tail(SWEEP)] == [("notice", 0)]
    applier.apply({SWEEP: world}, snapshot, replace(told, notices=()), (), {SWEEP: 0.4})
    assert notice_text(folder, 1) == ""


def test_a_resize_tells_the_task_to_keep_its_slots_and_a_stop_does_not() -> None:
    outside = Journal()
    world = sweep_with(running(0, 0, 1), running(1, 2))
    carry_out(outside.applier(), world, Resize(job(0), (0,), WHY), stop(1))
    flags = {c[1]: c[3]["resize"] for c in outside.of("put") if c[2] == "hermes_stop"}
    assert flags == {0: True, 1: False}


def test_a_task_has_the_slots_of_its_next_lease_before_that_is_written_and_less_before_more() -> (
    None
):
    outside = Journal()
    world = sweep_with(resizing(0, 1, 0), resizing(1, 2, 1, 2), starting(2, 3))
    carry_out(outside.applier(), world, start(0, 0, 2), start(1, 1))
    changes = [("slots", 1), ("slots", 0), ("hermes_lease", 0), ("hermes_lease", 1)]
    assert [k for k in kinds(outside) if k != ("rank", 2)] == changes
    assert [c[1:] for c in outside.of("slots")] == [(1, 1), (0, 2)]


def test_a_task_for_which_the_pool_has_no_slots_open_gets_no_lease_and_waits() -> None:
    outside = Journal(most_slots=1)
    world = sweep_with(resizing(0, 1, 0), resizing(1, 2, 1, 2))
    applier = outside.applier()
    carry_out(applier, world, start(0, 0, 2), start(1, 1))
    assert kinds(outside) == [("slots", 1), ("slots", 0), ("hermes_lease", 1)]
    assert applier.waits_for_slots
    outside.most_slots = 3
    carry_out(applier, world, start(0, 0, 2))
    assert not applier.waits_for_slots


def test_a_pool_that_is_shut_down_waits_for_no_slots() -> None:
    applier, world = Journal(most_slots=1).applier(), sweep_with(resizing(0, 1, 0))
    carry_out(applier, world, start(0, 0, 2))
    applier.stop_all([world], NOW_S)
    assert not applier.waits_for_slots


@pytest.mark.parametrize("asked", [1, 3])
def test_a_task_that_still_asks_for_other_slots_is_held_back_before_its_lease(asked: int) -> None:
    outside = Journal()
    before = waiting(0)
    world = sweep_with(replace(before, row=replace(before.row, pool_slots=asked)))
    carry_out(outside.applier(), world, start(0, 0, 1))
    assert kinds(outside) == [("rank", 0), ("hermes_lease", 0), ("rank", 0)]
    assert [c[3] for c in outside.of("rank")] == [HELD_POOL_SLOTS, 2]


def test_a_task_that_keeps_its_slots_waits_for_gpus_that_another_trial_has_not_left() -> None:
    outside = Journal()
    world = sweep_with(resizing(0, 2, 0, 1), running(1, 2))
    carry_out(outside.applier(), world, stop(1), start(0, 2))
    assert kinds(outside) == [("hermes_stop", 1)]


def test_a_resize_whose_grant_may_come_late_gets_no_second_lease_and_is_withdrawn() -> None:
    class TimedOut(Journal):
        is_back = False

        def put_state(self, task: TaskKey, key: str, value: Any) -> None:
            if not self.is_back:
                raise Unavailable("Airflow did not answer in time")
            super().put_state(task, key, value)

    outside, world = TimedOut(), sweep_with(resizing(0, 1, 0))
    applier = outside.applier()
    with pytest.raises(Unavailable):
        carry_out(applier, world, start(0, 0, 1))
    outside.is_back = True
    applier.faults.begin_round()
    carry_out(applier, world, start(0, 0))
    assert kinds(outside) == [("slots", 0), ("hermes_stop", 0)]
    ((_, _, _, told),) = outside.of("put")
    assert (told["epoch"], told["final"], told["resize"]) == (1, None, False)


def test_a_resize_is_not_withdrawn_while_the_quota_has_it_wait_for_others_to_leave() -> None:
    outside, world = Journal(), sweep_with(resizing(0, 1, 0), resizing(1, 1, 1))
    snapshot = Snapshot(NOW_S, (Gpu(0), Gpu(1)), tuple(world.jobs(NOW_S)))
    plan = Plan((), ranking=(job(0), job(1)), reasons={job(0): EARLY, job(1): WHY})
    outside.applier().apply({SWEEP: world}, snapshot, plan, [], {SWEEP: 0.4})
    assert kinds(outside) == [("hermes_stop", 1)]


def test_a_task_that_keeps_its_slots_and_gets_no_gpus_is_told_to_leave() -> None:
    outside = Journal()
    world = sweep_with(resizing(0, 1, 0), starting(1, 0))
    carry_out(outside.applier(), world)
    assert [c[1:3] for c in outside.of("put")] == [(0, "hermes_stop")]
    (told,) = (c[3] for c in outside.of("put"))
    assert (told["epoch"], told["final"], told["resize"]) == (1, None, False)
    assert outside.of("slots") == []


def test_a_task_that_keeps_its_slots_ends_with_its_sweep() -> None:
    outside = Journal()
    world = sweep_with(resizing(0, 1, 0), close=CloseRecord("enough"))
    applier = outside.applier()
    applier.settle(world, NOW_S)
    carry_out(applier, world)
    (told,) = (c[3] for c in outside.of("put"))
    assert (told["epoch"], told["final"], told["resize"]) == (1, "cancelled", False)


def test_the_lease_of_a_task_that_waits_in_its_slots_wakes_it() -> None:
    world = sweep_with(resizing(0, 1, 0))
    wake_file = world.folder(world.trials[0]).wake_file()
    world.folder(world.trials[0]).path.mkdir(parents=True)
    carry_out(Journal().applier(), world, start(0, 0))
    assert wake_file.woken()


def test_lease_and_stop_flag_lie_beside_the_trials_folder_for_its_task() -> None:
    outside, world = Journal(), sweep_with(running(0, 0), waiting(1))
    carry_out(outside.applier(), world, stop(0), start(1, 0))
    victim, follower = (world.folder(t) for t in world.trials)
    flag, own = read_stop_flag(victim, 1), read_lease(follower)
    assert flag is not None
    assert own is not None
    puts = [value for _, _, _, value in outside.of("put")]
    assert puts == [encode(flag), encode(own)]
    assert follower.lease.stat().st_mode & 0o077 == 0


def test_a_lease_that_has_not_begun_leaves_the_schedulers_reach_before_it_is_revoked() -> None:
    outside = Journal()
    carry_out(outside.applier(), sweep_with(starting(0, 0)), stop(0))
    assert kinds(outside)[:2] == [("rank", 0), ("hermes_lease", 0)]
    assert outside.of("rank")[0] == ("rank", 0, WAITING_WEIGHT, HELD_POOL_SLOTS)
    assert outside.of("put")[0][3]["revoked"]
    assert "hermes_stop" not in dict(kinds(outside))


@pytest.mark.parametrize("state", ["running", "up_for_retry"])
def test_a_resize_is_withdrawn_before_its_lease_is_revoked(state: str) -> None:
    outside, before = Journal(), resizing(0, 4, 0)
    task = replace(before.row, state=state)
    trial = replace(before, row=task, lease=lease(epoch=2, gpus=(0, 1, 2, 3)))
    world = sweep_with(trial)
    carry_out(outside.applier(), world, stop(0))
    writes = [c for c in outside.of("put", "rank") if c[0] == "put" or c[3] == HELD_POOL_SLOTS]
    assert [c[2] for c in writes[1:3]] == ["hermes_stop", "hermes_lease"]
    assert (writes[1][3]["epoch"], writes[1][3]["resize"]) == (1, False)
    assert writes[2][3]["revoked"]
    told = read_stop_flag(world.folder(trial), 1)
    assert told is not None
    assert not told.resize


def test_a_trial_that_is_ended_while_it_is_resized_is_still_told_so() -> None:
    outside, before = Journal(), resizing(0, 4, 0)
    trial = replace(before, lease=lease(epoch=2), stop=flag(final="cancelled"))
    carry_out(outside.applier(), sweep_with(trial), stop(0))
    assert [c[2] for c in outside.of("put")] == ["hermes_lease"]


def test_a_revoked_lease_is_never_ranked_as_leased_again() -> None:
    outside = Journal()
    carry_out(outside.applier(), sweep_with(starting(0, 0)), stop(0))
    assert {r[3] for r in outside.of("rank")} == {HELD_POOL_SLOTS}


def test_a_first_lease_brings_configuration_run_and_command() -> None:
    outside = Journal()
    carry_out(outside.applier(), sweep_with(pending(0)), start(0, 1))
    ((_, _, _, granted),) = outside.of("put")
    assert (granted["epoch"], granted["gpus"], granted["run_id"]) == (1, [1], "run-0")
    assert granted["command"][1:3] == ["train.py", "--rate"]
    assert granted["command"][3] == str(granted["config"]["rate"])
    assert granted["config"] == outside.of("open")[0][2]
    assert (granted["objective"], granted["experiment_id"]) == ("val_loss", "7")


def test_waiting_trials_are_ranked_in_the_plans_order_and_fit_no_pool() -> None:
    outside = Journal()
    world = sweep_with(waiting(0), waiting(1), pending(2))
    snapshot = Snapshot(NOW_S, (), tuple(world.jobs(NOW_S)))
    plan = Plan(ranking=(job(1), job(0)))
    outside.applier().apply({SWEEP: world}, snapshot, plan, (), {})
    ranks = {number: (weight, slots) for _, number, weight, slots in outside.of("rank")}
    assert ranks == {
        1: (WAITING_WEIGHT, HELD_POOL_SLOTS),
        0: (WAITING_WEIGHT - 1, HELD_POOL_SLOTS),
    }
    assert world.trials[2].row.priority_weight == UNOPENED_WEIGHT  # as it is: nothing to write


def test_what_occupies_a_slot_is_not_ranked() -> None:
    outside = Journal()
    queued = replace(starting(1, 1), row=row(1, "queued"))
    carry_out(outside.applier(), sweep_with(running(0, 0), queued))
    assert outside.of("rank") == []


def test_a_trial_is_told_to_stop_once_for_each_lease() -> None:
    outside = Journal()
    told = replace(running(0, 0), stop=flag(1))
    outside.applier().settle(sweep_with(told), NOW_S)
    assert outside.of("put") == []
    carry_out(outside.applier(), sweep_with(replace(running(0, 0), stop=flag(0))), stop(0))
    assert [c[2] for c in outside.of("put")] == ["hermes_stop"]


def test_a_running_trial_that_is_stopped_early_gets_a_final_flag() -> None:
    outside = Journal()
    carry_out(outside.applier(), sweep_with(running(0, 0)), stop(0, final=True))
    assert [(c[1], c[3]["final"]) for c in outside.of("put")] == [(0, "stopped_early")]


def test_a_waiting_trial_that_is_stopped_early_is_skipped_and_its_run_closed() -> None:
    outside = Journal()
    carry_out(outside.applier(), sweep_with(waiting(0)), stop(0, final=True))
    assert outside.of("skip", "finish") == [("finish", "run-0", "stopped_early"), ("skip", [0])]
    assert outside.of("put")[-1][3]["final"] == "stopped_early"


def test_closing_flags_running_trials_skips_waiting_ones_and_revokes_starting_ones() -> None:
    outside = Journal()
    close = CloseRecord("stopped by its user")
    trials = (running(0, 0), waiting(1), pending(2), starting(3, 1))
    outside.applier().settle(sweep_with(*trials, close=close), NOW_S)
    assert kinds(outside) == [
        ("hermes_stop", 0), ("rank", 3), ("hermes_lease", 3), ("hermes_segment", 1),
        ("skip", [1, 2]),
    ]  # fmt: skip
    assert outside.of("put")[0][3]["final"] == "cancelled"
    assert outside.of("finish") == [("finish", "run-1", "cancelled")]


def test_a_trial_that_was_ended_and_whose_task_waits_still_is_skipped() -> None:
    """The controller died between the trial's record and its task's state."""
    outside = Journal()
    over = segment(running=False, final="stopped_early", ended_s=NOW_S, task=row(0).id)
    outside.applier().settle(
        sweep_with(TrialRecords(row(0, "scheduled"), lease(), None, over)), NOW_S
    )
    assert outside.of("skip") == [("skip", [0])]


def test_the_second_trial_of_a_round_is_asked_for_knowing_of_the_first() -> None:
    world = sweep_with(pending(0), pending(1))
    world.opened_now[0] = {"x": 0.5}
    assert [(o.number, o.state) for o in world.history()] == [(0, "running")]


def test_closing_again_writes_nothing_new() -> None:
    outside = Journal()
    applier = outside.applier()
    close = CloseRecord("stopped by its user")
    applier.settle(sweep_with(running(0, 0), waiting(1), pending(2), close=close), NOW_S)
    outside.forget()
    over = segment(running=False, final="cancelled", ended_s=NOW_S)
    after = (
        replace(running(0, 0), stop=StopFlag(1, close.reason, NOW_S, "cancelled")),
        TrialRecords(row(1, "skipped"), lease(), None, over),
        TrialRecords(row(2, "skipped"), None, None, None),
    )
    applier.settle(sweep_with(*after, close=close), NOW_S + 1)
    assert outside.calls == []


def test_a_trial_that_was_being_preempted_is_told_that_the_sweep_ends() -> None:
    outside = Journal()
    told = replace(running(0, 0), stop=flag(1))
    outside.applier().settle(sweep_with(told, close=CloseRecord("over")), NOW_S)
    assert [c[3]["final"] for c in outside.of("put")] == ["cancelled"]


def test_a_segment_that_began_as_its_lease_was_revoked_is_stopped() -> None:
    """The task read its lease just before it was taken back."""
    outside = Journal()
    astray = replace(running(0, 0), lease=lease(1, revoked=True))
    assert astray.phase is Phase.STOPPING
    outside.applier().settle(sweep_with(astray), NOW_S)
    assert kinds(outside) == [("hermes_stop", 0)]
    outside.forget()
    outside.applier().settle(sweep_with(replace(astray, stop=flag(1))), NOW_S)
    assert outside.calls == []


def test_a_segment_that_began_as_its_lease_was_revoked_ends_with_its_sweep() -> None:
    outside = Journal()
    astray = replace(running(0, 0), lease=lease(1, revoked=True), stop=flag(1))
    outside.applier().settle(sweep_with(astray, close=CloseRecord("over")), NOW_S)
    assert [(c[2], c[3]["final"]) for c in outside.of("put")] == [("hermes_stop", "cancelled")]


@pytest.mark.parametrize(
    ("state", "final"), [("success", "finished"), ("failed", "failed"), ("skipped", "cancelled")]
)
def test_a_task_that_ended_without_a_word_gives_its_trial_a_final_state(
    state: str, final: str
) -> None:
    outside = Journal()
    ended = replace(running(0, 0), row=row(0, state))
    outside.applier().settle(sweep_with(ended), NOW_S)
    assert outside.of("put")[0][3]["final"] == final
    assert outside.of("finish") == [("finish", "run-0", final)]


def test_shutting_down_stops_running_trials_and_takes_back_leases() -> None:
    outside = Journal()
    outside.applier().stop_all([sweep_with(running(0, 0), starting(1, 1), waiting(2))], NOW_S)
    assert kinds(outside) == [("hermes_stop", 0), ("rank", 1), ("hermes_lease", 1)]


def test_an_mlflow_that_is_away_opens_nothing_and_says_nothing_was_started() -> None:
    outside = Journal(mlflow_away=True)
    applier, world = outside.applier(), sweep_with(pending(0))
    for _ in range(3):
        carry_out(applier, world, start(0, 0))
    assert (outside.of("put", "open"), read_tail(SWEEP)) == ([], [])
    outside.mlflow_away = False
    carry_out(applier, world, start(0, 0))
    assert kinds(outside)[:2] == [("open", 0), ("hermes_lease", 0)]
    assert [d["action"] for d in read_tail(SWEEP)] == ["start"]


def test_an_mlflow_that_is_away_does_not_hinder_a_preemption() -> None:
    outside = Journal(mlflow_away=True)
    carry_out(outside.applier(), sweep_with(running(0, 0), waiting(1)), stop(0), start(1, 0))
    assert kinds(outside) == [("hermes_stop", 0), ("hermes_lease", 1), ("rank", 1)]
    assert [d["action"] for d in read_tail(SWEEP)] == ["stop", "start"]


def test_no_lease_is_written_before_the_last_of_many_stop_flags() -> None:
    outside = Journal()
    told, begun = range(4), range(4, 8)
    trials = [running(n, n) for n in told] + [pending(n) for n in begun]
    actions = [stop(n) for n in told] + [start(n, n - 4) for n in begun]
    carry_out(outside.applier(requests=4), sweep_with(*trials), *actions)
    written = [what for what, _ in kinds(outside) if what != "open"]
    assert written == ["hermes_stop"] * 4 + ["hermes_lease"] * 4 + ["rank"] * 4


def test_a_stop_flag_that_cannot_be_written_ends_the_round_before_any_lease() -> None:
    class Away(Journal):
        def put_state(self, task: TaskKey, key: str, value: Any) -> None:
            if key == "hermes_stop":
                raise Unavailable("Airflow did not answer")
            super().put_state(task, key, value)

    outside, world = Away(), sweep_with(running(0, 0), waiting(1))
    with pytest.raises(Unavailable):
        carry_out(outside.applier(requests=4), world, stop(0), start(1, 0))
    assert kinds(outside) == []
    assert read_lease(world.folder(world.trials[1])) is None


@pytest.mark.parametrize("opened", [{}, {0: {"rate": 0.5}}])
def test_only_a_run_that_mlflow_cannot_have_is_made_unseen(opened: dict[int, Any]) -> None:
    outside = Journal(opened=opened)
    carry_out(outside.applier(), sweep_with(pending(0)), start(0, 0))
    assert [c[3] for c in outside.of("open")] == [not opened]


@pytest.mark.parametrize("requests", [1, 4])
def test_an_mlflow_that_refuses_one_sweep_hinders_no_other_write(requests: int) -> None:
    outside = Journal(refusal=Refused("the run was deleted"))
    applier = outside.applier(requests)
    carry_out(applier, sweep_with(running(0, 0), waiting(1), pending(2)), start(2, 1), start(1, 0))
    assert kinds(outside) == [("hermes_lease", 1), ("rank", 1)]
    applier.settle(sweep_with(waiting(1), close=CloseRecord("over")), NOW_S)
    assert outside.of("skip") == [("skip", [1])]


def test_a_configuration_that_mlflow_has_and_no_lease_is_used_again() -> None:
    outside = Journal(opened={0: {"rate": 0.0625}})
    carry_out(outside.applier(), sweep_with(pending(0)), start(0, 0))
    ((_, _, _, granted),) = outside.of("put")
    assert granted["config"] == {"rate": 0.0625}
    assert granted["command"][-1] == "0.0625"


def test_a_trial_keeps_the_configuration_that_it_was_first_opened_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow keeps the first one: another in the lease would train what no run shows."""
    outside = Journal()
    applier, world = outside.applier(), sweep_with(pending(0))
    asked: list[int] = []

    def ask(own: SweepState, number: int) -> dict[str, Any]:
        asked.append(number)
        return {"rate": 0.01 * len(asked)}

    monkeypatch.setattr(SweepState, "draw", ask)
    for _ in range(2):  # the first lease was lost on its way to Airflow
        carry_out(applier, world, start(0, 0))
    assert [c[2] for c in outside.of("open")] == [{"rate": 0.01}] * 2
    assert asked == [0]


def test_tags_of_the_sweep_are_written_once_for_each_value() -> None:
    outside = Journal()
    applier, world = outside.applier(), sweep_with(waiting(0))
    for _ in range(3):
        carry_out(applier, world)
    assert [c[2] for c in outside.of("tag")] == [
        {"hermes.pool_slots": "2"},
        {"hermes.policy": "hermes"},
        {"hermes.airflow_url": f"http://airflow/dags/hermes_sweep/runs/{SWEEP}"},
    ]


def failed(number: int) -> TrialRecords:
    return TrialRecords(
        row(number, "failed"), lease(), None, segment(running=False, final="failed")
    )


def test_a_sweep_ends_when_as_many_trials_failed_as_its_budget_allows() -> None:
    budget = {"failed_trials": 2}
    assert spent_budget(sweep_with(failed(0), pending(1), budget=budget), NOW_S) is None
    spent = spent_budget(sweep_with(failed(0), failed(1), budget=budget), NOW_S)
    assert spent is not None
    assert (spent.state, spent.at_s) == ("cancelled", NOW_S)
    assert "2 trials failed" in spent.reason


def broken(number: int, reason: str = "no package foo3", **changes: Any) -> TrialRecords:
    """A trial that has failed by its script."""
    facts = {"failures": 1, "reason": reason, "ended_s": 110.0, "service_gpu_s": 5.0, **changes}
    record = segment(running=False, final="failed", **facts)
    return TrialRecords(row(number, "running"), lease(), None, record)


def diverged(number: int) -> TrialRecords:
    return broken(number, "val_loss is NaN at step 2", cause="diverged")


def test_a_diverged_trial_counts_as_failed_only_if_the_sweep_says_so() -> None:
    budget = {"failed_trials": 2}
    trials = (broken(0, "no data"), diverged(1), pending(2))
    assert spent_budget(sweep_with(*trials, budget=budget), NOW_S) is None
    assert (
        spent_budget(sweep_with(*trials, budget={**budget, "count_diverged": True}), NOW_S)
        is not None
    )


def test_a_sweep_whose_first_trials_fail_alike_ends_with_that_reason() -> None:
    world = sweep_with(broken(0), broken(1, "no package foo4"), broken(2), pending(3))
    close = due_end(world, NOW_S)
    assert close is not None
    assert (close.state, close.tag) == ("cancelled", FAILED_TAG)
    assert close.reason == "the first 3 trials failed alike: no package foo3"


def test_a_sweep_goes_on_while_it_is_not_its_script_that_fails() -> None:
    alike = (broken(0), broken(1), broken(2))
    worlds = {
        "fewer": sweep_with(broken(0), broken(1), pending(3)),
        "not asked for": sweep_with(*alike, pending(3), budget={"same_failures": None}),
        "more asked for": sweep_with(*alike, pending(3), budget={"same_failures": 4}),
        "another reason": sweep_with(*alike, broken(3, "no data"), pending(4)),
        "one has finished": sweep_with(*alike, succeeded(3), pending(4)),
        "one has come further": sweep_with(*alike, running(3, 0), pending(4)),
        "one had reported a value": sweep_with(broken(0), broken(1, step=1), broken(2), pending(3)),
        "they diverged": sweep_with(diverged(0), diverged(1), diverged(2), pending(3)),
        "a person marked them": sweep_with(*(broken(n, failures=0) for n in range(3)), pending(3)),
        "they failed before it was resumed": sweep_with(
            *(broken(n, ended_s=49.0) for n in range(3)), pending(3)
        ),
    }
    assert {what: due_end(world, NOW_S) for what, world in worlds.items()} == dict.fromkeys(worlds)
    valued, unread = sweep_with(*alike, pending(3)), sweep_with(*alike, pending(3))
    valued.curves = {1: ((1, 0.5, 0),)}
    unread.curves_read = False
    assert due_end(valued, NOW_S) is None
    assert due_end(unread, NOW_S) is None


def test_a_trial_that_has_just_begun_does_not_keep_a_broken_sweep_alive() -> None:
    young = replace(running(3, 0), segment=segment(started_s=NOW_S - 1.0, gpus=(0,)))
    assert due_end(sweep_with(broken(0), broken(1), broken(2), young), NOW_S) is not None


def succeeded(number: int) -> TrialRecords:
    return TrialRecords(
        row(number, "success"), lease(), None, segment(running=False, final="finished")
    )


def test_a_sweep_ends_when_its_wall_clock_is_spent() -> None:
    budget = {"wall_clock_seconds": 100}
    assert spent_budget(sweep_with(pending(0), budget=budget), 149.0) is None
    assert spent_budget(sweep_with(pending(0), budget=budget), 150.0) is not None


def test_a_sweep_ends_at_its_deadline_and_says_what_is_left_undone() -> None:
    world = sweep_with(running(0, 0, 1), pending(1), pending(2), deadline="100s")
    assert due_end(world, 149.9) is None
    end = due_end(world, 150.0)
    assert end is not None
    assert (end.state, end.tag) == ("cancelled", "hermes.closed")
    assert end.reason == (
        "its deadline has passed (1970-01-01 00:02:30 UTC): of 3 trials 0 had ended, "
        "1 were stopped before their end, 2 had not begun"
    )


def test_the_segment_under_way_counts_against_the_gpu_budget() -> None:
    budget = {"gpu_seconds": 20}
    world = sweep_with(running(0, 0, 1), budget=budget)
    assert spent_budget(world, 109.0) is None
    assert spent_budget(world, 110.0) is not None


def test_a_spent_budget_closes_the_sweep_once() -> None:
    outside = Journal()
    world = sweep_with(running(0, 0), budget={"gpu_seconds": 1})
    applier = outside.applier()
    applier.settle(world, NOW_S)
    assert kinds(outside) == [("hermes_close", -1), ("hermes_stop", 0)]
    assert world.close is not None
    (leaving,) = world.jobs(NOW_S)
    assert (leaving.phase, leaving.resumes) == (Phase.STOPPING, False)
    assert (leaving.gpus_held, leaving.gpus_to_leave) == ((), (0,))


def test_the_use_of_a_pod_whose_segment_the_controller_closes_is_kept_where_no_pod_sees_it() -> (
    None
):
    own = lease(pod={})
    paused = TrialRecords(row(0), own, None, segment(), left="preempted")
    world = sweep_with(paused)
    folder = world.folder(paused)
    folder.path.mkdir(parents=True)
    told = {"epoch": 1, "gpus": [0], "start_s": 100.0, "end_s": 104.0, "outcome": "preempted"}
    (folder.path / "segments.jsonl").write_text(json.dumps(told))
    Journal().applier().settle(world, 200.0)
    (folder.path / "segments.jsonl").unlink()
    assert [(s["start_s"], s["end_s"]) for s in counted_segments(folder)] == [(100.0, 104.0)]
