"""Spaces whose choices bring parameters with them, and constraints, under every algorithm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.search import ALGORITHMS, make_sampler
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible, approach, feasible_positions, witnesses
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.space import (
    ChoiceParameter,
    Config,
    Integer,
    LogUniform,
    Quantised,
    Space,
    Uniform,
)
from hermes_ops.search.tree import Combinations, axes, canonical, from_units, grid_size, to_units

NESTED: Space = (("tau", Integer(1, 3)),)
BROUGHT: Space = (
    ("momentum", Quantised(0, 0.9, 0.1)),
    ("style", ChoiceParameter(("a", "b"), (NESTED, ()))),
)
OPTIMIZER = ChoiceParameter(("adam", "sgd", "rms"), ((), BROUGHT, (("rho", Integer(5, 6)),)))
DISCRETE: Space = (("units", Integer(1, 4)), ("optimizer", OPTIMIZER), ("batch", Integer(1, 4)))
MIXED: Space = (*DISCRETE, ("rate", LogUniform(1e-4, 1.0)))
SPACES = {"grid": DISCRETE, "random": MIXED, "tpe": MIXED}
LIMITS = ("units * batch <= 6", "momentum < 0.5 or units == 1", "optimizer != 'rms' or rho == 5")
EACH = pytest.mark.parametrize("algorithm", ALGORITHMS)


def constraints(*sources: str) -> tuple[Constraint, ...]:
    return tuple(Constraint.parse(source) for source in sources)


def build(algorithm: str, *limits: str, seed: int = 7, **more: Any) -> Sampler:
    space = SPACES[algorithm]
    return make_sampler(algorithm, space, seed, 5, constraints=constraints(*limits), **more)


def loss_of(config: Config) -> float:
    momentum = config.get("momentum", 0.9)
    assert isinstance(momentum, int | float)
    return abs(momentum - 0.2) + (config["optimizer"] != "sgd")


def play(sampler: Sampler, trials: int) -> list[Observation]:
    history: list[Observation] = []
    for number in range(trials):
        config = sampler.ask(number, history)
        history.append(Observation(number, config, loss_of(config), "finished"))
    return history


def expected_names(config: Config) -> list[str]:
    names = ["units", "optimizer"]
    names += {"adam": [], "sgd": ["momentum", "style"], "rms": ["rho"]}[str(config["optimizer"])]
    return [*names, *(["tau"] if config.get("style") == "a" else []), "batch"]


@EACH
def test_a_configuration_has_what_its_choices_bring_and_nothing_else(algorithm: str) -> None:
    history = play(build(algorithm), 24)
    for seen in history:
        rate = ["rate"] if algorithm != "grid" else []
        assert list(seen.config) == expected_names(dict(seen.config)) + rate
        assert canonical(SPACES[algorithm], seen.config) == seen.config
    assert {seen.config["optimizer"] for seen in history} == {"adam", "sgd", "rms"} - (
        {"rms"} if algorithm == "grid" else set()
    )


@EACH
def test_every_configuration_satisfies_the_constraints(algorithm: str) -> None:
    limits = constraints(*LIMITS)
    for seen in play(build(algorithm, *LIMITS), 24):
        assert all(limit.holds(dict(seen.config)) for limit in limits)


@EACH
def test_with_constraints_too_the_same_seed_and_results_give_the_same_trials(
    algorithm: str,
) -> None:
    first, second = (play(build(algorithm, *LIMITS), 12) for _ in range(2))
    assert first == second
    assert build(algorithm, *LIMITS).ask(12, first[::-1]) == build(algorithm, *LIMITS).ask(
        12, first
    )


@EACH
def test_a_constraint_that_always_holds_changes_nothing(algorithm: str) -> None:
    assert play(build(algorithm, "units > 0"), 12) == play(build(algorithm), 12)


@EACH
def test_constraints_that_nothing_satisfies_are_refused_at_once(algorithm: str) -> None:
    with pytest.raises(ValueError, match="satisfies the constraints"):
        build(algorithm, "units > batch and batch > units")


@EACH
def test_a_known_point_that_the_constraints_exclude_is_refused(algorithm: str) -> None:
    point = {"units": 4, "optimizer": "adam", "batch": 4, "rate": 0.5}
    assert build(algorithm, points_to_evaluate=[point]).ask(0, [])["units"] == 4
    with pytest.raises(ValueError, match=r"units \* batch <= 6"):
        build(algorithm, *LIMITS, points_to_evaluate=[point])


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_constraints_that_leave_almost_nothing_still_give_every_trial(algorithm: str) -> None:
    limit = "rate > 0.995 and rate < 0.9999"
    history = play(build(algorithm, limit), 12)
    assert all(constraints(limit)[0].holds(dict(seen.config)) for seen in history)
    assert len({seen.config["rate"] for seen in history}) > 3
    assert len({seen.config["units"] for seen in history}) > 1


def test_a_draw_that_is_excluded_is_drawn_again_and_no_other_is_touched() -> None:
    limit = constraints("units < 3")[0]
    free, bound = build("random"), build("random", "units < 3")
    pairs = [(free.ask(number, []), bound.ask(number, [])) for number in range(30)]
    assert any(not limit.holds(before) for before, _ in pairs)
    assert all(before == after for before, after in pairs if limit.holds(before))


def test_a_choice_is_as_likely_with_many_parameters_as_with_none() -> None:
    sampler = build("random")
    chosen = [sampler.ask(number, [])["optimizer"] for number in range(300)]
    assert all(70 <= chosen.count(value) <= 130 for value in OPTIMIZER.values)


def test_tpe_learns_the_parameters_of_a_choice_from_the_trials_that_had_them() -> None:
    def late(algorithm: str) -> list[Observation]:
        return [o for seed in (2, 3) for o in play(build(algorithm, seed=seed), 26)[14:]]

    def distance(trials: list[Observation]) -> float:
        found = [(o.loss or 0.0) for o in trials if o.config["optimizer"] == "sgd"]
        return sum(found) / len(found)

    tpe, rand = late("tpe"), late("random")
    assert distance(tpe) < 0.6 * distance(rand)
    assert sum("momentum" in o.config for o in tpe) > 1.5 * sum(
        "momentum" in o.config for o in rand
    )


def test_tpe_goes_on_when_no_trial_had_a_choice_yet() -> None:
    adam: Config = {"units": 1, "optimizer": "adam", "batch": 1, "rate": 0.1}
    history = [Observation(n, {**adam, "units": 1 + n % 4}, float(n), "finished") for n in range(9)]
    asked = [build("tpe").ask(number, history) for number in range(9, 19)]
    assert all(canonical(MIXED, config) == config for config in asked)


def flat_combinations(space: Space) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Every combination by its definition: each value with every one of what it brings."""
    each: list[list[tuple[tuple[str, Any], ...]]] = []
    for name, parameter in space:
        if isinstance(parameter, ChoiceParameter) and parameter.spaces:
            pairs = zip(parameter.values, parameter.spaces, strict=True)
            each.append(
                [((name, v), *rest) for v, below in pairs for rest in flat_combinations(below)]
            )
        else:
            count = parameter.cardinality or 0
            each.append([((name, parameter.from_unit((i + 0.5) / count)),) for i in range(count)])
    for parts in itertools.product(*each):
        yield tuple(pair for part in parts for pair in part)


