from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.folders import (
    TrialFolder,
    counted_segments,
    metrics_wake_file,
    write_start,
    write_use,
)
from hermes_ops.airflow.records import CorrectedStart
from hermes_ops.airflow.trial.metrics import MetricFeed, TrialOutcome, finish_run, save_segments
from hermes_ops.errors import Refused, Unavailable
from tests.unit.airflow.builders import SWEEP, lease, segment


class Mlflow:
    """A trial's run, and the sender of its metrics."""

    def __init__(self, trouble: Exception | None = None, sends: Sequence[int] = ()) -> None:
        self.trouble = trouble
        self.sends = list(sends)
        self.said: list[Any] = []

    def _say(self, *what: Any) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.said.append(what)

    def pump(self) -> int:
        self.said.append("pump")
        return self.sends.pop(0) if self.sends else 0

    def drain(self, timeout_s: float) -> bool:
        self.said.append("drain")
        return True

    def save_segments(self, run_id: str, rows: Sequence[Any]) -> None:
        self._say("segments", run_id, [(r.trial, r.epoch, r.gpus, r.end_s) for r in rows])
        self.starts = [(r.startup_s, r.restore_s) for r in rows]

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        self._say("columns", run_id, {m["key"]: m["value"] for m in metrics})

    def finish(self, run_id: str, state: str, tags: Mapping[str, str]) -> None:
        self._say("finish", run_id, state, dict(tags))


def feed_of(mlflow: Mlflow) -> MetricFeed:
    outside: Any = mlflow
    feed = MetricFeed(
        lease().run_id, TrialFolder.from_sweep(SWEEP, 3), objective=("loss", "minimize")
    )
    feed.tracker = feed._sender = outside
    return feed


def test_a_pause_sends_metrics_and_the_record_of_segments() -> None:
    mlflow = Mlflow()
    feed_of(mlflow).pump_once()
    feed_of(mlflow).pump_once(ended=True)
    assert [s if isinstance(s, str) else s[0] for s in mlflow.said] == [
        "pump",
        "pump",
        "segments",
        "columns",
    ]


