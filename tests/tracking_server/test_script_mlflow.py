"""Scripts that call MLflow themselves, as real trials beside a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.tracking import MetricSender, SweepRef, Tracker
from hermes_ops.tracking.curves import CurveReader

pytestmark = pytest.mark.integration

LOSSES = [0.5, 0.25, 0.2, 0.15, 0.125]
START = f"""
import os, sys, mlflow
LOSSES = {LOSSES}
def log(name="val_loss", steps=(1, 2, 3, 4, 5), values=LOSSES):
    for step, value in zip(steps, values):
        mlflow.log_metric(name, value, step=step)
"""
CONFIG = {"batch_size": 48, "nesterov": True, "rate": 0.001, "layers": [8, 8], "note": None}


class ScriptTrial:
    """A trial with a run of its own; each segment is a process of hermes-trial."""

    def __init__(self, tracker: Tracker, sweep: SweepRef, number: int, folder: Path) -> None:
        self.tracker, self.sweep, self.folder = tracker, sweep, folder
        self.run_id = tracker.open_trial(sweep, number, CONFIG)
        self.experiment = tracker.sweep(sweep).ref.experiment_id
        self.epoch = 0
        self.number = number
        self.output = ""
        self.flags: tuple[str, ...] = ()

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "MLFLOW_TRACKING_URI": self.tracker.uri,
            "MLFLOW_RUN_ID": self.run_id,
            "MLFLOW_EXPERIMENT_NAME": "digits",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            **more,
        }

    def start(
        self, script: str, *options: str, begin: str = START, **more: str
    ) -> subprocess.Popen[str]:
        self.epoch += 1
        self.folder.mkdir(exist_ok=True)
        (self.folder.parent / "train.py").write_text(begin + script)
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.folder)]
        command += ["--epoch", str(self.epoch), "--objective", "val_loss", *options]
        return subprocess.Popen(
            [*command, "--", sys.executable, *self.flags, "train.py"],
            cwd=self.folder.parent,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *options: str, begin: str = START, **more: str) -> str:
        """Run a segment to its end, send its metrics and return its outcome."""
        process = self.start(script, *options, begin=begin, **more)
        self.output, _ = process.communicate(timeout=120)
        sender = MetricSender(
            self.run_id, self.folder / "metrics.jsonl", self.folder / "sent.json", self.tracker
        )
        assert sender.drain(10)
        return str(self.result["outcome"])

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def curve(self, name: str = "val_loss") -> list[tuple[int, float]]:
        """Every point of a metric in the trial's run, repeated ones too."""
        return [(m.step, m.value) for m in self.tracker.history(self.run_id, name)]

    def seen(self) -> list[tuple[int, float]]:
        """The curve that policies see."""
        points = CurveReader(self.tracker, "val_loss").fetch(self.sweep).points
        return [(step, value) for step, value, _ in points[self.number]]

    def wait_for_checkpoint(self, step: int) -> None:
        deadline_s = time.monotonic() + 120
        while json.loads((self.folder / "status.json").read_text())["checkpoint_step"] != step:
            assert time.monotonic() < deadline_s, "the checkpoint is not seen"
            time.sleep(0.02)

    def run_info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._run()["info"]
        return found

    def params(self) -> dict[str, str]:
        return {p["key"]: p["value"] for p in self._run()["data"].get("params", ())}

    def _run(self) -> dict[str, Any]:
        found: dict[str, Any] = self.tracker._rest.get("runs/get", {"run_id": self.run_id})["run"]
        return found

    def children(self) -> list[dict[str, Any]]:
        body = {
            "experiment_ids": [self.experiment],
            "filter": f"tags.mlflow.parentRunId = '{self.run_id}'",
            "max_results": 100,
        }
        found: list[dict[str, Any]] = self.tracker._rest.post("runs/search", body).get("runs", [])
        return found


@pytest.fixture
def trial(tracker: Tracker, sweep: SweepRef, tmp_path: Path) -> ScriptTrial:
    return ScriptTrial(tracker, sweep, 0, tmp_path / "trial")


EPOCHS = list(enumerate(LOSSES, 1))
FROM_ZERO = list(enumerate(LOSSES))


