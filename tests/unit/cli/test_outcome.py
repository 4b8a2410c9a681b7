"""The document of a sweep, and how it is printed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.records import SweepRecord, encode
from hermes_ops.cli.outcome import (
    deadline_line,
    document,
    print_outcome,
    usage_line,
)
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.tracking import SweepRef
from tests.unit.simulator.recorded_sweeps import Mlflow, config


class Airflow:
    """Knows the plan of one sweep in a group."""

    def get_state(self, task: TaskKey, key: str) -> object:
        assert task == TaskKey("mine", "1", "group.plan")
        facts = json.loads(config().to_json())
        return encode(SweepRecord(facts, 2, "group.trial", "parent", "1", "digits"))


@pytest.mark.parametrize(("kept", "word"), [(None, ""), (True, ": kept"), (False, ": not kept")])
def test_a_deadline_is_told_with_what_became_of_it(kept: bool | None, word: str) -> None:
    at = {"at": "2026-12-01T07:00:00+00:00", "kept": kept}
    assert deadline_line(at) == f"Deadline 2026-12-01 07:00:00 UTC{word}"


def test_the_document_says_how_many_gpus_the_segments_held_at_once() -> None:
    connection: Any = SimpleNamespace(airflow=Airflow(), tracker=Mlflow())
    place = SweepLocation("digits-1", "mine", "1", "group")
    assert document(connection, place)["max_slots_used"] == 1


def test_before_the_first_decision_no_size_of_the_pool_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {"wall_seconds": 3.2, "max_slots_used": 0, "pool_slots": None}
    tracker = Addressed("http://mlflow:5000")
    begun: dict[str, Any] = {"trials": [], "best": None, "state": "running", **facts}
    connection: Any = SimpleNamespace(tracker=tracker)
    print_outcome(connection, "digits-1", begun)
    said = capsys.readouterr().out
    assert "3 s, at most 0 GPUs in use at once" in said
    assert "None" not in said
    assert usage_line({**facts, "pool_slots": 2}) == "3 s, at most 0 of 2 GPUs in use at once"
    resumed = usage_line({**facts, "wall_seconds": 90.0, "ended_seconds": 80.0})
    assert resumed == "10 s without the 80 s after an end, at most 0 GPUs in use at once"


def test_an_address_of_ipv6_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Addressed("http://[fd00::7]:5000")
    begun: dict[str, Any] = {"trials": [], "best": None, "state": "running", "wall_seconds": 3.2,
             "max_slots_used": 0, "pool_slots": None}  # fmt: skip
    connection: Any = SimpleNamespace(tracker=tracker)
    print_outcome(connection, "digits-1", begun)
    assert capsys.readouterr().out.count("http://[fd00::7]:5000/") == 2


class Addressed:
    """An MLflow that has every sweep; its addresses begin so."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def find_sweep(self, sweep: str, experiment: str | None = None) -> SweepRef:
        return SweepRef(sweep, "1", "parent")

    def run_url(self, experiment: str, run: str) -> str:
        return f"{self.uri}/{run}"

    def comparison_url(self, sweep: SweepRef) -> str:
        return f"{self.uri}/{sweep.sweep_id}"
