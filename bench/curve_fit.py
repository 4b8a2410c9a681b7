"""The time of a fit of many learning curves."""

from __future__ import annotations

import random
import time

import numpy as np

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.curve_fit import fit

JOBS = 100 if QUICK else 1_000
POINTS = 50


def run() -> Figures:
    """Measure the CPU seconds of one fit of all curves, in all forms; and of one curve alone."""
    steps = np.arange(1.0, POINTS + 1)
    curves = _curves(steps)
    all_s, one_s = [], []
    for _ in range(1 if QUICK else 7):
        all_s.append(_took_s([steps] * JOBS, curves))
        one_s += [_took_s([steps], [curve]) for curve in curves[:10]]
    return {
        "all_s": figures(all_s),
        "one_ms": figures((took_s * 1000.0 for took_s in one_s), 3),
        "jobs": JOBS,
        "points_a_curve": POINTS,
    }


def _took_s(steps: list[Floats], losses: list[Floats]) -> float:
    started_s = time.process_time()
    fit(steps, losses)
    return time.process_time() - started_s


def _curves(steps: Floats) -> list[Floats]:
    """Draw noisy curves: half fall like 1/k, half exponentially."""
    chance = random.Random(1)
    made: list[Floats] = []
    for number in range(JOBS):
        rate, floor = chance.uniform(0.01, 0.5), chance.uniform(-1.0, 1.0)
        clean = 1 / (rate * steps + 0.5) if number % 2 else 2 * np.exp(-rate * steps)
        noise = np.array([chance.gauss(0.0, 0.01) for _ in steps])
        made.append(clean + floor + noise)
    return made