@pytest.mark.parametrize(
    ("script", "curve"),
    [
        pytest.param(
            """
mlflow.set_experiment("of-the-script")
with mlflow.start_run(run_name="mine", tags={"kind": "real"}) as run:
    assert run.info.run_id == os.environ["HERMES_MLFLOW_RUN_ID"]
    log(steps=range(100, 600, 100))
    mlflow.log_metric("accuracy", 0.9, step=500)
""",
            EPOCHS,
            id="batches, in an experiment of the script",
        ),
        pytest.param(
            """
assert mlflow.start_run(run_id=os.environ["MLFLOW_RUN_ID"])
for epoch, loss in enumerate(LOSSES):
    values = {"val_loss": loss, "accuracy": 1 - loss}
    mlflow.log_metrics(values, step=epoch, synchronous=False).wait()
    mlflow.log_param("last", epoch, synchronous=False).wait()
mlflow.end_run()
mlflow.log_metric("val_loss", 9.0)
mlflow.log_metric("accuracy", 0.9)
""",
            FROM_ZERO,
            id="epochs from 0 without waiting, and a last value after the run's end",
        ),
        pytest.param(
            """
os.environ.pop("MLFLOW_RUN_ID")
mlflow.set_experiment("of-the-script")
for part in (0, 1):
    with mlflow.start_run(run_name=f"part-{part}"):
        mlflow.log_params({"part": part, "batch_size": 48.0, "nesterov": True})
        log(steps=(1, 2), values=LOSSES[2 * part:])
mlflow.log_metrics({"val_loss": LOSSES[4], "accuracy": 0.9}, step=9)
""",
            EPOCHS,
            id="several runs in a row",
        ),
        pytest.param(
            """
import subprocess
mlflow.set_experiment("of-the-script")
with mlflow.start_run() as run:
    child = "import mlflow; mlflow.log_metric('val_loss', 0.5, step=1)"
    subprocess.run([sys.executable, "-c", child], check=True)
mlflow.start_run()
log(steps=range(2, 6), values=LOSSES[1:])
mlflow.log_metric("accuracy", 0.9)
""",
            EPOCHS,
            id="a process of the script",
        ),
    ],
)
def test_what_a_script_logs_in_the_trial_s_run_is_its_curve(
    trial: ScriptTrial, script: str, curve: list[tuple[int, float]]
) -> None:
    assert trial.run(script) == "finished", trial.output
    assert trial.curve() == trial.seen() == curve
    assert trial.curve("accuracy")[-1][1] == 0.9
    assert trial.run_info()["status"] == "RUNNING"
    assert trial.run_info()["run_name"] == "trial-000"
    assert trial.params()["batch_size"] == "48"
    assert trial.children() == []


@pytest.mark.parametrize(
    ("script", "curve"),
    [
        pytest.param(
            """
import threading
mlflow.set_experiment("of-the-script")
def fold(number):
    with mlflow.start_run(run_name=f"fold-{number}", nested=True):
        mlflow.log_params({"fold": number})
        log(steps=(1, 2), values=LOSSES[2 * number:])
with mlflow.start_run():
    fold(0)
    thread = threading.Thread(target=fold, args=(1,))
    thread.start()
    thread.join()
    mlflow.log_metric("val_loss", LOSSES[4])
""",
            EPOCHS,
            id="child runs",
        ),
        pytest.param(
            """
client = mlflow.MlflowClient()
run = client.create_run(client.create_experiment("of-a-logger"))
for epoch, loss in enumerate(LOSSES):
    client.log_batch(run.info.run_id, [mlflow.entities.Metric("val_loss", loss, 1, epoch * 50)])
client.set_terminated(run.info.run_id)
assert client.get_run(run.info.run_id).info.status == "FINISHED"
""",
            FROM_ZERO,
            id="a logger with a run of its own",
        ),
        pytest.param(
            """
mlflow.set_tracking_uri("sqlite:///own.db")
with mlflow.start_run() as run:
    assert run.info.run_id != os.environ.get("MLFLOW_RUN_ID")
    mlflow.log_params({"batch_size": 99})
    with mlflow.start_run(nested=True) as child:
        log(steps=range(5))
client = mlflow.MlflowClient()
assert client.get_run(run.info.run_id).info.status == "FINISHED"
assert len(client.get_metric_history(child.info.run_id, "val_loss")) == 5
""",
            FROM_ZERO,
            id="a store of its own",
        ),
    ],
)
def test_the_objective_in_other_runs_is_the_curve_too(
    trial: ScriptTrial, script: str, curve: list[tuple[int, float]]
) -> None:
    assert trial.run(script) == "finished", trial.output
    assert trial.curve() == trial.seen() == curve
    assert trial.params()["batch_size"] == "48"
    names = {"fold-0", "fold-1"} if "fold" in script else set()
    assert {child["info"]["run_name"] for child in trial.children()} == names


