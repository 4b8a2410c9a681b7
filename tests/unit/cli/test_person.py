"""Who gives a command: what is recorded, and what nobody can write into a line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.cli.connection import (
    ACTIONS_TAG,
    MOST_ACTIONS,
    Person,
    current_person,
    record_action,
)
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.errors import Unavailable

ANNA = Person("anna", "an", "laptop")


class Sweep:
    """A sweep in Airflow and MLflow; what was written of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tags: dict[str, str] = {}
        self.away = False

    def note(self, task: Any, text: str) -> None:
        if self.away:
            raise Unavailable("Airflow is away")
        self.notes.append(text)

    def find_sweep(self, *_: object) -> Any:
        return SimpleNamespace(parent_run_id="parent")

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(tags=dict(self.tags))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        assert run_id == "parent"
        self.tags |= tags

    def record(self, action: str) -> None:
        connection: Any = SimpleNamespace(airflow=self, tracker=self)
        record_action(connection, SweepLocation.in_main_dag("s"), ANNA, action)


def test_each_action_is_a_line_with_its_time_and_its_person() -> None:
    sweep = Sweep()
    sweep.record("stop")
    sweep.record("resume")
    lines = sweep.tags[ACTIONS_TAG].splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "stop by an@laptop, Airflow user anna",
        "resume by an@laptop, Airflow user anna",
    ]
    assert sweep.notes == lines


def test_the_newest_actions_are_kept() -> None:
    sweep = Sweep()
    for number in range(MOST_ACTIONS + 3):
        sweep.record(f"extend by {number}")
    lines = sweep.tags[ACTIONS_TAG].splitlines()
    assert len(lines) == MOST_ACTIONS
    assert "extend by 22 " in lines[-1]


def test_an_action_that_cannot_be_written_down_has_been_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sweep = Sweep()
    sweep.away = True
    sweep.record("stop")
    assert "not recorded who did this: Airflow is away" in caplog.text


def test_the_name_of_the_system_is_not_that_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    airflow: Any = SimpleNamespace(user_name=lambda: "anna")
    found = current_person(airflow)
    assert found.airflow_user == "anna"
    assert found.system_user != "somebody-else"


def test_a_name_makes_no_second_line() -> None:
    airflow: Any = SimpleNamespace(user_name=lambda: "a\n2026: stop by\x1b[31m" + "x" * 200)
    name = current_person(airflow).airflow_user
    assert name.startswith("a?2026: stop by?[31m")
    assert len(name) == 64


def test_an_airflow_that_does_not_say_who_is_logged_in_stops_nobody() -> None:
    def away() -> str:
        raise Unavailable("away")

    airflow: Any = SimpleNamespace(user_name=away)
    assert current_person(airflow).airflow_user == "unknown"
