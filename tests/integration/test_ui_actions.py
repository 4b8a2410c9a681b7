"""What a person does in Airflow's pages, by the requests that these send: clear, mark, pause…"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DAG = "/api/v2/dags/hermes_sweep"
LEAVES_WITHIN_S = 120.0
PAUSE_S = 0.3


def clear(lab: Any, sweep: Any, *tasks: Any, note: str | None = None) -> None:
    """The dialog "Clear Task Instance", with the tasks behind it as it proposes."""
    body = {
        "dry_run": False, "dag_run_id": sweep.id, "only_failed": False, "note": note,
        "task_ids": list(tasks), "include_downstream": True, "reset_dag_runs": True,
    }  # fmt: skip
    answer = lab.airflow.post(f"{DAG}/clearTaskInstances", json=body)
    assert answer.status_code == 200, answer.text


def patch(lab: Any, path: str, body: Any) -> None:
    answer = lab.airflow.patch(path, json=body)
    assert answer.status_code == 200, answer.text


def mark(lab: Any, sweep: Any, number: int, state: str) -> None:
    """The button "Mark task instance as…"."""
    patch(lab, f"{DAG}/dagRuns/{sweep.id}/taskInstances/trial/{number}", {"new_state": state})


def trial_states(sweep: Any) -> list[str | None]:
    tasks = sweep.tasks()
    return [tasks[key]["state"] for key in sorted(k for k in tasks if k[0] == "trial")]


def finished(sweep: Any) -> list[int]:
    """The trials whose tasks have succeeded."""
    tasks = sweep.tasks().items()
    return [n for (task, n), facts in tasks if task == "trial" and facts["state"] == "success"]


def first_steps(harness: Any, sweep: Any, number: int) -> list[int]:
    """Where each segment of a trial began, those of one lease too."""
    lines = harness.json_lines(sweep.folder / "trials" / str(number) / "segments.jsonl")
    return [line["first_step"] for line in lines if "first_step" in line]


def fragile(folder: Path) -> Any:
    """A sweep whose trials fail for good in their fourth epoch, until `folder`/fix is there."""
    return {
        "command": ["python", "fragile.py", "--fails", "{fails}"],
        "environment": {"FIX": str(folder / "fix")},
        "max_failures": 0,
    }


def train(lab: Any, harness: Any, name: str, folder: Path, trials: int = 2) -> tuple[Any, Path]:
    """A sweep of which two trials have trained some epochs; they go on while the file is there."""
    slow = harness.slow_file(folder)
    content = harness.stub(name, harness.alike(trials), harness.LONG, PAUSE_S, slow_while=slow)
    sweep = lab.start(content)
    harness.await_(lambda: sweep.lines(0) > 3 and sweep.lines(1) > 3, 120)
    return sweep, slow


def test_a_running_trial_that_is_cleared_resumes_from_its_checkpoint(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    sweep, slow = train(lab, harness, "cleared", tmp_path)
    clear(lab, sweep, ["trial", 0])
    harness.await_(lambda: len(first_steps(harness, sweep, 0)) >= 2, 120)
    slow.unlink()
    sweep.await_end()
    assert sweep.states() == {0: "finished", 1: "finished"}
    sweep.assert_whole(0, harness.alike(1)[0])
    assert first_steps(harness, sweep, 0)[1] > 3
    assert sweep.tasks()["trial", 0]["try_number"] == 2
    assert [len(runs) for runs in sweep.runs().values()] == [1, 1]


def clear_whole_run(lab: Any, harness: Any, sweep: Any) -> None:
    """The button "Clear" of a run that has ended; wait until it has ended again."""
    body = {"dry_run": False, "only_failed": False}
    answer = lab.airflow.post(f"{DAG}/dagRuns/{sweep.id}/clear", json=body)
    assert answer.status_code == 200, answer.text
    harness.await_(lambda: sweep.state not in ("success", "failed"))
    sweep.await_end()


def test_clearing_the_whole_run_of_a_stopped_sweep_lets_all_its_trials_finish(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    sweep, slow = train(lab, harness, "halted-whole", tmp_path)
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    sweep.await_end()
    assert sweep.states() == {0: "cancelled", 1: "cancelled"}
    slow.unlink()
    clear_whole_run(lab, harness, sweep)
    assert sweep.states() == {0: "finished", 1: "finished"}
    assert "hermes.closed" not in sweep.parent["tags"]


@pytest.fixture(scope="module")
def mended(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep that ended with a failed trial; it was mended and its whole run cleared."""
    folder = tmp_path_factory.mktemp("fragile")
    content = harness.config(
        "fragile", {"fails": ["no", "yes"]}, "fragile.py", trial=fragile(folder)
    )
    sweep = lab.run(content)
    before = sweep.states(), len(sweep.segments(0)), sweep.parent["tags"]["hermes.state"]
    (folder / "fix").write_text("")
    clear_whole_run(lab, harness, sweep)
    return sweep, before


