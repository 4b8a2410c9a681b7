"""Which steps of a trial the values are that its script has logged to MLflow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.mlflow.logged_values import FirstValues, LoggedValues, last_step

OWN = 0


def note(path: Path, *steps: int | None, run: int = OWN, name: str = "loss") -> None:
    """Log values that rise by one: 1, 2, 3 and so on over the whole file."""
    text = path.read_text() if path.exists() else ""
    with path.open("a") as stream:
        for value, step in enumerate(steps, text.count(f'"{name}"') + 1):
            entry = {"name": name, "value": float(value), "step": step, "run": run, "time_ms": 0}
            stream.write(json.dumps(entry) + "\n")


def points(metrics: Iterable[Metric], name: str = "loss") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in metrics if m.name == name]


def curve(path: Path, *, ended: bool = True) -> list[tuple[int, float]]:
    values = LoggedValues(path, "loss", 0)
    found = values.earlier + values.new()
    return points(found + (values.close() if ended else []))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mlflow.jsonl"


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([0, 1, 2], [0, 1, 2]),
        ([100, 200, 300], [1, 2, 3]),
        ([0, 50, 100], [0, 1, 2]),
        ([None, None, None], [1, 2, 3]),
        ([0, 0, 0], [1, 2, 3]),
        ([0], [1]),
        ([1, 2, 1, 2], [1, 2, 3, 4]),
        ([0, 1, 0, 1], [0, 1, 2, 3]),
        ([5, 5, 6], [1, None, 2]),
        ([1, 2, None], [1, 2, None]),
    ],
)
def test_the_steps_of_one_run(path: Path, steps: list[int | None], numbers: list[int]) -> None:
    note(path, *steps)
    assert curve(path) == [(n, i) for i, n in enumerate(numbers, 1) if n is not None]


def test_a_first_step_0_waits_for_what_comes_next(path: Path) -> None:
    values = LoggedValues(path, "loss", 0)
    note(path, 0)
    assert values.new() == []
    note(path, 1)
    assert points(values.new()) == [(0, 1.0), (1, 2.0)]


def test_runs_in_a_row_are_counted_on(path: Path) -> None:
    for run in (1, 2, 3):
        note(path, 1, 2, run=run)
    assert curve(path) == [(n, n) for n in range(1, 7)]


def test_runs_of_a_single_value_are_counted_on(path: Path) -> None:
    for run in (1, 2, 3):
        note(path, 9, run=run)
    assert curve(path) == [(1, 1), (2, 2), (3, 3)]


def test_a_child_run_that_says_the_same_as_the_trial_s_own_counts_once(path: Path) -> None:
    for step in (1, 2):
        for run in (OWN, 1):
            note(path, step, run=run)
    assert curve(path) == [(1, 1.0), (2, 3.0)]


def test_a_mean_over_child_runs_that_is_logged_at_the_end_is_the_last_value(path: Path) -> None:
    note(path, 1, 2, run=1)
    note(path, 1, 2, run=2)
    note(path, None)
    assert curve(path) == [(n, n) for n in range(1, 6)]


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 3), st.booleans())
def test_a_segment_that_goes_on_behind_its_checkpoint_loses_and_repeats_no_value(
    tmp_path_factory: pytest.TempPathFactory, lost: list[int], factor: int, has_steps: bool
) -> None:
    """Each segment ends `lost` epochs after its newest checkpoint."""
    path = tmp_path_factory.mktemp("trial") / "mlflow.jsonl"
    stored: dict[int, float] = {}
    done = 0
    for epochs in [*lost, 3]:
        values = LoggedValues(path, "loss", done)
        for epoch in range(done + 1, done + epochs + 1):
            step = epoch * factor if has_steps else None
            entry = {"name": "loss", "value": epoch, "step": step, "run": OWN, "time_ms": 0}
            with path.open("a") as stream:
                stream.write(json.dumps(entry) + "\n")
        for metric in values.new():
            stored.setdefault(metric.step, metric.value)
        done += epochs // 2
    assert stored == {epoch: epoch for epoch in range(1, max(stored) + 1)}


def test_what_a_killed_supervisor_has_not_stored_is_there_in_the_next_segment(path: Path) -> None:
    note(path, 10, 20, 30)
    values = LoggedValues(path, "loss", 2)
    assert points(values.earlier) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    note(path, 30, 40)
    assert points(values.new()) == [(3, 4.0), (4, 5.0)]


def test_further_training_after_a_checkpoint_at_its_beginning_is_counted_on(path: Path) -> None:
    note(path, 1, 2, run=1)
    values = LoggedValues(path, "loss", 2)
    note(path, 1, 2, run=1)
    assert points(values.new()) == [(3, 3.0), (4, 4.0)]


def test_other_metrics_stand_at_the_steps_of_the_objective(path: Path) -> None:
    values = LoggedValues(path, "loss", 0)
    note(path, 10, name="size")
    note(path, 10)
    note(path, 10, name="latency")
    note(path, 20)
    note(path, None, name="latency")
    found = values.new()
    assert points(found, "size") == [(1, 1.0)]
    assert points(found, "latency") == [(1, 1.0)]
    assert points(values.close(), "latency") == [(2, 2.0)]


def test_an_output_that_was_further_before_stays_the_curve(path: Path) -> None:
    note(path, 100)
    values = LoggedValues(path, "loss", 0)
    assert points(values.earlier) == [(1, 1.0)]
    path.unlink()
    values = LoggedValues(path, "loss", 0)
    note(path, 100)
    assert values.new(printed_step=100) == []
    note(path, 200)
    assert values.new(printed_step=200) == []
    assert LoggedValues(path, "loss", 0).earlier == []


def test_lines_that_are_no_values_are_passed_over(path: Path) -> None:
    path.write_text('{"name": "loss"}\n{"name": "loss", "value": "x", "step": 1, "run": 0}\n[]\n')
    note(path, 7)
    assert [step for step, _ in curve(path)] == [1]


def printed(name: str, step: int) -> list[Metric]:
    return [Metric(name, float(step), step)]


def test_a_printed_metric_that_is_logged_too_is_left_to_mlflow() -> None:
    first = FirstValues({"loss"})
    first.log([])
    assert first.release(printed("acc", 1)) == []
    first.log(["acc"])
    assert first.release(printed("acc", 2)) == []
    assert first.close() == []


def test_a_printed_metric_that_is_not_logged_comes_whole_with_its_second_value() -> None:
    first = FirstValues({"loss"})
    first.log([])
    assert first.release(printed("acc", 1)) == []
    assert first.release(printed("acc", 2)) == printed("acc", 1) + printed("acc", 2)
    assert first.release(printed("acc", 3)) == printed("acc", 3)


def test_a_single_printed_value_is_stored_at_the_end() -> None:
    first = FirstValues({"loss"})
    first.log([])
    first.release(printed("acc", 1))
    assert first.close() == printed("acc", 1)


@pytest.mark.parametrize("imports_mlflow", [True, False])
def test_the_objective_and_the_metrics_of_other_scripts_are_not_held_back(
    imports_mlflow: bool,
) -> None:
    first = FirstValues({"loss"})
    if imports_mlflow:
        first.log([])
    assert first.release(printed("loss", 1)) == printed("loss", 1)
    assert (first.release(printed("acc", 1)) == printed("acc", 1)) is not imports_mlflow


class Server(HTTPServer):
    """Answers every request alike, and keeps the requests."""

    answer: bytes = b"{}"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def variables(server: Server, **more: str) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": server.uri, "MLFLOW_RUN_ID": "abc", **more}


def test_the_highest_step_is_returned(server: Server) -> None:
    server.answer = json.dumps({"metrics": [{"step": 3}, {"step": "12"}, {}]}).encode()
    assert last_step("val loss", variables(server)) == 12
    ((path, log_in),) = server.asked
    assert path.startswith("/api/2.0/mlflow/metrics/get-history?run_id=abc&metric_key=val+loss&")
    assert log_in is None


@pytest.mark.parametrize("answer", [b"{}", b'{"metrics": []}', b"<html>", b"[]", b'{"metrics": 1}'])
def test_an_answer_without_a_value_is_none(server: Server, answer: bytes) -> None:
    server.answer = answer
    assert last_step("loss", variables(server)) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "t"}, "Bearer t"),
        ({"MLFLOW_TRACKING_USERNAME": "a", "MLFLOW_TRACKING_PASSWORD": "b"}, "Basic YTpi"),
    ],
)
def test_it_logs_in_as_mlflow_does(server: Server, more: dict[str, str], expected: str) -> None:
    last_step("loss", variables(server, **more))
    assert server.asked[0][1] == expected


def test_a_log_in_in_the_address_is_sent_as_a_header(server: Server) -> None:
    last_step("loss", variables(server, MLFLOW_TRACKING_URI=server.uri.replace("//", "//a:b@")))
    assert server.asked[0][1] == "Basic YTpi"


def test_without_a_server_or_a_run_nothing_is_asked(server: Server) -> None:
    assert last_step("loss", variables(server, MLFLOW_RUN_ID="")) is None
    assert last_step("loss", variables(server, MLFLOW_TRACKING_URI="sqlite:///x.db")) is None
    assert server.asked == []
    server.server_close()
    assert last_step("loss", variables(server)) is None
