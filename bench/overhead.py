"""The overhead of `hermes-trial` for a training run that is never stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.measure import QUICK, Figures, environment, figures, timed
from bench.trial import TIMEOUT_S, SupervisedTrial, calibrated, network, plain

TARGET_S = 3.0 if QUICK else 70.0
EPOCHS = 3 if QUICK else 30
PAIRS = 1 if QUICK else 5
BATCH = 64
NETWORK = "small"


def run() -> Figures:
    """Measure alternating pairs of the same run, plain and with a checkpoint each epoch."""
    env = environment()
    with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
        place = Path(folder)
        steps = calibrated(NETWORK, EPOCHS, BATCH, TARGET_S, env, place / "timings.json")
        script = network(NETWORK, EPOCHS, steps, BATCH)
        plain_s, hermes_s, checkpoints = [], [], []
        for pair in range(PAIRS):
            trial = SupervisedTrial(place / f"trial-{pair}")
            if pair % 2 == 0:
                plain_s.append(plain(script, env))
            hermes_s.append(_under_hermes(trial, script, env))
            if pair % 2 == 1:
                plain_s.append(plain(script, env))
            checkpoints.append(len(trial.events("checkpoint")))
    ratios = [ours / theirs for ours, theirs in zip(hermes_s, plain_s, strict=True)]
    return {
        "plain_s": figures(plain_s),
        "hermes_s": figures(hermes_s),
        "ratio": figures(ratios),
        "target_ratio_median": 1.02,
        "epochs": EPOCHS,
        "steps_per_epoch": steps,
        "checkpoints_per_run": min(checkpoints),
    }


def _under_hermes(trial: SupervisedTrial, script: list[object], env: Mapping[str, str]) -> float:
    took_s = timed(trial.command(1, script), env, TIMEOUT_S)
    trial.check_finished()
    return took_s
