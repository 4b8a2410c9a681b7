"""Ten preemptions of one Keras trial, and the parts of their time."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.measure import (
    ONE_CORE,
    QUICK,
    SCRIPTS,
    Figures,
    NotMeasuredError,
    await_,
    child,
    environment,
    figures,
    timed,
)
from bench.trial import PREEMPTED, TIMEOUT_S, SupervisedTrial

PREEMPTIONS = 2 if QUICK else 10
EPOCHS_A_SEGMENT = 3 if QUICK else 30
EPOCHS = (PREEMPTIONS + 1) * EPOCHS_A_SEGMENT
SCRIPT = [SCRIPTS / "stamped.py", "--epochs", EPOCHS, "--batch-size", 32, "--filters", 16]
PARTS = ("save_s", "switch_s", "start_s", "restore_s", "first_batch_s")


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The time (Unix seconds) at which a segment was asked to stop."""

    told_s: float


def run() -> Figures:
    """Measure the same trial without a stop, and stopped ten times, without and with a standby."""
    env = environment(**ONE_CORE)
    with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
        place = Path(folder)
        whole = SupervisedTrial(place / "whole", "val_loss")
        whole_s = timed(whole.command(1, SCRIPT), env, TIMEOUT_S)
        cold = _stopped(SupervisedTrial(place / "cold", "val_loss"), env, None, whole_s)
        with _standby_server(place / "standby.sock", env) as socket:
            warm = _stopped(SupervisedTrial(place / "warm", "val_loss"), env, socket, whole_s)
    return {
        "preemptions": PREEMPTIONS,
        "epochs": EPOCHS,
        "without_a_stop_s": round(whole_s, 2),
        "fresh_interpreter": cold,
        "standby_interpreter": warm,
    }


@contextlib.contextmanager
def _standby_server(socket: Path, env: Mapping[str, str]) -> Iterator[Path]:
    server = [sys.executable, "-P", "-m", "hermes_ops.trial.standby"]
    with child([*server, "--socket", socket, "--slots", 1], env):
        await_(socket.exists, 30.0, "the standby server listens", 0.05)
        yield socket


def _stopped(
    trial: SupervisedTrial, env: Mapping[str, str], standby: Path | None, whole_s: float
) -> Figures:
    started_s = time.monotonic()
    stops = [_segment(trial, n, env, standby) for n in range(1, PREEMPTIONS + 1)]
    timed(trial.command(PREEMPTIONS + 1, SCRIPT, standby), env, TIMEOUT_S)
    took_s = time.monotonic() - started_s
    trial.check_finished()
    parts = [_split(trial, n, stop) for n, stop in enumerate(stops)]
    split = {name: figures(p[name] for p in parts) for name in PARTS}
    added = [sum(p.values()) for p in parts]
    return {
        "whole_run_s": round(took_s, 2),
        "added_by_difference_s": round((took_s - whole_s) / PREEMPTIONS, 3),
        "added_s": figures(added),
        "median_split_s": {n: round(median(p[n] for p in parts), 4) for n in PARTS},
        **split,
        "from_standby": sum(bool(s.get("standby")) for s in trial.stamps[1:]),
    }


def _segment(
    trial: SupervisedTrial, number: int, env: Mapping[str, str], standby: Path | None
) -> StopRequest:
    """Run one segment until its share of the epochs is done, then stop it."""
    with child(trial.command(number, SCRIPT, standby), env) as process:
        wanted = number * EPOCHS_A_SEGMENT
        await_(
            lambda: trial.step >= wanted or process.poll() is not None, TIMEOUT_S, "a segment", 0.05
        )
        told_s = time.time()
        process.send_signal(signal.SIGTERM)
        code = process.wait(TIMEOUT_S)
        if code != PREEMPTED:
            raise NotMeasuredError(f"hermes-trial ended with {code}, not as preempted")
    return StopRequest(told_s)


def _split(trial: SupervisedTrial, number: int, stop: StopRequest) -> dict[str, float]:
    """Split the time from SIGTERM to the next first batch into consecutive parts.

    Save: to the checkpoint that the stop has caused. Switch: to the start of the next script by
    the next hermes-trial. Start: Python, TensorFlow and the script up to `fit`. Then the restore,
    and what Keras does before its first batch.
    """
    stamp = trial.stamps[number + 1]
    saved_s = max(
        e["time_s"] for e in trial.events("checkpoint") if e["time_s"] < stamp["process_s"]
    )
    saved_s = max(saved_s, stop.told_s)
    restored = trial.events("restored")[number]
    return {
        "save_s": saved_s - stop.told_s,
        "switch_s": stamp["process_s"] - saved_s,
        "start_s": restored["time_s"] - restored["seconds"] - stamp["process_s"],
        "restore_s": restored["seconds"],
        "first_batch_s": stamp["first_batch_begin_s"] - restored["time_s"],
    }
