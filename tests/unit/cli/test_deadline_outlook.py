"""What `hermes sweep check` says of a deadline: six trials of ten epochs, of one GPU each."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.cli.deadline_outlook import DeadlineOutlook, outlook
from hermes_ops.cli.sweep_check import estimate_cost
from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.model import EXAMPLE
from hermes_ops.tracking.earlier_sweeps import SweepCost

EARLIER = (SweepCost("a", (1.0, 2.0, 3.0), 100.0, 100.0),)  # the quartiles: 1.5, 2, 2.5


def config(deadline: str | None, *, trial: Any = None, **budget: Any) -> SweepConfig:
    return parse(
        {
            **EXAMPLE,
            "deadline": deadline,
            "search": EXAMPLE["search"] | {"max_trials": 6},
            "trial": EXAMPLE["trial"] | (trial or {}),
            "budget": {"max_epochs": 10, **budget},
        },
        "test",
        None,
    )


def seen(file: SweepConfig, slots: int | None = 2, *, earlier: Any = EARLIER) -> DeadlineOutlook:
    result = outlook(file, estimate_cost(file, earlier), slots, 1_000.0)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("deadline", "kept"), [("75s", "likely"), ("74s", "open"), ("45s", "open"), ("44s", "unlikely")]
)
def test_three_rounds_of_two_trials_take_45_to_75_seconds(deadline: str, kept: str) -> None:
    assert seen(config(deadline)).kept == kept


def test_it_says_how_many_trials_come_to_their_end() -> None:
    assert seen(config("44s")).render() == (
        "Deadline: 1970-01-01 00:17:24 UTC, 44 s after a start now.\n"
        "  Not likely to be kept: all trials take about 1 min 00 s (45 s to 1 min 15 s), 2 at a "
        "time, if no other sweep has GPUs of the pool; 4 of 6 come to their last epoch by then."
    )


def test_the_limit_of_parallel_trials_counts() -> None:
    assert seen(config("75s", max_parallel=1), slots=6).kept == "unlikely"
    assert seen(config("75s"), slots=1).kept == "unlikely"


@pytest.mark.parametrize("own", [{"wall_clock_seconds": 40}, {"gpu_seconds": 80}])
def test_a_budget_that_is_spent_before_keeps_it(own: dict[str, int]) -> None:
    assert seen(config("44s", **own)).kept == "likely"


def test_a_declared_time_limit_is_enough_without_earlier_sweeps() -> None:
    limited = {"time_limit_seconds": 20}
    assert seen(config("60s", trial=limited), earlier=()).kept == "likely"
    assert seen(config("59s", trial=limited), earlier=()).kept == "unknown"


def test_what_is_not_known_is_said() -> None:
    assert "no earlier sweep" in seen(config("1h"), earlier=()).reason
    assert "the pool's GPUs" in seen(config("1h"), slots=None).reason
    assert seen(config("1h"), earlier=()).render().count("Cannot tell") == 1


def test_trials_that_never_fit_never_end() -> None:
    assert seen(config("1h", trial={"gpus": 4})).kept == "unlikely"


def test_without_a_deadline_nothing_is_said() -> None:
    assert outlook(config(None), None, 2, 0.0) is None


def test_the_document_has_the_time_for_people_and_for_programs() -> None:
    document = seen(config("75s")).document()
    assert (document["at_s"], document["left_s"], document["kept"]) == (1_075.0, 75.0, "likely")
    assert document["at"] == "1970-01-01 00:17:55 UTC"
