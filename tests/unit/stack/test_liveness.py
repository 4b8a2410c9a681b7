from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.errors import StackError
from hermes_ops.stack import health, liveness
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.liveness import Liveness
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.supervisor_client import ProgramState, SupervisorClient

HANGS = {"scheduler": "no heartbeat"}


def _running(pid: int = 7, state: str = "RUNNING") -> list[ProgramState]:
    return [ProgramState("scheduler", state, pid, 1.0, 0.0)]


def _failures(watched: Liveness, states: list[ProgramState], most: int = 100) -> int:
    """Return after how many failed checks in a row the scheduler hangs; `most` if it does not."""
    return next((n for n in range(1, most) if watched.hanging(states, HANGS)), most)


def test_a_program_that_has_worked_hangs_after_its_limit_of_failed_checks() -> None:
    watched = Liveness(limit=3, start_limit=9)
    assert watched.hanging(_running(), {}) == []
    assert _failures(watched, _running()) == 3


def test_one_passed_check_starts_the_count_anew() -> None:
    watched = Liveness(limit=3, start_limit=9)
    watched.hanging(_running(), {})
    assert watched.hanging(_running(), HANGS) == watched.hanging(_running(), HANGS) == []
    assert watched.hanging(_running(), {}) == []
    assert _failures(watched, _running()) == 3


def test_a_program_that_starts_has_more_time_and_so_has_its_next_process() -> None:
    watched = Liveness(limit=3, start_limit=9)
    assert _failures(watched, _running(7)) == 9
    assert _failures(watched, _running(8)) == 9


@pytest.mark.parametrize("state", ["STARTING", "STOPPING", "BACKOFF", "EXITED", "STOPPED"])
def test_a_program_that_does_not_run_never_hangs(state: str) -> None:
    assert _failures(Liveness(limit=1, start_limit=1), _running(state=state)) == 100


class _Supervisor(SupervisorClient):
    """Notes what is killed; away where it has no states."""

    def __init__(self, states: list[ProgramState]) -> None:
        super().__init__(Layout(Path("/nowhere")))
        self._states, self.killed = states, list[str]()

    def states(self) -> list[ProgramState]:
        if not self._states:
            raise StackError("The process supervisor does not answer")
        return self._states

    def kill_program(self, name: str) -> None:
        self.killed.append(name)


def test_a_program_that_hangs_is_killed_with_a_line_that_says_why() -> None:
    supervisor, lines = _Supervisor(_running()), list[str]()
    for _ in range(3):
        watched = Liveness(1, 1)
        liveness.watch(watched, supervisor, lambda: HANGS, lambda: False, lines.append)
    assert supervisor.killed == ["scheduler"] * 3
    assert set(lines) == {"scheduler hangs and is restarted: no heartbeat"}


def test_nothing_is_killed_while_a_disk_is_full_nor_for_what_failed_meanwhile() -> None:
    supervisor, watched, lines = _Supervisor(_running()), Liveness(2, 2), list[str]()
    for is_full in (False, True, False):
        watched.hanging(_running(), {})
        liveness.watch(watched, supervisor, lambda: HANGS, lambda full=is_full: full, lines.append)  # type: ignore[misc]
    assert (supervisor.killed, lines) == ([], [])


def test_without_a_supervisor_nothing_is_killed() -> None:
    supervisor, lines = _Supervisor([]), list[str]()
    liveness.watch(Liveness(1, 1), supervisor, lambda: HANGS, lambda: False, lines.append)
    assert (supervisor.killed, lines) == ([], ["The process supervisor does not answer"])


@pytest.fixture
def pages() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    """Return the address of a server on loopback, and the pages that it has: status and JSON."""
    answers: dict[str, tuple[int, Any]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, document = answers.get(self.path, (404, None))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()


def _health(**of_parts: str) -> tuple[int, Mapping[str, Any]]:
    parts = ("metadatabase", "scheduler", "dag_processor", "triggerer")
    return 200, {part: {"status": of_parts.get(part, "healthy")} for part in parts}


def _stack(url: str) -> StackRecord:
    return StackRecord("/h", url, url, "gpus", 2, "fifo", {}, False, 0, 0.0, f"{url}/metrics")


GOOD = {"/api/v2/version": (200, {}), "/health": (200, "OK"), "/livez": (200, "ok")}


def test_each_program_is_judged_by_its_own_page(
    pages: tuple[str, dict[str, tuple[int, Any]]],
) -> None:
    url, answers = pages
    answers |= {**GOOD, "/api/v2/monitor/health": _health()}
    assert health.problems(_stack(url)) == {}
    answers["/api/v2/monitor/health"] = _health(scheduler="unhealthy", triggerer="unhealthy")
    assert set(health.problems(_stack(url))) == {"scheduler", "triggerer"}
    answers |= {"/livez": (503, "rounds hang"), "/health": (500, "")}
    assert set(health.problems(_stack(url))) == {"scheduler", "triggerer", "controller", "mlflow"}


def test_no_heartbeat_is_missed_while_the_database_or_the_api_server_is_away(
    pages: tuple[str, dict[str, tuple[int, Any]]],
) -> None:
    url, answers = pages
    answers |= {
        **GOOD,
        "/api/v2/monitor/health": _health(metadatabase="unhealthy", scheduler="unhealthy"),
    }
    assert health.problems(_stack(url)) == {}
    answers["/api/v2/monitor/health"] = (500, {})
    assert health.problems(_stack(url)) == {}
    answers["/api/v2/version"] = (500, {})
    assert set(health.problems(_stack(url))) == {"api-server"}


def test_a_controller_whose_port_another_has_taken_is_not_judged(
    pages: tuple[str, dict[str, tuple[int, Any]]],
) -> None:
    url, answers = pages
    answers |= {**GOOD, "/livez": (404, {}), "/api/v2/monitor/health": _health()}
    assert health.problems(_stack(url)) == {}
