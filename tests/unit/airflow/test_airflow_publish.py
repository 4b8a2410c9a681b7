from __future__ import annotations

import json

import pytest

from hermes_ops.airflow.control.publish import publish, read_view, view_path
from hermes_ops.core.model import Gpu, JobId, Plan, Reason, Snapshot, Term
from tests.unit.airflow.worlds import SWEEP, book, pending, running, waiting


def published(*points: tuple[int, float, int], direction: str = "minimize") -> None:
    world = book(running(0, 0), waiting(1), pending(2),
                 objective={"metric": "score", "direction": direction})  # fmt: skip
    world.curves = {0: points}
    first, second = JobId(f"{SWEEP}/0"), JobId(f"{SWEEP}/1")
    reason = Reason("it leads", (Term("gain", float("inf")),), second, "a gain of 2")
    plan = Plan(ranking=(first, second), reasons={first: reason})
    publish("gpus", Snapshot(7.0, (Gpu(0),), tuple(world.jobs(110.0))), plan, {SWEEP: world}, "p")


def test_a_view_comes_back_as_it_was_published() -> None:
    published((1, 0.5, 101_000), (2, 0.25, 102_000))
    view = read_view("gpus")
    assert view is not None
    assert (view["time_s"], view["policy"], view["gpus"]) == (7.0, "p", [0])
    assert view["sweeps"] == {SWEEP: {"trials": 3, "ended": 0, "open": 2, "closing": None}}
    first, second, third = view["jobs"]
    assert (first["id"], first["phase"], first["gpus"]) == (f"{SWEEP}/0", "running", [0])
    assert (first["step"], first["value"], first["rank"]) == (2, 0.25, 1)
    assert (first["reason"], first["runner_up"]) == ("it leads", f"{SWEEP}/1")
    assert (second["rank"], second["value"], third["rank"]) == (2, None, None)


def test_a_maximised_value_is_shown_as_the_user_knows_it() -> None:
    published((1, 0.875, 101_000), direction="maximize")
    view = read_view("gpus")
    assert view is not None
    assert view["jobs"][0]["value"] == 0.875


def test_a_view_is_strict_json_whatever_the_numbers_are() -> None:
    published((1, float("nan"), 101_000))
    found = json.loads(view_path("gpus").read_text(), parse_constant=pytest.fail)
    assert found["jobs"][0]["value"] == "nan"
    assert found["jobs"][0]["terms"] == {"gain": "inf"}


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_no_view_or_a_damaged_one_is_none(text: str | None) -> None:
    if text is not None:
        view_path("gpus").write_text(text)
    assert read_view("gpus") is None
