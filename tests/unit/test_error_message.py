"""What is shown of a request that a server refuses: nothing of its body."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.client import AirflowClient, TaskKey
from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.airflow.trial.running_segment import if_airflow_answers
from hermes_ops.error_message import (
    MOST_CHARACTERS,
    document_texts,
    keep_bodies_out_of_logs,
    mask_texts,
    response_message,
)
from hermes_ops.errors import HermesError
from hermes_ops.tracking.rest import RestClient

SECRET = "hunter2-of-the-sweep"
LEASE = {"epoch": 1, "environment": {"api_key": SECRET}, "command": ["python", "train.py"]}
TASK = TaskKey("hermes_sweep", "run-1", "trial", 3)


def refusing(document: Any) -> httpx.MockTransport:
    """An Airflow that says what FastAPI does: with the input, and the whole body once more."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": "t"})
        return httpx.Response(422, json=document(json.loads(request.content)))

    return httpx.MockTransport(answer)


def unprocessable(body: Any) -> Any:
    error = {"type": "value_too_long", "loc": ["body", "value"], "msg": "Value is too long"}
    return {"detail": [{**error, "input": body, "ctx": {"actual": str(body)}}], "body": body}


def said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "document",
    [
        unprocessable,
        lambda body: {"detail": f"cannot store {body}"},
        lambda body: {"detail": {"reason": "too long", "message": json.dumps(body), "x": body}},
        lambda body: body,
    ],
)
def test_nothing_of_a_refused_body_is_in_the_error_or_its_traceback(
    document: Any, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("hidden")
    client = AirflowClient(AirflowCredentials("http://airflow", "hermes", tmp_path / "password"))
    client._http = httpx.Client(base_url="http://airflow", transport=refusing(document))
    with pytest.raises(HermesError, match=r"Airflow refused PUT .*422") as detail_message:
        client.put_state(TASK, "hermes_lease", LEASE)
    assert SECRET not in said(detail_message.value)
    with pytest.raises(HermesError, match="422") as detail_message:
        client.trigger("hermes_sweep", "run-1", {"sweep": f"trial:\n  api_key: '{SECRET}'\n"})
    assert SECRET not in said(detail_message.value)


def test_the_type_the_place_and_the_message_of_a_refusal_are_kept() -> None:
    answer = json.dumps(unprocessable(LEASE))
    assert response_message(answer) == "body.value: Value is too long (value_too_long)"
    many = {"detail": [{"loc": ["body", n], "msg": "no"} for n in range(9)]}
    assert response_message(json.dumps(many)).endswith("body.4: no; and 4 more")


def test_a_page_of_a_proxy_says_nothing_and_a_line_is_kept() -> None:
    assert response_message(b"<html>Bad gateway</html>") == ""
    assert response_message(b"upstream is away", b"{}") == "upstream is away"
    assert response_message(f"what is {SECRET}?", json.dumps({"conf": SECRET})) == "what is ***?"
    assert len(response_message(json.dumps({"detail": "x" * 9_000}))) == MOST_CHARACTERS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(JSON, JSON)
def test_any_answer_to_any_request_can_be_shown(answer: Any, request: Any) -> None:
    shown = response_message(json.dumps(answer), json.dumps(request))
    assert len(shown) <= MOST_CHARACTERS
    assert not [t for t in document_texts(request) if len(t) > 8 and t in shown]


def test_longer_texts_are_hidden_before_those_that_they_hold() -> None:
    assert mask_texts('a "quoted\\n" b', ["quoted\n", "quot"]) == 'a "***" b'


def test_what_airflow_refuses_a_task_is_said_without_what_was_sent() -> None:
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse

    detail = {"status_code": 422, "message": "Client error", "detail": unprocessable(LEASE)}
    lines: list[str] = []

    def call() -> None:
        raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail=detail))

    if_airflow_answers(call, lines.append)
    (line,) = lines
    assert "422 body.value: Value is too long" in line
    assert SECRET not in line


def test_mlflow_s_refusal_is_its_code_and_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RestClient("http://127.0.0.1:1")
    document = {"error_code": "INVALID_PARAMETER_VALUE", "message": "too long", "body": SECRET}
    transport = httpx.MockTransport(lambda _: httpx.Response(400, json=document))
    monkeypatch.setattr(client, "_connected", lambda: httpx.Client(transport=transport))
    with pytest.raises(HermesError, match="INVALID_PARAMETER_VALUE too long") as detail_message:
        client.post("runs/log-batch", {"value": SECRET})
    assert SECRET not in said(detail_message.value)


def test_libraries_log_no_bodies_even_where_airflow_logs_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("httpcore.http11", "kubernetes.client.rest", "httpx")
    with caplog.at_level(logging.DEBUG):
        keep_bodies_out_of_logs()
        for name in names:
            logging.getLogger(name).debug("response body: %s", SECRET)
    assert SECRET not in caplog.text


def test_a_pod_that_kubernetes_refuses_shows_none_of_its_variables() -> None:
    from kubernetes.client import V1Container, V1EnvVar, V1Pod, V1PodSpec
    from kubernetes.client.exceptions import ApiException

    from hermes_ops.kubernetes.api import ClusterPods

    class Client:
        def create_namespaced_pod(self, *_: object, **__: object) -> None:
            error = ApiException(status=422, reason="Unprocessable Entity")
            message = f'Pod "t" is invalid: env[0].value: Invalid value: "{SECRET}": too long'
            error.body = json.dumps({"message": message, "details": {"pod": SECRET}})
            raise error

    container = V1Container(name="trial", env=[V1EnvVar(name="API_KEY", value=SECRET)])
    with pytest.raises(HermesError, match=r'Invalid value: "\*\*\*": too long') as detail_message:
        ClusterPods(Client(), "here").create(V1Pod(spec=V1PodSpec(containers=[container])))
    assert SECRET not in said(detail_message.value)
