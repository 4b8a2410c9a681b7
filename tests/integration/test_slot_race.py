"""Many preemptions in a short time: a task that leaves its slot must never be taken as failed.

Airflow fails a task whose late "success" event meets it scheduled again; the delay of
`hermes_ops.airflow.trial.trial_task` is there to prevent it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(900)]

TRIALS, EPOCHS, PAUSE_S = 8, 400, 0.25  # two at a time: 400 s of training
LEAST_PREEMPTIONS = 30
EAGER = {"guard_k": 0, "guard_quanta": 3, "threshold": 4}


def contested(lab: Any, harness: Any, folder: Path) -> Any:
    """Return a sweep of equal trials that took turns as fast as Airflow allows, after its end.

    The trials train until they have been preempted often enough, however fast the machine is.
    """
    slow, rates = harness.slow_file(folder), harness.alike(TRIALS)
    with lab.policy("hermes", **EAGER):
        sweep = lab.start(harness.stub("race", rates, EPOCHS, PAUSE_S, slow_while=slow))
        harness.await_(lambda: len(preempted(sweep)) >= LEAST_PREEMPTIONS, 600)
        slow.unlink()
        sweep.await_end()
    return sweep


def preempted(sweep: Any) -> list[dict[str, Any]]:
    """Return the segments of the sweep that have ended by a preemption."""
    segments = [segment for number in range(TRIALS) for segment in sweep.segments(number)]
    return [segment for segment in segments if segment.get("outcome") == "preempted"]


def assert_no_try_is_lost(sweep: Any) -> None:
    trials = {n: t for (task, n), t in sweep.tasks().items() if task == "trial"}
    assert Counter(t["state"] for t in trials.values()) == {"success": TRIALS}
    assert {t["try_number"] for t in trials.values()} == {1}
    assert len(preempted(sweep)) >= LEAST_PREEMPTIONS
    for number in trials:
        assert [step for step, _ in sweep.curve(number)] == list(range(1, EPOCHS + 1))


def test_no_preemption_fails_a_task_or_costs_a_try_on_sqlite(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    assert_no_try_is_lost(contested(lab, harness, tmp_path))


def test_no_preemption_fails_a_task_or_costs_a_try_on_postgresql(
    killed: Any, harness: Any, tmp_path: Path
) -> None:
    with closing(harness.Lab(killed.stack, tmp_path)) as lab:
        assert_no_try_is_lost(contested(lab, harness, tmp_path))
