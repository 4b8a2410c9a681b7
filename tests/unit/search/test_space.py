"""Every parameter: values within its bounds, of plain types, both bounds reachable."""

from __future__ import annotations

import math
from argparse import ArgumentParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.search.space import (
    ChoiceParameter,
    Integer,
    LogInteger,
    LogUniform,
    Quantised,
    SearchParameter,
    Uniform,
    text,
)
from hermes_ops.search.tree import grid_size

UNIT = st.floats(0.0, 1.0)
PARAMETERS: list[tuple[SearchParameter, type]] = [
    (Uniform(-1.5, 2.5), float),
    (LogUniform(1e-5, 10.0), float),
    (Integer(-3, 12), int),
    (LogInteger(1, 1000), int),
    (Quantised(16, 128, 16), int),
    (Quantised(0.1, 0.95, 0.1), float),
    (ChoiceParameter(("adam", "sgd", "rmsprop")), str),
]
KINDS = pytest.mark.parametrize(("parameter", "kind"), PARAMETERS, ids=str)


@KINDS
@given(unit=UNIT)
def test_every_quantile_is_a_plain_value_that_the_parameter_allows(
    parameter: SearchParameter, kind: type, unit: float
) -> None:
    value = parameter.from_unit(unit)
    assert type(value) is kind
    assert parameter.canonical(value) == value


@KINDS
@given(unit=UNIT)
def test_a_value_survives_the_way_to_the_unit_interval_and_back(
    parameter: SearchParameter, kind: type, unit: float
) -> None:
    value = parameter.from_unit(unit)
    position = parameter.to_unit(value)
    again = parameter.from_unit(position)
    assert 0.0 <= position <= 1.0
    if isinstance(value, float):
        assert isinstance(again, float)
        assert math.isclose(value, again, rel_tol=1e-9, abs_tol=1e-9)
    else:
        assert again == value


@pytest.mark.parametrize(
    ("parameter", "first", "last"),
    [
        (Uniform(-1.5, 2.5), -1.5, 2.5),
        (LogUniform(1e-5, 10.0), 1e-5, 10.0),
        (Integer(-3, 12), -3, 12),
        (LogInteger(1, 1000), 1, 1000),
        (Quantised(16, 128, 16), 16, 128),
        (Quantised(0.1, 0.95, 0.1), 0.1, 0.9),
    ],
)
def test_both_bounds_can_be_drawn(parameter: SearchParameter, first: float, last: float) -> None:
    assert (parameter.from_unit(0.0), parameter.from_unit(1.0)) == pytest.approx((first, last))


def test_decimal_steps_carry_no_binary_noise() -> None:
    steps = Quantised(0.1, 0.5, 0.1)
    assert [steps.at(i) for i in range(steps.cardinality)] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_step_as_wide_as_the_range_in_decimal_fits_once() -> None:
    assert Quantised(0.1, 0.3, 0.2).cardinality == 2


def test_half_of_a_log_uniform_range_lies_below_its_geometric_mean() -> None:
    assert LogUniform(1e-4, 1.0).from_unit(0.5) == pytest.approx(1e-2)
    assert LogInteger(1, 10_000).from_unit(0.5) == round(math.sqrt(0.5 * 10_000.5))


def test_choices_that_are_equal_in_python_are_told_apart() -> None:
    choice = ChoiceParameter((1, True, 1.0, "x", None))
    assert [choice.index_of(v) for v in choice.values] == [0, 1, 2, 3, 4]
    assert choice.canonical(True) is True


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        (Uniform(0, 1), 1.1),
        (Uniform(0, 1), "0.5"),
        (Uniform(0, 1), True),
        (LogUniform(0.1, 1), 0.0),
        (Uniform(0, 1), math.nan),
        (Integer(1, 3), 2.0),
        (Integer(1, 3), 4),
        (Integer(1, 3), True),
        (Quantised(0, 10, 5), 3),
        (Quantised(0, 10, 5), 15),
        (ChoiceParameter(("a", 1)), True),
        (ChoiceParameter(("a", 1)), "b"),
    ],
)
def test_a_value_outside_the_parameter_has_no_canonical_form(
    parameter: SearchParameter, value: object
) -> None:
    with pytest.raises(ValueError, match=r"outside|not|between"):
        parameter.canonical(value)


def test_the_size_of_a_grid_is_the_product_and_unknown_with_a_continuous_axis() -> None:
    discrete = (("a", Integer(1, 3)), ("b", ChoiceParameter(("x", "y"))))
    assert grid_size(discrete) == 6
    assert grid_size((*discrete, ("c", Uniform(0, 1)))) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (True, "true"), (False, "false"), (1, "1"), (0.1, "0.1"), (1e-5, "1e-05")],
)
def test_values_reach_the_trial_as_text(value: object, shown: str) -> None:
    assert text(value) == shown  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1e-5, -1.25e-300, -1e16, -0.1, 1e-5, 5e-324, -5e-324, -0.0])
def test_a_float_as_text_is_read_back_by_argparse_to_the_same_number(value: float) -> None:
    parser = ArgumentParser()
    parser.add_argument("--shift", type=float)
    assert parser.parse_args(["--shift", text(value)]).shift == value
