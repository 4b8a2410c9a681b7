"""The tree-structured Parzen estimator, by hyperopt, asked one trial at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from hermes_ops.search.interface import Observation
from hermes_ops.search.random import RandomSampler, seed_of
from hermes_ops.search.space import (
    Choice,
    Config,
    Discrete,
    Integer,
    LogInteger,
    Parameter,
    Quantised,
    Space,
)


class TpeSampler:
    """Draw start-up trials at random, then where good trials are dense and bad ones are not.

    Each question builds hyperopt's whole memory anew from the history, so nothing is kept here.
    Trials in flight enter with their loss so far; those without one enter with the worst loss seen
    (a constant liar), so that their neighbourhood is not tried a second time meanwhile. Failed
    trials enter as failures, behind every other. While no loss at all is known, trials are random.

    hyperopt sees axes named p0, p1, ... and numbers, never a user's text.

    Source: Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011, section 4;
    the constant liar: Ginsbourger et al., "Kriging is well-suited to parallelize optimization".
    """

    size = None

    def __init__(self, space: Space, seed: int, startup_trials: int) -> None:
        """`startup_trials`: trials of a lower number are drawn at random."""
        self._space = space
        self._seed = seed
        self._startup_trials = startup_trials
        self._random = RandomSampler(space, seed)

    def exhausted(self, number: int) -> bool:  # noqa: ARG002 - interface
        """Never."""
        return False

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """A random draw during start-up, TPE's suggestion afterwards."""
        others = sorted((o for o in history if o.number != number), key=lambda o: o.number)
        losses = [o.loss for o in others if o.loss is not None and _counts(o)]
        if number < self._startup_trials or not losses:
            return self._random.ask(number, history)
        return self._suggest(number, others, max(losses))

    def _suggest(self, number: int, history: Sequence[Observation], worst: float) -> Config:
        from hyperopt import tpe
        from hyperopt.base import trials_from_docs

        domain = _domain(tuple(_kind(parameter) for _, parameter in self._space))
        docs = [self._document(o, worst) for o in history]
        suggestions = tpe.suggest(
            [number],
            domain,
            trials_from_docs(docs, validate=False),
            seed_of(self._seed, number),
            n_startup_jobs=0,
            verbose=False,
        )
        drawn = suggestions[0]["misc"]["vals"]
        return {
            name: _decode(parameter, float(drawn[f"p{axis}"][0]))
            for axis, (name, parameter) in enumerate(self._space)
        }

    def _document(self, seen: Observation, worst: float) -> dict[str, Any]:
        tid = seen.number
        vals = {
            f"p{axis}": [_encode(parameter, seen.config[name])]
            for axis, (name, parameter) in enumerate(self._space)
        }
        return {
            "state": 2,  # hyperopt's JOB_STATE_DONE: provisional losses are told as results
            "tid": tid,
            "spec": None,
            "result": _result(seen, worst),
            "misc": {"tid": tid, "cmd": None, "idxs": {k: [tid] for k in vals}, "vals": vals},
            "exp_key": None,
            "owner": None,
            "version": 0,
            "book_time": None,
            "refresh_time": None,
        }


def _counts(seen: Observation) -> bool:
    return seen.state != "failed" and seen.loss is not None and math.isfinite(seen.loss)


def _result(seen: Observation, worst: float) -> dict[str, Any]:
    if _counts(seen):
        return {"status": "ok", "loss": seen.loss}
    if seen.state == "running" and seen.loss is None:
        return {"status": "ok", "loss": worst}
    return {"status": "fail"}


def _kind(parameter: Parameter) -> tuple[str, int]:
    """The axis that hyperopt sees: unordered, evenly spaced levels, or the unit interval."""
    if isinstance(parameter, Choice):
        return "choice", parameter.cardinality
    if isinstance(parameter, Integer | Quantised) and not isinstance(parameter, LogInteger):
        return "levels", parameter.cardinality
    return "unit", 0


@functools.lru_cache(maxsize=64)
def _domain(kinds: tuple[tuple[str, int], ...]) -> Any:  # noqa: ANN401 - hyperopt is untyped
    from hyperopt import hp
    from hyperopt.base import Domain

    def axes() -> Iterable[tuple[str, Any]]:
        for axis, (kind, levels) in enumerate(kinds):
            label = f"p{axis}"
            if kind == "choice":
                yield label, hp.randint(label, levels)
            elif kind == "levels":
                yield label, hp.quniform(label, -0.5, levels - 0.5, 1)
            else:
                yield label, hp.uniform(label, 0.0, 1.0)

    return Domain(_never_called, dict(axes()))


def _never_called(_config: object) -> float:
    raise RuntimeError("hyperopt only suggests; it runs nothing")


def _encode(parameter: Parameter, value: Any) -> float | int:  # noqa: ANN401 - a Value
    kind, _ = _kind(parameter)
    if kind == "unit":
        return parameter.to_unit(value)
    index = cast(Discrete, parameter).index_of(value)
    return index if kind == "choice" else float(index)


def _decode(parameter: Parameter, drawn: float) -> Any:  # noqa: ANN401 - a Value
    kind, levels = _kind(parameter)
    if kind == "unit":
        return parameter.from_unit(drawn)
    return cast(Discrete, parameter).at(min(max(round(drawn), 0), levels - 1))
