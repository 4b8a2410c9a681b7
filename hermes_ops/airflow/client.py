"""Airflow's public REST interface: state store, task-instance states, triggers, runs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from hermes_ops.airflow.pieces import KeyValues, read_record, write_record
from hermes_ops.asking import ask, backoff_s
from hermes_ops.errors import HermesError, Unavailable

TRIES = 3


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to log in: the address, a user and the file (JSON: user -> password) with the secret."""

    url: str
    user: str
    password_file: Path

    @classmethod
    def from_environment(cls) -> Credentials:
        """From HERMES_AIRFLOW_URL, HERMES_AIRFLOW_USER and HERMES_AIRFLOW_PASSWORD_FILE."""
        try:
            return cls(
                os.environ["HERMES_AIRFLOW_URL"],
                os.environ["HERMES_AIRFLOW_USER"],
                Path(os.environ["HERMES_AIRFLOW_PASSWORD_FILE"]),
            )
        except KeyError as error:
            raise HermesError(
                f"{error.args[0]} is not set: set it to reach Airflow, or use `hermes up`."
            ) from None

    def password(self) -> str:
        """The secret: the file holds it alone, or a JSON object of users (HermesError if not)."""
        import json

        try:
            text = self.password_file.read_text().strip()
            return str(json.loads(text)[self.user]) if text.startswith("{") else text
        except OSError as error:
            fact, remedy = f"cannot be read ({error.strerror})", "HERMES_AIRFLOW_PASSWORD_FILE"
        except ValueError as error:
            fact, remedy = f"is not JSON ({error})", "HERMES_AIRFLOW_PASSWORD_FILE"
        except KeyError:
            fact, remedy = f"has no password of the user {self.user!r}", "HERMES_AIRFLOW_USER"
        raise HermesError(f"{self.password_file} {fact}: correct it or {remedy}.")


