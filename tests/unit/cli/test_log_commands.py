from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.trial_log import LogExcerpt
from hermes_ops.cli import log_commands, outcome
from hermes_ops.cli.connection import Connection
from hermes_ops.cli.log_commands import TrialLog
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.errors import HermesError, Unavailable

LOGGER = "airflow.task.operators.hermes_ops.airflow.trial.operator.HermesTrialOperator"
GONE = [{"event": "::group::Log message source details"}, {"event": "no such file"}]


def line(text: str) -> dict[str, Any]:
    return {"event": text, "level": "info", "logger": LOGGER}


class Airflow:
    """Airflow with the task of one trial; `states` come one after the other, then the last."""

    def __init__(
        self, logs: Mapping[int, Sequence[dict[str, Any]]], *states: str | Exception | None
    ) -> None:
        self.logs = logs
        self.states = list(states)
        self.lines = 0
        """Messages of the newest try that are there, when it is followed."""

    def task_instance(self, task: TaskKey) -> Any:
        assert task == TaskKey("hermes_sweep", "digits-1", "trial", 3)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return None if state is None else {"state": state}

    def tries(self, task: TaskKey) -> list[int]:
        return sorted(self.logs)

    def task_log(self, task: TaskKey, attempt: int) -> Any:
        return self.logs.get(attempt, [])

    def task_log_since(self, task: TaskKey, attempt: int, token: str | None) -> Any:
        if attempt == max(self.logs):
            self.lines += 1
        return self.logs[attempt][int(token or 0) : self.lines], str(self.lines)


def log_of(airflow: Airflow) -> TrialLog:
    services: Any = airflow
    connection = Connection(services, services, "gpus", "http://airflow", "http://mlflow")
    return TrialLog(connection, SweepLocation.in_main_dag("digits-1"), 3)


def fetched(airflow: Airflow) -> list[str]:
    return [message["event"] for messages in log_of(airflow).fetch() for message in messages]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_commands, "PERIOD_S", 0.0)


def test_the_logs_of_all_tries_come_one_after_the_other() -> None:
    assert fetched(Airflow({1: [line("a")], 2: [line("b")]}, "success")) == ["a", "b"]


@pytest.mark.parametrize(("airflow", "message"), [
    (Airflow({}, ""), "has not begun"),
    (Airflow({}, "skipped"), "had not begun when its sweep ended"),
    (Airflow({1: []}, "queued"), "has not begun"),
    (Airflow({1: GONE}, "success"), r"has no log of the trial digits-1/3 \(no such file\): it was"),
])  # fmt: skip
def test_a_trial_without_a_log_is_reported_with_the_reason(airflow: Airflow, message: str) -> None:
    with pytest.raises(HermesError, match=message):
        fetched(airflow)


def test_the_log_of_a_try_that_is_gone_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fetched(Airflow({1: GONE, 2: [line("b")]}, "success")) == ["b"]
    assert "no log of try 1" in capsys.readouterr().err


@pytest.mark.parametrize("is_followed", [False, True])
def test_the_log_of_a_try_that_airflow_forgot_comes_from_the_folder_of_the_stack(
    is_followed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    folder = "dag_id=hermes_sweep/run_id=digits-1/task_id=trial/map_index=3"
    file = tmp_path / "airflow" / "logs" / folder / "attempt=1.log"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(line("a")) + "\nno JSON\n")
    airflow = Airflow({2: [line("b")]}, "success")
    if is_followed:
        log_commands._follow(log_of(airflow), LogExcerpt())
        assert capsys.readouterr().out.split() == ["a", "b"]
    else:
        assert fetched(airflow) == ["a", "b"]


def test_a_number_that_the_sweep_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        trial_count = 3

    monkeypatch.setattr(outcome, "fetch_config", lambda *_: Config())
    with pytest.raises(HermesError, match="has no trial 3: its 3 trials have the numbers 0 to 2"):
        fetched(Airflow({}, None))


@pytest.mark.parametrize(("sweep", "message"), [
    ("running", "has not begun"), ("failed", "has not been planned"), (None, "not been planned"),
])  # fmt: skip
def test_a_trial_of_a_sweep_that_is_still_to_be_planned_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, sweep: str | None, message: str
) -> None:
    def without_plan(*_: object) -> None:
        raise HermesError("the sweep has not been planned")

    monkeypatch.setattr(outcome, "fetch_config", without_plan)
    monkeypatch.setattr(log_commands, "airflow_state", lambda *_: sweep)
    with pytest.raises(HermesError, match=message):
        fetched(Airflow({}, None))


def test_following_prints_each_line_once_until_the_trial_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [line(text) for text in "abcde"]
    states = ("running", "running", Unavailable("away"), "running", "up_for_reschedule",
              "up_for_reschedule", "running", "success")  # fmt: skip
    log_commands._follow(log_of(Airflow({1: lines}, *states)), LogExcerpt())
    assert capsys.readouterr().out.split() == list("abcde")


def test_following_waits_for_a_trial_that_has_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    airflow = Airflow({}, "", "", "running", "success")
    logs = {1: [line("a")]}
    polls: list[int] = []

    def tries(task: TaskKey) -> list[int]:
        polls.append(1)
        airflow.logs = logs if len(polls) > 1 else {}
        return sorted(airflow.logs)

    airflow.tries = tries  # type: ignore[method-assign]
    log_commands._follow(log_of(airflow), LogExcerpt())
    printed = capsys.readouterr()
    assert printed.out.split() == ["a"]
    assert printed.err.count("has not begun: waiting for it") == 1


def test_following_a_trial_that_never_began_ends_with_the_reason() -> None:
    with pytest.raises(HermesError, match="had not begun when its sweep ended"):
        log_commands._follow(log_of(Airflow({}, "", "skipped")), LogExcerpt())


def test_following_continues_in_the_next_try_behind_the_rest_of_the_last_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    airflow = Airflow({1: [line("a"), line("b")]}, "running", "running", "success")

    def tries(task: TaskKey) -> list[int]:
        if airflow.lines:
            airflow.logs = {1: [line("a"), line("b")], 2: [line("c")]}
        return sorted(airflow.logs)

    airflow.tries = tries  # type: ignore[method-assign]

    def task_log_since(task: TaskKey, attempt: int, token: str | None) -> Any:
        airflow.lines += 1
        known = airflow.logs[attempt][: 1 if airflow.lines == 1 else None]
        return known[int(token or 0) :], str(len(known))

    airflow.task_log_since = task_log_since  # type: ignore[method-assign]
    log_commands._follow(log_of(airflow), LogExcerpt())
    assert capsys.readouterr().out.split() == ["a", "b", "c"]


def test_an_interruption_leaves_the_trial_running_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    states: Any = ("running", KeyboardInterrupt())

    class Interrupted(Airflow):
        def task_instance(self, task: TaskKey) -> Any:
            state: Any = self.states.pop(0)
            if isinstance(state, KeyboardInterrupt):
                raise state
            return {"state": state}

    with pytest.raises(typer.Exit) as left:
        log_commands._follow(log_of(Interrupted({1: [line("a")]}, *states)), LogExcerpt())
    assert left.value.exit_code == 130
    assert "`hermes logs digits-1/3 --follow` shows it again" in capsys.readouterr().err
