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

TRIALS, PAUSE_S = 8, 0.25
LEAST_PREEMPTIONS = 30


@pytest.fixture(params=["sqlite", "postgresql"])
def contested(
    request: pytest.FixtureRequest, own_stack: Any, harness: Any, tmp_path: Path
) -> Iterator[Any]:
    """A sweep of equal trials, after its end; they took turns as fast as Airflow allows.

    The trials train until they have been preempted often enough, however fast the machine is.
    """
    options = ["--policy", "hermes"]
    for option in ("guard_k=0", "guard_quanta=3", "threshold=4"):
        options += ["--policy-option", option]
    if request.param == "postgresql":
        options += ["--airflow-db", request.getfixturevalue("postgres").url("race")]
    started = own_stack.up(*options)
    assert started.returncode == 0, started.stderr
    lab = harness.Lab(own_stack, tmp_path)
    try:
        slow = harness.slow_file(tmp_path)
        rates = harness.alike(TRIALS)
        sweep = lab.start(harness.stub("race", rates, harness.LONG, PAUSE_S, slow_while=slow))
        harness.await_(lambda: len(preempted(sweep)) >= LEAST_PREEMPTIONS, 600)
        slow.unlink()
        sweep.await_end()
        yield sweep
    finally:
        lab.close()


def preempted(sweep: Any) -> list[dict[str, Any]]:
    """Return the segments of the sweep that have ended by a preemption."""
    segments = [segment for number in range(TRIALS) for segment in sweep.segments(number)]
    return [segment for segment in segments if segment.get("outcome") == "preempted"]


def test_no_preemption_fails_a_task_or_costs_a_try(contested: Any, harness: Any) -> None:
    trials = {n: t for (task, n), t in contested.tasks().items() if task == "trial"}
    assert Counter(t["state"] for t in trials.values()) == {"success": TRIALS}
    assert {t["try_number"] for t in trials.values()} == {1}
    assert len(preempted(contested)) >= LEAST_PREEMPTIONS
    for number in trials:
        assert [step for step, _ in contested.curve(number)] == list(range(1, harness.LONG + 1))
