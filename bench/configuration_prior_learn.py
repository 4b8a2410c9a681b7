"""Learn the prior over configurations that `frontrunner` ships, from recorded tasks.

`python -m bench.configuration_prior_learn` writes
hermes_ops/policies/frontrunner/configuration_prior.json, in some seconds. A small network learns
the normal score of each configuration's final loss within its task, from the training tasks and
those that were known before the split; each task counts the same. To answer for spaces that have
but some of the hyper-parameters, each configuration is also learnt with some of them left out, the
same of all configurations of a task.

`--without TASK,... --into FILE` learns from the others, as in `bench.frontrunner_learn`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from bench.curve_tasks import KNOWN, split, tasks
from bench.frontrunner import dataset
from hermes_ops.policies.frontrunner.configuration_prior import (
    FILE,
    PARAMETERS,
    ConfigurationPrior,
    known_values,
    names_of,
)

Floats = NDArray[np.float64]
EACH = 256  # configurations of a task
HIDDEN = 16
PENALTY = 1.0  # of the squares of the weights
LEFT_OUT = 6  # further copies of each task, with some hyper-parameters left out
KEPT = 0.5  # the share of them that is kept there
ITERATIONS = 400


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A task of which N configurations are known: `values[N, P]`, `scores[N]`, the space's names.

    A score is the normal score of a final loss: its deviation if the ranks were normal.
    """

    values: Floats
    scores: Floats
    names: frozenset[str]


def of_task(task: str) -> Recorded:
    """Return what is recorded of a task."""
    curves = dataset(task)
    finite = np.where(np.isfinite(curves.val_loss), curves.val_loss, np.inf)
    rows = np.random.default_rng(0).permutation(len(curves))[:EACH]
    final_losses = finite[rows].min(axis=1)
    scores = norm.ppf((rankdata(final_losses) - 0.5) / len(rows))
    configurations = [curves.configuration(int(row)) for row in rows]
    return Recorded(known_values(configurations), scores, names_of(configurations))


def learn(parts: Sequence[Recorded], seed: int = 0) -> ConfigurationPrior:
    """Return the prior that explains the scores best, less the penalty."""
    everything = np.concatenate([part.values for part in parts])
    is_seen = ~np.isnan(everything).all(axis=0)
    center, spread = np.zeros(len(is_seen)), np.ones(len(is_seen))
    center[is_seen] = np.nanmean(everything[:, is_seen], axis=0)
    spread[is_seen] = np.nanstd(everything[:, is_seen], axis=0)
    chance = np.random.default_rng(seed)
    rows, targets = list[Floats](), list[Floats]()
    for part in parts:
        for copy in range(1 + LEFT_OUT):
            is_kept = (chance.random(len(center)) < KEPT) | (copy == 0)
            rows.append(np.where(is_kept, part.values, np.nan))
            targets.append(part.scores)
    spaces = frozenset(part.names for part in parts)
    nothing = np.zeros(0)
    blank = ConfigurationPrior(center, spread, nothing, nothing, nothing, spaces)
    network = MLPRegressor(
        hidden_layer_sizes=(HIDDEN,),
        activation="tanh",
        solver="lbfgs",
        alpha=PENALTY,
        max_iter=ITERATIONS,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # that ITERATIONS end it is wanted
        network.fit(blank.inputs(np.concatenate(rows)), np.concatenate(targets))
    hidden, output = network.coefs_
    hidden[np.tile(~is_seen, 2)] = 0.0  # nothing is known of these: they change no score
    return replace(blank, hidden=hidden, bias=network.intercepts_[0], output=output[:, 0])


def write_prior(names: Sequence[str], into: Path) -> None:
    """Learn from these tasks, but for those without a known hyper-parameter; write the file."""
    parts = {name: of_task(name) for name in names}
    known = {name: part for name, part in parts.items() if not np.isnan(part.values).all()}
    facts = {
        "made_by": "bench/configuration_prior_learn.py",
        "tasks": list(known),
        "licence": "LCBench (YAHPO Gym) and TaskSet: Apache 2.0",
        "parameters": PARAMETERS,
    }
    prior = learn(list(known.values()))
    into.write_text(json.dumps({**facts, **prior.to_json()}, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Learn, and write the file."""
    training, _ = split(tasks())
    parser = argparse.ArgumentParser(prog="bench.configuration_prior_learn", description=__doc__)
    parser.add_argument("--without", default="", metavar="TASK[,...]")
    parser.add_argument("--into", type=Path, default=Path(FILE))
    asked = parser.parse_args(arguments)
    left_out = set(filter(None, asked.without.split(",")))
    names = [name for name in (*training, *KNOWN) if name not in left_out]
    write_prior(names, asked.into)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
