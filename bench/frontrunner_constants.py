"""Learn the constants of the model of `frontrunner` from recorded tasks.

`python -m bench.frontrunner_constants` changes one constant after the other, by a factor up or
down, and keeps what makes the trials that end as the best more likely: in random states of the
training tasks and the known ones (`random_states`), each task counting the same. This is coordinate
ascent, with each of FACTORS in turn. The chances are those of the model without the correction and
the prior over configurations, which are learnt on top of it. It prints the changed constants, as a
variant of `bench.frontrunner`, and what they are worth for the tasks of `--without`, from which
nothing is learnt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.curve_tasks import KNOWN, split, tasks
from bench.frontrunner import PACKAGE, Variant, interval_of_mean
from bench.frontrunner_chances import MODEL, NO_PRIOR, State, nats, states_of

Floats = NDArray[np.float64]
Place = tuple[int, ...]  # of a number in a constant of tuples
FIRST_SEED = 20_000  # sweeps of other seeds than those of other measurements
FACTORS = (1.5, 1.25)
LEAST_GAIN = 0.002  # nats that a change must bring
LEARNT = (
    "table.WARP",
    "configurations.WIDTHS",
    "regression.FIRST_NOISE",
    "regression.GROWTH",
    "regression.NOISE_RANGE",
    "regression.PRIOR_WEIGHT",
    "regression.LEVEL_EFFECT",
    "regression.SLOPE_EFFECT",
    "regression.SLOW_EFFECT",
    "regression.EFFECT_SDS",
    "forecast.SPREAD_PRIOR",
    "forecast.MODEL_ERRORS",
    "forecast.SURER",
    "forecast.UNSEEN",
    "forecast.SIGNAL",
    "forecast.NUGGET",
    "forecast.LEAST_BETWEEN",
    "forecast.SPREAD_WEIGHT",
    "forecast.SLOW",
)


def main(arguments: Sequence[str]) -> int:
    """Learn, and print."""
    training, _ = split(tasks())
    parser = argparse.ArgumentParser(prog="bench.frontrunner_constants", description=__doc__)
    parser.add_argument("--without", default="", metavar="TASK[,...]")
    parser.add_argument("--sweeps", type=int, default=12, help="of each task")
    parser.add_argument("--states", type=int, default=2, help="of each sweep")
    asked = parser.parse_args(arguments)
    left_out = tuple(filter(None, asked.without.split(",")))
    names = [name for name in (*training, *KNOWN) if name not in left_out]
    seeds = range(FIRST_SEED, FIRST_SEED + asked.sweeps)
    states = [states_of(name, seeds, asked.states) for name in names]
    first = {name: constant(name) for name in LEARNT}
    found = climb(states, first)
    changed = {name: value for name, value in found.items() if value != first[name]}
    print(Variant("frontrunner", tuple(changed.items())))
    others = [states_of(name, seeds, asked.states) for name in left_out]
    for label, of in (("learnt from", states), ("the others", others)):
        if of:
            mean, low, high = interval_of_mean(nats_of(of, found) - nats_of(of, first))
            print(f"{label:12} {mean:+.3f} nats ({low:+.3f} to {high:+.3f})")
    return 0


def constant(name: str) -> Any:  # noqa: ANN401 - a number, or tuples of numbers
    """Return a constant of the package."""
    module, _, own = f"{PACKAGE}.{name}".rpartition(".")
    return getattr(import_module(module), own)


def nats_of(states: Sequence[Sequence[State]], constants: Mapping[str, Any]) -> Floats:
    """Return tasks x states nats of the trials that end as the best."""
    model = Variant.parse(f"{MODEL}:{NO_PRIOR}")
    variant = Variant("frontrunner", (*model.changes, *constants.items()))
    return np.array([nats(variant, of_task) for of_task in states])


def climb(states: Sequence[Sequence[State]], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants that no change of a single number improves, as far as FACTORS reach."""
    best = dict(constants)
    least = float(nats_of(states, best).mean())
    for factor in FACTORS:
        numbers = [(name, place) for name, value in constants.items() for place in places(value)]
        for name, place in numbers:
            for by in (factor, 1 / factor):
                tried = {**best, name: multiplied(best[name], place, by)}
                found = float(nats_of(states, tried).mean())
                if found < least - LEAST_GAIN:
                    best, least = tried, found
                    print(f"{least:.4f} {name} {best[name]}", file=sys.stderr, flush=True)
                    break
    return best


def places(value: Any) -> Iterator[Place]:  # noqa: ANN401 - a number, or tuples of numbers
    """Yield the places of all numbers but 0."""
    if isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from ((number, *place) for place in places(part))
    elif value:
        yield ()


def multiplied(value: Any, place: Place, factor: float) -> Any:  # noqa: ANN401 - as above
    """Return the value with the number at this place multiplied, to three digits."""
    if not place:
        return float(f"{value * factor:.3g}")
    number, *inner = place
    parts = list(value)
    parts[number] = multiplied(parts[number], tuple(inner), factor)
    return tuple(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
