"""Many preemptions in a short time: a task that leaves its slot must never be taken as failed.

Airflow fails a task whose late "success" event meets it scheduled again; the delay of
`hermes_ops.airflow.trial.trial_task` is there to prevent it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(900)]

TRIALS, EPOCHS, PAUSE_S = 8, 150, 0.25
LEAST_PREEMPTIONS = 30


@pytest.fixture(params=["sqlite", "postgresql"])
def contested(
    request: pytest.FixtureRequest, own_stack: Any, harness: Any, tmp_path: Path
) -> Iterator[Any]:
    """A sweep of equal trials that take turns as fast as Airflow allows, after its end."""
    options = ["--policy", "hermes"]
    # Three quanta of patience: 50 preemptions on a machine with twice as much work as cores.
    for option in ("guard_k=0", "guard_quanta=3", "threshold=4"):
        options += ["--policy-option", option]
    if request.param == "postgresql":
        options += ["--airflow-db", request.getfixturevalue("postgres").url("race")]
    started = own_stack.up(*options)
    assert started.returncode == 0, started.stderr
    lab = harness.Lab(own_stack, tmp_path)
    try:
        sweep = lab.start(harness.stub("race", harness.alike(TRIALS), EPOCHS, PAUSE_S))
        sweep.await_end(600)
        yield sweep
    finally:
        lab.close()


def test_no_preemption_fails_a_task_or_costs_a_try(contested: Any) -> None:
    trials = {n: t for (task, n), t in contested.tasks().items() if task == "trial"}
    assert Counter(t["state"] for t in trials.values()) == {"success": TRIALS}
    assert {t["try_number"] for t in trials.values()} == {1}
    preempted = [s for n in trials for s in contested.segments(n) if s["outcome"] == "preempted"]
    assert len(preempted) >= LEAST_PREEMPTIONS
    for number in trials:
        assert [step for step, _ in contested.curve(number)] == list(range(1, EPOCHS + 1))
