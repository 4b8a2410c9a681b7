"""What a deadline is worth to `frontrunner`: the best loss that a sweep has reached by then.

`python -m bench.frontrunner_deadline` cuts recorded sweeps of 64 trials off on 4 GPUs, once a
share of the time that all trials would take has passed. For each share and policy it prints how
many trials of the sweep end better than the best value by then (all where there is none), with a
95 % interval by bootstrap over tasks and seeds. `frontrunner` is run twice: without the deadline
in its jobs, and with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from bench.curve_tasks import split, tasks
from bench.frontrunner import GPUS, TRIALS, Floats, dataset, interval_of_mean
from hermes_ops.core.model import Snapshot
from hermes_ops.loop import run
from hermes_ops.policies import make_policy
from hermes_ops.simulator.cluster import VirtualCluster
from hermes_ops.simulator.curves import sample
from hermes_ops.simulator.engine import layout
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.workload import Costs, Workload

SHARES = (0.05, 0.2)
KNOWING = "frontrunner, with the deadline"
POLICIES = {"fifo": "fifo", "asha": "asha", "frontrunner": "frontrunner", KNOWING: "frontrunner"}


def best_by(workload: Workload, policy: str, deadline_s: float) -> float:
    """Return the lowest loss that is reported until the deadline; inf without any."""
    chosen, cluster = make_policy(policy, {}, {}), VirtualCluster(workload, layout(GPUS))

    def is_done(snapshot: Snapshot) -> bool:
        return cluster.is_over or snapshot.time_s > deadline_s

    run(chosen, cluster, chosen.initial(), is_done)
    seen = (o.loss for o in cluster.journal.observations if o.at_s <= deadline_s)
    return min(filter(isfinite, seen), default=inf)


def better_trials(task: str, seed: int, share: float, switch_s: float) -> dict[str, int]:
    """Return how many trials end better than the best value by the deadline, by policy."""
    drawn, _ = sample(dataset(task), TRIALS, seed, costs=Costs(startup_s=switch_s))
    deadline_s = share * sum(work.seconds for work in drawn.jobs) / int(GPUS)
    told = replace(drawn, jobs=tuple(replace(w, deadline_s=deadline_s) for w in drawn.jobs))
    ends = [lowest_loss(work) for work in drawn.jobs]
    found = {}
    for name, policy in POLICIES.items():
        best = best_by(told if name == KNOWING else drawn, policy, deadline_s)
        found[name] = sum(end < best for end in ends)
    return found


def table(shares: Sequence[float], counts: Mapping[float, Mapping[str, Floats]]) -> Iterator[str]:
    """Yield the lines of the table; `counts` are tasks x seeds by share and policy."""
    yield f"| policy | {' | '.join(f'{100 * share:g} %' for share in shares)} |"
    yield "|---" * (1 + len(shares)) + "|"
    for policy in POLICIES:
        cells = [_cell(counts[share][policy]) for share in shares]
        yield f"| {policy} | {' | '.join(cells)} |"
    gains = [_cell(counts[share]["frontrunner"] - counts[share][KNOWING]) for share in shares]
    yield f"| gain by knowing it | {' | '.join(gains)} |"


def _cell(values: Floats) -> str:
    mean, low, high = interval_of_mean(values)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str]) -> int:
    """Simulate the sweeps, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.frontrunner_deadline", description=__doc__)
    parser.add_argument("--tasks", help="names, separated by commas, in place of the training side")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--switch-cost", type=float, default=0.0, metavar="SECONDS")
    asked = parser.parse_args(arguments)
    names = tuple(asked.tasks.split(",")) if asked.tasks else split(tasks())[0]
    shape = len(names), asked.seeds
    counts = {share: {policy: np.zeros(shape) for policy in POLICIES} for share in SHARES}
    for row, task in enumerate(names):
        for seed in range(asked.seeds):
            for share in SHARES:
                for policy, better in better_trials(task, seed, share, asked.switch_cost).items():
                    counts[share][policy][row, seed] = better
        print(f"{task} is done", file=sys.stderr, flush=True)
    print(f"{len(names)} tasks x {asked.seeds} seeds, switch {asked.switch_cost:g} s")
    print("\n".join(table(SHARES, counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