RESUMING = """
import json, time
path = os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state.json")
done = json.load(open(path)) if os.path.exists(path) else 0
mlflow.set_experiment("of-the-script")
with mlflow.start_run() as run:
    assert run.info.run_id == os.environ["HERMES_MLFLOW_RUN_ID"]
    mlflow.log_params({"pid": os.getpid(), "start_epoch": done, "rate": 1e-3})
    mlflow.log_param("nesterov", True)
    for epoch in range(done, 5):
        CALL
        json.dump(epoch + 1, open(path + ".tmp", "w"))
        os.replace(path + ".tmp", path)
        if epoch == 2 and not done:
            print("waits", flush=True)
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("call", "curve"),
    [
        ("mlflow.log_metric('val_loss', LOSSES[epoch], step=epoch * 100)", FROM_ZERO),
        ("mlflow.log_metric('val_loss', LOSSES[epoch])", EPOCHS),
    ],
    ids=["batches", "no steps"],
)
def test_a_resumed_trial_goes_on_in_its_run_and_its_curve(
    trial: ScriptTrial, call: str, curve: list[tuple[int, float]]
) -> None:
    script = RESUMING.replace("CALL", call)
    process = trial.start(script)
    assert process.stdout is not None
    assert any("waits" in line for line in process.stdout)
    trial.wait_for_checkpoint(curve[2][0])
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert trial.result["outcome"] == "preempted", output
    assert trial.run_info()["status"] == "RUNNING"
    assert trial.run(script) == "finished", trial.output
    assert trial.output.splitlines() == [
        "hermes: MLflow keeps the values that were logged first: pid, start_epoch"
    ]
    assert trial.curve() == curve
    assert {**trial.params(), "pid": ""} == {
        "batch_size": "48",
        "layers": "[8, 8]",
        "nesterov": "true",
        "note": "null",
        "pid": "",
        "rate": "0.001",
        "start_epoch": "0",
    }


@pytest.mark.parametrize(
    ("script", "curve"),
    [
        (
            "for e, v in enumerate(LOSSES, 1): print(f'epoch={e} loss={2 * v} val_loss={v}'); "
            "mlflow.log_metrics({'loss': 2 * v, 'val_loss': v}, step=e - 1)",
            EPOCHS,
        ),
        (
            "for e, v in enumerate(LOSSES): "
            "mlflow.log_metrics({'loss': 2 * v, 'val_loss': v}, step=e * 50); "
            "print(f'epoch={e + 1} loss={2 * v} val_loss={v}')",
            EPOCHS,
        ),
        (
            "from hermes_ops.trial import report\n"
            "for e, v in enumerate(LOSSES): report(step=e + 1, loss=2 * v, val_loss=v); "
            "mlflow.log_metrics({'loss': 2 * v, 'val_loss': v}, step=e)",
            EPOCHS,
        ),
    ],
    ids=["printed first", "logged first", "reported"],
)
def test_what_a_script_says_in_two_ways_is_in_mlflow_once(
    trial: ScriptTrial, script: str, curve: list[tuple[int, float]]
) -> None:
    assert trial.run(script) == "finished", trial.output
    assert trial.curve() == curve
    assert [value for _, value in trial.curve("loss")] == [2 * value for value in LOSSES]


def test_what_a_script_without_the_hook_logs_in_the_trial_s_run_counts_as_it_is(
    trial: ScriptTrial,
) -> None:
    trial.flags = ("-I",)
    (trial.folder).mkdir()
    (trial.folder / "metrics.jsonl").touch()
    script = "with mlflow.start_run(): log()"
    assert trial.run(script, MLFLOW_TRACKING_USERNAME="somebody") == "finished", trial.output
    assert trial.seen() == EPOCHS
    assert trial.result["step"] == 5


def test_nan_fails_the_trial_at_its_step(trial: ScriptTrial) -> None:
    script = "import time\nlog(values=[0.5, 0.25, float('nan')])\ntime.sleep(60)"
    assert trial.run(script) == "failed"
    assert trial.result["reason"] == "val_loss is NaN at step 3"


AUTOLOG = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy, keras, mlflow
mlflow.set_experiment("of-the-script")
mlflow.autolog(log_models=False, log_datasets=False, silent=True)
x = numpy.arange(64.0).reshape(-1, 1) / 64
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
stop = keras.callbacks.EarlyStopping(
    monitor="loss", patience=1, start_from_epoch=1, min_delta=100.0, restore_best_weights=True
)
model.fit(x, 3 * x, epochs=5, validation_split=0.25, callbacks=[stop], verbose=0)
"""


@pytest.mark.tensorflow
def test_what_mlflow_logs_by_itself_beside_the_keras_hook_is_there_once(trial: ScriptTrial) -> None:
    assert trial.run(AUTOLOG, begin="", CUDA_VISIBLE_DEVICES="") == "finished", trial.output
    for name in ("loss", "val_loss"):
        assert [step for step, _ in trial.curve(name)] == [1, 2, 3]
    assert trial.curve("stopped_epoch") == [(0, 2.0)]
    assert trial.params()["opt_name"] == "sgd"
    assert trial.run_info()["status"] == "RUNNING"
