from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hermes_ops.airflow.sweep.ended_sweep import BudgetChanges
from hermes_ops.cli import assemble, sweep_commands
from hermes_ops.cli.sweep_location import SweepLocation


class Sweep:
    """An ended sweep of 40 trials that does what it is told; what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.recorded: list[Any] = []

    def extend(self, trials: int, more: BudgetChanges) -> int:
        self.told.append(("extend", trials, more))
        return 40 + trials

    def resume(self, more: BudgetChanges, *, failed: bool) -> tuple[int, ...]:
        self.told.append(("resume", more, failed))
        return tuple(range(30))


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    found = Sweep()

    def ended(sweep: str, home: object) -> tuple[Any, SweepLocation, Sweep]:
        dag, _, run = sweep.rpartition(":group:")
        place = SweepLocation(sweep, dag, run, "group") if dag else SweepLocation.in_main_dag(sweep)
        return SimpleNamespace(airflow=None), place, found

    monkeypatch.setattr(sweep_commands, "_find_ended", ended)
    monkeypatch.setattr(sweep_commands, "current_person", lambda _: "anna")
    monkeypatch.setattr(
        sweep_commands, "record_action", lambda *given: found.recorded.append(given[2:])
    )
    return found


def said(*words: str) -> str:
    result = CliRunner().invoke(assemble(), ["sweep", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_extending_says_how_many_trials_there_are_then(sweep: Sweep) -> None:
    output = said("extend", "digits-1", "--trials", "5", "--wall-clock-seconds", "60")
    assert "5 more trials, 45 in all" in output
    assert "hermes sweep watch digits-1" in output
    assert sweep.told == [("extend", 5, BudgetChanges(wall_clock_seconds=60.0))]


def test_a_new_deadline_goes_with_it(sweep: Sweep) -> None:
    said("resume", "digits-1", "--deadline", "2h")
    assert sweep.told == [("resume", BudgetChanges(deadline="2h"), False)]


def test_in_a_group_of_a_dag_it_is_said_that_what_is_behind_it_stays_as_it_is(sweep: Sweep) -> None:
    assert "behind group in the DAG mine" in said("resume", "mine:group:run:1").replace("\n", " ")
    assert "behind" not in said("resume", "digits-1")


def test_resuming_says_which_trials_go_on(sweep: Sweep) -> None:
    output = said("resume", "digits-1", "--failed", "--gpu-seconds", "9", "--failed-trials", "3")
    assert "goes on with 30 trials: 0, 1, 2" in output
    assert "19 and 10 more" in output
    assert sweep.told == [("resume", BudgetChanges(gpu_seconds=9.0, failed_trials=3), True)]
    assert sweep.recorded == [("anna", "resume")]


@pytest.mark.parametrize("trials", [[], ["--trials", "0"], ["--trials", "many"]])
def test_a_number_of_trials_is_needed(sweep: Sweep, trials: list[str]) -> None:
    result = CliRunner().invoke(assemble(), ["sweep", "extend", "digits-1", *trials])
    assert result.exit_code == 2
    assert sweep.told == []
