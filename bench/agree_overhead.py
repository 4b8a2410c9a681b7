"""The share of a training step that the look for an agreed stop takes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.horovod_env import VARIABLES, interpreter
from bench.measure import QUICK, SCRIPTS, Figures, environment, figures, timed
from bench.trial import TIMEOUT_S, SupervisedTrial

WORKERS = 2
EPOCHS = 2 if QUICK else 30
STEPS = 40 if QUICK else 200
WARM_UP = 2
"""The first epochs are not measured: the step is traced, and the processor wakes up."""


def run() -> Figures:
    """Measure a trial half of whose steps are without the agreement, in turns."""
    with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
        trial = SupervisedTrial(Path(folder) / "trial")
        guard = [sys.executable, "-P", "-m", "hermes_ops.trial", "--dir", trial.folder]
        options = ["--epoch", 1, "--objective", "loss", "--workers", WORKERS]
        script = [SCRIPTS / "agree.py", "--epochs", WARM_UP + EPOCHS, "--steps", STEPS]
        command = [*guard, *options, "--", interpreter(), *script]
        timed(command, environment(**VARIABLES), TIMEOUT_S)
        trial.check_finished()
        stamps = trial.stamps[WARM_UP:]
    return {
        "with_step_ms": figures(1e3 * stamp["with_s"] for stamp in stamps),
        "without_step_ms": figures(1e3 * stamp["without_s"] for stamp in stamps),
        "look_us": figures((1e6 * stamp["look_s"] for stamp in stamps), 1),
        "ratio": figures(stamp["with_s"] / stamp["without_s"] for stamp in stamps),
        "target_ratio_median": 1.01,
        "workers": WORKERS,
        "steps_per_epoch": STEPS,
    }
