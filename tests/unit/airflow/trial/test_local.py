from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.trial.local import (
    LocalSegment,
    located,
    trial_command,
    trial_environment,
    trial_options,
    trial_variables,
)
from hermes_ops.airflow.trial.trial_task import reschedule_delay_s
from hermes_ops.config.fields import OF_ONE_TRIAL
from hermes_ops.errors import HermesError
from hermes_ops.moved_paths import FILE, MovedPaths
from hermes_ops.trial.outcome import INFRASTRUCTURE, PREEMPTED
from hermes_ops.trial.supervisor.options import parse
from tests.unit.airflow.builders import lease

FOLDER = TrialFolder(Path("/h/sweeps/s/trials/3"))
SERVICES = {
    "AIRFLOW_HOME": "/a",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://u:secret@db",
    "_AIRFLOW_PROCESS_CONTEXT": "server",
    "__HERMES_TOKEN": "secret",
    "HERMES_AIRFLOW_PASSWORD_FILE": "/p",
    "HERMES_POLICY": "fifo",
    "SUPERVISOR_ENABLED": "1",
    "SQLALCHEMY_DATABASE_URI": "postgresql://u:secret@db",
    "FLASK_SECRET": "secret",
}


def environment(**inherited: str) -> dict[str, str]:
    own = lease(gpus=(1, 2), environment={"HERMES_PARAM_RATE": "0.1", "MINE": "1"}, max_epochs=20)
    return trial_environment(own, FOLDER, "s", 3, inherited)


def test_no_variable_of_the_services_reaches_the_script() -> None:
    found = environment(**SERVICES)
    assert not SERVICES.keys() & found.keys()
    assert not any("secret" in value for value in found.values())


def test_of_the_workers_own_variables_only_the_listed_and_the_named_reach_the_script() -> None:
    worker = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "hush", "HF_TOKEN": "named"}
    found = environment(**worker, HERMES_TRIAL_ENVIRONMENT="HF_TOKEN")
    assert (found["PATH"], found["HF_TOKEN"]) == ("/bin", "named")
    assert not {"AWS_SECRET_ACCESS_KEY", "HERMES_TRIAL_ENVIRONMENT"} & found.keys()


def test_the_users_own_variables_and_the_home_reach_the_script() -> None:
    found = environment(PATH="/bin", HERMES_HOME="/h", MLFLOW_TRACKING_URI="http://m")
    assert (found["PATH"], found["HERMES_HOME"]) == ("/bin", "/h")
    assert found["MLFLOW_TRACKING_URI"] == "http://m"


def test_the_trial_its_gpus_and_its_parameters_reach_the_script() -> None:
    found = environment(CUDA_VISIBLE_DEVICES="0,1,2,3", PYTHONDONTWRITEBYTECODE="1")
    assert found["CUDA_VISIBLE_DEVICES"] == found["HERMES_GPUS"] == "1,2"
    assert (found["HERMES_SWEEP"], found["HERMES_TRIAL"]) == ("s", "3")
    assert (found["HERMES_PARAM_RATE"], found["MINE"]) == ("0.1", "1")
    assert found["HERMES_CHECKPOINT_DIR"] == "/h/sweeps/s/trials/3/checkpoints"
    assert found["HERMES_METRICS_FILE"] == "/h/sweeps/s/trials/3/metrics.jsonl"
    assert (found["HERMES_MAX_EPOCHS"], found["MLFLOW_RUN_ID"]) == ("20", "run-0")
    assert "PYTHONDONTWRITEBYTECODE" not in found


def test_a_sweep_file_sets_no_variable_that_a_trial_is_given() -> None:
    ours = trial_variables(lease(environment={}), FOLDER, "s", 3)
    free = {name for name in ours if not name.startswith("HERMES_")} - OF_ONE_TRIAL.keys()
    assert free == {"PYTHONUNBUFFERED"}


def test_without_a_gpu_the_script_sees_none() -> None:
    assert trial_environment(lease(gpus=()), FOLDER, "s", 3, {})["CUDA_VISIBLE_DEVICES"] == ""


