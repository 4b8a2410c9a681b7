from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.faults import Fault, Subject
from hermes_ops.airflow.control.pool_file import publish, publish_trouble, read_view
from hermes_ops.airflow.explanation import explain, problem_lines, silence_line, trouble_line
from hermes_ops.cli.inspection_commands import _line
from hermes_ops.cli.live_view import new_lines
from hermes_ops.cli.stack_commands import _problem_lines
from hermes_ops.core.model import Gpu, Plan, Snapshot
from hermes_ops.errors import Refused
from tests.unit.airflow.builders import SWEEP, pending, sweep_with


def fault(sweep: str = SWEEP, trial: int | None = 3, tries: int = 2) -> Fault:
    subject = Subject(sweep, trial)
    return Fault(subject, "write its lease", "Airflow refused it", 60.0, tries, 62.0, False)


def view_with(*faults: Fault) -> dict[str, Any]:
    world = sweep_with(pending(3))
    jobs = tuple(world.jobs(110.0))
    publish("gpus", Snapshot(7.0, (Gpu(0),), jobs), Plan(()), {SWEEP: world}, "p", faults=faults)
    found = read_view("gpus")
    assert found is not None
    return found


class NoTracker:
    """An MLflow that knows nothing."""

    def __getattr__(self, _: str) -> Any:
        raise Refused("there is no such sweep")


def test_a_step_that_fails_is_in_the_view_in_explain_and_in_a_followed_sweep() -> None:
    view = view_with(fault(), fault("another-2", 0), fault(trial=4))
    (mine,) = problem_lines(view, SWEEP, 3)
    assert mine.startswith(f"Problem of trial 3 of {SWEEP}: write its lease failed 2 times since ")
    assert mine.endswith(": Airflow refused it")
    tracker: Any = NoTracker()
    assert explain("gpus", tracker, f"{SWEEP}/3").problems == (mine,)
    said: dict[str, str] = {}
    (_, line) = new_lines(view, SWEEP, said)  # trials that fail alike are one line of a log
    assert line.endswith(": Airflow refused it")
    assert not new_lines(view_with(fault(tries=3)), SWEEP, said)
    assert len(problem_lines(view)) == 3
    assert problem_lines(view_with(), SWEEP) == []


def test_times_are_in_utc_with_their_date_wherever_they_are_read(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(time.tzset)  # the last to run: after the variable is undone
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        (line,) = problem_lines(view_with(fault()), SWEEP, 3)
        assert "since 1970-01-01 00:01:00 UTC" in line
        failing = {"time_s": 7.0, "trouble": {"since_s": 60.0, "rounds": 17, "reason": "no pool"}}
        assert "since 1970-01-01 00:01:00 UTC (17 in a row)" in trouble_line(failing)
        assert "since 1970-01-01 00:00:07 UTC" in silence_line({"time_s": 7.0}, 1e6)
        taken = {"time_s": 60.0, "action": "start", "gpus": [1], "reason": "x", "terms": {}}
        assert _line(taken) == "  1970-01-01 00:01:00 UTC start on GPU 1: x"


def test_of_many_problems_some_are_shown_and_the_others_counted() -> None:
    lines = problem_lines(view_with(*(fault(trial=n) for n in range(14))))
    assert (len(lines), lines[-1]) == (11, "4 more steps fail")


def test_rounds_that_fail_are_in_the_view_until_one_is_done() -> None:
    view_with()
    publish_trouble("gpus", {"since_s": 60.0, "rounds": 17, "reason": "no pool"})
    failing = read_view("gpus")
    assert "17 in a row" in trouble_line(failing)
    assert trouble_line(failing).endswith("no pool")
    tracker: Any = NoTracker()
    assert "no pool" in "".join(explain("gpus", tracker, f"{SWEEP}/3").problems)
    publish_trouble("gpus", None)
    assert trouble_line(read_view("gpus")) == ""
    publish_trouble("gpus", {"since_s": 60.0, "rounds": 18, "reason": "no pool"})
    assert trouble_line(view_with()) == ""


def test_rounds_that_fail_before_the_first_view_are_shown_too() -> None:
    publish_trouble("gpus", {"since_s": 60.0, "rounds": 1, "reason": "no pool"})
    assert "no pool" in trouble_line(read_view("gpus"))


@pytest.mark.parametrize(("age_s", "silent"), [(1.0, False), (119.0, False), (121.0, True)])
def test_a_controller_that_makes_no_rounds_is_noticed(age_s: float, silent: bool) -> None:
    assert bool(silence_line(view_with(), 7.0 + age_s)) is silent
    assert silence_line(None, 1e9) == ""


def test_status_shows_what_fails_in_the_pool_of_its_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view_with(fault())
    publish_trouble("gpus", {"since_s": 60.0, "rounds": 17, "reason": "no pool"})
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "another"))
    healthy = {"is_unsupervised": False, "orphans": (), "disks": (), "trouble": ""}
    seen: Any = SimpleNamespace(record=SimpleNamespace(pool="gpus"), is_running=True, **healthy)
    failing, problem = _problem_lines(home, seen)
    assert failing.endswith("no pool")
    assert problem.startswith(f"Problem of trial 3 of {SWEEP}")
    stopped: Any = SimpleNamespace(record=seen.record, is_running=False, **healthy)
    assert _problem_lines(home, stopped) == []
