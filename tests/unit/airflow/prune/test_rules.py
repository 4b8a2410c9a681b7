from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.prune.candidates import PruneRules, SweepAge, judge, parse_age_s

DAY_S = 86_400.0
NOW_S = 2_000 * DAY_S
MOMENTS = st.floats(0.0, 2 * NOW_S)
AGES = st.builds(
    SweepAge,
    sweep=st.sampled_from(["digits-1", "nightly:digits-2"]),
    name=st.sampled_from(["digits", ""]),
    ended_s=st.none() | MOMENTS,
    resumable_until_s=st.none() | MOMENTS,
    unknown=st.sampled_from(["", "nobody knows"]),
)
RULES = st.builds(
    PruneRules,
    now_s=st.just(NOW_S),
    older_than_s=st.floats(0.0, NOW_S),
    only=st.sampled_from([(), ("digits",), ("nightly:*",), ("other",)]),
)


def rules(*only: str, older_than_s: float = 90 * DAY_S) -> PruneRules:
    return PruneRules(NOW_S, older_than_s, only)


def ended(days_ago: float, **changes: Any) -> SweepAge:
    return SweepAge("digits-1", "digits", NOW_S - days_ago * DAY_S, **changes)


@given(AGES, RULES)
def test_only_what_has_ended_long_enough_ago_and_cannot_be_resumed_goes(
    age: SweepAge, asked: PruneRules
) -> None:
    verdict = judge(age, asked)
    if verdict.goes:
        assert age.ended_s is not None
        assert not age.unknown
        assert NOW_S - age.ended_s >= asked.older_than_s
        assert age.resumable_until_s is None or age.resumable_until_s <= NOW_S
        assert verdict.reason == ""
    else:
        assert verdict.reason


@given(AGES, RULES, st.floats(0.0, NOW_S))
def test_what_stays_for_its_age_stays_when_more_age_is_asked_for(
    age: SweepAge, asked: PruneRules, more_s: float
) -> None:
    stricter = PruneRules(NOW_S, asked.older_than_s + more_s, asked.only)
    assert judge(age, asked).goes or not judge(age, stricter).goes


def test_a_sweep_of_the_age_goes_and_a_younger_one_says_when_it_ended() -> None:
    assert judge(ended(90), rules()).goes
    younger = judge(ended(89), rules())
    assert (younger.goes, younger.reason) == (False, "it ended on 1975-03-27")


@pytest.mark.parametrize(
    ("age", "reason"),
    [
        (SweepAge("s", "", None), "it has not ended"),
        (SweepAge("s", "", None, unknown="Airflow does not say"), "Airflow does not say"),
        (ended(400, resumable_until_s=NOW_S + DAY_S), "can be resumed until 1975-06-25"),
        (ended(400, resumable_until_s=1e300), "can be resumed until a day far off"),
    ],
)
def test_what_stays_says_why(age: SweepAge, reason: str) -> None:
    verdict = judge(age, rules())
    assert not verdict.goes
    assert reason in verdict.reason


def test_a_stopped_sweep_whose_checkpoints_have_expired_goes() -> None:
    assert judge(ended(400, resumable_until_s=NOW_S), rules()).goes


@pytest.mark.parametrize("only", ["digits", "digits-1", "digits-*"])
def test_sweeps_are_named_by_name_or_id(only: str) -> None:
    assert judge(ended(100), rules("none", only)).goes
    assert not judge(ended(100), rules("none")).goes


def test_ages_are_hours_days_or_weeks() -> None:
    assert [parse_age_s(t) for t in ("12h", "90d", "1.5 w")] == [43_200, 90 * DAY_S, 10.5 * DAY_S]


@pytest.mark.parametrize("text", ["", "90", "3m", "-1d", "1y", "d", "1e3d"])
def test_another_age_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="as in 12h, 90d or 8w"):
        parse_age_s(text)


@pytest.mark.parametrize("text", ["10001d", "1000000d", "9" * 400 + "w"])
def test_an_age_beyond_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at most 10000d"):
        parse_age_s(text)