@dataclass(frozen=True, slots=True)
class TaskKey:
    """One task instance; `map_index` -1 for a task that is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1


@dataclass(slots=True)
class AirflowClient:
    """A thin client; logs in on first use and again when its token is refused."""

    credentials: Credentials
    timeout_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    _http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.credentials.url, timeout=self.timeout_s)

    def put_state(self, task: TaskKey, key: str, value: object) -> None:
        """Write one record of the task state store, of any size; it never expires by itself."""
        write_record(self._state_store(task), key, value)

    def get_state(self, task: TaskKey, key: str) -> object:
        """One record of the task state store; None when there is none."""
        return read_record(self._state_store(task).read, key)

    def _state_store(self, task: TaskKey) -> KeyValues:
        """The values of one task; those over 65,535 bytes are refused by Airflow."""
        values = f"{_instances(task)}/{quote(task.task_id)}/state-store"
        of_task = {"map_index": task.map_index}

        def read(key: str) -> object:
            path = f"{values}/{quote(key)}"
            answer = self._call("GET", path, params=of_task, missing_ok=True)
            return None if answer is None else answer["value"]

        def write(key: str, value: object) -> None:
            body = {"value": value, "expires_at": None}
            self._call("PUT", f"{values}/{quote(key)}", params=of_task, json=body)

        def delete(key: str) -> None:
            self._call("DELETE", f"{values}/{quote(key)}", params=of_task, missing_ok=True)

        return KeyValues(read, write, delete)

    def skip(self, tasks: Iterable[TaskKey]) -> None:
        """Set task instances that wait to `skipped`, in one request a DAG run."""
        self.mark(tasks, "skipped")

    def mark(self, tasks: Iterable[TaskKey], state: str) -> None:
        """Set task instances that wait to success, failed or skipped, in one request a DAG run."""
        runs: dict[tuple[str, str], list[TaskKey]] = {}
        for task in tasks:
            runs.setdefault((task.dag_id, task.run_id), []).append(task)
        for keys in runs.values():
            entities = [
                {"task_id": k.task_id, "map_index": k.map_index, "new_state": state} for k in keys
            ]
            body = {
                "actions": [
                    {"action": "update", "entities": entities, "action_on_non_existence": "skip"}
                ]
            }
            self._call("PATCH", _instances(keys[0]), json=body)

    def clear(
        self,
        dag_id: str,
        run_id: str,
        tasks: Sequence[str | tuple[str, int]],
        note: str | None = None,
    ) -> None:
        """Have these tasks of a run run again, with a note; a run that had ended goes on."""
        body = {
            "note": note,
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [list(t) if isinstance(t, tuple) else t for t in tasks],
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self._call("POST", f"/api/v2/dags/{quote(dag_id)}/clearTaskInstances", json=body)

    def note(self, task: TaskKey, text: str) -> None:
        """Write the note of a task instance, which its page shows."""
        mapped = f"/{task.map_index}" if task.map_index >= 0 else ""
        path = f"{_instances(task)}/{quote(task.task_id)}{mapped}"
        self._call("PATCH", path, json={"note": text}, params={"update_mask": "note"})

    def trigger(self, dag_id: str, run_id: str, conf: Mapping[str, Any]) -> dict[str, Any]:
        """Start a DAG run with that id and configuration.

        An Airflow on SQLite answers 500, or late, when its writers meet: it is asked again after
        growing pauses, as the id makes all requests one run: a 409 is no error then. Unavailable
        when it starts none.
        """
        body = {"dag_run_id": run_id, "conf": dict(conf), "logical_date": None}
        path = f"/api/v2/dags/{quote(dag_id)}/dagRuns"
        for turn, pause_s in enumerate(backoff_s(self.chance)):
            try:
                return dict(self._call("POST", path, tries=1, json=body))
            except Unavailable as error:
                if isinstance(error.__cause__, httpx.ConnectError):
                    raise
                self.sleep(pause_s)
                found = self._made(dag_id, run_id)
            except HermesError:
                if turn == 0 or (found := self._made(dag_id, run_id)) is None:
                    raise
            if found is not None:
                return found
        raise Unavailable(
            f"Airflow is too busy to start the run {run_id} of {dag_id}: nothing was started. "
            "Try again, or use PostgreSQL, where requests do not wait for each other."
        )

    def _made(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        """Return the run that a request made whose answer was lost; None if none is known."""
        try:
            return self.dag_run(dag_id, run_id)
        except Unavailable:
            return None

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any] | None:
        """The DAG run; None when there is none of that id."""
        answer = self._call("GET", _run(dag_id, run_id), missing_ok=True)
        return None if answer is None else dict(answer)

    def dag_runs(self, dag_ids: Sequence[str], limit: int = 100) -> list[dict[str, Any]]:
        """The newest runs of these DAGs, newest first."""
        body = {"dag_ids": list(dag_ids), "page_limit": limit, "order_by": "-run_after"}
        return list(self._call("POST", "/api/v2/dags/~/dagRuns/list", json=body)["dag_runs"])

    def task_instance(self, task: TaskKey) -> dict[str, Any] | None:
        """A task instance that is not mapped; None when there is none."""
        answer = self._call("GET", f"{_instances(task)}/{quote(task.task_id)}", missing_ok=True)
        return None if answer is None else dict(answer)

    def made_by(
        self, operator: str, dag_id: str = "~", run_id: str = "~", limit: int = 50
    ) -> list[dict[str, Any]]:
        """The task instances of an operator (its class's name), those of the newest runs first."""
        params: dict[str, str | int] = {
            "operator": operator,
            "limit": limit,
            "order_by": "-run_after",
        }
        answer = self._call("GET", f"{_run(dag_id, run_id)}/taskInstances", params=params)
        return list(answer["task_instances"])

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Every task instance of a run, mapped ones included."""
        rows: list[dict[str, Any]] = []
        while True:
            params = {"limit": 100, "offset": len(rows), "order_by": "map_index"}
            answer = self._call("GET", f"{_run(dag_id, run_id)}/taskInstances", params=params)
            rows.extend(answer["task_instances"])
            if not answer["task_instances"] or len(rows) >= answer["total_entries"]:
                return rows

    def pool(self, name: str) -> dict[str, Any] | None:
        """Return the pool; None when there is none of that name."""
        answer = self._call("GET", f"/api/v2/pools/{quote(name, safe='')}", missing_ok=True)
        return None if answer is None else dict(answer)

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        """The DAG; None while Airflow has not parsed it."""
        answer = self._call("GET", f"/api/v2/dags/{quote(dag_id)}", missing_ok=True)
        return None if answer is None else dict(answer)

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def _call(
        self,
        method: str,
        path: str,
        *,
        missing_ok: bool = False,
        tries: int = TRIES,
        **arguments: Any,  # noqa: ANN401 - httpx's own arguments
    ) -> Any:  # noqa: ANN401 - a JSON document
        try:
            response = ask(lambda: self._answer(method, path, arguments), tries)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"Airflow at {self.credentials.url} did not answer: {error}"
            ) from error
        if missing_ok and response.status_code == httpx.codes.NOT_FOUND:
            return None
        _raise_for(response)
        return _document(response) if response.content else None

    def _answer(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        if "authorization" not in self._http.headers:
            self._log_in()
        response = self._http.request(method, path, **arguments)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._log_in()
            response = self._http.request(method, path, **arguments)
        return response

    def _log_in(self) -> None:
        body = {"username": self.credentials.user, "password": self.credentials.password()}
        response = self._http.post("/auth/token", json=body)
        _raise_for(response)
        self._http.headers["authorization"] = f"Bearer {_document(response)['access_token']}"


def run_page(dag_id: str, run_id: str) -> str:
    """The page of a DAG run, below Airflow's address."""
    return f"dags/{quote(dag_id)}/runs/{quote(run_id, safe='')}"


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def _instances(task: TaskKey) -> str:
    return f"{_run(task.dag_id, task.run_id)}/taskInstances"


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    detail = response.text[:500]
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise Unavailable(f"Airflow answered {response.status_code}: {detail}")
    raise HermesError(
        f"Airflow refused {response.request.method} {response.request.url.path} "
        f"({response.status_code}): {detail}"
    )


def _document(response: httpx.Response) -> Any:  # noqa: ANN401 - a JSON document
    try:
        return response.json()
    except ValueError:
        url = response.request.url.copy_with(path="/", query=None)
        raise HermesError(
            f"what answers at {url} is no Airflow: correct HERMES_AIRFLOW_URL."
        ) from None
