from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from hermes_ops.core.summary import Segment
from hermes_ops.errors import Refused
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.summary import log_sizes

pytestmark = pytest.mark.integration


def test_a_sweep_asked_for_twice_is_one_run_and_keeps_its_first_config(tracker: Tracker) -> None:
    one = tracker.ensure_sweep("digits", "twice", "first: 1\n", {"hermes.policy": "fifo"})
    two = tracker.ensure_sweep("digits", "twice", "second: 2\n", {"hermes.policy": "other"})
    assert one == two == tracker.find_sweep("twice") == tracker.find_sweep("twice", "digits")
    assert tracker.artifacts.fetch(one.parent_run_id, "sweep.yaml") == b"first: 1\n"
    assert tracker.sweep(one).tags["hermes.policy"] == "fifo"


def test_a_sweep_that_crashed_before_its_config_was_stored_gets_it_later(tracker: Tracker) -> None:
    bare = Tracker(tracker.uri)
    bare.artifacts.has = lambda run_id, name: True  # type: ignore[method-assign]
    sweep = bare.ensure_sweep("digits", "crashed", "name: x\n")
    bare.close()
    assert tracker.artifacts.files(sweep.parent_run_id) == ()
    assert tracker.ensure_sweep("digits", "crashed", "name: x\n") == sweep
    assert tracker.artifacts.files(sweep.parent_run_id) == ("sweep.yaml",)


def test_of_two_runs_for_one_trial_the_oldest_is_the_trial(
    tracker: Tracker, sweep: SweepRef
) -> None:
    clock = iter([2_000.0, 1_000.0]).__next__
    key = {
        "hermes.sweep": sweep.sweep_id,
        "hermes.kind": "trial",
        "hermes.trial": "3",
        "mlflow.parentRunId": sweep.parent_run_id,
    }
    maker = Tracker(tracker.uri, clock=clock)
    later = maker._create_run(sweep.experiment_id, "trial-003", key)["info"]["run_id"]
    older = maker._create_run(sweep.experiment_id, "trial-003", key)["info"]["run_id"]
    maker.close()
    assert later != older
    assert tracker.open_trial(sweep, 3, {}) == older
    assert [t.run_id for t in tracker.trials(sweep)] == [older]


def test_a_run_that_is_there_though_it_was_said_to_be_unseen_stands(
    tracker: Tracker, sweep: SweepRef
) -> None:
    first = tracker.open_trial(sweep, 2, {"a": 1})
    assert tracker.open_trial(sweep, 2, {"a": 2}, unseen=True) == first
    (trial,) = tracker.trials(sweep)
    assert (trial.run_id, trial.config) == (first, {"a": 1})


