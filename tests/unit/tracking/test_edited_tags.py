"""Tags of runs that somebody has edited or deleted in MLflow, where everybody may."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from hermes_ops.tracking import SweepRef, Tracker

REF = SweepRef("digits-1", "1", "parent")


def run(number: int, **edited: str | None) -> dict[str, Any]:
    tags: dict[str, str | None] = {
        "hermes.sweep": "digits-1", "hermes.kind": "trial", "hermes.trial": str(number),
        "hermes.config": json.dumps({"rate": 0.5}), "mlflow.parentRunId": "parent",
        "hermes.segment_log": '[[1,[0],100.0,130.0,0,3,"finished"]]',
        **{f"hermes.{name}": value for name, value in edited.items()},
    }  # fmt: skip
    info = {"run_id": f"run-{number}", "experiment_id": "1", "start_time": number,
            "status": "RUNNING"}  # fmt: skip
    known = [{"key": key, "value": value} for key, value in tags.items() if value is not None]
    return {"info": info, "data": {"tags": known}}


def tracker(monkeypatch: pytest.MonkeyPatch, *runs: dict[str, Any]) -> Tracker:
    answer = httpx.Response(200, json={"runs": runs})
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    monkeypatch.setattr("hermes_ops.tracking.rest._new_client", lambda *_: client)
    return Tracker("http://mlflow")


@pytest.mark.parametrize("number", [None, "", "three", "-1", "²"])
def test_a_run_without_the_number_of_its_trial_is_left_out(
    monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    asked = tracker(monkeypatch, run(0), run(1, trial=number), run(2))
    assert [trial.number for trial in asked.trials(REF)] == [0, 2]
    assert [trial.number for trial in asked.overview.trials(REF, 10)] == [0, 2]
    edited = run(1, trial=number)
    edited["data"]["metrics"] = [{"key": "hermes.best", "value": 0.25, "step": 0, "timestamp": 1}]
    assert tracker(monkeypatch, edited).overview.best(REF, maximize=False) == 0.25


@pytest.mark.parametrize("text", ["[[1,", "rate = 0.5", "{"])
def test_a_configuration_and_segments_that_cannot_be_read_count_as_none(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (trial,) = tracker(monkeypatch, run(0, config=text, segment_log=text)).trials(REF)
    assert (trial.config, trial.segments) == ({}, ())
