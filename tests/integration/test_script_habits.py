"""Sweeps of scripts with the habits of real ones, all at the same time in a pool of two slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FALLING = [(n, pytest.approx(1 / (n + 1), abs=1e-4)) for n in range(1, 6)]
X = {"x": {"type": "uniform", "low": 0, "high": 1}}
FLAGGED = {**X, "flag": {"type": "choice", "values": [True, False]}}
WIDE = {f"p{n}": {"type": "uniform", "low": 0, "high": 1} for n in range(1000)}
LONG = {"prompt": {"type": "choice", "values": ["語" * 4000, "答" * 4000]}}
CURVES = {
    "batch_lines": FALLING,
    "global_step": FALLING,
    "baseline": [(0, 2.3), *FALLING],
    "improved": FALLING,
    "numpy_scalar": FALLING,
    "thousands": [(n, round(9000 / n + 500, 2)) for n in range(1, 6)],
    "saves_after": FALLING,
    "beyond": FALLING,
    "mlflow_alone": FALLING,
    "daemon": FALLING,
}
ARGUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mlflow_alone": (FLAGGED, ("--x={x}", "--flag={flag}"))
}


def swept(harness: Any, habit: str, space: Any = None, *more: str, **changes: Any) -> Any:
    own, arguments = ARGUMENTS.get(habit, (X, ()))
    search = {"algorithm": "random", "max_trials": 1, "space": space or own}
    return {
        "name": habit.replace("_", "-"),
        "objective": {"metric": "val_loss"},
        "search": {**search, **changes},
        "trial": {
            "command": ["python", "manners.py", habit, *arguments, *more],
            "directory": str(harness.SCRIPTS),
        },
        "budget": {"max_epochs": 5},
    }


@pytest.fixture(scope="module")
def sweeps(lab: Any, harness: Any) -> dict[str, Any]:
    """All sweeps, ended. Those that are hardest on the others come first."""
    wide = swept(harness, "saying", WIDE, algorithm="tpe", max_trials=3)
    long = swept(harness, "saying", LONG, "--prompt={prompt}")
    files = {"wide": {**wide, "name": "wide"}, "long": {**long, "name": "long"}}
    files |= {habit: swept(harness, habit) for habit in (*CURVES, "wrong_name")}
    started = {name: lab.start(content) for name, content in files.items()}
    for sweep in started.values():
        sweep.await_end(600)
    return started


@pytest.mark.parametrize("habit", CURVES)
def test_the_curve_of_a_trial_is_what_its_script_meant(habit: str, sweeps: Any, lab: Any) -> None:
    sweep = sweeps[habit]
    assert sweep.states() == {0: "finished"}
    run = sweep.runs()[0][0]["info"]["run_id"]
    assert lab.history(run, "val_loss") == CURVES[habit]
    assert len(sweep.segments(0)) == 1


def test_a_script_that_saves_its_model_at_the_end_is_not_cut_off(sweeps: Any) -> None:
    assert Path(sweeps["saves_after"].folder, "trials", "0", "saved").read_text() == "yes"


@pytest.mark.parametrize(("name", "trials"), [("wide", 3), ("long", 1)])
def test_a_large_configuration_is_trained_as_any_other(
    name: str, trials: int, sweeps: Any, lab: Any
) -> None:
    sweep = sweeps[name]
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(trials), "finished")
    for runs in sweep.runs().values():
        assert lab.history(runs[0]["info"]["run_id"], "val_loss") == FALLING


def test_params_that_the_script_logs_in_its_own_spelling_are_no_failure(sweeps: Any) -> None:
    (run,) = sweeps["mlflow_alone"].runs()[0]
    assert run["params"]["flag"].lower() in ("true", "false")
    assert 0 <= float(run["params"]["x"]) <= 1


def test_a_process_that_left_its_session_ends_with_the_trial(sweeps: Any) -> None:
    pid = Path(sweeps["daemon"].folder, "trials", "0", "daemon").read_text()
    command = Path("/proc", pid, "cmdline")
    assert not command.exists() or b"manners.py" not in command.read_bytes()


def test_an_objective_that_is_never_reported_is_tried_once_and_the_reason_says_what_was(
    sweeps: Any,
) -> None:
    sweep = sweeps["wrong_name"]
    assert sweep.states() == {0: "failed"}
    assert len(sweep.segments(0)) == 1
    reason = sweep.tag(0, "hermes.reason")
    assert "val_loss" in reason
    assert "val_acc" in reason
