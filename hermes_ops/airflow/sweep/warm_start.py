"""The best configurations of earlier sweeps, tried first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from math import inf, isfinite
from typing import TYPE_CHECKING

from hermes_ops.config import SweepConfig, parse
from hermes_ops.core.history import PastTrial
from hermes_ops.search.space import Config
from hermes_ops.search.tree import axes
from hermes_ops.tracking.history import past_trials

if TYPE_CHECKING:
    from hermes_ops.tracking import Tracker


def warmed(config: SweepConfig, tracker: Tracker, say: Callable[[str], None]) -> SweepConfig:
    """The sweep with its `search.warm_start` best past configurations behind its known ones.

    Those of ended sweeps of the same name whose parameters and objective are the same; what the
    space or its constraints do not allow any more, or misses a bound of a metric, is left out.
    Raises Unavailable.
    """
    search, objective = config.search, config.objective
    if not search.warm_start:
        return config
    names = tuple(search.space)
    every = {name for name, _ in axes(search.to_space())}
    past = past_trials(
        tracker,
        config.name,
        metric=objective.metric,
        sign=objective.sign,
        names=names,
        sometimes=tuple(every.difference(names)),
        total_steps=config.budget.max_epochs,
        keeping=config.secondary,
    )
    known = [dict(point) for point in search.points_to_evaluate]
    room = min(search.warm_start, search.max_trials - len(known))
    fresh = [c for c in best_first(past, config) if c not in known][: max(0, room)]
    say(f"{len(fresh)} configurations of earlier sweeps are tried first: {fresh}")
    document = json.loads(config.to_json())
    document["search"]["points_to_evaluate"] = [*known, *fresh]
    return parse(document, source="the best of earlier sweeps", base=None)


def best_first(past: Iterable[PastTrial], config: SweepConfig) -> list[Config]:
    """The configurations of past trials that the search may have, each once, the best first."""
    feasible = config.search.to_feasible()

    def allowed() -> Iterator[tuple[float, Config]]:
        for trial in past:
            try:
                yield _best(trial), feasible.canonical(dict(trial.configuration))
            except (KeyError, ValueError):  # of another space, or excluded by a constraint
                continue

    found: list[Config] = []
    for _, candidate in sorted(allowed(), key=lambda pair: pair[0]):
        if candidate not in found:
            found.append(candidate)
    return found


def _best(trial: PastTrial) -> float:
    return min((p.loss for p in trial.curve if isfinite(p.loss)), default=inf)
