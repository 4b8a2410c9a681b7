"""Airflow's public REST interface: state store, task-instance states, triggers, runs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from hermes_ops.airflow.credentials import AirflowCredentials, LogInRefused
from hermes_ops.airflow.state_store import KeyValues, read_record, write_record
from hermes_ops.error_message import keep_bodies_out_of_logs, response_message
from hermes_ops.errors import HermesError, NotPermitted, Unavailable
from hermes_ops.retry import (
    BUSY,
    BUSY_OR_CONFLICT,
    FEW,
    START_PAUSE_S,
    START_PAUSES,
    backoff_s,
    send_with_retry,
)

ENDED_RUN = ("success", "failed")
"""States of a DAG run that has ended."""

_NO_RUN = "hermes_prune_may_delete_runs"
"""Id of a DAG run that never exists: a request to delete it shows whether that is permitted."""

MOST_MARKED = 16
"""Task instances in a request that sets their state. Airflow takes about 30 ms for each, in one
transaction: with thousands the request times out, and on SQLite all other writers wait."""

_WRONG_PASSWORD = (httpx.codes.BAD_REQUEST, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


@dataclass(frozen=True, slots=True)
class TaskKey:
    """One task instance; `map_index` -1 for a task that is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1


@dataclass(slots=True)
class AirflowClient:
    """A thin client; logs in on first use and again when its token is refused.

    A request that meets a busy Airflow is sent again, up to `pauses` times after growing pauses.
    """

    credentials: AirflowCredentials
    timeout_s: float = 30.0
    pauses: int = FEW
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    _http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        keep_bodies_out_of_logs()
        self._http = httpx.Client(base_url=self.credentials.url, timeout=self.timeout_s)

    def put_state(self, task: TaskKey, key: str, value: object) -> None:
        """Write one record of the task state store, of any size; it never expires by itself."""
        write_record(self._state_store(task), key, value)

    def get_state(self, task: TaskKey, key: str) -> object:
        """Return one record of the task state store; None when there is none."""
        return read_record(self._state_store(task).read, key)

    def keep_state(self, task: TaskKey, key: str) -> None:
        """Store the value of a key again, without a date of expiry."""
        store = self._state_store(task)
        if (value := store.read(key)) is not None:
            store.write(key, value)

    def _state_store(self, task: TaskKey) -> KeyValues:
        """Return the values of one task; Airflow refuses those over 65,535 bytes."""
        values = f"{_instances(task)}/{quote(task.task_id)}/state-store"
        of_task = {"map_index": task.map_index}

        def read(key: str) -> object:
            path = f"{values}/{quote(key)}"
            answer = self._find(path, params=of_task)
            return None if answer is None else answer["value"]

        def write(key: str, value: object) -> None:
            body = {"value": value, "expires_at": None}
            self._call("PUT", f"{values}/{quote(key)}", params=of_task, json=body)

        def delete(key: str) -> None:
            self._call("DELETE", f"{values}/{quote(key)}", params=of_task, missing_ok=True)

        return KeyValues(read, write, delete)

    def xcom(self, task: TaskKey, key: str) -> object:
        """Return a task's XCom; None when there is none."""
        query = {"map_index": task.map_index}
        answer = self._find(_xcom(task, key), params=query)
        return None if answer is None else answer["value"]

    def add_xcom(self, task: TaskKey, key: str, value: object) -> None:
        """Add an XCom to a task (HermesError if it has one of that key)."""
        body = {"key": key, "value": value, "map_index": task.map_index}
        self._call("POST", _xcom(task), json=body)

    def renew_xcom(self, task: TaskKey, key: str, value: object) -> None:
        """Replace the value of an XCom, which renews its date."""
        body = {"value": value, "map_index": task.map_index}
        self._call("PATCH", _xcom(task, key), json=body)

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        """Set waiting task instances to `skipped`, as `mark` does."""
        self.mark(tasks, "skipped")

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        """Set waiting task instances to success, failed or skipped.

        Each request sets at most MOST_MARKED of one DAG run. If one fails, the states that earlier
        requests have set stay.
        """
        runs: dict[tuple[str, str], list[TaskKey]] = {}
        for task in tasks:
            runs.setdefault((task.dag_id, task.run_id), []).append(task)
        for batch in (batch for of_run in runs.values() for batch in _batches(of_run)):
            entities = [
                {"task_id": k.task_id, "map_index": k.map_index, "new_state": state} for k in batch
            ]
            body = {
                "actions": [
                    {"action": "update", "entities": entities, "action_on_non_existence": "skip"}
                ]
            }
            self._call("PATCH", _instances(batch[0]), json=body)

    def clear(
        self,
        dag_id: str,
        run_id: str,
        tasks: Sequence[str | tuple[str, int]],
        note: str | None = None,
    ) -> None:
        """Clear these tasks of a run, with a note: they run again, and an ended run goes on."""
        body = {
            "note": note,
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [list(t) if isinstance(t, tuple) else t for t in tasks],
            "only_failed": False,
            "reset_dag_runs": True,
        }
        before = self._identity(dag_id, run_id, tasks)
        self._call(
            "POST",
            f"/api/v2/dags/{quote(dag_id)}/clearTaskInstances",
            # All of them are cleared, or none: a second time would end what has begun again.
            is_done=lambda: before != self._identity(dag_id, run_id, tasks),
            json=body,
        )

    def _identity(self, dag_id: str, run_id: str, tasks: Sequence[str | tuple[str, int]]) -> object:
        """Return what a clear changes of the first of these tasks."""
        first = tasks[0] if tasks else ""
        path = "/".join(
            quote(str(part)) for part in ((first,) if isinstance(first, str) else first)
        )
        url = f"{_run(dag_id, run_id)}/taskInstances/{path}"
        instance = self._call("GET", url, missing_ok=True)
        return instance and (instance["id"], instance["state"] == "restarting")

    def note(self, task: TaskKey, text: str) -> None:
        """Write the note of a task instance, which its page shows."""
        body = {"note": text}
        self._call("PATCH", _instance(task), json=body, params={"update_mask": "note"})

    def user_name(self) -> str:
        """Return the name of the user that Airflow takes this client for."""
        if not self.credentials.has_token:
            return self.credentials.user
        return str(self._call("GET", "/ui/auth/me")["username"])

    def trigger(
        self, dag_id: str, run_id: str, conf: Mapping[str, Any], note: str | None = None
    ) -> dict[str, Any]:
        """Start a DAG run with that id, configuration and note.

        Airflow on SQLite answers HTTP 500, or late, when its writers collide. The request is
        retried after growing pauses; the run's id makes it idempotent, so a 409 is no error then.
        Unavailable when no run is started.
        """
        body = {"dag_run_id": run_id, "conf": dict(conf), "logical_date": None}
        body |= {} if note is None else {"note": note}
        path = f"/api/v2/dags/{quote(dag_id)}/dagRuns"
        for turn, pause_s in enumerate(backoff_s(self.chance, START_PAUSES, START_PAUSE_S)):
            try:
                return dict(self._call("POST", path, pauses=0, json=body))
            except LogInRefused:
                raise
            except Unavailable as error:
                if isinstance(error.__cause__, httpx.ConnectError):
                    raise
                self.sleep(pause_s)
                run = self._existing_run(dag_id, run_id)
            except HermesError:
                if turn == 0 or (run := self._existing_run(dag_id, run_id)) is None:
                    raise
            if run is not None:
                return run
        raise Unavailable(
            f"Airflow is too busy to start the run {run_id} of {dag_id}: nothing was started. "
            "Try again, or use PostgreSQL, where requests do not wait for each other."
        )

    def _existing_run(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        """Return the run of a request whose answer was lost; None if there is none."""
        try:
            return self.dag_run(dag_id, run_id)
        except Unavailable:
            return None

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        """Return the DAG run; None when there is none of that id."""
        return self._find(_run(dag_id, run_id))

    def dag_runs(self, dag_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the newest 100 runs of these DAGs, newest first."""
        body = {"dag_ids": list(dag_ids), "page_limit": 100, "order_by": "-run_after"}
        return list(self._call("POST", "/api/v2/dags/~/dagRuns/list", json=body)["dag_runs"])

    def all_dag_runs(self, dag_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every run of these DAGs, newest first, page by page."""
        body = {"dag_ids": list(dag_ids), "page_limit": 100, "order_by": "-run_after"}
        seen = 0
        while dag_ids:
            query = {**body, "page_offset": seen}
            answer = self._call("POST", "/api/v2/dags/~/dagRuns/list", json=query)
            yield from answer["dag_runs"]
            seen += len(answer["dag_runs"])
            if not answer["dag_runs"] or seen >= answer["total_entries"]:
                return

    def task_instance(self, task: TaskKey) -> dict[str, Any] | None:
        """Return a task instance; None when there is none."""
        return self._find(_instance(task))

    def tries(self, task: TaskKey) -> list[int]:
        """Return the numbers of the tries that a task has begun, oldest first."""
        answer = self._find(f"{_instance(task)}/tries") or {"task_instances": ()}
        numbers = {int(instance["try_number"] or 0) for instance in answer["task_instances"]}
        return sorted(numbers - {0})

    def task_log(self, task: TaskKey, attempt: int) -> list[dict[str, Any]]:
        """Return the messages of a try's log up to now; first come those on where it was read.

        Airflow streams it, so its API server needs little memory for a long one.
        """
        query, headers = {"map_index": task.map_index}, {"accept": "application/x-ndjson"}
        path = _log(task, attempt)
        response = self._respond("GET", path, missing_ok=True, params=query, headers=headers)
        if response is None:
            return []
        try:  # by line feeds alone: a message may have other characters that end a line
            return [json.loads(line) for line in response.content.split(b"\n") if line.strip()]
        except ValueError:
            raise _no_airflow(response) from None

    def task_log_since(
        self, task: TaskKey, attempt: int, token: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the messages of a try's log after a token, and the next token while it runs."""
        query = {"map_index": task.map_index, **({} if token is None else {"token": token})}
        answer = self._find(_log(task, attempt), params=query)
        return (list(answer["content"]), answer["continuation_token"]) if answer else ([], None)

    def made_by(
        self, operator: str, dag_id: str = "~", run_id: str = "~", limit: int = 50
    ) -> list[dict[str, Any]]:
        """Return the task instances of an operator (by class name), newest runs first."""
        params = {"operator": operator, "limit": str(limit), "order_by": "-run_after"}
        answer = self._call("GET", f"{_run(dag_id, run_id)}/taskInstances", params=params)
        return list(answer["task_instances"])

    def all_made_by(self, operator: str) -> Iterator[dict[str, Any]]:
        """Yield every task instance of an operator (by class name), oldest runs first."""
        yield from self._all_instances("~", "~", operator=operator, order_by="run_after")

    def delete_dag_run(self, dag_id: str, run_id: str) -> bool:
        """Delete a run with its tasks, XComs and records; False for one that has not ended."""
        run = self.dag_run(dag_id, run_id)
        if run is None:
            return True
        if run["state"] not in ENDED_RUN:
            return False
        self._call("DELETE", _run(dag_id, run_id), missing_ok=True)
        return True

    def may_delete_runs(self, dag_id: str) -> bool:
        """Return whether Airflow lets this user delete runs of the DAG.

        It is asked to delete one that is not there: it checks the right before it looks for the
        run. Its audit log has the request.
        """
        try:
            self._call("DELETE", _run(dag_id, _NO_RUN), missing_ok=True)
        except NotPermitted:
            return False
        return True

    def confirm_edit(self, task: TaskKey) -> None:
        """Clear the task without effect: raise NotPermitted if Airflow does not let this user."""
        body = {
            "dry_run": True,
            "dag_run_id": task.run_id,
            "task_ids": [task.task_id],
            "only_failed": False,
        }
        self._call("POST", f"/api/v2/dags/{quote(task.dag_id)}/clearTaskInstances", json=body)

    def delete_state(self, task: TaskKey, key: str) -> None:
        """Delete one value of the task state store; none may be there."""
        self._state_store(task).delete(key)

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return every task instance of a run, mapped ones included."""
        return list(self._all_instances(dag_id, run_id, order_by="map_index"))

    def _all_instances(self, dag_id: str, run_id: str, **query: str) -> Iterator[dict[str, Any]]:
        """Yield the task instances that the query finds, page by page."""
        path, seen = f"{_run(dag_id, run_id)}/taskInstances", 0
        while True:
            answer = self._call("GET", path, params={**query, "limit": 100, "offset": seen})
            yield from answer["task_instances"]
            seen += len(answer["task_instances"])
            if not answer["task_instances"] or seen >= answer["total_entries"]:
                return

    def pool(self, name: str) -> dict[str, Any] | None:
        """Return the pool; None when there is none of that name."""
        return self._find(f"/api/v2/pools/{quote(name, safe='')}")

    def confirm_pool_edit(self, name: str) -> None:
        """Edit the pool without changing it: raise NotPermitted if Airflow does not let this user.

        Airflow's audit log has the request.
        """
        path = f"/api/v2/pools/{quote(name, safe='')}"
        pool = self._call("GET", path)
        body = {key: pool[key] for key in ("slots", "description", "include_deferred")}
        body["pool"] = name  # all are checked, one is written: of the default pool not any
        self._call("PATCH", path, params={"update_mask": "include_deferred"}, json=body)

    def resize_pool(self, name: str, slots: int) -> None:
        """Give the pool that many slots; NotPermitted if Airflow does not let this user."""
        path = f"/api/v2/pools/{quote(name, safe='')}"
        pool = self._call("GET", path)
        if pool["slots"] != slots:
            body = {key: pool[key] for key in ("description", "include_deferred")}
            body |= {"pool": name, "slots": slots}
            self._call("PATCH", path, params={"update_mask": "slots"}, json=body)

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        """Return the DAG; None while Airflow has not parsed it."""
        return self._find(f"/api/v2/dags/{quote(dag_id)}")

    def dag_fields(self, dag_id: str) -> frozenset[str] | None:
        """Return the names of the DAG's params, its form's fields; None while it is not parsed."""
        details = self._find(f"/api/v2/dags/{quote(dag_id)}/details")
        return None if details is None else frozenset(details.get("params") or ())

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def _find(self, path: str, **arguments: Any) -> dict[str, Any] | None:  # noqa: ANN401 - httpx's own
        """Return the JSON object at the path; None when there is none."""
        answer = self._call("GET", path, missing_ok=True, **arguments)
        return None if answer is None else dict(answer)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:  # noqa: ANN401 - a JSON document
        """Return the JSON of the response; None without any. The arguments are `_respond`'s."""
        response = self._respond(method, path, **arguments)
        return _document(response) if response is not None and response.content else None

    def _respond(
        self,
        method: str,
        path: str,
        *,
        missing_ok: bool = False,
        pauses: int | None = None,
        is_done: Callable[[], bool] | None = None,
        **arguments: Any,  # noqa: ANN401 - httpx's own arguments
    ) -> httpx.Response | None:
        """Return the response to a request; None for what is not there, or is done already."""
        try:
            response = send_with_retry(
                lambda: self._answer(method, path, arguments),
                backoff_s(self.chance, self.pauses if pauses is None else pauses),
                busy=BUSY if method == "POST" else BUSY_OR_CONFLICT,
                sleep=self.sleep,
                is_done=is_done,
            )
        except httpx.HTTPError as error:
            raise Unavailable(
                f"Airflow at {self.credentials.url} did not answer: {error}"
            ) from error
        if response is None or (missing_ok and response.status_code == httpx.codes.NOT_FOUND):
            return None
        _raise_for(response)
        return response

    def _answer(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        if self.credentials.has_token:
            return self._answer_to_token(method, path, dict(arguments))
        if "authorization" not in self._http.headers and (busy := self._log_in()) is not None:
            return busy
        response = self._http.request(method, path, **arguments)
        if _refuses_token(response):
            if (busy := self._log_in()) is not None:
                return busy
            response = self._http.request(method, path, **arguments)
        return response

    def _answer_to_token(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        """Return the answer to a request with the token; its file may be replaced at any time."""
        used, given_headers = "", arguments.pop("headers", {})
        while (token := self.credentials.current_token()) != used:
            used, headers = token, {**given_headers, "authorization": f"Bearer {token}"}
            response = self._http.request(method, path, headers=headers, **arguments)
            if not _refuses_token(response):
                return response
        raise self.credentials.refused_token(used, time.time())

    def _log_in(self) -> httpx.Response | None:
        """Fetch a token; return the answer of an Airflow that is too busy to give one."""
        user = self.credentials.user
        body = {"username": user, "password": self.credentials.password()}
        response = self._http.post("/auth/token", json=body)
        if response.status_code in BUSY:
            return response
        if response.status_code in _WRONG_PASSWORD:
            raise LogInRefused(
                f"Airflow refuses the log-in of {user!r} ({response.status_code}): correct "
                f"HERMES_AIRFLOW_USER or the password in {self.credentials.password_file}."
            )
        if response.is_redirect or response.is_client_error:
            raise LogInRefused(
                "the auth manager of this Airflow gives no token for a user and password "
                f"({response.status_code} at /auth/token): put a token into a file and name it in "
                "HERMES_AIRFLOW_TOKEN_FILE."
            )
        _raise_for(response)
        self._http.headers["authorization"] = f"Bearer {_document(response)['access_token']}"
        return None


def _batches(tasks: Sequence[TaskKey]) -> Iterator[Sequence[TaskKey]]:
    for begin in range(0, len(tasks), MOST_MARKED):
        yield tasks[begin : begin + MOST_MARKED]


def _refuses_token(response: httpx.Response) -> bool:
    """Tell whether the token is not taken: it has expired (401) or its key is another one (403)."""
    if response.status_code == httpx.codes.FORBIDDEN:
        return "Invalid JWT token" in response.text
    return response.status_code == httpx.codes.UNAUTHORIZED


def run_page(dag_id: str, run_id: str) -> str:
    """Return the page of a DAG run, relative to Airflow's address."""
    return f"dags/{quote(dag_id)}/runs/{quote(run_id, safe='')}"


def task_page(task: TaskKey) -> str:
    """Return the page of a task with its log, relative to Airflow's address."""
    mapped = "" if task.map_index < 0 else f"/mapped/{task.map_index}"
    return f"{run_page(task.dag_id, task.run_id)}/tasks/{quote(task.task_id)}{mapped}"


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def _instances(task: TaskKey) -> str:
    return f"{_run(task.dag_id, task.run_id)}/taskInstances"


def _instance(task: TaskKey) -> str:
    mapped = f"/{task.map_index}" if task.map_index >= 0 else ""
    return f"{_instances(task)}/{quote(task.task_id)}{mapped}"


def _log(task: TaskKey, attempt: int) -> str:
    return f"{_instances(task)}/{quote(task.task_id)}/logs/{attempt}"


def _xcom(task: TaskKey, key: str = "") -> str:
    entries = f"{_instances(task)}/{quote(task.task_id)}/xcomEntries"
    return f"{entries}/{quote(key)}" if key else entries


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    message = response_message(response.content, response.request.content) or response.reason_phrase
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise Unavailable(f"Airflow answered {response.status_code}: {message}")
    refusal = (
        f"Airflow refused {response.request.method} {response.request.url.path} "
        f"({response.status_code}): {message}"
    )
    if response.status_code == httpx.codes.FORBIDDEN:
        raise NotPermitted(
            f"{refusal}. This Airflow user lacks the right: ask an administrator of Airflow for it."
        )
    raise HermesError(refusal)


def _document(response: httpx.Response) -> Any:  # noqa: ANN401 - a JSON document
    try:
        return response.json()
    except ValueError:
        raise _no_airflow(response) from None


def _no_airflow(response: httpx.Response) -> HermesError:
    url = response.request.url.copy_with(path="/", query=None)
    return HermesError(f"what answers at {url} is no Airflow: correct HERMES_AIRFLOW_URL.")
