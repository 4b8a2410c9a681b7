from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.cleanup.sweep_end import replaced_by_newer
from hermes_ops.airflow.folders import TrialFolder, sweep_folder, write_ending
from hermes_ops.airflow.records import REPLACED, Ending
from hermes_ops.airflow.sweep import sweep_report
from hermes_ops.core.summary import Segment
from hermes_ops.errors import Refused
from hermes_ops.tracking import SweepRef, TrialRun
from tests.unit.simulator.recorded_sweeps import Mlflow, config


class Server(Mlflow):
    """The MLflow of one ended sweep, and what the report task writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: dict[str, set[str]] = {}
        self.metrics: dict[str, dict[str, float]] = {}
        self.finished = ""
        self.ends: dict[str, tuple[str, str]] = {}
        self.segments: dict[str, list[tuple[int, float | None]]] = {}

    def finish(self, run_id: str, state: str, tags: Mapping[str, str] | None = None) -> None:
        if tags is None:
            self.finished = state
        else:
            self.ends[run_id] = (state, tags.get("hermes.reason", ""))

    def save_segments(self, run_id: str, segments: Sequence[Segment]) -> None:
        self.segments[run_id] = [(s.epoch, s.end_s) for s in segments]

    def log_metrics(self, run_id: str, metrics: list[dict[str, Any]]) -> None:
        self.metrics[run_id] = {m["key"]: m["value"] for m in metrics}

    def log_folder(self, run_id: str, folder: Path, path: str) -> None:
        self.folders[path] = {file.name for file in folder.iterdir()}

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        pass


def closed(server: Any) -> Any:
    return sweep_report.close_sweep(server, "digits-1", config(), {})


def test_the_report_lies_at_the_sweeps_run_and_beside_its_trials() -> None:
    server = Server()
    document = closed(server)
    assert document["best"]["number"] == 1
    assert {"report.html", "curves.png", "gpus.png", "trials.csv"} < server.folders["report"]
    page = (sweep_folder("digits-1") / "report" / "report.html").read_text()
    assert "Replayed under fifo" in page
    assert server.metrics["1"]["hermes.best"] == 0.6


def test_the_reason_of_a_replaced_night_is_what_the_controller_has_written_as_its_end() -> None:
    close = replaced_by_newer(0.0)
    server = Server()
    server.runs, server.tags[close.tag], server.state = (), close.reason, "cancelled"
    document = closed(server)
    assert (document["best"], document["reason"]) == (None, REPLACED)


@pytest.mark.parametrize("part", ["background", "report.write", "shutil.copytree"])
def test_a_report_that_cannot_be_written_does_not_fail_the_sweep(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("too many trials")

    monkeypatch.setattr(f"hermes_ops.airflow.sweep.sweep_report.{part}", fail)
    server = Server()
    assert closed(server)["best"]["number"] == 1
    assert server.finished == "finished"
    assert "The report of digits-1 could not be written." in caplog.text


@pytest.mark.parametrize("refused", [False, True])
def test_params_that_a_killed_controller_has_left_are_written_by_the_report_if_mlflow_takes_them(
    refused: bool,
) -> None:
    class Left(Server):
        params: tuple[str, Any] = ("", {})

        def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
            first, *rest = super().trials(sweep, open_only=open_only)
            return (replace(first, unwritten={"rate": 0.1}), *rest)

        def add_params(self, run_id: str, config: Any) -> None:
            self.params = (run_id, config)
            if refused:
                raise Refused("too many params")

    server = Left()
    closed(server)
    assert server.finished == "finished"
    assert server.params == ("0", {"rate": 0.1})


class Open(Server):
    """An MLflow that was away as the first trial ended: its run is still open."""

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        first, *rest = super().trials(sweep, open_only=open_only)
        return (replace(first, state=self.ends.get("0", ("running", ""))[0]), *rest)


SETTLED = "settled after the sweep's end"


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the report's pictures: what is in MLflow matters alone."""
    monkeypatch.setattr(sweep_report, "_write", lambda *_: None)


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize(
    ("known", "task", "state", "reason"),
    [
        ("failed", "failed", "failed", "boom"),
        ("stopped_early", "cancelled", "stopped_early", "boom"),
        ("cancelled", "cancelled", "cancelled", "boom"),
        ("failed", "finished", "finished", SETTLED),  # it was resumed since
        ("cancelled", "failed", "failed", SETTLED),
        (None, "failed", "failed", SETTLED),
    ],
)
def test_a_trial_that_ended_while_mlflow_was_away_has_its_own_state_and_reason(
    known: str | None, task: str, state: str, reason: str
) -> None:
    server: Any = Open()
    if known is not None:
        ending = Ending(known, {"hermes.reason": "boom"})
        write_ending(TrialFolder.from_sweep("digits-1", 0), ending)
    document = sweep_report.close_sweep(server, "digits-1", config(), {0: task})
    assert server.ends == {"0": (state, reason)}
    assert document["trials"][0]["state"] == state


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize(("epoch", "is_sent"), [(1, True), (0, False)])
def test_an_end_that_was_written_after_a_kill_is_sent_if_mlflow_has_no_newer_segment(
    epoch: int, is_sent: bool
) -> None:
    folder = TrialFolder.from_sweep("digits-1", 0)
    folder.path.mkdir(parents=True)
    lines = ({"epoch": epoch, "gpus": [0], "start_s": 5.0}, {"epoch": epoch, "end_s": 7.0})
    (folder.path / "segments.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    server = Server()
    closed(server)
    assert server.segments == ({"0": [(epoch, 7.0)]} if is_sent else {})
