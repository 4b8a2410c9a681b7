"""Search algorithms behind one interface (`interface.Sampler`); other packages add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hermes_ops.errors import ConfigError, Problem
from hermes_ops.registry import FactoryRegistry
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible
from hermes_ops.search.interface import Sampler
from hermes_ops.search.samplers import (
    CheckedSampler,
    GridSampler,
    KnownPointsFirst,
    LimitedSampler,
    RandomSampler,
)
from hermes_ops.search.space import Config, Space
from hermes_ops.search.tpe import TpeSampler


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The settings with which a sampler is created."""

    feasible: Feasible
    """The space of the parameters with the constraints between them."""
    seed: int
    """In [0, 2**32): the same seed and results give the same configurations."""
    startup_trials: int
    """How many trials are drawn before results are used, the points included."""
    points: tuple[Config, ...]
    """The configurations of the first trials, each as the space itself would give it."""


SamplerFactory = Callable[[SearchSettings], Sampler]

_BUILT_IN: dict[str, SamplerFactory] = {
    "grid": lambda s: GridSampler(s.feasible, s.points),
    "random": lambda s: RandomSampler(s.feasible, s.seed, s.points),
    "tpe": lambda s: TpeSampler(s.feasible, s.seed, s.startup_trials, s.points),
}
ALGORITHMS = tuple(_BUILT_IN)
"""The built-in ones."""

SAMPLERS = FactoryRegistry("hermes_ops.samplers", _BUILT_IN)


def make_sampler(  # noqa: PLR0917 - each is one key of the sweep file
    algorithm: str,
    space: Space,
    seed: int,
    startup_trials: int = 5,
    points_to_evaluate: Sequence[Mapping[str, object]] = (),
    max_trials: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> Sampler:
    """Return the sampler of a sweep, for trials 0 to `max_trials` - 1 (None: without a limit).

    The points to evaluate are the first trials of every algorithm; for TPE they count among its
    start-up trials. Every configuration satisfies the constraints: the answers of another
    package's sampler are checked. Raises ValueError for an algorithm, a point or constraints that
    the sweep model refuses, ConfigError for a space that another package's sampler refuses.
    """
    if algorithm not in SAMPLERS:
        raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(SAMPLERS)}")
    feasible = Feasible(space, tuple(constraints))
    points = tuple(feasible.canonical(point) for point in points_to_evaluate)
    settings = SearchSettings(feasible, seed, startup_trials, points)
    if algorithm in ALGORITHMS:
        sampler = SAMPLERS[algorithm](settings)
    else:
        sampler = CheckedSampler(_package_sampler(algorithm, settings), algorithm, feasible)
    sampler = KnownPointsFirst(sampler, points)
    return sampler if max_trials is None else LimitedSampler(sampler, max_trials)


def _package_sampler(algorithm: str, settings: SearchSettings) -> Sampler:
    """Return another package's sampler; raise ConfigError with the reason if it cannot be made."""
    factory = SAMPLERS[algorithm]
    try:
        sampler = factory(settings)
        if sampler.size is not None and sampler.size < 1:
            raise ValueError("it has no configuration")
        return sampler
    except Exception as error:  # whatever a package raises
        found = f"the sampler {algorithm!r}, which fails: {type(error).__name__}: {error}"
        fix = "change the sweep as its message says, or correct its package"
        problem = Problem("search.algorithm", found, "a sampler that takes this search", fix)
        raise ConfigError("the sweep", (problem,)) from error