def test_the_command_guards_the_script_with_its_epoch_and_gpu_locks(home: Path) -> None:
    own = lease(4, (0, 1), time_limit_s=9.0, metric_pattern="--x", python="/usr/bin/python3",
                finish_s=60.0)  # fmt: skip
    command = trial_command(own, FOLDER, "gpus")
    mine = command[command.index("hermes_ops.trial") + 1 : command.index("--")]
    pairs = dict(zip(mine[::2], mine[1::2], strict=False))
    assert (pairs["--epoch"], pairs["--gpus"]) == ("4", "0,1")
    assert pairs["--gpu-locks"] == str(home / "gpus" / "gpus")
    assert {"--time-limit=9.0", "--metric-pattern=--x", "--python=/usr/bin/python3"} <= set(mine)
    assert "--finish-seconds=60.0" in mine
    assert command[command.index("--") + 1 :] == ["python", "train.py"]


def test_options_that_the_lease_does_not_have_are_left_out() -> None:
    command = trial_command(lease(gpus=()), FOLDER, "gpus")
    assert not any(
        c.startswith(("--gpu", "--time", "--finish", "--metric", "--python")) for c in command
    )


@pytest.mark.parametrize("name", ["-elbo", "--loss", "val loss", "a=b"])
def test_an_objective_may_have_any_name(name: str) -> None:
    command = trial_command(lease(objective=name), FOLDER, "gpus")
    assert parse(command[command.index("hermes_ops.trial") + 1 :]).objective == name


def test_a_copy_of_the_directory_is_asked_for_in_processes_and_in_pods_alike() -> None:
    own = lease(workspace="copy")
    assert "--workspace=copy" in trial_command(own, FOLDER, "gpus")
    assert "--workspace=copy" in trial_options(own, FOLDER, Path("/tmp/gpus"))
    assert not any("workspace" in option for option in trial_command(lease(), FOLDER, "gpus"))


def test_a_missing_working_directory_is_named_with_its_remedy(tmp_path: Path) -> None:
    said: list[str] = []
    own = lease(directory=str(tmp_path / "gone"))
    with pytest.raises(HermesError, match=r"gone does not exist: correct trial\.directory"):
        LocalSegment(own, TrialFolder(tmp_path), "s", 0, "gpus", said.append).start()


def test_a_script_that_outlives_its_trial_is_told_once_more_when_patience_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.trial.local.FINAL_GRACE_S", 0.0)
    told: list[str] = []
    monkeypatch.setattr(LocalSegment, "stop", lambda _: told.append("stop"))
    patient = replace(lease(), directory=str(tmp_path), command=("sleep", "60"))
    own = LocalSegment(patient, TrialFolder(tmp_path / "trial"), "s", 3, "gpus", print)
    own.start()
    try:
        own.hurry()
        assert (own.wait(0.0), own.wait(0.0), told) == (None, None, ["stop"])
    finally:
        monkeypatch.undo()
        own.finish()


def test_a_process_that_is_stopped_before_it_handles_signals_is_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.trial.local.trial_command", lambda *_: ["sleep", "60"])
    own = replace(lease(), directory=str(tmp_path))
    segment = LocalSegment(own, TrialFolder(tmp_path / "trial"), "s", 3, "gpus", print)
    segment.prepare()
    segment.stop()
    try:
        assert segment.wait(60.0) == PREEMPTED
    finally:
        segment.finish()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_process_that_is_killed_before_its_script_has_begun_is_no_failure_of_the_script(
    tmp_path: Path, home: Path, is_begun: bool
) -> None:
    script = ("python", "-c", "import time; print('epoch=1 loss=1', flush=True); time.sleep(600)")
    own = replace(lease(gpus=()), directory=str(tmp_path), command=script)
    folder = TrialFolder(tmp_path / "trial")
    folder.path.mkdir()
    earlier = {"epoch": own.epoch, "gpus": [], "start_s": 1.0, "first_step": 0}
    (folder.path / "segments.jsonl").write_text(json.dumps(earlier) + "\n")  # its task was killed
    segment = LocalSegment(own, folder, "s", 3, "gpus", lambda _: None)
    segment.prepare()
    if not is_begun:
        os.kill(segment.pid, signal.SIGKILL)
    segment.start()
    while is_begun and not (folder.metrics.exists() and folder.metrics.read_text()):
        time.sleep(0.02)
    if is_begun:
        os.kill(segment.pid, signal.SIGKILL)
    while (code := segment.wait(0.1)) is None:
        pass
    segment.finish()
    assert code == (-9 if is_begun else INFRASTRUCTURE)
    assert bool(segment.trouble) is not is_begun