def test_a_trial_that_has_left_its_gpu_has_its_figures_in_the_table_before_its_sweep_ends() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    values = [("loss", 0.5), ("acc", 0.1), ("loss", 0.25), ("loss", float("nan")), ("loss", 0.75)]
    lines = [
        {"name": name, "value": value, "step": step, "time_ms": step}
        for step, (name, value) in enumerate(values, start=1)
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    segments = [
        {"epoch": 1, "gpus": [0], "start_s": 1.0, "first_step": 0},
        {"epoch": 1, "end_s": 5.0, "last_step": 2, "outcome": "preempted"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in segments)
    (folder.path / "segments.jsonl").write_text(text)
    mlflow = Mlflow()
    feed_of(mlflow).pump_once(ended=True)
    assert mlflow.said[-1] == (
        "columns",
        "run-0",
        {
            "hermes.best": 0.25,
            "hermes.final": 0.75,
            "hermes.steps": 2.0,
            "hermes.segments": 1.0,
            "hermes.preemptions": 1.0,
            "hermes.gpu_seconds": 4.0,
        },
    )


def test_metrics_that_were_sent_wake_the_controllers_and_an_idle_look_does_not() -> None:
    wake_file, feed = metrics_wake_file(), feed_of(Mlflow(sends=[0, 3, 0]))
    told = [(feed.pump_once(), wake_file.woken()) for _ in range(3)]
    assert told == [(False, False), (True, True), (False, False)]


def test_new_metrics_are_looked_for_often_and_rest_after_a_sending() -> None:
    pauses: list[float] = []

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == 5

    feed = feed_of(Mlflow(sends=[0, 3, 0, 0]))
    stop: Any = SimpleNamespace(wait=wait)
    feed._stop, feed.look_s = stop, lambda: 0.2
    feed._loop()
    assert pauses == [0.2, 0.2, 0.4, 0.2, 0.2]


def test_an_end_sends_the_rest_before_it_closes_the_run() -> None:
    mlflow = Mlflow()
    feed_of(mlflow).finish(TrialOutcome("finished"), segment(ended_s=9.0, step=7))
    assert [s if isinstance(s, str) else s[0] for s in mlflow.said] == [
        "drain",
        "segments",
        "columns",
        "finish",
    ]


@pytest.mark.parametrize(
    "trouble",
    [Unavailable("away"), Refused("the run was deleted"), OSError(28, "No space left on device")],
)
def test_trouble_with_mlflow_or_the_volume_is_never_the_trials(trouble: Exception) -> None:
    mlflow = Mlflow(trouble)
    feed = feed_of(mlflow)
    feed.pump_once(ended=True)
    feed.finish(TrialOutcome("finished"), segment())
    feed.close()
    assert mlflow.said == ["pump", "drain"]  # nothing else was taken


def test_a_feed_without_an_address_leaves_the_metrics_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    line = '{"name": "loss", "value": 1.0, "step": 1, "time_ms": 1}\n'
    folder.metrics.write_text(line)
    feed = MetricFeed(lease().run_id, folder)
    feed.pump_once()
    feed.finish(TrialOutcome("finished"), segment())
    assert (folder.metrics.read_text(), folder.sent.exists()) == (line, False)


def test_segments_are_stored_with_their_gpus_those_under_way_without_an_end() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    lines = [
        {"epoch": 1, "gpus": [0, 1], "start_s": 1.0, "first_step": 0},
        {"epoch": 1, "end_s": 5.0, "last_step": 2, "outcome": "preempted", "startup_s": 1.5},
        {"epoch": 2, "gpus": [1], "start_s": 7.0, "first_step": 2},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder.path / "segments.jsonl").write_text(text)
    mlflow: Any = Mlflow()
    save_segments(mlflow, "run-3", folder)
    assert mlflow.said[0] == ("segments", "run-3", [(3, 1, (0, 1), 5.0), (3, 2, (1,), None)])
    assert mlflow.starts == [(1.5, None), (None, None)]


def test_segments_that_a_script_has_shortened_are_stored_as_they_are_on_record() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    write_use(folder, segment(epoch=1, spans=((4.0, 9.0),), held=((1.0, 9.0),), sizes=(2,)))
    short = {"epoch": 1, "gpus": [0, 1], "start_s": 8.0, "end_s": 9.0, "startup_s": 0.5}
    (folder.path / "segments.jsonl").write_text(json.dumps(short))
    mlflow: Any = Mlflow()
    feed_of(mlflow).pump_once(ended=True)
    _, stored, *_, (_, _, columns) = mlflow.said
    assert stored == ("segments", lease().run_id, [(3, 1, (0, 1), 9.0)])
    assert columns["hermes.gpu_seconds"] == 16.0


@pytest.mark.parametrize(
    ("told", "stored"),
    [
        ([{"epoch": 2, "gpus": [3], "start_s": 158.0, "end_s": 160.0}], (3, 2, (0, 1), 160.0)),
        ([{"epoch": 2, "gpus": [3], "start_s": 900.0, "end_s": 990.0}], (3, 2, (0, 1), 160.0)),
        ([{"epoch": 2, "gpus": [3], "start_s": 100.0}], (3, 2, (0, 1), 160.0)),
        ([], (3, 2, (0, 1), 160.0)),
        ([{"epoch": 2, "gpus": [3], "start_s": 101.0, "end_s": 159.0}], (3, 2, (3,), 159.0)),
    ],
)
def test_a_container_that_the_triggerer_saw_run_is_stored_before_its_segment_is_on_record(
    told: list[dict[str, Any]], stored: tuple[object, ...]
) -> None:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    write_use(folder, segment(epoch=1, spans=((1.0, 9.0),), held=((1.0, 9.0),), sizes=(2,)))
    write_start(folder, CorrectedStart(2, 90.0, 90.0, ran_s=60.0, began_s=100.0, gpus=(0, 1)))
    first = {"epoch": 1, "gpus": [0, 1], "start_s": 1.0, "end_s": 9.0}
    lines = "".join(f"{json.dumps(line)}\n" for line in (first, *told))
    (folder.path / "segments.jsonl").write_text(lines)
    mlflow: Any = Mlflow()
    feed_of(mlflow).pump_once(ended=True)
    assert mlflow.said[1] == ("segments", lease().run_id, [(3, 1, (0, 1), 9.0), stored])
    assert folder.empty()
    assert counted_segments(folder) == ()


def test_a_run_is_closed_with_its_accounts_and_of_a_failure_its_last_lines() -> None:
    mlflow: Any = Mlflow()
    record = segment(service_gpu_s=3.0, segments=2, preemptions=1, step=7, ended_s=9.0)
    finish_run(mlflow, "run-3", TrialOutcome("failed", "no data", ("a", "b")), record)
    ((_, run_id, state, tags),) = mlflow.said
    assert (run_id, state) == ("run-3", "failed")
    assert tags == {
        "hermes.segments": "2",
        "hermes.preemptions": "1",
        "hermes.gpu_seconds": "3.000",
        "hermes.steps": "7",
        "hermes.ended": "9.000",
        "hermes.reason": "no data",
        "hermes.output_tail": "a\nb",
    }


def test_what_a_switch_of_the_trial_has_cost_is_kept_with_its_run() -> None:
    mlflow: Any = Mlflow()
    finish_run(
        mlflow,
        "run-3",
        TrialOutcome("finished"),
        segment(startup_s=0.51234, checkpoint_s=0.0, repeat_s=1.5),
    )
    ((*_, tags),) = mlflow.said
    kept = {name: value for name, value in tags.items() if name.endswith("_s")}
    assert kept == {
        "hermes.startup_s": "0.512",
        "hermes.checkpoint_s": "0.000",
        "hermes.repeat_s": "1.500",
    }


def sized_folder(*gpus: int) -> TrialFolder:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    folder.path.mkdir(parents=True)
    line = {"epoch": 1, "gpus": list(gpus), "start_s": 1.0, "first_step": 4}
    (folder.path / "segments.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_the_gpus_and_the_batch_of_a_segment_are_logged_once_with_its_first_values() -> None:
    sized_folder(0, 1).record_batch(1, 64)
    mlflow = Mlflow(sends=[0, 1, 1])
    feed = feed_of(mlflow)
    for _ in range(3):
        feed.pump_once()
    logged = ("columns", "run-0", {"hermes.workers": 2.0, "hermes.batch": 64.0})
    assert mlflow.said == ["pump", "pump", logged, "pump"]


def test_of_a_trial_on_one_gpu_no_size_is_logged() -> None:
    sized_folder(0)
    mlflow = Mlflow(sends=[1])
    feed_of(mlflow).pump_once()
    assert mlflow.said == ["pump"]
