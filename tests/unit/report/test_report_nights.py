from __future__ import annotations

from typing import Any

from hermes_ops.core.summary import Night, SweepSummary, TrialSummary
from hermes_ops.report.background import Background
from hermes_ops.report.page import page
from hermes_ops.report.table import nights


def summary(best: float | None, direction: str = "minimize") -> SweepSummary:
    trial = TrialSummary(0, "finished", {"rate": 0.1}, best, best, 5, gpu_seconds=90.0)
    return SweepSummary("tonight", "finished", (trial,), "loss", direction, 60.0)


def night(best: float | None, **facts: Any) -> Night:
    whole = {"sweep": "n", "started_s": 0.0, "state": "finished", "config": {"rate": 0.2},
             "gpu_seconds": 60.0, **facts}  # fmt: skip
    return Night(best=best, **whole)


def told(*earlier: Night) -> Background:
    return Background(nights=earlier, started_s=86_400.0)


def test_tonight_stands_above_the_nights_before_it() -> None:
    found = nights(summary(0.5), told(night(0.7), night(None, state="failed", gpu_seconds=None)))
    assert [n["when"] for n in found] == [
        "1970-01-02 00:00",
        "1970-01-01 00:00",
        "1970-01-01 00:00",
    ]
    assert [n["best"] for n in found] == ["0.5", "0.7", "–"]
    assert found[0]["config"] == "rate = 0.1"
    assert found[2]["gpu_time"] == "–"


def test_the_page_says_that_the_times_of_nights_are_in_utc() -> None:
    text = page(summary(0.5), {}, (), told(night(0.7)))
    assert ">night, UTC</th>" in text
    assert ">1970-01-02 00:00</th>" in text


def test_the_best_of_all_nights_is_marked_in_the_users_own_direction() -> None:
    found = nights(summary(0.5), told(night(0.4), night(0.6)))
    assert [n["is_best"] for n in found] == [False, True, False]
    found = nights(summary(0.5, "maximize"), told(night(0.4), night(0.6)))
    assert [n["is_best"] for n in found] == [False, False, True]


def test_a_value_of_another_objective_is_named_and_never_the_best_of_all_nights() -> None:
    other, same = night(0.01, objective="maximize f1"), night(0.4, objective="minimize loss")
    found = nights(summary(0.5), told(other, same))
    assert [n["best"] for n in found] == ["0.5", "0.01 (maximize f1)", "0.4"]
    assert [n["is_best"] for n in found] == [False, False, True]
    assert nights(summary(0.5), told(night(None, objective="maximize f1")))[1]["best"] == "–"


def test_of_two_equal_nights_the_earlier_is_the_best() -> None:
    found = nights(summary(0.5), told(night(0.5)))
    assert [n["is_best"] for n in found] == [False, True]


def test_a_sweep_without_earlier_nights_has_no_such_table() -> None:
    assert nights(summary(0.5), told()) == []
    assert "The last nights" not in page(summary(0.5), {}, (), told())
    assert "The last nights" in page(summary(0.5), {}, (), told(night(0.7)))
