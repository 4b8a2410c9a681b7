"""Numbers and times for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.amounts import counted, duration, figure, short_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.03124, "0.0312"),
        (12.0, "12"),
        (999.96, "1,000"),
        (1234.5, "1,234"),
        (-0.5, "-0.5"),
        (3.2e-5, "3.2e-05"),
        (float("inf"), "inf"),
    ],
)
def test_a_figure_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert figure(value) == text


@given(st.floats(1e-4, 1e14))
def test_a_figure_is_within_half_a_digit_of_its_value(value: float) -> None:
    text = figure(value)
    assert "e" not in text
    assert abs(float(text.replace(",", "")) - value) <= 0.0051 * value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (1_000, "16 min 40 s"),
        (9_000, "2 h 30 min"),
    ],
)
def test_a_time_has_tenths_below_ten_seconds_alone(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


def test_a_time_without_end_is_said_to_be_unknown() -> None:
    assert short_duration(float("inf")) == "an unknown time"
    assert duration(41.6) == "42 s"


@pytest.mark.parametrize(("number", "text"), [(0, "0 teams"), (1, "1 team"), (2, "2 teams")])
def test_one_thing_is_no_plural(number: int, text: str) -> None:
    assert counted(number, "team") == text
