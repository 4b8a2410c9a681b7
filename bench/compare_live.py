"""One sweep of Keras trials under several policies, live, and the replay of each."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bench import stack
from bench.measure import QUICK, ROOT, Figures, NotMeasuredError
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.cli.connection import Connection
from hermes_ops.cli.sweep_location import ENDED_AIRFLOW_STATES
from hermes_ops.errors import Unavailable

if TYPE_CHECKING:
    from hermes_ops.simulator.replay import ReplaySettings
    from hermes_ops.simulator.sweep_history import RecordedSweep
    from hermes_ops.tracking import Tracker

SLOTS = 2
TRIALS = 4 if QUICK else 24
EPOCHS = 2 if QUICK else 6
SPACE: Figures = {
    "learning_rate": {"type": "loguniform", "low": 0.0003, "high": 0.03},
    "dropout": {"type": "uniform", "low": 0, "high": 0.6},
    "filters": {"type": "integer", "low": 112, "high": 160},  # epochs of two to four seconds
    "batch_size": {"type": "quantised", "low": 16, "high": 64, "step": 16},
    "optimizer": {"type": "choice", "values": ["adam", "sgd"]},
}
SEED = 13  # its best trial is in the middle of them: neither for fifo nor against it
ALL = ("fifo", "hermes") if QUICK else ("fifo", "fair", "slaq", "hermes", "frontrunner")
POLICIES = tuple(filter(None, os.environ.get("BENCH_POLICIES", "").split(","))) or ALL
OPTIONS = {"fair": {"quantum_steps": 1}}  # with a quantum of one epoch it is the papers' RR
SWEEP_TIMEOUT_S = 900.0
POLL_S = 2.0
SETTLE_S = 5.0 if QUICK else 20.0
TARGET = 0.05
DELAYS_S = (0.2, 0.4, 0.6, 0.8, 1.0)  # how late a value may be seen; a replay takes 0.4


def run() -> Figures:
    """Compare measured and simulated seconds until the best trial has finished, by policy.

    One stack serves all sweeps, one after the other; its policy is changed in between. The sweeps
    have the same configurations and training seeds, and names of their own, so that none learns
    from another. A short one first, not measured, teaches the standby interpreters their imports.
    """
    from hermes_ops.policies import make_policy

    for policy in POLICIES:  # a name that is wrong is found before half an hour has passed
        make_policy(policy, OPTIONS.get(policy, {}))
    with stack.running(SLOTS) as own:
        connection = Connection.from_home(own.home)
        _swept(own, connection, "fifo", config("warm-up", trials=2 * SLOTS, epochs=1))
        stack.settle(SETTLE_S)
        found = {}
        for policy in POLICIES:
            sweep = _swept(own, connection, policy, config(f"live-{policy}"))
            found[policy] = compared(connection.tracker, sweep, policy)
    return {
        "policies": found,
        "trials": TRIALS,
        "epochs": EPOCHS,
        "slots": SLOTS,
        "target_relative": TARGET,
        "within_target": all(abs(f["relative"]) <= TARGET for f in found.values()),
    }


def config(name: str, trials: int = TRIALS, epochs: int = EPOCHS) -> Figures:
    """Return examples/digits/sweep.yaml with a number of configurations of SPACE, always the same.

    Its networks are larger: a value is seen up to a second after it was reported. Were epochs not
    several times as long, chance alone would say how many of them a trial gets before it makes
    way, and one that gets another one changes all that comes after it.
    """
    import yaml

    folder = ROOT / "examples/digits"
    made: Figures = yaml.safe_load((folder / "sweep.yaml").read_text())
    made["name"] = name
    made["search"] = {"algorithm": "random", "seed": SEED, "max_trials": trials, "space": SPACE}
    command = made["trial"]["command"]
    command[command.index("--filters") + 1] = "{filters}"
    command += ["--batch-size", "{batch_size}"]
    command[command.index("--epochs") + 1] = str(epochs)
    made["trial"]["directory"] = str(folder)
    made["budget"] = {"max_epochs": epochs}
    return made


def _swept(own: stack.Stack, connection: Connection, policy: str, file: Figures) -> str:
    """Run a sweep to its end under the policy; return its id."""
    options = [f"--option={name}={value}" for name, value in OPTIONS.get(policy, {}).items()]
    own.hermes("policy", policy, *options)
    sweep = own.start(file)
    deadline_s = time.monotonic() + SWEEP_TIMEOUT_S
    state = ""
    while state not in ENDED_AIRFLOW_STATES:
        if time.monotonic() > deadline_s:
            raise NotMeasuredError(f"{sweep.id}: not ended within {SWEEP_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
        with contextlib.suppress(Unavailable):  # a busy Airflow answers the next time
            run = connection.airflow.dag_run(MAIN_DAG, sweep.id) or {}
            state = str(run.get("state", ""))
    return sweep.id


def compared(tracker: Tracker, sweep: str, policy: str) -> Figures:
    """Compare the measured figures of a sweep with its replay under the same policy.

    `relative`: the distance of the simulated time to best from the measured one, as a part of it;
    from the nearer bound, 0 between them. `by_sight_s`: the simulated one (its lower bound) for
    other observation delays: how much a fraction of a second can change.
    """
    from hermes_ops.simulator.replay import ReplaySettings, replay
    from hermes_ops.simulator.sweep_history import fetch_recorded_sweep

    recorded = fetch_recorded_sweep(tracker, sweep)
    settings = ReplaySettings(policy, OPTIONS.get(policy, {}))
    found = replay(recorded, settings)
    measured, time_to_best, costs = recorded.measured, found.time_to_best_s, found.costs
    if measured.time_to_best_s is None or time_to_best.low is None or time_to_best.high is None:
        raise NotMeasuredError(f"{sweep}: no trial has finished with a value")
    nearest_s = min(max(measured.time_to_best_s, time_to_best.low), time_to_best.high)
    off_s = nearest_s - measured.time_to_best_s
    return {
        "sweep": sweep,
        "best_trial": measured.best,
        "measured_time_to_best_s": round(measured.time_to_best_s, 2),
        "simulated_time_to_best_s": _rounded(time_to_best.document(), 2),
        "relative": round(off_s / measured.time_to_best_s, 4),
        "by_sight_s": {str(s): _delayed(recorded, settings, s) for s in DELAYS_S},
        "measured_gpu_s": round(3600 * measured.gpu_hours, 1),
        "simulated_gpu_s": _rounded(found.gpu_hours.document(), 1, 3600.0),
        "measured_preemptions": measured.preemptions,
        "simulated_preemptions": found.preemptions.document(),
        "switch_s": {
            "startup": round(costs.startup_s, 3),
            "restore": round(costs.restore_s, 3),
            "checkpoint": round(costs.checkpoint_s, 3),
            "handover": round(costs.handover_s, 3),
            "warm_up": round(costs.warm_s, 3),
            "leave": round(costs.leave_s, 3),
        },
        "cut_short": list(found.cut_short),
    }


def _delayed(
    recorded: RecordedSweep, settings: ReplaySettings, observation_delay_s: float
) -> float | None:
    """Return the simulated time to best in seconds with that observation delay."""
    from hermes_ops.simulator.replay import replay

    workload = replace(recorded.workload, observation_delay_s=observation_delay_s)
    found_s = replay(replace(recorded, workload=workload), settings).time_to_best_s.low
    return None if found_s is None else round(found_s, 1)


def _rounded(values: dict[str, float | None], digits: int, factor: float = 1.0) -> Figures:
    return {k: None if v is None else round(factor * v, digits) for k, v in values.items()}
