"""Search algorithms: grid, random and TPE behind one interface (`interface.Sampler`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes_ops.search.constraint import Constraint
    from hermes_ops.search.interface import Sampler
    from hermes_ops.search.space import Space

ALGORITHMS = ("grid", "random", "tpe")


def make_sampler(  # noqa: PLR0917 - each is one key of the sweep file
    algorithm: str,
    space: Space,
    seed: int,
    startup_trials: int = 5,
    points_to_evaluate: Sequence[Mapping[str, object]] = (),
    max_trials: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> Sampler:
    """The sampler of a sweep, for trials 0 to `max_trials` - 1 (None: without a limit).

    The points to evaluate are the first trials of every algorithm; for TPE they count among its
    start-up trials. Every configuration satisfies the constraints. Raises ValueError for an
    algorithm, a point or constraints that the sweep model refuses.
    """
    from hermes_ops.search.feasible import Feasible
    from hermes_ops.search.grid import GridSampler
    from hermes_ops.search.known import KnownFirst, Limited
    from hermes_ops.search.random import RandomSampler
    from hermes_ops.search.tpe import TpeSampler

    feasible = Feasible(space, tuple(constraints))
    sampler: Sampler
    points = tuple(feasible.canonical(point) for point in points_to_evaluate)
    if algorithm == "grid":
        sampler = GridSampler(feasible, points)
    elif algorithm == "random":
        sampler = KnownFirst(RandomSampler(feasible, seed, points), points)
    elif algorithm == "tpe":
        sampler = KnownFirst(TpeSampler(feasible, seed, startup_trials, points), points)
    else:
        raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    return sampler if max_trials is None else Limited(sampler, max_trials)
