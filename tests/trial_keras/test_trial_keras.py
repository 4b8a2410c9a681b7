"""A resumed Keras trial equals one that was never interrupted, in Keras 3 and in Keras 2."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.trial_keras.conftest import VARIABLES, Interpreter

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def _scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripts", Path(__file__).with_name("scripts.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripts = _scripts()


class Run:
    """A trial in a folder of its own."""

    def __init__(self, base: Path, name: str, interpreter: Interpreter, script: str) -> None:
        self.folder = base / name
        self.script = interpreter.script(base / f"{name}.py")
        self.text = script
        self.interpreter = interpreter
        self.output = ""

    def segment(self, at: str = "", *options: str, objective: str = "val_loss") -> int:
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.folder)]
        command += ["--epoch", "1", "--objective", objective, *options]
        command += self.interpreter.options
        self.script.write_text(self.text)
        finished = subprocess.run(
            [*command, "--", self.interpreter.path, str(self.script)],
            env={**os.environ, **VARIABLES, "AT": at},
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        self.output = finished.stdout + finished.stderr
        return finished.returncode

    def metrics(self) -> dict[tuple[str, int], float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        found = [(m["name"], m["step"], m["value"]) for m in map(json.loads, lines)]
        assert len({(n, s) for n, s, _ in found}) == len(found), "a step is there twice"
        return {(n, s): v for n, s, v in found}

    @property
    def result(self) -> dict[str, Any]:
        return self._document("result.json")

    @property
    def status(self) -> dict[str, Any]:
        return self._document("status.json")

    def _document(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name).read_text())
        return content

    def said(self, word: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(word)]


def assert_same(run: Run, whole: Run) -> None:
    found, expected = run.metrics(), whole.metrics()
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5), key
    assert run.said("history") == whole.said("history")
    assert run.said("weights") == whole.said("weights")


Whole = Callable[[Interpreter, str], Run]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Runs that were never interrupted, each made once."""
    made: dict[tuple[Interpreter, str], Run] = {}

    def whole(interpreter: Interpreter, script: str) -> Run:
        if (interpreter, script) not in made:
            run = Run(tmp_path_factory.mktemp("whole"), "whole", interpreter, script)
            objective = "val_loss" if "validation_data" in script else "loss"
            assert run.segment(objective=objective) == 0, run.output
            made[interpreter, script] = run
        return made[interpreter, script]

    return whole


NEW_PROCESS = "TERM:0:1:3"


@pytest.mark.parametrize("at", [NEW_PROCESS, "KILL:0:3:2", "TERM:0:3:7"])
def test_a_stopped_and_resumed_trial_has_the_same_curve(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole, at: str
) -> None:
    whole = whole_run(interpreter, scripts.ONE)
    started = interpreter.plain if at == NEW_PROCESS else interpreter
    run = Run(tmp_path, "run", started, scripts.ONE)
    code = run.segment(at)
    assert code == 75 if at.startswith("TERM") else code not in (0, 75), run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)
    assert (run.folder / "model" / "model.keras").exists()
    assert run.status["timings"]["restore_s"] > 0
    assert 0 < run.status["tensor_skew"] <= 1


@pytest.mark.parametrize("rounds", ["", "2"])
def test_files_and_lines_that_are_both_shuffled_go_on_in_the_same_order(
    tmp_path: Path, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, rounds: str
) -> None:
    monkeypatch.setenv("ROUNDS", rounds)
    whole = Run(tmp_path, "whole", interpreter, scripts.STACKED)
    assert whole.segment() == 0, whole.output
    run = Run(tmp_path, "run", interpreter, scripts.STACKED)
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)


