from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hermes_ops.airflow import open_secrets
from hermes_ops.airflow.open_secrets import Message, SecretGuard
from hermes_ops.airflow.plugin import HermesPlugin
from hermes_ops.errors import ConfigError

RUNS = "/api/v2/dags/hermes_sweep/dagRuns"


def sweep(environment: Any, **trial: Any) -> dict[str, Any]:
    return {"name": "s", "search": {}, "trial": {"environment": environment, **trial}}


class Server:
    """Airflow behind the guard: says which body reached it, in how many pieces it came."""

    def __init__(self) -> None:
        self.reached: list[bytes] = []
        self.sent: list[Message] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), bool(message.get("more_body"))
        self.reached.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def post(self, path: str, body: bytes, method: str = "POST", piece: int = 7) -> int:
        pieces = [body[n : n + piece] for n in range(0, len(body), piece)] or [b""]
        waiting = [
            {"type": "http.request", "body": part, "more_body": n + 1 < len(pieces)}
            for n, part in enumerate(pieces)
        ]

        async def receive() -> Message:
            return waiting.pop(0)

        async def send(message: Message) -> None:
            self.sent.append(message)

        scope: Message = {"type": "http", "method": method, "path": path}
        asyncio.run(SecretGuard(self)(scope, receive, send))
        return int(self.sent[0]["status"])


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (RUNS, "conf"),
        (f"/below{RUNS}/", "conf"),
        ("/execution/dag-runs/own/run-1", "conf"),
        ("/api/v2/assets/3/materialize", "conf"),
        ("/api/v2/backfills", "dag_run_conf"),
    ],
)
@pytest.mark.parametrize(
    "conf",
    [
        sweep({"HF_TOKEN": "hf_12345678"}),
        sweep({"DB": "postgresql://me:swordfish@host/x"}),
        sweep({"PLAIN": "swordfish"}, secrets=["PLAIN"]),
        sweep({"NUMERIC_KEY": 12345678}),
        {"trial": {"command": ["x"], "pod": {"environment": {"API_TOKEN": "swordfish"}}}},
    ],
)
def test_a_run_with_a_secret_is_refused_before_airflow_has_its_configuration(
    path: str, key: str, conf: dict[str, Any]
) -> None:
    server = Server()
    assert server.post(path, json.dumps({key: conf}).encode()) == 400
    assert server.reached == []
    answer = json.loads(server.sent[1]["body"])["detail"]
    assert "environment." in answer
    assert not {"hf_12345678", "swordfish", "12345678"} & {*answer.replace('"', " ").split()}
    assert "{env:" in answer or "trial.pod.secrets" in answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[1]",
        b'{"conf": null}',
        json.dumps({"conf": {}}).encode(),
        json.dumps({"conf": sweep(None)}).encode(),
        json.dumps({"conf": sweep({"HF_TOKEN": "{env:HF_TOKEN}"})}).encode(),
        json.dumps({"conf": sweep({"AUTH_TOKEN": "Bearer {env:T}", "A": "b"})}).encode(),
        json.dumps({"conf": sweep({"URL": "https://me:{env:PW}@host"})}).encode(),
        json.dumps({"conf": {"trial": {"environment": {"TOKEN": "of another DAG"}}}}).encode(),
    ],
)
def test_any_other_request_reaches_airflow_as_it_was(body: bytes) -> None:
    server = Server()
    assert server.post(RUNS, body) == 200
    assert server.reached == [body]


def test_requests_that_make_no_run_are_not_looked_at() -> None:
    body = json.dumps({"conf": sweep({"HF_TOKEN": "hf_12345678"})}).encode()
    for path, method in ((f"{RUNS}/list", "POST"), (RUNS, "GET"), ("/ui/dags", "POST")):
        assert Server().post(path, body, method) == 200


def test_the_plugin_puts_the_guard_before_airflows_api() -> None:
    (entry,) = HermesPlugin.fastapi_root_middlewares
    assert entry["middleware"] is SecretGuard


def test_a_pods_secret_is_sent_to_a_secret_of_kubernetes_and_a_connections_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_pod = sweep({"HF_TOKEN": "hf_12345678"}, run_in="pod")
    with pytest.raises(ConfigError, match=r"trial\.environment\.HF_TOKEN.*trial\.pod\.secrets"):
        open_secrets.refuse(in_pod, "test")
    monkeypatch.setenv("HERMES_RUN_IN", "pod")  # an installation of pods alone
    with pytest.raises(ConfigError, match=r"trial\.pod\.secrets"):
        open_secrets.refuse(sweep({"HF_TOKEN": "hf_12345678"}), "test")
    open_secrets.refuse(sweep({"DB_PASSWORD": "{{ conn.x.password }}"}), "test", ["DB_PASSWORD"])
