"""Answers at MLflow's address that are not MLflow's: of a proxy, of a log-in page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hermes_ops.confined_folder import DOCUMENT_BYTES
from hermes_ops.errors import HermesError, Refused, Unavailable
from hermes_ops.tracking import MetricSender, Tracker
from hermes_ops.tracking.artifacts import json_objects

GONE = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "Run 'run-1' not found"}


def tracker(monkeypatch: pytest.MonkeyPatch, *answers: httpx.Response) -> Tracker:
    """Return a client to whose requests come these answers, the last one to all others."""
    left = list(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        return left.pop(0) if len(left) > 1 else left[0]

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr("hermes_ops.tracking.rest._new_client", lambda *_: client)
    return Tracker("http://mlflow")


def sender(folder: Path, tracker: Tracker) -> MetricSender:
    file = folder / "metrics.jsonl"
    lines = [{"name": "loss", "value": 0.5, "step": n, "time_ms": n} for n in range(5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return MetricSender("run-1", file, folder / "sent.json", tracker)


@pytest.mark.parametrize(
    "foreign",
    [
        httpx.Response(302, headers={"location": "https://sso.example/login"}),
        httpx.Response(404, text="404 page not found"),
        httpx.Response(400, text="<html>Bad Request</html>"),
        httpx.Response(405),
    ],
    ids=lambda answer: str(answer.status_code),
)
def test_metrics_that_another_server_refuses_in_place_of_mlflow_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: httpx.Response
) -> None:
    sending = sender(tmp_path, tracker(monkeypatch, foreign))
    assert sending.pump() == 0
    assert sending.behind_bytes > 0
    again = MetricSender("run-1", tmp_path / "metrics.jsonl", tmp_path / "sent.json",
                         tracker(monkeypatch, httpx.Response(200, json={})))  # fmt: skip
    assert again.pump() == 5


def test_the_metrics_of_a_run_that_mlflow_itself_says_is_gone_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = sender(tmp_path, tracker(monkeypatch, httpx.Response(404, json=GONE)))
    sending.pump()
    assert sending.behind_bytes == 0


def test_a_run_is_not_taken_for_deleted_because_a_proxy_does_not_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Refused):
        tracker(monkeypatch, httpx.Response(404, text="no route")).deletion.delete_run("run-1")
    with pytest.raises(Refused):
        tracker(monkeypatch, httpx.Response(404, text="no route")).find_sweep("s", "digits")
    tracker(monkeypatch, httpx.Response(404, json=GONE)).deletion.delete_run("run-1")


@pytest.mark.parametrize("text", ["[]", '"welcome"', "null", "[" * 100_000, "<html>"])
def test_an_answer_that_is_no_object_of_json_is_not_mlflows(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    asked = tracker(monkeypatch, httpx.Response(200, text=text))
    for ask in (asked.newest_sweeps, lambda: asked.find_sweep("s", "digits")):
        with pytest.raises(Unavailable, match="not as an MLflow server"):
            ask()


def test_an_artifact_without_end_is_refused_once_it_is_too_large_for_a_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1_000_000
            yield b"x" * 1_000_000

    run = {"run": {"info": {"artifact_uri": "mlflow-artifacts:/1/run-1/artifacts"}}}
    endless_answer = httpx.Response(200, content=endless())
    asked = tracker(monkeypatch, httpx.Response(200, json=run), endless_answer)
    with pytest.raises(Refused, match="more than 67,108,864 bytes"):
        asked.artifacts.fetch("run-1", "sweep.yaml")
    assert sent < 2 * DOCUMENT_BYTES


def test_only_objects_of_a_log_in_mlflow_are_decisions() -> None:
    lines = ['{"job": "a/0"}', "[]", "7", "[" * 100_000, '{"job": "a']
    assert json_objects("\n".join(lines).encode()) == [{"job": "a/0"}]


def test_an_artifact_that_is_not_there_is_told_from_a_proxy_by_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = {"run": {"info": {"artifact_uri": "mlflow-artifacts:/1/run-1/artifacts"}}}
    asked = tracker(monkeypatch, httpx.Response(200, json=run), httpx.Response(404))
    with pytest.raises(HermesError) as caught:
        asked.artifacts.fetch("run-1", "sweep.yaml")
    assert isinstance(caught.value, Refused)
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"
