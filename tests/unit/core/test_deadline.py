"""The text of a deadline, and what is said of a sweep that has or has not kept it."""

from __future__ import annotations

import pytest

from hermes_ops.core.deadline import Deadline, DeadlineResult, missed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28_800.0), ("1d 12h", 129_600.0), ("1d12h30m", 131_400.0), ("1.5h", 5_400.0),
     ("90m", 5_400.0), ("45s", 45.0)],
)  # fmt: skip
def test_a_duration_counts_from_the_start(text: str, seconds: float) -> None:
    assert Deadline.from_text(text).at_s(1_000.0) == 1_000.0 + seconds


@pytest.mark.parametrize(
    "text",
    ["2026-12-01T08:00:00+01:00", "2026-12-01 07:00Z", "2026-12-01 07:00:00 Z",
     "2026-12-01 02:00:00 -05:00"],
)  # fmt: skip
def test_a_time_is_the_same_whenever_the_sweep_begins(text: str) -> None:
    deadline = Deadline.from_text(text)
    assert deadline.at_s(0.0) == deadline.at_s(9e9) == 1_796_108_400.0


@pytest.mark.parametrize(
    "text",
    ["", " ", "8", "h", "0s", "-1h", "1h 1d", "8 hours", "2026-12-01", "2026-12-01T08:00:00",
     "2026-13-01T08:00:00Z", "2026-12-01T08:00:00+99:00", "9999-12-31T23:59:59-01:00", "99999999d",
     "soon"],
)  # fmt: skip
def test_anything_else_is_no_deadline(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|seconds, not|no time"):
        Deadline.from_text(text)


def test_the_end_says_what_is_left_undone() -> None:
    ended, cut, unbegun = (True, True), (True, False), (False, False)
    said = missed(0.0, [ended, ended, cut, unbegun, unbegun, unbegun, (False, True)])
    assert said == (
        "its deadline has passed (1970-01-01 00:00:00 UTC): of 7 trials 3 had ended, "
        "1 were stopped before their end, 3 had not begun"
    )
    assert DeadlineResult.from_end(0.0, has_ended=True, reason=said).kept is False


@pytest.mark.parametrize("reason", ["", "stopped by ann", "budget.gpu_seconds (9) is spent"])
def test_a_sweep_that_another_reason_has_ended_has_kept_it(reason: str) -> None:
    result = DeadlineResult.from_end(60.0, has_ended=True, reason=reason)
    assert result.words == "1970-01-01 00:01:00 UTC: kept"
    assert result.to_document() == {"at": "1970-01-01T00:01:00+00:00", "kept": True}


def test_while_a_sweep_runs_nobody_knows() -> None:
    result = DeadlineResult.from_end(60.0, has_ended=False, reason="")
    assert (result.kept, result.words) == (None, "1970-01-01 00:01:00 UTC")


def test_trials_that_end_long_after_it_by_themselves_have_not_kept_it() -> None:
    for ended_s, kept in ((60.0, True), (100.0, True), (4_000.0, False)):
        result = DeadlineResult.from_end(60.0, has_ended=True, reason="", ended_s=ended_s)
        assert result.kept is kept
