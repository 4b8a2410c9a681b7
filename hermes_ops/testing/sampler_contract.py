"""Contract tests for samplers of any package."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from hermes_ops.search import make_sampler
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.space import (
    ChoiceParameter,
    Config,
    Integer,
    LogInteger,
    LogUniform,
    Quantised,
    Space,
    Uniform,
)
from hermes_ops.search.tree import canonical

DISCRETE: Space = (
    ("filters", Integer(8, 11)),
    ("batch", Quantised(16, 64, 16)),
    ("optimizer", ChoiceParameter(("adam", "sgd", None))),
)
MIXED: Space = (
    ("rate", LogUniform(1e-4, 0.1)),
    ("dropout", Uniform(0.0, 0.6)),
    ("units", LogInteger(16, 256)),
    *DISCRETE,
    ("constant", ChoiceParameter((1.5,))),
)
TYPES: dict[str, tuple[type, ...]] = {
    "rate": (float,),
    "dropout": (float,),
    "units": (int,),
    "filters": (int,),
    "batch": (int,),
    "optimizer": (str, type(None)),
    "constant": (float,),
}
CONDITIONAL: Space = (
    ("filters", Integer(8, 11)),
    ("optimizer", ChoiceParameter(("adam", "sgd"), ((), (("momentum", Quantised(0, 4, 1)),)))),
)
CONSTRAINTS = ("filters < 10 or optimizer == 'sgd'", "momentum < 4")
PLAIN = (float, int, str, bool, type(None))
POINT: Config = {"filters": 9, "batch": 32, "optimizer": None}
FULL: Config = {"rate": 0.01, "dropout": 0.5, "units": 64, "constant": 1.5, **POINT}


class SamplerContract:
    """Tests over the samplers named in `samplers`; a subclass named `Test…` runs them.

    The names are those under which SAMPLERS has them. `spaces` gives a sampler that cannot take
    `MIXED`, as a grid cannot, a space of its own, of at least 30 configurations.
    """

    samplers: ClassVar[Sequence[str]] = ()
    spaces: ClassVar[dict[str, Space]] = {"grid": DISCRETE}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test once a sampler."""
        if "algorithm" in metafunc.fixturenames:
            metafunc.parametrize("algorithm", self.samplers)

    def space(self, algorithm: str) -> Space:
        """Return the space that the sampler searches."""
        return self.spaces.get(algorithm, MIXED)

    def build(self, algorithm: str, seed: int = 7, **more: Any) -> Sampler:  # noqa: ANN401 - keys of make_sampler
        """Return the sampler, with five start-up trials."""
        return make_sampler(algorithm, self.space(algorithm), seed, 5, **more)

    def test_the_same_seed_and_results_give_the_same_trials(self, algorithm: str) -> None:
        first, second = (play(self.build(algorithm), 14, loss_of) for _ in range(2))
        assert first == second

    def test_a_question_asked_twice_has_one_answer_whatever_was_asked_between(
        self, algorithm: str
    ) -> None:
        sampler = self.build(algorithm)
        history = play(sampler, 10, loss_of)
        before = sampler.ask(10, history)
        sampler.ask(3, history[:2])
        shuffled = random.Random(0).sample(history, len(history))
        again = self.build(algorithm).ask(10, history)
        assert sampler.ask(10, shuffled) == before == again

    def test_the_trial_asked_for_does_not_count_itself(self, algorithm: str) -> None:
        sampler = self.build(algorithm)
        history = play(sampler, 8, loss_of)
        running_trial = Observation(8, sampler.ask(8, history), 0.0, "running")
        assert sampler.ask(8, [*history, running_trial]) == running_trial.config

    def test_every_value_lies_in_the_space_and_is_a_plain_object(self, algorithm: str) -> None:
        space = self.space(algorithm)
        for seen in play(self.build(algorithm), 30, loss_of):
            assert list(seen.config) == list(canonical(space, seen.config))
            assert canonical(space, seen.config) == seen.config
            types = TYPES if space in (MIXED, DISCRETE) else {}
            assert all(type(v) in types.get(name, PLAIN) for name, v in seen.config.items())
            assert json.loads(json.dumps(seen.config)) == seen.config

    def test_conditional_parameters_and_constraints_are_respected(self, algorithm: str) -> None:
        """Samplers with a space of their own are skipped, except for the grid."""
        if algorithm in self.spaces.keys() - SamplerContract.spaces.keys():
            pytest.skip("it has a space of its own")
        constraints = [Constraint.parse(source) for source in CONSTRAINTS]
        sampler = make_sampler(algorithm, CONDITIONAL, 7, 5, constraints=constraints)
        for seen in play(sampler, 12, loss_of):
            assert canonical(CONDITIONAL, seen.config) == seen.config
            assert all(constraint.holds(seen.config) for constraint in constraints)

    def test_any_history_has_an_answer(self, algorithm: str) -> None:
        """Nothing reported, failures, NaN, infinite and huge losses, one loss for all."""
        sampler = self.build(algorithm)
        configs = [sampler.ask(number, []) for number in range(6)]
        for loss in (None, math.nan, math.inf, -math.inf, 1e300, 0.0):
            for state in ("running", "finished", "failed"):
                history = [Observation(n, c, loss, state) for n, c in enumerate(configs)]
                space = self.space(algorithm)
                config = sampler.ask(6, history)
                assert canonical(space, config) == config

    def test_known_points_come_first_and_in_order(self, algorithm: str) -> None:
        space, unaided = self.space(algorithm), self.build(algorithm)
        points = [unaided.ask(number, []) for number in (1, 0)]
        if space in (MIXED, DISCRETE):
            points = [{n: {**FULL, "filters": f}[n] for n, _ in space} for f in (9, 8)]
        sampler = self.build(algorithm, points_to_evaluate=points)
        assert [sampler.ask(number, []) for number in (0, 1)] == points

    def test_a_point_outside_the_space_is_refused(self, algorithm: str) -> None:
        with pytest.raises((ValueError, KeyError)):
            self.build(algorithm, points_to_evaluate=[{"filters": 99}])

    def test_there_is_no_trial_beyond_the_limit(self, algorithm: str) -> None:
        sampler = self.build(algorithm, max_trials=3)
        assert sampler.size == 3
        assert [sampler.exhausted(number) for number in range(4)] == [False, False, False, True]
        with pytest.raises(IndexError):
            sampler.ask(3, [])


def loss_of(config: Config) -> float:
    """Return the loss of a configuration: lowest at a rate of 0.01 and with sgd.

    In any other space it is the sum of log(1 + |number|).
    """
    if set(POINT) <= config.keys() <= set(FULL):
        rate = config.get("rate", 0.01)
        assert isinstance(rate, float)
        return abs(math.log10(rate) + 2.0) + (config["optimizer"] != "sgd")
    return sum(math.log1p(abs(v)) for v in config.values() if isinstance(v, int | float))


def play(sampler: Sampler, trials: int, judge: Callable[[Config], float]) -> list[Observation]:
    """Return the first trials of a search, each finished before the next one is asked for."""
    history: list[Observation] = []
    for number in range(trials):
        config = sampler.ask(number, history)
        history.append(Observation(number, config, judge(config), "finished"))
    return history
