"""hermes-trial beside scripts that train their epochs and then go on, or never stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trial.supervised import SupervisedTrial

BEGIN = """
import json, os, sys, time
def say(*words): print(*words, flush=True)
def loss(e): return 1.0 / (e + 1)
"""
CURVE = [(1.0 / (e + 1), e) for e in range(1, 6)]


class Trial(SupervisedTrial):
    """Runs hermes-trial on a script in a temporary folder, for five epochs."""

    def start(self, script: str, *options: str) -> subprocess.Popen[bytes]:
        self.script.write_text(BEGIN + script)
        self.epoch += 1
        own = ["--max-epochs", "5", "--objective", "val_loss", "--directory", str(self.base)]
        command = [sys.executable, "train.py"]
        return self.supervise([*own, *options], command, errors=subprocess.STDOUT)

    def run(self, script: str, *options: str) -> tuple[str, str]:
        output, _ = self.start(script, *options).communicate(timeout=60)
        return self.result["outcome"], output.decode()

    def file(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name).read_text())
        return content

    def curve(self, name: str = "val_loss") -> list[tuple[float, int]]:
        lines = self.lines("metrics.jsonl")
        return [(line["value"], line["step"]) for line in lines if line["name"] == name]


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    trial.close()


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


EPOCHS = "for e in range(1, 6): say(f'epoch={e} val_loss={loss(e)}')\n"


@pytest.mark.parametrize(
    "script",
    [
        "for e in range(1, 6):\n"
        "    for b in range(10, 101, 10): say(f'step={(e - 1) * 100 + b} train_loss={loss(e)}')\n"
        "    say(f'epoch={e} val_loss={loss(e)}')\n",
        "for e in range(1, 6):\n"
        "    say(json.dumps({'global_step': e * 100, 'epoch': e, 'val_loss': loss(e)}))\n",
        "best = 1.5\n"
        "for e in range(1, 6):\n"
        "    say(f'epoch={e} val_loss={loss(e)}')\n"
        "    say(f'improved: val_loss={best:.4f} --> val_loss={loss(e):.4f}, saving')\n",
        "for e in range(1, 6): say(\"{'epoch': %d, 'val_loss': np.float64(%r)}\" % (e, loss(e)))\n",
        "say('Namespace(epochs=5, step=1, val_loss=7.0)')\n" + EPOCHS,
        "for e in range(1, 6): say(f'Epoch {e}/5 - train loss: 3 - val_loss: {loss(e)}')\n",
        "from hermes_ops.trial import report\n"
        "for e in range(1, 8): report(e, val_loss=loss(e)); time.sleep(0.05 * (e > 5))\n"
        "time.sleep(60)\n",
        "import itertools\n"
        "for e in itertools.count(1): say(f'epoch={e} val_loss={loss(e)}'); time.sleep(0.02)\n",
        "import itertools\nfor e in itertools.count(1): say(f'val_loss={loss(e)}')\n",
    ],
    ids=[
        *("lines of batches", "global step", "improved", "numpy 2", "arguments", "colons"),
        *("report", "no end", "no end and no steps"),
    ],
)
def test_the_curve_is_that_of_the_epochs_that_the_script_was_told(
    trial: Trial, script: str
) -> None:
    outcome, output = trial.run(script)
    assert (outcome, trial.curve()) == ("finished", CURVE), output
    assert trial.file("status.json")["step"] == 5
    assert output.count("hermes-trial:") <= 1


def test_a_script_that_does_more_after_its_last_epoch_ends_by_itself(trial: Trial) -> None:
    outcome, output = trial.run(EPOCHS + "time.sleep(1)\nopen('saved', 'w')\nsay('saved')\n")
    assert (outcome, trial.result["exit_code"]) == ("finished", 0)
    assert output.endswith("saved\n")
    assert (trial.base / "saved").exists()


def test_an_epoch_0_before_training_is_a_point_and_shifts_nothing(trial: Trial) -> None:
    outcome, output = trial.run("say('epoch=0 val_loss=2.3')\n" + EPOCHS + "say('at the end')\n")
    assert (outcome, trial.curve()) == ("finished", [(2.3, 0), *CURVE])
    assert output.endswith("at the end\n")


def test_a_script_that_counts_its_epochs_from_0_trains_all_of_them(trial: Trial) -> None:
    outcome, _ = trial.run(EPOCHS.replace("range(1, 6)", "range(5)") + "open('saved', 'w')\n")
    assert outcome == "finished"
    assert [step for _, step in trial.curve()] == [0, 1, 2, 3, 4]
    assert (trial.base / "saved").exists()


def test_a_script_that_does_not_end_after_its_last_epoch_is_ended_as_finished(
    trial: Trial,
) -> None:
    outcome, output = trial.run(EPOCHS + "time.sleep(60)\n", "--finish-seconds", "0.5")
    assert (outcome, trial.curve()) == ("finished", CURVE)
    assert "it has not ended 0.5 s (trial.finish_seconds) after its last epoch" in output


def test_a_time_limit_after_the_last_epoch_ends_a_trial_as_finished(trial: Trial) -> None:
    outcome, _ = trial.run(EPOCHS + "time.sleep(60)\n", "--time-limit", "8")
    assert outcome == "finished"


def test_an_error_after_the_last_epoch_is_a_failure(trial: Trial) -> None:
    outcome, _ = trial.run(EPOCHS + "raise SystemExit('it cannot be saved')\n")
    assert outcome == "failed"
    assert trial.result["reason"] == "exit code 1: it cannot be saved"


def test_a_trial_in_its_last_lines_keeps_its_gpu_and_finishes_after_a_stop(trial: Trial) -> None:
    save = (
        "while not os.path.exists(os.environ['HERMES_METRICS_FILE']) or "
        "open(os.environ['HERMES_METRICS_FILE']).read().count('\\n') < 5: time.sleep(0.01)\n"
        "open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').write('5')\n"
    )
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    lines = "open('last', 'w')\ntime.sleep(60)\n"
    process = trial.start(handler + EPOCHS + save + lines)
    wait_for((trial.base / "last").exists)
    wait_for(lambda: trial.file("status.json")["checkpoint_step"] == 5)
    status = trial.file("status.json")
    assert (status["preemptible"], status["step"]) == (False, 5)
    assert "last epoch is over" in status["preemptible_reason"]
    process.terminate()
    assert process.wait(60) == 0
    assert trial.result["outcome"] == "finished"


def test_last_lines_that_were_stopped_are_run_again_and_change_no_value(trial: Trial) -> None:
    script = (
        "path = os.environ['HERMES_CHECKPOINT_DIR'] + '/state'\n"
        "if not os.path.exists(path):\n"
        "    say('epoch=0 val_loss=2.3')\n"
        "    for e in range(1, 6): say(f'epoch={e} val_loss={loss(e)}')\n"
        "    open(path, 'w').write('5')\n    open('last', 'w')\n    time.sleep(60)\n"
        "say('improved: val_loss=9')\nopen('saved', 'w')\n"
    )
    process = trial.start(script)
    wait_for((trial.base / "last").exists)
    wait_for(lambda: trial.file("status.json")["checkpoint_step"] == 5)
    process.terminate()
    assert process.wait(60) == 75
    assert trial.run(script)[0] == "finished"
    assert trial.curve() == [(2.3, 0), *CURVE]
    assert (trial.base / "saved").exists()


def test_what_is_not_read_is_said_once_in_the_trial_and_in_its_failure(trial: Trial) -> None:
    script = "for e in range(1, 6): say(f'epoch={e} val_loss=0,{e}')\n"
    outcome, output = trial.run(script + "time.sleep(0.3)\nraise SystemExit(3)\n")
    assert output.count('hermes-trial: not read: "epoch=1 val_loss=0,1": a comma') == 1
    outcome, output = trial.run(script)
    assert (outcome, output.count("hermes-trial: not read")) == ("failed", 0)
    assert 'not read: "epoch=1 val_loss=0,1"' in trial.result["reason"]


def test_a_script_whose_first_value_is_beyond_its_last_epoch_is_told_why(trial: Trial) -> None:
    outcome, _ = trial.run("say('epoch=50 val_loss=1')\ntime.sleep(60)\n")
    assert outcome == "failed"
    assert "step 50 is beyond budget.max_epochs (5)" in trial.result["reason"]


def test_values_of_a_report_from_0_to_the_last_epoch_are_stored(trial: Trial) -> None:
    script = (
        "from hermes_ops.trial import report\n"
        "report(0, val_loss=2.3)\nreport(700, train_loss=1.0)\n"
        "for e in range(1, 6): report(e, val_loss=loss(e))\n"
    )
    assert trial.run(script)[0] == "finished"
    assert trial.curve() == [(2.3, 0), *CURVE]
    assert trial.curve("train_loss") == [(1.0, 700)]
    assert os.path.exists(trial.folder / "status.json")
    assert trial.file("status.json")["step"] == 5


def test_a_script_whose_values_are_not_read_is_told_so_early_and_once(trial: Trial) -> None:
    script = (
        "say('epoch 1 | validation loss 0.5')\nwhile not os.path.exists('go'): time.sleep(.1)\n"
    )
    process = trial.start(script, "--advise-after", "0.2")
    wait_for((trial.folder / "status.json").exists)
    wait_for(lambda: trial.file("status.json")["advice"])
    told = trial.file("status.json")["advice"]
    assert told.startswith("no value of 'val_loss' has been read so far")
    assert "epoch (?P<step>\\d+)\\b.*?\\b(?P<name>validation loss)" in told
    (trial.base / "go").touch()
    output, _ = process.communicate(timeout=60)
    assert output.decode().count(told) == 2  # while it runs, and in its failure
    assert trial.result["outcome"] == "failed"


def test_a_script_that_prints_nothing_like_a_value_is_told_so_too(trial: Trial) -> None:
    script = "say('Epoch   Loss')\nwhile not os.path.exists('go'): time.sleep(.1)\n"
    process = trial.start(script, "--advise-after", "0.2")
    wait_for((trial.folder / "status.json").exists)
    wait_for(lambda: trial.file("status.json")["advice"])
    assert trial.file("status.json")["advice"] == (
        "no value of 'val_loss' has been read so far: no line looks like one"
    )
    (trial.base / "go").touch()
    output, _ = process.communicate(timeout=60)
    assert output.count(b"hermes-trial: no value of 'val_loss' has been read so far\n") == 1


def test_a_script_whose_values_are_read_is_told_nothing(trial: Trial) -> None:
    script = EPOCHS + "say('validation loss 0.5')\ntime.sleep(4)\n"
    outcome, output = trial.run(script, "--advise-after", "3")
    assert (outcome, "hermes-trial" in output) == ("finished", False)
    assert trial.file("status.json")["advice"] == ""


def test_a_trial_that_trains_again_from_scratch_is_not_ended_before_its_last_epoch(
    trial: Trial,
) -> None:
    script = (
        "again = os.path.exists('last')\n"
        "for e in range(1, 6):\n"
        "    time.sleep(4 * again * (e == 5))\n"
        "    say(f'epoch={e} val_loss={loss(e)}')\n"
        "open('last', 'w')\nif not again: time.sleep(60)\nopen('saved', 'w')\n"
    )
    process = trial.start(script)
    wait_for((trial.base / "last").exists)
    wait_for(lambda: len(trial.curve()) == 5)
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "interrupted"
    assert trial.run(script, "--finish-seconds", "3")[0] == "finished"
    assert (trial.base / "saved").exists()
    assert trial.curve() == CURVE
