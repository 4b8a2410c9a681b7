"""No configuration is tried again while one of a finite space is untried."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import ParameterSampler

from hermes_ops.search import make_sampler
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible, key_of, size_of
from hermes_ops.search.interface import Observation
from hermes_ops.search.samplers import seed_of
from hermes_ops.search.space import (
    ChoiceParameter,
    Config,
    Integer,
    LogInteger,
    Quantised,
    Space,
    Uniform,
)
from hermes_ops.search.tree import canonical

LEARNERS = pytest.mark.parametrize("algorithm", ["random", "tpe"])
SIX: Space = tuple((f"p{n}", ChoiceParameter((1, 2, 3, 4, 5, 6))) for n in range(5))

PLAIN = st.one_of(
    st.integers(1, 3).map(lambda n: Integer(0, n)),
    st.integers(1, 3).map(lambda n: LogInteger(1, 1 + n)),
    st.integers(1, 3).map(lambda n: Quantised(0.1, 0.1 + 0.2 * n, 0.2)),
    st.integers(1, 3).map(lambda n: ChoiceParameter(tuple("abc"[:n]))),
)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Small finite spaces; the first parameter may bring another with one of its values."""
    flat = draw(st.lists(PLAIN, min_size=1, max_size=2))
    axes: list[tuple[str, Any]] = [(f"x{n}", axis) for n, axis in enumerate(flat)]
    if draw(st.booleans()):
        below: Space = (("under", draw(PLAIN)),)
        axes.insert(0, ("branch", ChoiceParameter(("with", "without"), (below, ()))))
    return tuple(axes)


def loss_of(config: Config) -> float:
    """Prefer few configurations, so that a search that learns comes back to them."""
    return float(sum(len(str(value)) + str(value).count("1") for value in config.values()))


def play(sampler: Any, trials: int) -> list[Config]:
    history: list[Observation] = []
    for number in range(trials):
        config = sampler.ask(number, history)
        history.append(Observation(number, config, loss_of(config), "finished"))
    return [dict(o.config) for o in history]


@LEARNERS
@settings(max_examples=15, deadline=None)
@given(space=spaces(), seed=st.integers(0, 2**32 - 1), startup=st.integers(1, 5))
def test_every_configuration_is_tried_once_before_any_is_tried_again(
    algorithm: str, space: Space, seed: int, startup: int
) -> None:
    size = size_of(Feasible(space))
    assert size is not None
    sampler = make_sampler(algorithm, space, seed, startup)
    drawn = play(sampler, 2 * size)
    assert len({key_of(c) for c in drawn[:size]}) == size
    assert set(Counter(key_of(c) for c in drawn).values()) == {2}
    assert all(canonical(space, config) == config for config in drawn)


@LEARNERS
def test_constraints_and_known_points_count(algorithm: str) -> None:
    space: Space = (("a", Integer(1, 6)), ("b", Integer(1, 6)))
    rules = (Constraint.parse("a + b <= 5"),)
    point = {"a": 1, "b": 4}
    assert size_of(Feasible(space, rules)) == 10
    sampler = make_sampler(algorithm, space, 3, 2, [point], constraints=rules)
    drawn = play(sampler, 10)
    assert drawn[0] == point
    assert len({key_of(c) for c in drawn}) == 10
    assert all(c["a"] + c["b"] <= 5 for c in drawn)  # type: ignore[operator]


def test_tpe_keeps_off_a_known_point_whose_trial_has_not_begun() -> None:
    space: Space = (("a", ChoiceParameter((1, 2, 3))),)
    sampler = make_sampler("tpe", space, 0, 1, [{"a": 1}, {"a": 2}])
    done = [Observation(0, {"a": 1}, 5.0, "finished")]
    assert sampler.ask(2, done) == {"a": 3}


def test_tpe_draws_as_many_configurations_as_there_are_trials() -> None:
    drawn = play(make_sampler("tpe", SIX, 0), 60)
    assert len({key_of(c) for c in drawn}) == 60


def test_random_search_draws_as_many_configurations_as_there_are_trials() -> None:
    sampler = make_sampler("random", SIX, 0)
    drawn = [sampler.ask(number, ()) for number in range(2_000)]
    assert len({key_of(c) for c in drawn}) == 2_000
    again = make_sampler("random", SIX, 0)
    assert [again.ask(number, ()) for number in (1_999, 3, 700)] == [
        drawn[1_999], drawn[3], drawn[700],
    ]  # fmt: skip


def test_an_untried_configuration_is_near_the_one_that_tpe_wanted() -> None:
    space: Space = (("x", Integer(0, 99)), ("y", Integer(0, 99)))
    done = [
        Observation(n, {"x": n % 5, "y": n // 5}, float(n % 5 + n // 5), "finished")
        for n in range(25)
    ]
    sampler = make_sampler("tpe", space, 1, 1)
    asked = [sampler.ask(100 + n, done) for n in range(10)]
    assert all(key_of(c) not in {key_of(o.config) for o in done} for c in asked)
    assert sum(isinstance(c["x"], int) and c["x"] < 50 for c in asked) >= 8


@pytest.mark.parametrize("seed", range(3))
def test_the_first_draw_of_a_trial_is_that_of_a_parameter_sampler(seed: int) -> None:
    from scipy.stats import uniform

    space: Space = (("b", Uniform(0.0, 1.0)), ("a", Uniform(0.0, 1.0)))
    marginals = {name: uniform(0.0, 1.0) for name, _ in space}
    (expected,) = ParameterSampler(marginals, 1, random_state=seed_of(seed, 4))
    assert make_sampler("random", space, seed).ask(4, ()) == expected


@LEARNERS
def test_values_of_a_choice_that_leave_nothing_continuous_are_not_combined_twice(
    algorithm: str,
) -> None:
    below: Space = (("momentum", Uniform(0.0, 0.99)),)
    space: Space = (
        ("optimizer", ChoiceParameter(("adam", "sgd"), ((), below))),
        ("batch", ChoiceParameter((32, 64, 128))),
        ("layers", Integer(1, 3)),
    )
    drawn = play(make_sampler(algorithm, space, 0, 5), 30)
    assert len(set(map(key_of, drawn))) == 30
    constraint = Constraint.parse("optimizer == 'adam' and batch < 100")
    few = play(make_sampler(algorithm, space, 0, 5, constraints=[constraint]), 12)
    assert len(set(map(key_of, few[:6]))) == 6
    assert all(constraint.holds(config) for config in few)
