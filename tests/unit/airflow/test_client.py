from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hermes_ops.airflow.client import MOST_MARKED, AirflowClient, TaskKey
from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.errors import HermesError, NotPermitted, Unavailable
from hermes_ops.retry import MANY

Answer = Callable[[httpx.Request], httpx.Response]
TASK = TaskKey("hermes_sweep", "manual/1 +x", "trial", 3)


class Airflow:
    """Airflow's REST interface: gives tokens, refuses those that it did not give last."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tokens = 0
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            self.tokens += 1
            return httpx.Response(201, json={"access_token": f"t{self.tokens}"})
        self.requests.append(request)
        if request.headers.get("authorization") != f"Bearer t{self.tokens}":
            return httpx.Response(401, json={"detail": "no"})
        return self.answer(request)

    def restart(self) -> None:
        """Tokens of before are worth nothing."""
        self.tokens += 1


def client_of(handler: Callable[[httpx.Request], httpx.Response], folder: Path) -> AirflowClient:
    secret = folder / "password"
    secret.write_text("hidden\n")
    credentials = AirflowCredentials("http://airflow", "hermes", secret)
    client = AirflowClient(credentials, sleep=lambda _: None)
    client._http = httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(handler))
    return client


def ok(document: Any = None) -> Answer:
    return lambda _: httpx.Response(200, json=document)


def status(code: int, text: str = "no") -> Answer:
    return lambda _: httpx.Response(code, text=text)


def test_it_logs_in_once_and_writes_the_record(tmp_path: Path) -> None:
    airflow = Airflow(ok())
    client = client_of(airflow, tmp_path)
    client.put_state(TASK, "hermes_stop", {"epoch": 1})
    client.put_state(TASK, "hermes_stop", {"epoch": 2})
    first, second = airflow.requests
    assert airflow.tokens == 1
    assert first.method == "PUT"
    assert first.url.raw_path.decode() == (
        "/api/v2/dags/hermes_sweep/dagRuns/manual%2F1%20%2Bx/taskInstances/trial"
        "/state-store/hermes_stop?map_index=3"
    )
    assert json.loads(second.content) == {"value": {"epoch": 2}, "expires_at": None}


@pytest.mark.parametrize(("answer", "fields"), [
    (ok({"params": {"name": {}, "trial": {}}}), {"name", "trial"}),
    (ok({"params": None}), set()), (status(404), None),
])  # fmt: skip
def test_the_fields_of_a_dag_are_those_of_its_form(
    answer: Answer, fields: set[str] | None, tmp_path: Path
) -> None:
    airflow = Airflow(answer)
    assert client_of(airflow, tmp_path).dag_fields("a.b") == fields
    assert airflow.requests[-1].url.path == "/api/v2/dags/a.b/details"


def test_a_kept_record_is_stored_as_it_was_without_a_date(tmp_path: Path) -> None:
    airflow = Airflow(ok({"value": {"pieces": {"config": ["ab", 1]}}}))
    client_of(airflow, tmp_path).keep_state(TASK, "hermes_sweep")
    assert [r.method for r in airflow.requests] == ["GET", "PUT"]
    written = json.loads(airflow.requests[1].content)
    assert written == {"value": {"pieces": {"config": ["ab", 1]}}, "expires_at": None}


def test_a_record_that_has_gone_is_not_made_by_keeping_it(tmp_path: Path) -> None:
    airflow = Airflow(status(404))
    client_of(airflow, tmp_path).keep_state(TASK, "hermes_sweep")
    assert [r.method for r in airflow.requests] == ["GET"]


def test_a_refused_token_is_replaced_and_the_request_repeated(tmp_path: Path) -> None:
    airflow = Airflow(ok({"value": {"epoch": 1}}))
    client = client_of(airflow, tmp_path)
    assert client.get_state(TASK, "hermes_lease") == {"epoch": 1}
    airflow.restart()
    assert client.get_state(TASK, "hermes_lease") == {"epoch": 1}
    assert airflow.tokens == 3


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    client = client_of(Airflow(status(404)), tmp_path)
    assert client.get_state(TASK, "hermes_lease") is None
    assert client.dag_run("hermes_sweep", "x") is None
    assert client.dag("hermes_sweep") is None


@pytest.mark.parametrize("code", [500, 502, 503])
def test_an_airflow_in_trouble_is_unavailable(tmp_path: Path, code: int) -> None:
    with pytest.raises(Unavailable, match=str(code)):
        client_of(Airflow(status(code)), tmp_path).made_by("PlanOperator")


def test_a_change_that_met_another_writer_is_asked_for_again(tmp_path: Path) -> None:
    codes = iter([500, 500, 200])
    airflow = Airflow(lambda _: httpx.Response(next(codes)))
    client_of(airflow, tmp_path).put_state(TASK, "hermes_stop", {"epoch": 1})
    assert [r.method for r in airflow.requests] == ["PUT"] * 3
    assert len({r.content for r in airflow.requests}) == 1


def test_an_airflow_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Unavailable, match="http://airflow did not answer: refused"):
        client_of(away, tmp_path).made_by("PlanOperator")


def test_a_refusal_says_what_was_asked_and_why_not(tmp_path: Path) -> None:
    with pytest.raises(HermesError, match=r"refused GET .*\(403\): not yours") as told:
        client_of(Airflow(status(403, "not yours")), tmp_path).made_by("PlanOperator")
    assert not isinstance(told.value, Unavailable)


def test_something_else_at_the_address_is_no_airflow(tmp_path: Path) -> None:
    page = client_of(lambda _: httpx.Response(200, text="<html>"), tmp_path)
    with pytest.raises(HermesError, match="is no Airflow"):
        page.made_by("PlanOperator")


def test_many_tasks_of_a_run_are_skipped_by_several_requests_each_of_which_stays(
    tmp_path: Path,
) -> None:
    skipped: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        numbers = [e["map_index"] for e in json.loads(request.content)["actions"][0]["entities"]]
        if 120 in numbers:
            return httpx.Response(500, text="database is locked")
        skipped.extend(numbers)
        return httpx.Response(200)

    keys = [TaskKey(TASK.dag_id, TASK.run_id, "trial", n) for n in range(988)]
    with pytest.raises(HermesError, match="database is locked"):
        client_of(Airflow(answer), tmp_path).skip(keys)
    assert skipped == list(range(120 // MOST_MARKED * MOST_MARKED))


def test_waiting_tasks_are_skipped_in_one_request_a_run(tmp_path: Path) -> None:
    airflow = Airflow(ok())
    other = TaskKey("hermes_sweep", "other", "trial", 0)
    keys = [TASK, TaskKey(TASK.dag_id, TASK.run_id, "trial", 4), other]
    client_of(airflow, tmp_path).skip(keys)
    bodies = [json.loads(r.content)["actions"][0]["entities"] for r in airflow.requests]
    assert [[e["map_index"] for e in entities] for entities in bodies] == [[3, 4], [0]]
    assert {e["new_state"] for entities in bodies for e in entities} == {"skipped"}


def test_nothing_to_skip_asks_nothing(tmp_path: Path) -> None:
    airflow = Airflow(ok())
    client_of(airflow, tmp_path).skip([])
    assert airflow.requests == []


def test_task_instances_are_read_page_by_page(tmp_path: Path) -> None:
    def page(request: httpx.Request) -> httpx.Response:
        start = int(request.url.params["offset"])
        rows = [{"map_index": i} for i in range(start, min(start + 100, 230))]
        return httpx.Response(200, json={"task_instances": rows, "total_entries": 230})

    found = client_of(Airflow(page), tmp_path).task_instances("hermes_sweep", "x")
    assert [r["map_index"] for r in found] == list(range(230))


@pytest.mark.parametrize("text", ["hidden", "hidden\n", '{"hermes": "hidden", "admin": "x"}'])
def test_the_password_file_holds_the_secret_alone_or_users(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p"
    file.write_text(text)
    assert AirflowCredentials("http://a", "hermes", file).password() == "hidden"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (None, "cannot be read"),
        ("{broken", "is not JSON"),
        ('{"admin": "x"}', "has no password of the user 'hermes'"),
    ],
)
def test_a_bad_password_file_is_named_with_its_remedy(
    tmp_path: Path, text: str | None, fact: str
) -> None:
    file = tmp_path / "p"
    if text is not None:
        file.write_text(text)
    with pytest.raises(HermesError, match=f"{file}.*{fact}.*HERMES_AIRFLOW"):
        AirflowCredentials("http://a", "hermes", file).password()


def test_the_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_AIRFLOW_URL", "http://a")
    with pytest.raises(HermesError, match="HERMES_AIRFLOW_USER is not set"):
        AirflowCredentials.from_environment()


def test_a_run_is_triggered_again_when_airflow_failed_and_does_not_know_it(tmp_path: Path) -> None:
    codes = iter([500, 404, 200])
    airflow = Airflow(lambda _: httpx.Response(next(codes), json={"dag_run_id": "mine"}))
    assert client_of(airflow, tmp_path).trigger("d", "mine", {})["dag_run_id"] == "mine"
    assert [r.method for r in airflow.requests] == ["POST", "GET", "POST"]


def test_a_run_that_airflow_made_before_it_failed_is_not_made_twice(tmp_path: Path) -> None:
    codes = iter([500, 200])
    airflow = Airflow(lambda _: httpx.Response(next(codes), json={"dag_run_id": "mine"}))
    assert client_of(airflow, tmp_path).trigger("d", "mine", {})["dag_run_id"] == "mine"
    assert [r.method for r in airflow.requests] == ["POST", "GET"]


def test_a_large_record_is_written_in_values_that_airflow_takes(tmp_path: Path) -> None:
    values: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        key = request.url.path.rpartition("/")[2]
        if request.method == "GET":
            return httpx.Response(200 if key in values else 404, json={"value": values.get(key)})
        value = json.loads(request.content)["value"]
        assert len(json.dumps(value)) <= 65_535
        values[key] = value
        return httpx.Response(204)

    record = {"epoch": 1, "config": {f"p{n}": "\u8a9e" * 1_000 + str(n) for n in range(200)}}
    client = client_of(Airflow(answer), tmp_path)
    client.put_state(TASK, "hermes_lease", record)
    assert client.get_state(TASK, "hermes_lease") == record


def test_a_conflict_after_an_answer_that_was_lost_is_a_run_that_has_started(tmp_path: Path) -> None:
    codes = iter([503, 404, 409, 200])
    airflow = Airflow(lambda _: httpx.Response(next(codes), json={"dag_run_id": "mine"}))
    assert client_of(airflow, tmp_path).trigger("d", "mine", {})["dag_run_id"] == "mine"
    assert [r.method for r in airflow.requests] == ["POST", "GET", "POST", "GET"]


def test_a_conflict_at_the_first_request_is_somebody_elses_run(tmp_path: Path) -> None:
    airflow = Airflow(status(409, "exists"))
    with pytest.raises(HermesError, match="409"):
        client_of(airflow, tmp_path).trigger("d", "mine", {})
    assert len(airflow.requests) == 1


def test_a_busy_airflow_is_asked_again_after_pauses_that_grow_and_in_the_end_is_one_line(
    tmp_path: Path,
) -> None:
    answers = {"POST": 500, "GET": 404}
    airflow = Airflow(lambda r: httpx.Response(answers[r.method], text="orig_error hidden"))
    client = client_of(airflow, tmp_path)
    pauses: list[float] = []
    client.sleep, client.chance = pauses.append, lambda: 1.0
    with pytest.raises(Unavailable) as raised:
        client.trigger("d", "mine", {})
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[8.0] * 14]
    assert "nothing was started" in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_airflow_that_nobody_hears_is_not_waited_for(tmp_path: Path) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = client_of(gone, tmp_path)
    pauses: list[float] = []
    client.sleep = pauses.append
    with pytest.raises(Unavailable, match="did not answer"):
        client.trigger("d", "mine", {})
    assert pauses == []


WRITES: dict[str, Callable[[AirflowClient], object]] = {
    "stop a sweep": lambda client: client.put_state(TASK, "hermes_close", {"reason": "x"}),
    "tag it": lambda client: client.note(TASK, "mine"),
    "mark tasks": lambda client: client.skip([TASK]),
    "delete a value": lambda client: client.delete_state(TASK, "hermes_stop"),
    "list runs": lambda client: client.dag_runs(["d"]),
}


@pytest.mark.parametrize("failures", [1, 2, 8])
@pytest.mark.parametrize("code", [500, 503])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_person_does_is_done_once_a_busy_airflow_has_time(
    tmp_path: Path, write: str, code: int, failures: int
) -> None:
    codes = iter([*[code] * failures, 200])
    airflow = Airflow(lambda _: httpx.Response(next(codes), json={"dag_runs": []}))
    client, pauses = client_of(airflow, tmp_path), list[float]()
    client.sleep, client.chance, client.pauses = pauses.append, lambda: 1.0, MANY
    WRITES[write](client)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4][:failures]
    assert len({(r.method, r.url, r.content) for r in airflow.requests}) == 1


def test_the_controller_waits_for_a_busy_airflow_for_less_than_a_quarter_of_a_second(
    tmp_path: Path,
) -> None:
    client, pauses = client_of(Airflow(status(500)), tmp_path), list[float]()
    client.sleep, client.chance = pauses.append, lambda: 1.0
    with pytest.raises(Unavailable, match="500"):
        client.put_state(TASK, "hermes_stop", {"epoch": 1})
    assert len(pauses) == 2
    assert sum(pauses) < 0.25


def test_a_conflict_is_asked_again_unless_the_request_makes_something(tmp_path: Path) -> None:
    codes = iter([409, 200])
    client_of(Airflow(lambda _: httpx.Response(next(codes))), tmp_path).note(TASK, "mine")
    refusing = Airflow(status(409))
    with pytest.raises(HermesError, match="409"):
        client_of(refusing, tmp_path).dag_runs(["d"])
    assert len(refusing.requests) == 1


def test_a_log_in_that_meets_another_writer_is_asked_for_again(tmp_path: Path) -> None:
    codes = iter([500, 201])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(next(codes), json={"access_token": "t"})
        return httpx.Response(200, json={})

    client_of(answer, tmp_path).note(TASK, "mine")
    assert next(codes, None) is None


class Clearing:
    """An Airflow whose answer to a clear is lost; it has cleared the task or not."""

    def __init__(self, *, has_cleared: bool) -> None:
        self.has_cleared, self.cleared = has_cleared, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            number = self.cleared if self.has_cleared else 0
            return httpx.Response(200, json={"id": f"of try {number}", "state": None})
        self.cleared += 1
        return httpx.Response(500 if self.cleared == 1 else 200, json={})


@pytest.mark.parametrize(("has_cleared", "asked"), [(True, 1), (False, 2)])
def test_a_clear_whose_answer_was_lost_is_not_done_twice(
    tmp_path: Path, has_cleared: bool, asked: int
) -> None:
    clearing = Clearing(has_cleared=has_cleared)
    client_of(Airflow(clearing), tmp_path).clear("d", "r", [("trial", 3), "report"])
    assert clearing.cleared == asked


def test_the_right_to_edit_a_pool_is_asked_for_by_an_edit_that_changes_nothing(
    tmp_path: Path,
) -> None:
    pool = {"name": "gpus", "slots": 4, "description": "GPUs", "include_deferred": True, "x": 1}
    airflow = Airflow(ok(pool))
    client_of(airflow, tmp_path).confirm_pool_edit("gpus")
    _, edit = airflow.requests
    assert (edit.method, edit.url.path) == ("PATCH", "/api/v2/pools/gpus")
    assert edit.url.params["update_mask"] == "include_deferred"
    assert json.loads(edit.content) == {
        "pool": "gpus",
        "slots": 4,
        "description": "GPUs",
        "include_deferred": True,
    }


def test_a_user_without_the_right_is_told_apart_from_another_refusal(tmp_path: Path) -> None:
    for code, kind in ((403, NotPermitted), (422, HermesError)):
        with pytest.raises(HermesError, match=f"({code})") as raised:
            client_of(Airflow(status(code)), tmp_path).confirm_pool_edit("gpus")
        assert type(raised.value) is kind


@pytest.mark.parametrize(("code", "permitted"), [(404, True), (403, False)])
def test_whether_runs_may_be_deleted_is_asked_of_a_run_that_is_not_there(
    tmp_path: Path, code: int, permitted: bool
) -> None:
    airflow = Airflow(status(code))
    assert client_of(airflow, tmp_path).may_delete_runs("hermes_sweep") is permitted
    (asked,) = airflow.requests
    assert (asked.method, asked.url.path) == (
        "DELETE",
        "/api/v2/dags/hermes_sweep/dagRuns/hermes_prune_may_delete_runs",
    )


def test_the_right_to_edit_a_run_is_asked_for_without_an_edit(tmp_path: Path) -> None:
    airflow = Airflow(ok({"task_instances": [], "total_entries": 0}))
    client_of(airflow, tmp_path).confirm_edit(TaskKey("hermes_sweep", "r", "plan"))
    (asked,) = airflow.requests
    assert asked.url.path == "/api/v2/dags/hermes_sweep/clearTaskInstances"
    assert json.loads(asked.content)["dry_run"] is True


def test_a_refusal_says_who_can_help(tmp_path: Path) -> None:
    client = client_of(Airflow(status(403)), tmp_path)
    with pytest.raises(NotPermitted, match="lacks the right: ask an administrator of Airflow"):
        client.put_state(TASK, "hermes_close", {})


def test_the_tries_of_a_mapped_task_are_numbered_without_the_one_that_has_not_begun(
    tmp_path: Path,
) -> None:
    tries = [{"try_number": 2}, {"try_number": 1}, {"try_number": 0}]
    airflow = Airflow(ok({"task_instances": tries}))
    assert client_of(airflow, tmp_path).tries(TASK) == [1, 2]
    assert airflow.requests[0].url.raw_path.endswith(b"/taskInstances/trial/3/tries")
    assert client_of(Airflow(status(404)), tmp_path).tries(TASK) == []


def test_a_message_of_a_log_may_have_any_character_that_ends_a_line(tmp_path: Path) -> None:
    text = '{"event": "a\u2028b\u0085c"}\n{"event": "d"}\n'
    airflow = Airflow(status(200, text))
    assert client_of(airflow, tmp_path).task_log(TASK, 2) == [
        {"event": "a\u2028b\u0085c"}, {"event": "d"},
    ]  # fmt: skip
    request = airflow.requests[0]
    assert request.url.path.endswith("/taskInstances/trial/logs/2")
    assert request.url.params["map_index"] == "3"
    assert request.headers["accept"] == "application/x-ndjson"


def test_what_is_new_in_a_log_is_asked_for_by_the_token(tmp_path: Path) -> None:
    airflow = Airflow(ok({"content": [{"event": "a"}], "continuation_token": "next"}))
    client = client_of(airflow, tmp_path)
    assert client.task_log_since(TASK, 1, None) == ([{"event": "a"}], "next")
    client.task_log_since(TASK, 1, "next")
    assert [request.url.params.get("token") for request in airflow.requests] == [None, "next"]
    assert client_of(Airflow(status(404)), tmp_path).task_log_since(TASK, 1, None) == ([], None)
