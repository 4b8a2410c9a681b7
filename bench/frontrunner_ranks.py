"""How far behind the trial that ends as the best is at each depth, in sweeps of recorded tasks.

`python -m bench.frontrunner_ranks` prints, for each task, how many of 64 trials are ahead of it
when all have trained as far: the median over sweeps, and the 90th percentile. A policy that judges
by losses so far loses on tasks where that number is large.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.curve_tasks import KNOWN, split, tasks
from bench.frontrunner import TRIALS, dataset
from bench.frontrunner_chances import depths_of
from hermes_ops.simulator.curves import CurveDataset
from hermes_ops.simulator.tables import markdown

PERCENTILES = (50, 90)


def trials_ahead(curves: CurveDataset, depths: Sequence[int], sweeps: int) -> NDArray[np.intp]:
    """Return sweeps x depths: the trials with a lower loss so far than the one that ends best.

    The sweeps are those of `bench.frontrunner` with the seeds from 0 on.
    """
    losses = np.where(np.isfinite(curves.val_loss), curves.val_loss, np.inf)
    lowest = np.minimum.accumulate(losses, axis=1)[:, np.array(depths) - 1]
    ahead = []
    for seed in range(sweeps):
        sweep = lowest[np.random.default_rng(seed).permutation(len(curves))[:TRIALS]]
        best = sweep[np.argmin(sweep[:, -1])]
        ahead.append((sweep < best).sum(axis=0))
    return np.array(ahead)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.frontrunner_ranks", description=__doc__)
    parser.add_argument("--side", choices=("training", "known"), default="training")
    parser.add_argument("--sweeps", type=int, default=60)
    asked = parser.parse_args(arguments)
    names = KNOWN if asked.side == "known" else split(tasks())[0]
    rows, depths = [], depths_of(dataset(names[0]).epochs)
    for name in names:
        curves = dataset(name)
        ahead = trials_ahead(curves, depths_of(curves.epochs), asked.sweeps)
        figures = np.percentile(ahead, PERCENTILES, axis=0).astype(int).T
        rows.append((name, *(f"{median}, {most}" for median, most in figures[: len(depths) - 1])))
    print(markdown(("task", *(f"{depth} epochs" for depth in depths[:-1])), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
