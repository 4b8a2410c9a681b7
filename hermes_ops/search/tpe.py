"""The tree-structured Parzen estimator (TPE) of hyperopt, asked one trial at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from hermes_ops.search.feasible import Feasible, Key, Untried, approach, key_of, size_of, taken_keys
from hermes_ops.search.interface import Observation
from hermes_ops.search.samplers import RandomSampler, seed_of
from hermes_ops.search.space import (
    ChoiceParameter,
    Config,
    Discrete,
    Integer,
    LogInteger,
    Quantised,
    SearchParameter,
    Space,
)
from hermes_ops.search.tree import (
    active_space,
    axes,
    can_repeat,
    from_units,
    is_branching,
    to_units,
)

ATTEMPTS = 10
"""Suggestions for one trial; each takes about 10 ms."""

REPEATED = 3
"""Repeated suggestions after which an untried configuration is searched for."""

Shape = tuple[tuple[str, int, Any], ...]


class TpeSampler:
    """Draw start-up trials at random, then where good trials are dense and bad ones are not.

    Each question rebuilds hyperopt's whole memory from the history; the sampler is stateless but
    for the encoded configurations of the trials, which it keeps as long as they are the same.
    Trials in flight enter with their loss so far; those without one enter with the worst loss seen
    (a constant liar), so that their neighbourhood is not tried a second time meanwhile. Failed
    trials enter as failures, behind every other. While no loss at all is known, trials are random.

    Parameters that a choice activates are learned from the trials that had them, by the nesting
    of hyperopt's own `hp.choice`. A suggestion that does not satisfy the constraints is drawn
    again, `ATTEMPTS` times at most; then the last one is approached from the trial's random
    draw, which does satisfy them (our choice).

    No configuration is used twice before all have been used. hyperopt suggests repetitions: after
    `REPEATED` of them the trial gets the nearest untried configuration that is found (our choice).
    That matters where values can be counted, or where a choice leaves only such parameters.

    hyperopt sees axes named p0, p1, ... and numbers, never a user's text.

    Source: Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011, section 4;
    the constant liar: Ginsbourger et al., "Kriging is well-suited to parallelize optimization".
    """

    size = None

    def __init__(
        self, feasible: Feasible, seed: int, startup_trials: int, points: Sequence[Config] = ()
    ) -> None:
        """`startup_trials`: trials of a lower number are drawn at random."""
        self._feasible = feasible
        self._space = feasible.space
        self._seed = seed
        self._startup_trials = startup_trials
        self._points = tuple(points)
        self._random = RandomSampler(feasible, seed, points)
        self._can_repeat = can_repeat(feasible.space)
        self._size = size_of(feasible)
        self._labels = {name: f"p{axis}" for axis, (name, _) in enumerate(axes(self._space))}
        self._miscs: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Return False: there is always another suggestion."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return a random draw during start-up, TPE's suggestion afterwards."""
        others = sorted((o for o in history if o.number != number), key=lambda o: o.number)
        taken = self._taken(number, others)
        losses = [o.loss for o in others if o.loss is not None and _counts(o)]
        if number < self._startup_trials or not losses:
            config = self._random.ask(number, history)
        else:
            config = self._learned(number, [self._document(o, max(losses)) for o in others], taken)
        return config if key_of(config) not in taken else self._untried(number, config, taken)

    def _taken(self, number: int, others: Sequence[Observation]) -> Collection[Key]:
        """Return the keys of the other trials' configurations and of the points not yet tried."""
        if not self._can_repeat:
            return ()
        begun = {number, *(o.number for o in others)}
        waiting = (point for place, point in enumerate(self._points) if place not in begun)
        return taken_keys(itertools.chain((o.config for o in others), waiting), self._size)

    def _learned(self, number: int, docs: list[dict[str, Any]], taken: Collection[Key]) -> Config:
        """Return a feasible suggestion; after `REPEATED` repetitions it may be one of `taken`."""
        config: Config = {}
        repeated = 0
        for attempt in range(ATTEMPTS):
            config = self._suggest(number, attempt, docs)
            if not self._feasible.holds(config):
                continue
            repeated += key_of(config) in taken
            if key_of(config) not in taken or repeated == REPEATED:
                return config
        wanted = to_units(self._space, config)
        reached = approach(self._feasible, self._random.units(number), wanted)
        return from_units(self._space, reached)

    def _untried(self, number: int, config: Config, taken: Collection[Key]) -> Config:
        wanted = {**self._random.units(number), **to_units(self._space, config)}
        seed = seed_of(self._seed, number)
        return Untried(self._feasible).near(wanted, taken, seed) or config

    def _suggest(self, number: int, attempt: int, docs: list[dict[str, Any]]) -> Config:
        from hyperopt import tpe
        from hyperopt.base import trials_from_docs

        suggestions = tpe.suggest(
            [number],
            _domain(_shape(self._space)),
            trials_from_docs(docs, validate=False),
            seed_of(self._seed, number, attempt) if attempt else seed_of(self._seed, number),
            n_startup_jobs=0,
            verbose=False,
        )
        return self._decoded(self._space, suggestions[0]["misc"]["vals"])

    def _decoded(self, space: Space, drawn: Mapping[str, Sequence[float]]) -> Config:
        config: Config = {}
        for name, parameter in space:
            config[name] = _decode(parameter, float(drawn[self._labels[name]][0]))
            config |= self._decoded(active_space(parameter, config[name]), drawn)
        return config

    def _document(self, seen: Observation, worst: float) -> dict[str, Any]:
        config, misc = self._miscs.get(seen.number, (None, {}))
        if config is not seen.config:
            misc = self._misc(seen)
            self._miscs[seen.number] = seen.config, misc
        return {
            "state": 2,  # hyperopt's JOB_STATE_DONE: provisional losses are told as results
            "tid": seen.number,
            "spec": None,
            "result": _result(seen, worst),
            "misc": misc,
            "exp_key": None,
            "owner": None,
            "version": 0,
            "book_time": None,
            "refresh_time": None,
        }

    def _misc(self, seen: Observation) -> dict[str, Any]:
        """Return the part of a trial's document that its configuration alone decides."""
        tid = seen.number
        vals = {
            self._labels[name]: [_encode(parameter, seen.config[name])]
            if name in seen.config
            else []
            for name, parameter in axes(self._space)
        }
        idxs = {label: [tid] * len(held) for label, held in vals.items()}
        return {"tid": tid, "cmd": None, "idxs": idxs, "vals": vals}