@pytest.mark.parametrize("data", ["arrays", "pipeline"])
def test_an_epoch_goes_on_at_the_same_share_with_batches_of_another_size(
    tmp_path: Path, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("DATA", data)
    monkeypatch.setenv("BATCH", "4")
    run = Run(tmp_path, "run", interpreter, scripts.BATCHES)
    assert run.segment("TERM:0:1:29", objective="loss") == 75, run.output
    monkeypatch.setenv("BATCH", "16")
    assert run.segment(objective="loss") == 0, run.output
    first = [*range(30), 7, 8, 9]
    assert run.said("epoch") == [f"epoch 1 {first}", f"epoch 2 {list(range(10))}"]
    assert {step for _, step in run.metrics()} == {1, 2, 3}


def test_a_preempted_trial_leaves_no_temporary_file_behind(
    tmp_path: Path, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    run = Run(tmp_path, "run", interpreter.plain, scripts.TEMPORARY)
    assert run.segment(NEW_PROCESS) == 75, run.output
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_a_trial_that_is_killed_after_its_last_epoch_trains_no_epoch_more(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.DIES)
    run = Run(tmp_path, "run", interpreter, scripts.DIES)
    assert run.segment("TERM:0:2:7") not in (0, 75), run.output
    assert run.status["checkpoint_step"] == max(step for _, step in whole.metrics()) == 3
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_callbacks_go_on_where_they_were_and_their_files_where_the_script_looks_for_them(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.CALLBACKS)
    run = Run(tmp_path, "run", interpreter, scripts.CALLBACKS)
    for at in ("TERM:0:1:4", "TERM:0:2:0", "KILL:0:3:5", ""):
        run.segment(at)
    assert_same(run, whole)
    assert run.said("best") == whole.said("best") != []


def test_a_backup_that_another_trial_has_left_is_neither_used_nor_written(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run(interpreter, scripts.BACKUP)
    run, backup = Run(tmp_path, "run", interpreter, scripts.BACKUP), tmp_path / "backup"
    monkeypatch.setenv("BACKUP", str(backup))
    plain = {**os.environ, "LEAVE": "yes", "CUDA_VISIBLE_DEVICES": "", "HERMES_TRIAL_DIR": "none"}
    run.script.write_text(run.text)
    command = [interpreter.path, str(run.script)]
    left = subprocess.run(command, env=plain, check=False)
    files = sorted(backup.rglob("*"))
    assert left.returncode == 9
    assert files, "the script left no backup"
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert len(run.said("hermes: BackupAndRestore is left out")) == 1
    assert run.segment() == 0, run.output
    assert_same(run, whole)
    assert sorted(backup.rglob("*")) == files


def test_of_several_fits_those_that_are_complete_are_not_run_again(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.TWO_FITS)
    run = Run(tmp_path, "run", interpreter, scripts.TWO_FITS)
    assert run.segment("TERM:1:1:2") == 75, run.output
    assert run.segment("KILL:2:1:2") not in (0, 75), run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)
    assert run.said("between") == whole.said("between")
    assert {step for _, step in run.metrics()} == set(range(1, 9))


def test_fits_that_share_a_shuffled_pipeline_go_on_in_its_order(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.STAGES)
    run = Run(tmp_path, "run", interpreter, scripts.STAGES)
    assert run.segment("TERM:1:1:3") == 75, run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_any_number_of_fits_is_replayed_with_what_the_code_between_them_sees(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.LOOPS)
    run = Run(tmp_path, "run", interpreter, scripts.LOOPS)
    assert run.segment("TERM:17:8:1", objective="loss") == 75, run.output
    assert run.segment("KILL:19:1:2", objective="loss") not in (0, 75), run.output
    assert run.segment(objective="loss") == 0, run.output
    assert_same(run, whole)
    for word in ("between", "fold"):
        assert run.said(word) == whole.said(word)


def test_fits_whose_states_need_too_much_room_make_the_trial_not_preemptible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_run: Whole,
    standby: Callable[[str], Interpreter],
) -> None:
    interpreter = standby(sys.executable)
    whole = whole_run(interpreter, scripts.LOOPS)
    monkeypatch.setenv("HERMES_FIT_STATES_BYTES", "1")
    run = Run(tmp_path, "run", interpreter, scripts.LOOPS)
    assert run.segment("TERM:18:1:1", objective="loss") == 75, run.output
    assert run.result["outcome"] == "interrupted"
    assert run.output.count("not preemptible any more: the states after its 17 fit calls") == 1
    assert run.status["preemptible"] is False
    assert list((run.folder / "checkpoints").iterdir()) == []
    assert run.segment(objective="loss") == 0, run.output
    assert run.metrics() == whole.metrics()
    assert run.said("fold") == whole.said("fold")


@pytest.mark.parametrize("at", ["TERM:0:2:7", "after"])
def test_a_script_told_to_stop_when_all_is_trained_ends_by_itself(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole, at: str
) -> None:
    whole = whole_run(interpreter, scripts.ENDING)
    run = Run(tmp_path, "run", interpreter, scripts.ENDING)
    assert run.segment(at) == 0, run.output
    assert run.result["outcome"] == "finished"
    assert run.said("over") == ["over"]
    assert_same(run, whole)


def test_a_script_told_to_stop_while_its_interpreter_is_torn_down_has_finished(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.ENDING)
    run = Run(tmp_path, "run", interpreter.plain, scripts.TEARDOWN)
    assert run.segment() == 0, run.output
    assert run.result["outcome"] == "finished"
    assert run.said("gone") == ["gone"]
    assert_same(run, whole)


@pytest.mark.parametrize("at", ["TERM:0:2:7", "after"])
def test_a_script_whose_last_lines_take_long_is_preempted_in_them_and_trains_nothing_twice(
    tmp_path: Path,
    interpreter: Interpreter,
    whole_run: Whole,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    whole = whole_run(interpreter, scripts.ENDING)
    run = Run(tmp_path, "run", interpreter, scripts.ENDING)
    monkeypatch.setenv("ENDING_S", "500")
    assert run.segment(at) == 75, run.output
    assert run.result["outcome"] == "preempted"
    assert run.status["checkpoint_step"] == 3
    assert run.said("over") == []
    monkeypatch.setenv("ENDING_S", "0")
    assert run.segment() == 0, run.output
    assert run.said("over") == ["over"]
    assert_same(run, whole)


def test_unseeded_shuffling_shows_each_sample_once_an_epoch_across_a_stop(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    run = Run(tmp_path, "run", interpreter, scripts.UNSEEDED)
    assert run.segment("TERM:0:1:3", objective="loss") == 75, run.output
    assert run.segment(objective="loss") == 0, run.output
    rows = [line.split() for line in (run.folder / "seen").read_text().splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == 24
    epochs = [sorted(int(v) for row in rows[e : e + 8] for v in row) for e in (0, 8, 16)]
    assert epochs == [list(range(128))] * 3
    assert rows[:8] != rows[8:16]


def test_a_seeded_pipeline_with_a_cache_in_files_goes_on_in_mid_epoch(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.DATASET)
    run = Run(tmp_path, "run", interpreter, scripts.DATASET)
    assert run.segment("TERM:0:0:2") == 75, run.output
    assert list(run.folder.glob("cache*.lockfile"))
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert "start of an epoch only" not in run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_what_a_pipeline_captures_is_put_back(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.PIPELINES)
    run = Run(tmp_path, "run", interpreter, scripts.PIPELINES)
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert "start of an epoch only" not in run.output
    assert run.segment("KILL:1:1:2") not in (0, 75), run.output
    assert run.segment("TERM:1:2:4") == 75, run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_the_files_that_callbacks_write_are_those_of_a_run_that_never_stopped(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run(interpreter, scripts.FILES)
    run = Run(tmp_path, "run", interpreter, scripts.FILES)
    assert run.segment("TERM:0:2:3") == 75, run.output
    monkeypatch.setenv("DIE", "3")
    assert run.segment() not in (0, 75), run.output
    assert run.segment("TERM:1:2:4") == 75, run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)
    for word in ("rows", "file", "scalars"):
        assert run.said(word) == whole.said(word)


def test_state_that_only_the_users_own_code_holds_is_put_back(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.HIDDEN)
    run = Run(tmp_path, "run", interpreter, scripts.HIDDEN)
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert run.segment("KILL:0:3:5") not in (0, 75), run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_a_generator_goes_on_at_the_start_of_an_epoch_and_says_why(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    run = Run(tmp_path, "run", interpreter, scripts.GENERATOR)
    assert run.segment("TERM:0:2:3", objective="loss") == 75, run.output
    assert run.output.count("keeps no position") >= 1
    assert run.result["checkpoint_step"] == 2
    assert run.segment(objective="loss") == 0, run.output
    assert {step for _, step in run.metrics()} == {1, 2, 3, 4}


@pytest.mark.parametrize("loop", ["train_on_batch", "apply_gradients"])
def test_training_that_is_not_watched_is_said_when_it_starts(
    tmp_path: Path, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("LOOP", loop)
    run = Run(tmp_path, "run", interpreter, scripts.OWN_LOOP)
    assert run.segment(objective="loss") == 0, run.output
    lines = [line for line in run.output.splitlines() if line.startswith(("hermes:", "epoch="))]
    assert "runs outside fit" in lines[0]
    assert [line.startswith("epoch=") for line in lines[1:]] == [True] * 3
    assert {step for _, step in run.metrics()} == {1, 2, 3}


def test_a_torn_checkpoint_is_skipped_in_keras(
    tmp_path: Path, interpreter: Interpreter, whole_run: Whole
) -> None:
    whole = whole_run(interpreter, scripts.ONE)
    run = Run(tmp_path, "run", interpreter, scripts.ONE)
    assert run.segment("TERM:0:3:3") == 75, run.output
    newest = max((run.folder / "checkpoints").glob("keras-*"))
    with open(newest / "arrays.bin", "r+b") as stream:
        stream.seek(10)
        stream.write(b"torn")
    assert run.segment() == 0, run.output
    assert_same(run, whole)


def test_a_nan_objective_fails_and_max_epochs_finishes(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    run = Run(tmp_path, "nan", interpreter, scripts.DIVERGING)
    assert run.segment() not in (0, 70, 75)
    assert "val_loss is NaN at step" in run.result["reason"], run.output
    short = Run(tmp_path, "short", interpreter, scripts.ONE)
    assert short.segment("", "--max-epochs", "2") == 0, short.output
    assert {step for _, step in short.metrics()} == {1, 2}


def test_keras_on_another_backend_goes_on_at_the_start_of_an_epoch_and_says_so(
    tmp_path: Path, backend: tuple[str, Interpreter], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, interpreter = backend
    monkeypatch.setenv("KERAS_BACKEND", name)
    whole = Run(tmp_path, "whole", interpreter, scripts.BACKENDS)
    run = Run(tmp_path, "run", interpreter, scripts.BACKENDS)
    assert whole.segment() == 0, whole.output
    assert run.segment("TERM:0:2:3") == 75, run.output
    assert run.result["checkpoint_step"] == 2
    assert run.output.count("resumed at the start of an epoch only: Keras runs on") == 1
    assert run.segment("KILL:1:3:2") not in (0, 75), run.output
    assert run.segment("TERM:2:1:0") == 75, run.output
    assert run.segment() == 0, run.output
    assert_same(run, whole)
    assert run.said("between") == whole.said("between")
    assert (run.folder / "model" / "model.keras").exists()
