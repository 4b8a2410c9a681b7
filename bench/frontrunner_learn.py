"""Learn the correction of chances that `frontrunner` ships, from recorded tasks.

`python -m bench.frontrunner_learn` writes hermes_ops/policies/frontrunner/correction.json. It
maximises the likelihood of the trial that ends as the best, in two kinds of states of the training
tasks and of those that were known before the split: random ones (`random_states`), and, in rounds,
those into which the policy itself gets with what it has learnt so far, as it is most wrong where it
goes (DAgger, Ross et al., AISTATS 2011). Each task counts the same, and so does each kind. The
prior over configurations is left out there (WITHOUT_PRIOR), so that what is learnt holds in spaces
of which it knows nothing.

`--without TASK,... --into FILE` learns from the others: how good the correction is for a task that
it has not seen is what `bench.frontrunner` and `bench.frontrunner_chances` print, with `--tasks
TASK,...` and the variant `frontrunner:correction.FILE="FILE"` (the quotes belong to it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from bench.curve_tasks import KNOWN, split, tasks
from bench.frontrunner import TRIALS, Variant, dataset, until_best_s
from bench.frontrunner_chances import NO_PRIOR, State, random_states
from hermes_ops.core.model import Job, Plan, Policy, Snapshot
from hermes_ops.policies import make_policy
from hermes_ops.policies.frontrunner import contenders
from hermes_ops.policies.frontrunner.correction import (
    EVIDENCE,
    FILE,
    ChanceCorrection,
    evidence,
)
from hermes_ops.policies.frontrunner.forecast import estimate_sweep, is_timed
from hermes_ops.policies.frontrunner.table import tabulate
from hermes_ops.simulator.curves import CurveDataset, sample
from hermes_ops.simulator.metrics import best_work
from hermes_ops.simulator.workload import Costs

Floats = NDArray[np.float64]
FIRST_SEED = 5_000  # sweeps of other seeds than those of the measurements
HIDDEN = 6
PENALTY = 0.003  # of the squares of the weights, a task's mean nats being 1
SMALL = 24  # trials of each fourth sweep
SHORTEST = 12  # epochs of a sweep that is cut off
ITERATIONS = 200
WITHOUT_PRIOR = Variant.parse(f"frontrunner:{NO_PRIOR}")


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """S states of at most N trials: `evidence[S, N, F]`, `chance[S, N]`, `best[S]`, `weight[S]`."""

    evidence: Floats
    chance: Floats
    best: NDArray[np.intp]
    weight: Floats

    @classmethod
    def of(cls, states: Sequence[State]) -> Examples:
        """Return the examples of these states, together of weight 1."""
        width = len(EVIDENCE)
        found = cls(
            np.zeros((len(states), TRIALS, width)),
            np.zeros((len(states), TRIALS)),
            np.array([state.best for state in states]),
            np.full(len(states), 1 / len(states)),
        )
        with WITHOUT_PRIOR.applied():
            for number, state in enumerate(states):
                table, count = state.table, state.table.trial_count
                positions = estimate_sweep(table).at_the_end(table.over)
                found.chance[number, :count] = positions.chance
                found.evidence[number, :count] = evidence(table, positions)
        return found

    @classmethod
    def together(cls, parts: Sequence[Examples]) -> Examples:
        """Return all examples, together of weight 1."""
        columns = zip(*((p.evidence, p.chance, p.best, p.weight) for p in parts), strict=True)
        inputs, chance, best, weight = (np.concatenate(column) for column in columns)
        return cls(inputs, chance, best, weight / len(parts))


def states_at_random(curves: CurveDataset, sweeps: int, each: int) -> Iterator[State]:
    """Yield random states; each second sweep ends at an earlier epoch, each fourth is small."""
    for number in range(sweeps):
        seed = FIRST_SEED + number
        epochs = curves.epochs
        if number % 2:
            shortest = min(SHORTEST, epochs)
            epochs = int(np.random.default_rng(seed).integers(shortest, epochs + 1))
        shorter = replace(
            curves, val_loss=curves.val_loss[:, :epochs], elapsed_s=curves.elapsed_s[:, :epochs]
        )
        trials = SMALL if number % 4 == 3 else TRIALS
        if np.isfinite(shorter.val_loss[:, -1]).any():
            yield from random_states(shorter, seed, each, trials)


class _Recorder:
    """A policy that keeps what it was asked."""

    def __init__(self, policy: Policy[Any]) -> None:
        self.name, self.preempts = policy.name, policy.preempts
        self.initial, self._policy = policy.initial, policy
        self.snapshots: list[Snapshot] = []

    def decide(self, snapshot: Snapshot, memory: object) -> tuple[Plan, object]:
        """Decide as the policy does."""
        self.snapshots.append(snapshot)
        plan, after = self._policy.decide(snapshot, memory)
        return plan, after


def states_of_policy(task: str, sweeps: int, each: int, correction: Path) -> Iterator[State]:
    """Yield states of simulated sweeps under the policy with this correction.

    Each third sweep has an earlier one, each fourth is small.
    """
    for seed in range(FIRST_SEED, FIRST_SEED + sweeps):
        trials = SMALL if seed % 4 == 3 else TRIALS
        prior_sweeps = int(seed % 3 == 2)
        workload, prior = sample(
            dataset(task), trials, seed, prior_sweeps=prior_sweeps, costs=Costs()
        )
        best = best_work(workload)
        if best is None:
            continue
        recorder = _Recorder(make_policy("frontrunner", {}, {"prior": prior}))
        changes = (("correction.FILE", str(correction)), *WITHOUT_PRIOR.changes)
        with Variant("frontrunner", changes).applied():
            until_best_s(workload, recorder)
        chosen = np.random.default_rng(seed).permutation(len(recorder.snapshots))[:each]
        for number in np.sort(chosen):
            jobs: Sequence[Job] = contenders(recorder.snapshots[number].jobs)
            row = next((row for row, job in enumerate(jobs) if job.id == best.id), None)
            table = tabulate(jobs, prior)
            if row is not None and is_timed(table) and not table.over[row]:
                yield State(table, row)


def learn(examples: Examples, seed: int = 0) -> ChanceCorrection:
    """Return the correction with the largest likelihood less the penalty."""
    can_win = examples.chance > 0
    seen = examples.evidence[can_win]
    center, spread = seen.mean(axis=0), np.maximum(seen.std(axis=0), 1e-6)
    width = len(center)
    first = np.zeros(width + width * HIDDEN + 2 * HIDDEN)
    first[width : width + width * HIDDEN] = np.random.default_rng(seed).normal(
        scale=0.3, size=width * HIDDEN
    )

    def unpacked(numbers: Floats) -> ChanceCorrection:
        linear, hidden, bias, output = np.split(numbers, np.cumsum([width, width * HIDDEN, HIDDEN]))
        return ChanceCorrection(center, spread, linear, hidden.reshape(width, HIDDEN), bias, output)

    inputs = unpacked(first).standardised(examples.evidence)

    def loss(numbers: Floats) -> tuple[float, Floats]:
        return mean_nats(unpacked(numbers), inputs, examples)

    found = minimize(loss, first, jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS})
    return unpacked(found.x)


def mean_nats(
    correction: ChanceCorrection, inputs: Floats, examples: Examples
) -> tuple[float, Floats]:
    """Return the mean nats of the best trial and the penalty, with the gradient."""
    rows, can_win = np.arange(len(inputs)), examples.chance > 0
    units = np.tanh(inputs @ correction.hidden + correction.bias)
    log_chance = np.log(np.where(can_win, examples.chance, 1.0))
    log_chance = log_chance + inputs @ correction.linear + units @ correction.output
    log_chance = np.where(can_win, log_chance, -np.inf)
    log_chance -= log_chance.max(axis=1, keepdims=True)
    weights = np.exp(log_chance)
    total = weights.sum(axis=1)
    nats = np.log(total) - log_chance[rows, examples.best]
    change = weights / total[:, None]
    change[rows, examples.best] -= 1
    change *= examples.weight[:, None]
    by_trial, by_unit = change.reshape(-1), units.reshape(-1, units.shape[-1])
    of_trials = inputs.reshape(-1, inputs.shape[-1])
    through = by_trial[:, None] * correction.output * (1 - by_unit**2)
    gradients = (
        (of_trials.T @ by_trial, correction.linear),
        ((of_trials.T @ through).ravel(), correction.hidden.ravel()),
        (through.sum(axis=0), 0.0),
        (by_unit.T @ by_trial, correction.output),
    )
    penalised = (correction.linear, correction.hidden, correction.output)
    penalty = PENALTY * sum(float((part**2).sum()) for part in penalised)
    gradient = np.concatenate([part + 2 * PENALTY * of for part, of in gradients])
    return float(examples.weight @ nats) + penalty, gradient


def main(arguments: Sequence[str]) -> int:
    """Learn, and write the file."""
    training, _ = split(tasks())
    parser = argparse.ArgumentParser(prog="bench.frontrunner_learn", description=__doc__)
    parser.add_argument("--without", default="", metavar="TASK[,...]")
    parser.add_argument("--into", type=Path, default=Path(FILE))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sweeps", type=int, default=24, help="of each task in a round")
    parser.add_argument("--states", type=int, default=10, help="of each sweep")
    asked = parser.parse_args(arguments)
    left_out = set(filter(None, asked.without.split(",")))
    names = [name for name in (*training, *KNOWN) if name not in left_out]
    facts = {
        "made_by": "bench/frontrunner_learn.py",
        "tasks": names,
        "licence": "LCBench (YAHPO Gym), TaskSet and nb301: Apache 2.0",
        "rounds": asked.rounds,
        "sweeps": asked.sweeps,
        "states": asked.states,
        "evidence": EVIDENCE,
    }
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        of_random = partial(_at_random, sweeps=4 * asked.sweeps, each=asked.states // 2)
        at_random, of_policy = list(pool.map(of_random, names)), list[Examples]()
        for number in range(asked.rounds + 1):
            if number:
                of_round = partial(_of_policy, asked.sweeps, asked.states, asked.into)
                of_policy += pool.map(of_round, names)
            correction = _learnt(at_random, of_policy)
            asked.into.write_text(json.dumps({**facts, **correction.to_json()}, indent=1) + "\n")
            print(f"round {number}: {asked.into}", file=sys.stderr, flush=True)
    return 0


def _at_random(task: str, sweeps: int, each: int) -> Examples:
    return Examples.of([*states_at_random(dataset(task), sweeps, each)])


def _of_policy(sweeps: int, each: int, correction: Path, task: str) -> Examples:
    return Examples.of([*states_of_policy(task, sweeps, each, correction)])


def _learnt(*kinds: Sequence[Examples]) -> ChanceCorrection:
    """Learn from the kinds of states of which there are any."""
    return learn(Examples.together([Examples.together(kind) for kind in kinds if kind]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
