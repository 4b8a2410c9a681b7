"""Wait until every part of a stack answers, or say which one does not and what it last logged."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.supervisor_client import RUNNING, ProgramState, SupervisorClient

POLL_S = 0.3
REQUEST_TIMEOUT_S = 5.0
CRASHES_ALLOWED = 2
TAIL_LINES = 15
SWEEP_DAG = "hermes_sweep"
COMPONENT_PROGRAMS = {
    "scheduler": "scheduler",
    "dag_processor": "dag-processor",
    "triggerer": "triggerer",
}


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One condition of health: `probe` returns None if it holds, else what is missing."""

    program: str
    probe: Callable[[], str | None]


class HealthGate:
    """Waits for checks while it watches the supervised programs for crash loops."""

    def __init__(self, layout: Layout, supervisor: SupervisorClient, timeout_s: float) -> None:
        self._layout = layout
        self._supervisor = supervisor
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._crashes: dict[str, set[float]] = {}

    def wait(self, checks: Iterable[HealthCheck]) -> None:
        """Return when every check holds; raises `StackError` naming the program that failed."""
        pending = list(checks)
        while pending:
            reasons = [(check, check.probe()) for check in pending]
            pending = [check for check, reason in reasons if reason is not None]
            self._raise_on_crash()
            if pending and time.monotonic() > self._deadline_s:
                check, reason = next((c, r) for c, r in reasons if r is not None)
                raise self._failure(
                    check.program,
                    f"{reason} after {self._timeout_s:g} s (for a slow or busy machine raise "
                    "start_timeout_s in hermes.toml)",
                )
            if pending:
                time.sleep(POLL_S)

    def _raise_on_crash(self) -> None:
        for state in self._supervisor.states():
            if state.state not in {"BACKOFF", "FATAL", "EXITED"}:
                continue
            starts = self._crashes.setdefault(state.name, set())
            starts.add(state.started_s)
            if len(starts) > CRASHES_ALLOWED or state.state == "FATAL":
                raise self._failure(state.name, "it ends again as soon as it is started")

    def _failure(self, program: str, reason: str) -> StackError:
        log = self._layout.log(program)
        return StackError(
            f"{program} did not become healthy: {reason}. The last lines of {log}:\n"
            + "\n".join(f"    {line}" for line in tail(log))
        )


def tail(log: Path, lines: int = TAIL_LINES) -> Sequence[str]:
    """Return the last lines of a log file; empty if there is none."""
    try:
        return log.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def mlflow_check(url: str) -> HealthCheck:
    """Return the check that MLflow's server answers."""
    return _answer_check("mlflow", f"{url}/health")


def api_check(url: str) -> HealthCheck:
    """Return the check that Airflow's API server answers."""
    return _answer_check("api-server", f"{url}/api/v2/version")


def _answer_check(program: str, url: str) -> HealthCheck:
    def probe() -> str | None:
        response = _get(url)
        return None if response is not None and response.status_code == 200 else "no answer yet"

    return HealthCheck(program, probe)


def heartbeat_checks(url: str, since_s: float) -> list[HealthCheck]:
    """Return checks that each Airflow component has sent a heartbeat since `since_s` (Unix time).

    Older ones are those of an instance that is gone.
    """
    return [
        HealthCheck(program, lambda part=part: _heartbeat_problem(url, part, since_s))  # type: ignore[misc]
        for part, program in COMPONENT_PROGRAMS.items()
    ]


def _heartbeat_problem(url: str, part: str, since_s: float) -> str | None:
    response = _get(f"{url}/api/v2/monitor/health")
    if response is None or response.status_code != 200:
        return "Airflow's health page does not answer"
    row = response.json().get(part) or {}
    stamp = row.get(f"latest_{part}_heartbeat")
    if row.get("status") != "healthy" or stamp is None:
        return "no heartbeat yet"
    return None if datetime.fromisoformat(stamp).timestamp() >= since_s else "no heartbeat yet"


def problems(stack: StackRecord) -> dict[str, str]:
    """Return what does not work in a stack that has been up, by program.

    What cannot be known now is no problem: the heartbeats of Airflow's components while its API
    server or its database is away.
    """
    problem_of = {
        c.program: c.probe() for c in (api_check(stack.airflow_url), mlflow_check(stack.mlflow_url))
    }
    problem_of["controller"] = _controller_problem(stack.metrics_url)
    health = _get(f"{stack.airflow_url}/api/v2/monitor/health")
    document = health.json() if health is not None and health.status_code == 200 else {}
    if (document.get("metadatabase") or {}).get("status") == "healthy":
        for part, program in COMPONENT_PROGRAMS.items():
            row = document.get(part) or {}
            if row.get("status") != "healthy":
                problem_of[program] = f"no heartbeat since {row.get(f'latest_{part}_heartbeat')}"
    return {program: problem for program, problem in problem_of.items() if problem}


def _controller_problem(metrics_url: str) -> str | None:
    """Return why its rounds hang; None while it does not answer, as its port may be taken."""
    response = _get(str(httpx.URL(metrics_url).join("/livez"))) if metrics_url else None
    hangs = response is not None and response.status_code == 503
    return response.text.strip() if response is not None and hangs else None


def dag_check(client: httpx.Client) -> HealthCheck:
    """Return the check that the sweep DAG has been read; it names an import error."""

    def probe() -> str | None:
        try:
            response = client.get(f"/api/v2/dags/{SWEEP_DAG}")
            if response.status_code == 200 and not response.json().get("is_stale"):
                return None
            errors = client.get("/api/v2/importErrors", params={"limit": 50}).json()
        except (httpx.HTTPError, ValueError):
            return "Airflow does not answer"
        for row in errors.get("import_errors", []):
            if str(row.get("filename", "")).endswith(f"{SWEEP_DAG}.py"):
                return f"the DAG {SWEEP_DAG} cannot be imported: {_last_line(row)}"
        return f"the DAG {SWEEP_DAG} has not been read yet"

    return HealthCheck("dag-processor", probe)


def _last_line(row: dict[str, Any]) -> str:
    lines = str(row.get("stack_trace", "")).strip().splitlines()
    return lines[-1] if lines else "no trace"


def running_check(supervisor: SupervisorClient, name: str) -> HealthCheck:
    """Return the check that the supervisor has seen program `name` stay up for a second."""

    def probe() -> str | None:
        states: list[ProgramState] = supervisor.states()
        up = any(state.name == name and state.state == RUNNING for state in states)
        return None if up else "it is not running"

    return HealthCheck(name, probe)


@functools.cache
def _client() -> httpx.Client:
    # Each new client would read every certificate again.
    return httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=False)  # noqa: S501 - loopback http


def _get(url: str) -> httpx.Response | None:
    try:
        return _client().get(url)
    except httpx.HTTPError:
        return None