def test_clearing_a_whole_run_lets_what_failed_go_on_and_leaves_what_finished(mended: Any) -> None:
    sweep, (states, segments, _) = mended
    assert states == {0: "finished", 1: "failed"}
    assert sweep.states() == {0: "finished", 1: "finished"}
    assert len(sweep.segments(0)) == segments == 1
    assert [step for step, _ in sweep.curve(1)] == list(range(1, 9))
    assert trial_states(sweep) == ["success", "success"]
    assert sweep.state == "success"


def test_a_trial_that_goes_on_keeps_its_run_and_loses_the_reason_of_its_failure(
    mended: Any,
) -> None:
    sweep, _ = mended
    (run,) = sweep.runs()[1]
    assert run["info"]["status"] == "FINISHED"
    assert "hermes.reason" not in run["tags"]
    assert sweep.parent["tags"]["hermes.state"] == "finished"


def test_a_note_has_a_trial_begin_from_scratch_in_a_run_of_its_own(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    rates, slow = harness.alike(2), harness.slow_file(tmp_path)
    space = {"rate": rates, "epochs": [6, harness.LONG]}
    content = harness.config(
        "scratch", space, "stub.py", "--rate", "{rate}", "--epochs", "{epochs}", "--pause", "0.2",
        "--slow-while", str(slow), search={"max_trials": 4},
    )  # fmt: skip
    sweep = lab.start(content)
    short = harness.await_(lambda: finished(sweep), 120)[0]
    (old,) = sweep.runs()[short]
    clear(lab, sweep, ["trial", short])
    harness.await_(lambda: sweep.tasks()["trial", short]["state"] == "success", 120)
    assert len(sweep.segments(short)) == 1  # without the note it has finished, and stays so
    clear(lab, sweep, ["trial", short], note="from scratch")
    slow.unlink()
    sweep.await_end()
    runs = {run["info"]["run_id"]: run["tags"] for run in sweep.runs()[short]}
    kinds = {run_id: tags["hermes.kind"] for run_id, tags in runs.items()}
    assert sorted(kinds.values()) == ["set aside", "trial"]
    assert kinds[old["info"]["run_id"]] == "set aside"
    (new,) = (run_id for run_id, kind in kinds.items() if kind == "trial")
    assert runs[new]["hermes.state"] == "finished"
    assert [step for step, _ in lab.history(new)] == list(range(1, 7))
    assert sweep.segments(short)[0]["first_step"] == 0
    assert "Began from scratch" in sweep.tasks()["trial", short]["note"]
    assert len(sweep.document()["trials"]) == 4


def test_a_trial_that_is_marked_ends_as_marked_and_leaves_its_gpu(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    sweep, slow = train(lab, harness, "marked", tmp_path, trials=3)
    mark(lab, sweep, 0, "success")
    mark(lab, sweep, 1, "failed")
    harness.await_(lambda: sweep.lines(2) > 3, LEAVES_WITHIN_S + 60)
    harness.await_(lambda: len(set(sweep.live())) <= 1, LEAVES_WITHIN_S)
    at_marking = sweep.lines(0), sweep.lines(1)
    slow.unlink()
    sweep.await_end()
    assert sweep.states() == {0: "finished", 1: "failed", 2: "finished"}
    assert (sweep.lines(0), sweep.lines(1)) == at_marking
    assert trial_states(sweep) == ["success", "failed", "success"]
    assert sweep.tag(1, "hermes.reason") == "its task is failed"


def test_while_the_dag_is_paused_trials_train_on_and_none_begins(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    sweep, slow = train(lab, harness, "paused", tmp_path, trials=4)
    patch(lab, DAG, {"is_paused": True})
    try:
        slow.unlink()
        harness.await_(lambda: not sweep.live(), 120)
        begun = [sweep.lines(n) for n in range(4)]
        time.sleep(5)
        assert [sweep.lines(n) for n in range(4)] == begun
        assert sweep.live() == []
        assert sum(trained == harness.LONG for trained in begun) >= 2
        assert 0 in begun
    finally:
        patch(lab, DAG, {"is_paused": False})
    sweep.await_end()
    assert set(sweep.states().values()) == {"finished"}


@pytest.mark.parametrize("how", ["deleted", "failed"])
def test_a_run_that_is_deleted_or_marked_leaves_no_process_and_no_open_run(
    lab: Any, harness: Any, tmp_path: Path, how: str
) -> None:
    sweep, _ = train(lab, harness, f"gone-{how}", tmp_path, trials=3)
    run = f"{DAG}/dagRuns/{sweep.id}"
    assert lab.airflow.delete(run).status_code == 409  # Airflow deletes no run that is running
    patch(lab, run, {"state": "failed"})
    if how == "deleted":
        answer = lab.airflow.delete(run)
        assert answer.status_code == 204, answer.text
    harness.await_(lambda: not sweep.live(), LEAVES_WITHIN_S)
    harness.await_(lambda: sweep.parent["tags"]["hermes.state"] == "cancelled")
    assert set(sweep.states().values()) == {"cancelled"}
    assert "in Airflow before its report was written" in sweep.parent["tags"]["hermes.closed"]
    assert sweep.parent["info"]["status"] == "KILLED"
    after = lab.run(harness.stub("after", harness.alike(2), 3, 0.1))  # the GPUs are free
    assert set(after.states().values()) == {"finished"}


def test_a_pool_that_shrinks_and_grows_takes_and_gives_back_gpus(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    sweep, slow = train(lab, harness, "resized", tmp_path)
    with lab.pool(1):
        harness.await_(lambda: len(set(sweep.live())) == 1, LEAVES_WITHIN_S)
        left = [sweep.lines(0), sweep.lines(1)]
        harness.await_(lambda: sum(sweep.lines(n) > left[n] + 5 for n in (0, 1)) == 1, 180.0)
    harness.await_(lambda: len(set(sweep.live())) == 2, LEAVES_WITHIN_S)
    with lab.pool(3):
        slow.unlink()
        sweep.await_end()
    assert sweep.states() == {0: "finished", 1: "finished"}
    for number, rate in enumerate(harness.alike(2)):
        sweep.assert_whole(number, rate)


def test_triggering_again_with_the_same_configuration_is_a_sweep_of_its_own(
    mended: Any, lab: Any, harness: Any
) -> None:
    first, _ = mended
    conf = lab.airflow.get(f"{DAG}/dagRuns/{first.id}").json()["conf"]
    second = lab.run(conf)
    assert second.id != first.id
    assert second.states() == {0: "finished", 1: "finished"}
    params = [[runs[0]["params"] for _, runs in sorted(s.runs().items())] for s in (first, second)]
    assert params[0] == params[1]
    assert first.states() == {0: "finished", 1: "finished"}