def _counts(seen: Observation) -> bool:
    return seen.state != "failed" and seen.loss is not None and math.isfinite(seen.loss)


def _result(seen: Observation, worst: float) -> dict[str, Any]:
    if _counts(seen):
        return {"status": "ok", "loss": seen.loss}
    if seen.state == "running" and seen.loss is None:
        return {"status": "ok", "loss": worst}
    return {"status": "fail"}


def _kind(parameter: SearchParameter) -> tuple[str, int]:
    """Return the axis that hyperopt sees: unordered, evenly spaced levels, or [0, 1]."""
    if isinstance(parameter, ChoiceParameter):
        return "choice", parameter.cardinality
    if isinstance(parameter, Integer | Quantised) and not isinstance(parameter, LogInteger):
        return "levels", parameter.cardinality
    return "unit", 0


def _shape(space: Space) -> Shape:
    """Return a space as hyperopt sees it: for each axis its kind, its levels, its sub-spaces."""
    return tuple((*_kind(p), _below(p)) for _, p in space)


def _below(parameter: SearchParameter) -> tuple[Shape, ...]:
    if not isinstance(parameter, ChoiceParameter) or not is_branching(parameter):
        return ()
    return tuple(_shape(space) for space in parameter.spaces)


@functools.lru_cache(maxsize=64)
def _domain(shape: Shape) -> Any:  # noqa: ANN401 - hyperopt is untyped
    from hyperopt.base import Domain

    return Domain(_never_called, _nodes(shape, itertools.count()))


def _nodes(shape: Shape, numbers: Iterator[int]) -> dict[str, Any]:
    """Return hyperopt's own nodes by label, numbered in the order of `axes`."""
    from hyperopt import hp

    nodes: dict[str, Any] = {}
    for kind, levels, below in shape:
        label = f"p{next(numbers)}"
        if below:
            nodes[label] = hp.choice(label, [_nodes(part, numbers) for part in below])
        elif kind == "choice":
            nodes[label] = hp.randint(label, levels)
        elif kind == "levels":
            nodes[label] = hp.quniform(label, -0.5, levels - 0.5, 1)
        else:
            nodes[label] = hp.uniform(label, 0.0, 1.0)
    return nodes


def _never_called(_config: object) -> float:
    raise RuntimeError("hyperopt only suggests; it runs nothing")


def _encode(parameter: SearchParameter, value: Any) -> float | int:  # noqa: ANN401 - a Value
    kind, _ = _kind(parameter)
    if kind == "unit":
        return parameter.to_unit(value)
    index = cast(Discrete, parameter).index_of(value)
    return index if kind == "choice" else float(index)


def _decode(parameter: SearchParameter, drawn: float) -> Any:  # noqa: ANN401 - a Value
    kind, levels = _kind(parameter)
    if kind == "unit":
        return parameter.from_unit(drawn)
    return cast(Discrete, parameter).at(min(max(round(drawn), 0), levels - 1))
