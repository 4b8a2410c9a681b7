"""The share of a training step that the look for an agreed stop takes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.horovod_env import VARIABLES, interpreter
from bench.measure import QUICK, SCRIPTS, Figures, NotMeasuredError, environment, figures, timed
from bench.trial import TIMEOUT_S, SupervisedTrial

WORKERS = 2
PAIRS = 2 if QUICK else 30
STEPS = 30 if QUICK else 100
WARM_UP = 2
"""The first pairs are not measured: the step is traced, and the processor wakes up."""


def run() -> Figures:
    """Measure pairs of epochs of one trial, with and without the agreement, in turns."""
    with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
        trial = SupervisedTrial(Path(folder) / "trial")
        guard = [sys.executable, "-P", "-m", "hermes_ops.trial", "--dir", trial.folder]
        options = ["--epoch", 1, "--objective", "loss", "--workers", WORKERS]
        script = [SCRIPTS / "agree.py", "--epochs", 2 * (WARM_UP + PAIRS), "--steps", STEPS]
        command = [*guard, *options, "--", interpreter(), *script]
        timed(command, environment(**VARIABLES), TIMEOUT_S)
        trial.check_finished()
        stamps = trial.stamps[2 * WARM_UP :]
    pairs = [
        {bool(stamp["agrees"]): float(stamp["step_s"]) for stamp in stamps[first : first + 2]}
        for first in range(0, len(stamps), 2)
    ]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise NotMeasuredError(f"epochs with and without the agreement are no pairs: {stamps}")
    return {
        "with_step_ms": figures(1e3 * pair[True] for pair in pairs),
        "without_step_ms": figures(1e3 * pair[False] for pair in pairs),
        "ratio": figures(pair[True] / pair[False] for pair in pairs),
        "target_ratio_median": 1.01,
        "workers": WORKERS,
        "steps_per_epoch": STEPS,
    }
