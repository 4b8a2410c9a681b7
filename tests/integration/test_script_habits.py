"""One sweep of scripts with the habits of real ones, in a pool of two slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FALLING = [(n, pytest.approx(1 / (n + 1), abs=1e-4)) for n in range(1, 6)]
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
HABITS = [*CURVES, "wrong_name"]


@pytest.fixture(scope="module")
def sweep(lab: Any, harness: Any) -> Any:
    """A sweep with a trial for each habit, ended."""
    space = {"habit": HABITS, "x": [0.5], "flag": [True]}
    content = harness.config(
        "habits-of-scripts", space, "manners.py", "{habit}", "--x={x}", "--flag={flag}",
        objective={"metric": "val_loss"}, budget={"max_epochs": 5},
    )  # fmt: skip
    started = lab.start(content)
    started.await_end(600)
    return started


def own_folder(sweep: Any, habit: str) -> Path:
    return Path(sweep.folder, "trials", str(HABITS.index(habit)))


@pytest.mark.parametrize("habit", CURVES)
def test_the_curve_of_a_trial_is_what_its_script_meant(habit: str, sweep: Any, lab: Any) -> None:
    number = HABITS.index(habit)
    (run,) = sweep.runs()[number]
    assert run["params"]["habit"] == habit
    assert run["tags"]["hermes.state"] == "finished"
    assert lab.history(run["info"]["run_id"], "val_loss") == CURVES[habit]
    assert len(sweep.segments(number)) == 1


def test_a_script_that_saves_its_model_at_the_end_is_not_cut_off(sweep: Any) -> None:
    assert (own_folder(sweep, "saves_after") / "saved").read_text() == "yes"


def test_params_that_the_script_logs_in_its_own_spelling_are_no_failure(sweep: Any) -> None:
    (run,) = sweep.runs()[HABITS.index("mlflow_alone")]
    assert run["params"]["flag"].lower() in ("true", "false")
    assert 0 <= float(run["params"]["x"]) <= 1


def test_a_process_that_left_its_session_ends_with_the_trial(sweep: Any) -> None:
    pid = (own_folder(sweep, "daemon") / "daemon").read_text()
    command = Path("/proc", pid, "cmdline")
    assert not command.exists() or b"manners.py" not in command.read_bytes()


def test_an_objective_that_is_never_reported_is_tried_once_and_the_reason_says_what_was(
    sweep: Any,
) -> None:
    number = HABITS.index("wrong_name")
    assert sweep.states()[number] == "failed"
    assert len(sweep.segments(number)) == 1
    reason = sweep.tag(number, "hermes.reason")
    assert "val_loss" in reason
    assert "val_acc" in reason