def test_many_openers_of_one_trial_at_once_end_with_one_run(
    tracker: Tracker, sweep: SweepRef
) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(tracker.open_trial(sweep, 1, {"a": 1})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    (trial,) = tracker.trials(sweep)
    assert tracker.open_trial(sweep, 1, {}) == trial.run_id


@pytest.mark.parametrize(
    ("codes", "posts"), [(["BAD_REQUEST"], 2), (["BAD_REQUEST"] * 2, 2), (["MALFORMED_REQUEST"], 1)]
)
def test_params_that_another_client_wrote_at_the_same_time_are_written_once_more(
    tracker: Tracker,
    sweep: SweepRef,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[str],
    posts: int,
) -> None:
    run_id, real, sent = tracker.open_trial(sweep, 11, {}), tracker._rest.post, []

    def post(path: str, body: dict[str, object]) -> object:
        answer = real(path, body)  # this one is the other client's
        sent.append(path)
        if len(sent) <= len(codes):
            raise Refused("UNIQUE constraint failed", codes[len(sent) - 1])
        return answer

    monkeypatch.setattr(tracker._rest, "post", post)
    with pytest.raises(Refused) if len(codes) == posts else nullcontext():
        tracker.add_params(run_id, {"a": 1})
    assert sent == ["runs/log-batch"] * posts


def test_the_configuration_of_the_first_call_stands_with_its_types(
    tracker: Tracker, sweep: SweepRef
) -> None:
    config = {"lr": 1e-4, "units": 32, "bias": True, "opt": "adam", "odd?name": "x" * 7_000}
    run_id = tracker.open_trial(sweep, 7, config, {"hermes.sampler": "tpe"})
    assert tracker.open_trial(sweep, 7, {"lr": 9.0}) == run_id
    (trial,) = tracker.trials(sweep)
    assert trial.config == config
    assert type(trial.config["units"]) is int
    assert (trial.number, trial.state, trial.status) == (7, "running", "RUNNING")
    assert trial.tags["mlflow.runName"] == "trial-007"
    assert trial.tags["mlflow.parentRunId"] == sweep.parent_run_id
    run = tracker._rest.get("runs/get", {"run_id": run_id})["run"]
    params = {p["key"]: p["value"] for p in run["data"]["params"]}
    assert params["lr"] == "0.0001"
    assert params["bias"] == "true"
    assert len(params) == 5


def test_params_lost_in_a_crash_are_there_after_the_next_call(
    tracker: Tracker, sweep: SweepRef
) -> None:
    crashing = Tracker(tracker.uri)
    crashing._log_in_batches = lambda *a: (_ for _ in ()).throw(KeyError())  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        crashing.open_trial(sweep, 0, {"lr": 0.5})
    crashing.close()
    run_id = tracker.open_trial(sweep, 0, {"lr": 0.7})
    run = tracker._rest.get("runs/get", {"run_id": run_id})["run"]
    assert run["data"]["params"] == [{"key": "lr", "value": "0.5"}]


def test_a_run_opened_without_its_params_gets_them_later(tracker: Tracker, sweep: SweepRef) -> None:
    config = {"lr": 0.5, "odd?name": "x"}
    run_id = tracker.open_trial(sweep, 0, config, unseen=True, params=False)
    (bare,) = tracker.trials(sweep)
    assert (bare.run_id, bare.config, bare.unwritten) == (run_id, config, config)
    tracker.add_params(run_id, {"lr": 0.5})
    (half,) = tracker.trials(sweep)
    assert half.unwritten == {"odd?name": "x"}
    for _ in range(2):  # it may be done again
        tracker.add_params(run_id, config)
    (whole,) = tracker.trials(sweep)
    assert whole.unwritten == {}


def test_a_param_that_the_script_has_logged_first_stays_and_the_others_are_written(
    tracker: Tracker, sweep: SweepRef
) -> None:
    config = {"deep": True, "lr": 0.5}
    run_id = tracker.open_trial(sweep, 0, config, unseen=True, params=False)
    tracker._rest.post("runs/log-parameter", {"run_id": run_id, "key": "deep", "value": "True"})
    tracker.add_params(run_id, config)
    run = tracker._rest.get("runs/get", {"run_id": run_id})["run"]
    assert {p["key"]: p["value"] for p in run["data"]["params"]} == {"deep": "True", "lr": "0.5"}


def test_a_run_that_was_there_is_not_left_without_its_params(
    tracker: Tracker, sweep: SweepRef
) -> None:
    first = tracker.open_trial(sweep, 0, {"lr": 0.5}, unseen=True, params=False)
    assert tracker.open_trial(sweep, 0, {"lr": 0.7}, unseen=True, params=False) == first
    (trial,) = tracker.trials(sweep)
    assert (trial.config, trial.unwritten) == ({"lr": 0.5}, {})


def test_trials_are_read_beyond_one_page(
    tracker: Tracker, sweep: SweepRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.tracking.tracker._PAGE", 4)
    for number in range(9, -1, -1):
        tracker.open_trial(sweep, number, {"n": number})
    trials = tracker.trials(sweep)
    assert [t.number for t in trials] == list(range(10))
    assert [t.config["n"] for t in trials] == list(range(10))


def test_a_sweep_sees_no_run_of_another_in_the_same_experiment(
    tracker: Tracker, sweep: SweepRef
) -> None:
    other = tracker.ensure_sweep("digits", sweep.sweep_id + "-b", "name: digits\n")
    assert other.experiment_id == sweep.experiment_id
    mine = tracker.open_trial(sweep, 0, {"a": 1})
    assert tracker.open_trial(other, 0, {"a": 2}) != mine
    assert [t.run_id for t in tracker.trials(sweep)] == [mine]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("finished", "FINISHED"),
        ("failed", "FAILED"),
        ("stopped_early", "KILLED"),
        ("cancelled", "KILLED"),
    ],
)
def test_a_final_state_sets_the_status_of_the_run(
    tracker: Tracker, sweep: SweepRef, state: str, status: str
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    tracker.finish(run_id, state, {"hermes.best": "0.25"})
    tracker.finish(run_id, state)
    tracker.finish(sweep.parent_run_id, state)
    (trial,) = tracker.trials(sweep)
    assert (trial.state, trial.status, trial.tags["hermes.best"]) == (state, status, "0.25")
    assert trial.ended_ms is not None
    assert tracker.trials(sweep, open_only=True) == ()
    assert tracker.sweep(sweep).state == state


def test_a_trial_is_open_in_every_state_that_is_not_final(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    for state in ("pending", "waiting", "running"):
        tracker.set_tags(run_id, {"hermes.state": state})
        (trial,) = tracker.trials(sweep, open_only=True)
        assert (trial.state, trial.is_open) == (state, True)


def test_a_trial_whose_script_ended_the_run_is_running_again_when_it_resumes(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    tracker._rest.post("runs/update", {"run_id": run_id, "status": "FAILED", "end_time": 1})
    assert tracker.open_trial(sweep, 0, {}) == run_id
    assert tracker.trials(sweep)[0].status == "RUNNING"


def test_segments_of_any_number_come_back_and_fewer_replace_more(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 5, {})
    many = tuple(
        Segment(5, i, (0, 1), 1e9 + i, 1e9 + i + 0.5, i, i + 1, "preempted") for i in range(300)
    )
    tracker.save_segments(run_id, many)
    assert tracker.trials(sweep)[0].segments == many
    tracker.save_segments(run_id, many[:1])
    assert tracker.trials(sweep)[0].segments == many[:1]


def test_sizes_over_the_steps_are_stored_once_though_they_are_logged_again(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 6, {})
    first = Segment(6, 1, (0, 1), 1e9, 1e9 + 5, 0, 4, "preempted", batch=64)
    for segments in ([first], [first, Segment(6, 2, (0,), 1e9 + 9, batch=32, first_step=4)]):
        tracker.save_segments(run_id, segments)
        log_sizes(tracker, run_id, segments)
    stored = {name: tracker.history(run_id, f"hermes.{name}") for name in ("workers", "batch")}
    found = {name: [(m.step, m.value) for m in points] for name, points in stored.items()}
    assert found == {
        "workers": [(0, 2.0), (4, 2.0), (4, 1.0)],
        "batch": [(0, 64.0), (4, 64.0), (4, 32.0)],
    }
    assert [s.batch for s in tracker.trials(sweep)[0].segments] == [64, 32]


def test_decisions_come_back_in_order_and_a_torn_line_is_left_out(
    tracker: Tracker, sweep: SweepRef
) -> None:
    parent = sweep.parent_run_id
    assert tracker.read_decisions(parent) == ()
    tracker.record_decisions(parent, 2, ['{"n": 3}'])
    tracker.record_decisions(parent, 1, ['{"n": 1}', '{"n": 2'])
    tracker.record_decisions(parent, 2, ['{"n": 3}'])
    assert tracker.read_decisions(parent) == ({"n": 1}, {"n": 3})
    assert "decisions/000001.jsonl" in tracker.artifacts.files(parent)


def test_a_folder_comes_back_as_it_was(tracker: Tracker, sweep: SweepRef, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "deep er").mkdir(parents=True)
    (source / "deep er" / "größe.bin").write_bytes(bytes(range(256)) * 9_000)
    (source / "empty.txt").write_bytes(b"")
    tracker.log_folder(sweep.parent_run_id, source, "report")
    tracker.download(sweep.parent_run_id, "report", tmp_path / "out")
    copy = tmp_path / "out" / "report"
    assert (copy / "deep er" / "größe.bin").read_bytes() == bytes(range(256)) * 9_000
    assert (copy / "empty.txt").read_bytes() == b""


def test_a_deleted_experiment_is_restored_for_its_next_sweep(tracker: Tracker) -> None:
    first = tracker.ensure_sweep("short-lived", "a", "x")
    tracker._rest.post("experiments/delete", {"experiment_id": first.experiment_id})
    second = tracker.ensure_sweep("short-lived", "b", "x")
    assert second.experiment_id == first.experiment_id


def test_a_sweep_id_that_no_filter_can_hold_is_refused_with_the_remedy(tracker: Tracker) -> None:
    with pytest.raises(Refused, match="another run id"):
        tracker.ensure_sweep("digits", "a'b\"c", "x")
    quoted = tracker.ensure_sweep("digits", "it's 100% _fine_", "x")
    assert tracker.find_sweep("it's 100% _fine_", "digits") == quoted


def test_a_sweep_that_is_not_there_is_none(tracker: Tracker) -> None:
    assert tracker.find_sweep("nowhere") is None
    assert tracker.find_sweep("nowhere", "no such experiment") is None


def test_a_sweep_is_found_though_its_experiment_was_renamed(tracker: Tracker) -> None:
    one = tracker.ensure_sweep("before", "kept", "x", {"hermes.name": "before"})
    body = {"experiment_id": one.experiment_id, "new_name": "after"}
    tracker._rest.post("experiments/update", body)
    assert tracker.find_sweep("kept", "before") == one
    tracker.ensure_sweep("before", "next", "x", {"hermes.name": "before"})
    assert tracker.find_sweep("kept", "before") == one
    assert tracker.find_sweep("kept", "of another") is None


def test_the_sweeps_of_an_experiment_are_listed_newest_first(tracker: Tracker) -> None:
    made = [tracker.ensure_sweep("listed", f"listed__{n}", "name: listed\n") for n in range(3)]
    tracker.finish(made[0].parent_run_id, "finished")
    found = tracker.sweeps("listed")
    assert {s.ref for s in found} == set(made)
    assert [s.started_ms for s in found] == sorted((s.started_ms for s in found), reverse=True)
    assert {s.ref.sweep_id: s.state for s in found}["listed__0"] == "finished"
    assert tracker.sweeps("not there") == ()