@pytest.mark.parametrize("name", ["PYTHONHOME", "PYTHONPATH"])
def test_variables_for_the_interpreter_of_the_script_do_not_reach_that_of_hermes_trial(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('not the standard library')")
    said: list[str] = []
    own = replace(
        lease(environment={name: str(tmp_path)}, gpus=(), objective="loss"),
        directory=str(tmp_path),
        command=("sh", "-c", f'echo "{name}=${name}"; echo loss=1'),
    )
    segment = LocalSegment(own, TrialFolder(tmp_path / "trial"), "s", 3, "gpus", said.append)
    segment.start()
    try:
        while (code := segment.wait(1.0)) is None:
            pass
    finally:
        segment.finish()
    assert (code, said[-1]) == (0, "loss=1")
    assert said[0].endswith(str(tmp_path))


@given(st.floats(0, 600))
def test_a_preempted_task_stays_away_longer_than_a_late_event_can_take(heartbeat_s: float) -> None:
    assert reschedule_delay_s(heartbeat_s) >= max(8.0, 2 * heartbeat_s)


def test_the_delay_is_the_measured_one_for_both_settings_of_the_heartbeat() -> None:
    assert (reschedule_delay_s(1.0), reschedule_delay_s(5.0)) == (8.0, 12.0)


def test_after_a_restore_a_trial_runs_where_its_folders_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = MovedPaths((("/old", "/new"), ("/venv", "/own")))
    (tmp_path / FILE).write_text(moved.text())
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    recorded = lease(
        directory="/old/work", python="/venv/bin/python", environment={"DATA": "/old/data"}
    )
    recorded = replace(recorded, command=("/venv/bin/python", "a.py", "--in=/old/x", "/olden"))

    own = LocalSegment(recorded, FOLDER, "s", 3, "gpus", print).lease

    assert (own.directory, own.python) == ("/new/work", "/own/bin/python")
    assert own.command == ("/own/bin/python", "a.py", "--in=/new/x", "/olden")
    assert own.environment == {"DATA": "/new/data"}
    assert located(recorded, MovedPaths()) is recorded


@pytest.mark.parametrize(
    ("gpus", "changes", "options"),
    [
        ((0, 1, 2), {}, []),
        ((0, 1, 2), {"workers": "one_per_gpu"}, ["--workers", "3"]),
        ((0, 1), {"workers": "one_per_gpu", "tf_config": True}, ["--workers", "2", "--tf-config"]),
        ((4,), {"workers": "one_per_gpu", "tf_config": True}, ["--tf-config"]),
        ((4,), {"workers": "one_per_gpu"}, []),  # as without workers
        ((), {"workers": "one_per_gpu"}, []),
    ],
)
def test_each_gpu_has_a_worker_where_the_sweep_asks_for_it_and_there_are_several(
    gpus: tuple[int, ...], changes: dict[str, Any], options: list[str]
) -> None:
    found = trial_options(lease(gpus=gpus, **changes), FOLDER, Path("/tmp/gpus"))
    named = [o for o in found if o in ("--workers", "--tf-config")]
    is_alone = changes.get("workers") == "one_per_gpu" and len(gpus) < 2
    assert ("--torchrun" in found) == is_alone, "it may have others in its next segment"
    assert named == [o for o in options if o.startswith("--")]
    assert not options or options == found[found.index(options[0]) :][: len(options)]
