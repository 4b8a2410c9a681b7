"""The overhead table of the Hermes paper, on its four networks."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.measure import (
    ONE_CORE,
    QUICK,
    Figures,
    NotMeasuredError,
    await_,
    child,
    environment,
    figures,
    timed,
)
from bench.trial import PREEMPTED, TIMEOUT_S, SupervisedTrial, calibrated, network, plain

# Seconds in the paper's table: plain TensorFlow, under Hermes.
PAPER = {
    "googlenet": (30.12, 32.73),
    "vgg16": (94.26, 97.25),
    "vgg19": (110.49, 112.73),
    "resnet50": (66.88, 69.46),
}
NETWORKS = ("googlenet",) if QUICK else tuple(PAPER)
TARGET_S = 10.0 if QUICK else 30.0
REPEATS = 1 if QUICK else 3
EPOCHS = 4
BATCH = 16


def run() -> Figures:
    """Measure each network plain, under Hermes, and with one preemption; on one core."""
    env = environment(**ONE_CORE)
    with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
        rows = {name: _row(name, Path(folder) / name, env) for name in NETWORKS}
    return {"networks": rows, "epochs": EPOCHS, "batch": BATCH, "image": "32x32x3"}


def _row(name: str, place: Path, env: Mapping[str, str]) -> Figures:
    place.mkdir()
    steps = calibrated(name, EPOCHS, BATCH, TARGET_S, env, place / "timings.json")
    script = network(name, EPOCHS, steps, BATCH)
    plain_s, hermes_s, preempted_s = [], [], []
    for repeat in range(REPEATS):
        plain_s.append(plain(script, env))
        whole, stopped = (
            SupervisedTrial(place / f"whole-{repeat}"),
            SupervisedTrial(place / f"stopped-{repeat}"),
        )
        hermes_s.append(timed(whole.command(1, script), env, TIMEOUT_S))
        whole.check_finished()
        preempted_s.append(_with_one_preemption(stopped, script, env))
    base, ours, stopped_s = (figures(v, 2) for v in (plain_s, hermes_s, preempted_s))
    paper_plain_s, paper_hermes_s = PAPER[name]
    return {
        "steps_per_epoch": steps,
        "plain_s": base,
        "hermes_s": ours,
        "hermes_one_preemption_s": stopped_s,
        "hermes_delta_s": round(ours["median"] - base["median"], 2),
        "one_preemption_delta_s": round(stopped_s["median"] - base["median"], 2),
        "paper_plain_s": paper_plain_s,
        "paper_hermes_s": paper_hermes_s,
        "paper_delta_s": round(paper_hermes_s - paper_plain_s, 2),
    }


def _with_one_preemption(
    trial: SupervisedTrial, script: list[object], env: Mapping[str, str]
) -> float:
    """Return the wall time of a run that is stopped after half of its epochs, then resumed."""
    started_s = time.monotonic()
    with child(trial.command(1, script), env) as process:
        half = EPOCHS // 2
        await_(
            lambda: trial.step >= half or process.poll() is not None, TIMEOUT_S, "half way", 0.05
        )
        process.send_signal(signal.SIGTERM)
        code = process.wait(TIMEOUT_S)
        if code != PREEMPTED:
            raise NotMeasuredError(f"hermes-trial ended with {code}, not as preempted")
    timed(trial.command(2, script), env, TIMEOUT_S)
    took_s = time.monotonic() - started_s
    trial.check_finished()
    return took_s
