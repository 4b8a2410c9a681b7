"""How good the chances of `frontrunner` are: the log-likelihood of the trial that ends as the best.

`python -m bench.frontrunner_chances` draws sweeps of recorded tasks, trains their trials to random
depths (`random_states`), asks for the chances there, and prints by how many nats a variant loses
to the first one: the mean over tasks, with its interval by a paired bootstrap over tasks and
states. It costs a thousandth of the simulations of `bench.frontrunner`; a variant that is better
here must be confirmed there. `--changes` names the files of what was learnt from other tasks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.curve_tasks import KNOWN, split, tasks
from bench.frontrunner import TRIALS, Variant, dataset, interval_of_mean
from hermes_ops.policies.frontrunner.forecast import forecast_sweep
from hermes_ops.policies.frontrunner.table import FACTOR, LAST_SHARE, CurveTable
from hermes_ops.simulator.curves import CurveDataset

Floats = NDArray[np.float64]
Counts = NDArray[np.intp]
FIRST_SEED = 100  # sweeps of other seeds than those of `bench.frontrunner`
MODEL = "frontrunner:correction.EXTREME=0"
"""The policy with the chances of its model, not corrected by what recorded sweeps have taught."""
NO_PRIOR = "configuration_prior.EXTREME=0"
"""The change with which all configurations score alike."""
ABLATIONS = {
    "one scenario of slow trials": f"{MODEL}:forecast.SCENARIOS=[[0.4,1.0]]",
    "no slowness": f"{MODEL}:forecast.SCENARIOS=[[0.0,1.0]]:forecast.SLOW=0",
    "no error shared by all": f"{MODEL}:forecast.MODEL_ERRORS=[[0.0,1.0]]",
    "no hyper-parameters": f"{MODEL}:forecast.SIGNAL=1e-6",
    "variances as they are": f"{MODEL}:forecast.SURER=1.0",
    "no least chance": f"{MODEL}:forecast.UNSEEN=0",
    "no prior over configurations": f"{MODEL}:{NO_PRIOR}",
}
"""The model without a part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A sweep of which the trials have been trained to some depths; `best` ends as the best."""

    table: CurveTable
    best: int

    @property
    def uniform(self) -> float:
        """The nats of equal chances."""
        return float(np.log((~self.table.over).sum()))


def depths_of(epochs: int) -> tuple[int, ...]:
    """Return the depths at which the policy judges trials of so many epochs."""
    depths = [1]
    while depths[-1] < epochs * LAST_SHARE:
        depths.append(max(depths[-1] + 1, round(depths[-1] * FACTOR)))
    return (*depths[:-1], epochs)


def random_states(
    curves: CurveDataset, seed: int, count: int, trials: int = TRIALS
) -> Iterator[State]:
    """Yield `count` states of the sweep of this seed, in which the best trial has not ended."""
    depths = depths_of(curves.epochs)
    rows = np.random.default_rng(seed).permutation(len(curves))[:trials]
    finite = np.where(np.isfinite(curves.val_loss[rows]), curves.val_loss[rows], np.inf)
    columns = np.array(depths) - 1
    losses = np.minimum.accumulate(finite, axis=1)[:, columns]
    seconds = curves.elapsed_s[rows][:, columns]
    best = int(np.argmin(losses[:, -1]))
    chance = np.random.default_rng((seed, 1))
    steps = random_walk(losses, best, chance)
    configurations = tuple(curves.configuration(int(row)) for row in rows)
    for number in chance.permutation(len(steps))[:count]:
        reached = steps[number]
        seen = np.arange(len(depths)) < reached[:, None]
        known, known_s = np.where(seen, losses, np.nan), np.where(seen, seconds, np.nan)
        over = reached >= len(depths)
        yield State(CurveTable(depths, known, known_s, reached, over, configurations), best)


def random_walk(losses: Floats, best: int, chance: np.random.Generator) -> list[Counts]:
    """Return the depths that the trials have reached, step by step, until the best trial ends.

    Each step trains one trial to its next depth: the next new one, or a begun one, the sooner the
    better its rank there is. How much the rank counts is drawn for each walk, so that the states
    are those of bold and of careful policies. The first step has trained one trial.
    """
    trials, stages = losses.shape
    reached = np.zeros(trials, np.intp)
    by_rank, openness, momentum = chance.uniform((0.7, -1.0, 0.0), (3.5, 1.5, 0.6))
    steps: list[Counts] = []
    while reached[best] < stages:
        depth = np.maximum(reached - 1, 0)
        compared = reached[None, :] > depth[:, None]
        own = losses[np.arange(trials), depth][:, None]
        better = (compared & (own > losses[:, depth].T)).sum(axis=1)
        share = (better + 0.5) / np.maximum(compared.sum(axis=1), 1)
        score = np.where(reached > 0, momentum * reached - by_rank * np.log(8 * share), -np.inf)
        new = int((reached > 0).sum())  # trials begin in their order
        if new < trials:
            score[new] = openness
        score = np.where(reached >= stages, -np.inf, score)
        reached[np.argmax(score + 0.7 * chance.gumbel(size=trials))] += 1
        steps.append(reached.copy())
    return steps[:-1]


def states_of(task: str, seeds: Iterable[int], each: int) -> list[State]:
    """Return `each` random states of the sweep of each seed."""
    return [state for seed in seeds for state in random_states(dataset(task), seed, each)]


def nats(variant: Variant, states: Sequence[State]) -> list[float]:
    """Return the negative log-likelihoods of the best trials by the variant's chances."""
    with variant.applied():
        chances = [forecast_sweep(state.table).chance[state.best] for state in states]
    return [-float(np.log(max(chance, 1e-9))) for chance in chances]


def scores(
    variants: Sequence[Variant], names: Sequence[str], seeds: int, each: int
) -> dict[Variant | None, Floats]:
    """Return tasks x states nats of each variant; None: those of equal chances."""
    found: dict[Variant | None, list[list[float]]] = {v: [] for v in (None, *variants)}
    for task in names:
        states = states_of(task, range(FIRST_SEED, FIRST_SEED + seeds), each)
        found[None].append([state.uniform for state in states])
        for variant in variants:
            found[variant].append(nats(variant, states))
        print(task, file=sys.stderr, flush=True)
    return {key: np.array(values) for key, values in found.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.frontrunner_chances", description=__doc__)
    parser.add_argument("variants", nargs="*", help="default: the model and its ablations")
    parser.add_argument("--side", choices=("training", "validation", "known"), default="training")
    parser.add_argument("--tasks", help="names, separated by commas, in place of a side")
    parser.add_argument("--changes", default="", help="constants of all variants, as in one")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--states", type=int, default=1, help="of each sweep")
    asked = parser.parse_args(arguments)
    training, validation = split(tasks())
    sides = {"training": training, "validation": validation, "known": KNOWN}
    names = tuple(asked.tasks.split(",")) if asked.tasks else sides[asked.side]
    labels = {text: text for text in asked.variants} or {
        "the model": MODEL,
        **ABLATIONS,
        "the model, corrected": "frontrunner",
    }
    changes = f":{asked.changes}" if asked.changes else ""
    variants = {label: Variant.parse(f"{text}{changes}") for label, text in labels.items()}
    found = scores(list(variants.values()), names, asked.seeds, asked.states)
    first = found[next(iter(variants.values()))]
    print(f"{len(names)} tasks x {first.shape[1]} states; mean nats, and above")
    print(f"the first variant; equal chances: {found[None].mean():.3f}")
    for label, variant in variants.items():
        mean, low, high = interval_of_mean(found[variant] - first)
        print(f"{label:30} {found[variant].mean():6.3f} {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
