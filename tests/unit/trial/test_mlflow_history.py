"""What a server answers about a metric of the trial's run, and what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hermes_ops.trial.mlflow_history import last_step


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