@st.composite
def spaces(draw: st.DrawFn, prefix: str = "p", depth: int = 2) -> Space:
    """Small discrete trees with unique names."""
    made: list[tuple[str, Any]] = []
    for index in range(draw(st.integers(1 if depth == 2 else 0, 2))):
        name = f"{prefix}{index}"
        if depth and draw(st.booleans()):
            count = draw(st.integers(1, 3))
            below = tuple(draw(spaces(f"{name}{v}_", depth - 1)) for v in range(count))
            made.append((name, ChoiceParameter(tuple(range(count)), below)))
        else:
            made.append((name, Integer(0, draw(st.integers(1, 2)))))
    draw(st.randoms(use_true_random=False)).shuffle(made)
    return tuple(made)


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_a_grid_is_each_value_with_what_it_brings_exactly_once(space: Space) -> None:
    combinations = Combinations(space)
    size = grid_size(space)
    expected = sorted(flat_combinations(space))
    found = [combinations.at(position) for position in range(size or 0)]
    assert sorted(tuple(config.items()) for config in found) == expected
    assert [combinations.position(config) for config in found] == list(range(len(expected)))
    assert [dict(c) for c in combinations] == found


def test_the_combinations_of_a_flat_space_are_in_the_order_of_scikit_learn() -> None:
    from sklearn.model_selection import ParameterGrid

    space: Space = (("b", Integer(1, 2)), ("c", Integer(3, 5)), ("a", Quantised(0, 0.2, 0.1)))
    values = {"a": [0.0, 0.1, 0.2], "b": [1, 2], "c": [3, 4, 5]}
    assert list(Combinations(space)) == list(ParameterGrid(values))


