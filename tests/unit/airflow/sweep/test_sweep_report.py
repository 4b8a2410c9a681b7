from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.folders import sweep_folder
from hermes_ops.airflow.sweep import sweep_report
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

    def finish(self, parent_run_id: str, state: str) -> None:
        self.finished = state

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
