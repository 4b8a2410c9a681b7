"""One suite over every algorithm, then what is special to each."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar, Literal

import pytest

from hermes_ops.search import SAMPLERS, make_sampler
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.space import (
    ChoiceParameter,
    LogInteger,
    LogUniform,
    Space,
    Uniform,
)
from hermes_ops.testing.sampler_contract import (
    DISCRETE,
    MIXED,
    POINT,
    SamplerContract,
    loss_of,
    play,
)


class TestEverySampler(SamplerContract):
    samplers: ClassVar = SAMPLERS.builtin


class TestSamplersOfASpaceOfTheirOwn(SamplerContract):
    """A package's sampler may take neither of the contract's spaces."""

    samplers: ClassVar = ("random", "tpe")
    spaces: ClassVar = {
        "random": (("x", Uniform(0.0, 1.0)), ("rate", Uniform(0.0, 1.0))),
        "tpe": (
            ("filters", Uniform(1.0, 90.0)),
            (
                "kind",
                ChoiceParameter((True, "deep"), ((), (("layers", LogInteger(1, 64)),))),
            ),
        ),
    }


def build(algorithm: str, seed: int = 7, **more: Any) -> Sampler:
    space = DISCRETE if algorithm == "grid" else MIXED
    return make_sampler(algorithm, space, seed, 5, **more)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="grid, random, tpe"):
        make_sampler("annealing", DISCRETE, 0)


def test_a_grid_gives_every_combination_exactly_once() -> None:
    sampler = build("grid")
    tried = [tuple(sampler.ask(number, []).values()) for number in range(48)]
    assert sampler.size == 48
    assert sampler.exhausted(48)
    every = itertools.product(range(8, 12), (16, 32, 48, 64), ("adam", "sgd", None))
    assert set(tried) == set(every)
    assert len(tried) == len(set(tried))


def test_known_points_of_a_grid_are_not_tried_again() -> None:
    points = [POINT, {"filters": 8, "batch": 16, "optimizer": "adam"}]
    sampler = build("grid", points_to_evaluate=points)
    tried = [tuple(sampler.ask(number, []).values()) for number in range(48)]
    assert len(set(tried)) == 48


def test_a_grid_refuses_a_continuous_axis() -> None:
    with pytest.raises(ValueError, match="counted"):
        make_sampler("grid", MIXED, 0)


def test_random_trials_depend_on_the_seed_and_not_on_results() -> None:
    history = play(build("random"), 5, loss_of)
    assert build("random").ask(6, history) == build("random").ask(6, [])
    assert build("random", seed=8).ask(6, []) != build("random").ask(6, [])


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_a_point_that_the_same_seed_would_draw_is_tried_once(algorithm: str) -> None:
    earlier = build("random").ask(3, [])
    sampler = build(algorithm, points_to_evaluate=[earlier])
    drawn = [sampler.ask(number, []) for number in range(6)]
    assert drawn.count(earlier) == 1
    others = build("random")
    assert drawn[1:3] + drawn[4:] == [others.ask(number, []) for number in (1, 2, 4, 5)]


def test_random_rates_are_log_uniform() -> None:
    space: Space = (("rate", LogUniform(1e-4, 1.0)), ("units", LogInteger(1, 10_000)))
    sampler = make_sampler("random", space, 3)
    drawn = [sampler.ask(number, []) for number in range(400)]
    decades = [0, 0, 0, 0]
    for config in drawn:
        assert isinstance(config["rate"], float)
        decades[min(int(math.log10(config["rate"]) + 4), 3)] += 1
    assert all(70 <= count <= 130 for count in decades)
    small = sum(isinstance(c["units"], int) and c["units"] < 100 for c in drawn)
    assert 160 <= small <= 260


def test_tpe_is_random_search_until_its_start_up_trials_are_over() -> None:
    tpe, rand = build("tpe"), build("random")
    history = play(tpe, 5, loss_of)
    assert [seen.config for seen in history] == [rand.ask(number, []) for number in range(5)]
    assert tpe.ask(5, history) != rand.ask(5, history)


def test_tpe_depends_on_the_results_told() -> None:
    sampler = build("tpe")
    history = play(sampler, 10, loss_of)
    opposite = [Observation(o.number, o.config, -(o.loss or 0.0), o.state) for o in history]
    asked = [sampler.ask(number, history) for number in range(10, 20)]
    other = [sampler.ask(number, opposite) for number in range(10, 20)]
    assert all(a != b for a, b in zip(asked, other, strict=True))


def test_tpe_reads_the_configuration_of_a_trial_again_where_it_has_changed() -> None:
    sampler, fresh = (make_sampler("tpe", MIXED, 3, 2) for _ in range(2))
    history = play(sampler, 10, loss_of)
    others = [o.config for o in play(make_sampler("random", MIXED, 9), 10, loss_of)]
    sampler.ask(10, history)
    told = [Observation(o.number, c, o.loss, o.state) for o, c in zip(history, others, strict=True)]
    assert sampler.ask(10, told) == fresh.ask(10, told) != sampler.ask(10, history)


def test_tpe_finds_better_trials_than_random_search() -> None:
    def mean_of_last(algorithm: str, seed: int) -> float:
        history = play(build(algorithm, seed=seed), 24, loss_of)
        return sum(o.loss or 0.0 for o in history[14:]) / 10

    gains = [mean_of_last("random", seed) - mean_of_last("tpe", seed) for seed in range(3)]
    assert min(gains) > 0.5


def test_tpe_without_any_result_is_random_search() -> None:
    flying = [Observation(n, build("random").ask(n, []), None, "running") for n in range(6)]
    failed = [Observation(6, flying[0].config, math.nan, "finished")]
    assert build("tpe").ask(7, [*flying, *failed]) == build("random").ask(7, [])


def test_tpe_uses_the_loss_so_far_of_running_trials() -> None:
    sampler = build("tpe")
    history = play(sampler, 8, loss_of)
    flying = [Observation(o.number, o.config, o.loss, "running") for o in history]
    assert sampler.ask(8, flying) == sampler.ask(8, history)


def test_a_trial_in_flight_without_a_loss_keeps_tpe_from_asking_for_its_like() -> None:
    space: Space = (("x", Uniform(0.0, 1.0)),)
    sampler = make_sampler("tpe", space, 1, 1)
    done = [Observation(n, {"x": n / 40}, abs(n / 40 - 0.3), "finished") for n in range(0, 40, 2)]
    flying = [Observation(100 + n, {"x": 0.3 + n / 1000}, None, "running") for n in range(-10, 11)]

    def near(history: list[Observation]) -> int:
        asked = [sampler.ask(number, history)["x"] for number in range(200, 230)]
        return sum(isinstance(x, float) and abs(x - 0.3) < 0.05 for x in asked)

    assert near([*done, *flying]) < near(done)


def test_failed_and_diverged_trials_rank_behind_every_other() -> None:
    sampler = build("tpe")
    history = play(sampler, 8, loss_of)
    failed = [*history[:-1], Observation(7, history[7].config, None, "failed")]
    diverged = [*history[:-1], Observation(7, history[7].config, math.inf, "finished")]
    assert sampler.ask(8, failed) == sampler.ask(8, diverged)


@pytest.mark.parametrize("name", ["__import__('os')", "p0", "a.b", "{x}", "lambda: 1"])
def test_names_and_texts_are_only_texts_to_tpe(name: str) -> None:
    space: Space = ((name, ChoiceParameter(("1/0", "exit()", "p0"))), ("x", Uniform(0.0, 1.0)))
    sampler = make_sampler("tpe", space, 0, 1)
    history = [
        Observation(n, {name: value, "x": 0.5}, float(n), "finished")
        for n, value in enumerate(("1/0", "exit()", "p0"))
    ]
    assert sampler.ask(3, history)[name] in ("1/0", "exit()", "p0")


def test_tpe_learns_that_a_region_fails() -> None:
    def drawn_there(state: Literal["finished", "failed"]) -> int:
        sampler = build("tpe")
        history: list[Observation] = []
        for number in range(40):
            config = sampler.ask(number, history)
            bad = float(str(config["rate"])) > 0.01
            loss = 0.5 + 0.001 * (number % 7)
            history.append(Observation(number, config, loss, state if bad else "finished"))
        return sum(float(str(o.config["rate"])) > 0.01 for o in history[10:])

    assert drawn_there("failed") < drawn_there("finished") / 2