@settings(max_examples=60, deadline=None)
@given(spaces(), st.randoms(use_true_random=False))
def test_a_configuration_survives_the_way_to_quantiles_and_back(space: Space, rng: Any) -> None:
    units = {name: rng.random() for name, _ in axes(space)}
    config = from_units(space, units)
    assert from_units(space, to_units(space, config)) == config == canonical(space, config)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from(["x + y < 0.7", "x < y", "x * 10 // 1 != y * 10 // 1", "z < 0.2 or x < 0.4"]),
)
def test_what_is_approached_satisfies_the_constraints(
    wanted: tuple[float, float, float], limit: str
) -> None:
    below: Space = (("z", Uniform(0.0, 1.0)),)
    space: Space = (
        ("x", Uniform(0.0, 1.0)),
        ("y", Uniform(0.0, 1.0)),
        ("kind", ChoiceParameter(("a", "b"), (below, ()))),
    )
    feasible = Feasible(space, constraints(limit))
    units = dict(zip(("x", "y", "z"), wanted, strict=True)) | {"kind": 0.2}
    for start in witnesses(feasible):
        reached = approach(feasible, start, units)
        assert feasible.holds(from_units(space, reached))
        assert reached["y"] == units["y"] or "y" in limit


def test_a_wanted_value_is_taken_as_far_as_the_constraints_allow() -> None:
    space: Space = (("x", Uniform(0.0, 1.0)), ("y", Uniform(0.0, 1.0)))
    feasible = Feasible(space, constraints("x < 0.5"))
    reached = approach(feasible, {"x": 0.1, "y": 0.1}, {"x": 0.9, "y": 0.9})
    assert reached == {"x": pytest.approx(0.3), "y": 0.9}


def test_a_constrained_grid_leaves_out_what_is_excluded_and_keeps_the_order() -> None:
    free, bound = build("grid"), build("grid", *LIMITS)
    limits = constraints(*LIMITS)
    whole = [free.ask(number, []) for number in range(free.size or 0)]
    left = [config for config in whole if all(limit.holds(config) for limit in limits)]
    assert [bound.ask(number, []) for number in range(bound.size or 0)] == left
    assert 0 < len(left) < len(whole) == 4 * (1 + 10 * (3 + 1) + 2) * 4


def test_known_points_of_a_constrained_grid_come_first_and_once() -> None:
    points = [
        {"units": 2, "optimizer": "rms", "rho": 5, "batch": 3},
        {"units": 1, "optimizer": "adam", "batch": 1},
    ]
    sampler = build("grid", *LIMITS, points_to_evaluate=points)
    tried = [sampler.ask(number, []) for number in range(sampler.size or 0)]
    assert tried[:2] == points
    assert len({tuple(config.items()) for config in tried}) == len(tried)
    assert len(tried) == build("grid", *LIMITS).size


def test_a_grid_too_large_to_be_looked_through_is_refused_with_constraints_alone() -> None:
    space: Space = (("a", Integer(1, 1000)), ("b", Integer(1, 1000)))
    assert len(feasible_positions(Feasible(space))) == 10**6
    with pytest.raises(ValueError, match="1000000 combinations"):
        feasible_positions(Feasible(space, constraints("a < b")))


def test_spaces_that_python_calls_equal_are_told_apart() -> None:
    found = [
        len(
            feasible_positions(Feasible((("x", ChoiceParameter((value,))),), constraints("x == 1")))
        )
        for value in (1, True, 1.0)
    ]
    assert found == [1, 0, 1]


def test_a_space_that_cannot_be_counted_is_given_up_after_a_bounded_search() -> None:
    space: Space = (("x", Uniform(0.0, 1.0)), ("y", Uniform(0.0, 1.0)))
    assert witnesses(Feasible(space, constraints("x == y"))) == ()
    assert all(math.isfinite(u) for w in witnesses(Feasible(space)) for u in w.values())
