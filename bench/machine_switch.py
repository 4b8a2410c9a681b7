"""The time from a decision until the next trial reports, with machines and CeleryExecutor."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import postgres, stack, switch
from bench.machines import MachinesStack, machines_stack
from bench.measure import QUICK, Figures, NotMeasuredError, read_lines
from hermes_ops.trial.checkpoint_store.store import safe_name

MACHINES = {"a": 1, "b": 2}
TRIALS = 6 if QUICK else 12
SWITCHES = 8 if QUICK else 60
EPOCH_S = (0.3, 0.5) if QUICK else (2.0, 4.0)
WAIT_S = 400.0 if QUICK else 1_200.0
COURSE = switch.Timeline(
    "line_s",
    ("decision_to_trial_exit_s", "trial_exit_to_hermes_trial_s", "hermes_trial_to_reached_s"),
)


@dataclass(frozen=True, slots=True)
class MachineSweep:
    """A sweep whose trials' folders lie on machines."""

    own: MachinesStack
    id: str

    def decisions(self) -> list[dict[str, Any]]:
        """Return the controller's decisions."""
        return read_lines(self.own.home / "sweeps" / safe_name(self.id) / "decisions.jsonl")

    def trial(self, number: int) -> Path:
        """Return the folder of a trial, on the machine where it has trained."""
        folders = (self.own.trial_folder(name, self.id, number) for name in MACHINES)
        return next((f for f in folders if f.exists()), self.own.home)


def run() -> Figures:
    """Measure stubs on two machines that take turns; count the tries that Airflow has lost."""
    options = {"threshold": TRIALS // sum(MACHINES.values()), "guard_k": 0, "guard_quanta": 1}
    config = stack.stub_sweep("machines", TRIALS, "--epochs", 1_000_000, pause_s=EPOCH_S)
    with _stack(options) as own:
        sweep = _started(own, config)
        deadline_s = time.monotonic() + WAIT_S
        while len(switch.turns(sweep)) < SWITCHES and time.monotonic() < deadline_s:
            time.sleep(2.0)
        time.sleep(10.0)  # the last ones arrive
        found = [_switch(sweep, turn) for turn in switch.turns(sweep)]
        tries = _tries(own, sweep.id)
        own.hermes("sweep", "stop", sweep.id)
        stops = len(switch.stops(sweep))
    return {
        **switch.split(found, COURSE),
        "machines": MACHINES,
        "trials": TRIALS,
        "preemptions": stops,
        "tries_lost": sum(n - 1 for n in tries),
        "load_1m_at_the_end": round(os.getloadavg()[0], 2),
        "target_max_s": 2.0,
    }


@contextlib.contextmanager
def _stack(options: dict[str, int]) -> Iterator[MachinesStack]:
    with (
        tempfile.TemporaryDirectory(prefix="hermes-machines-", ignore_cleanup_errors=True) as name,
        postgres.server() as server,
        machines_stack(Path(name), server, MACHINES, "CeleryExecutor", options) as own,
    ):
        yield own


def _started(own: MachinesStack, config: Figures) -> MachineSweep:
    file = own.folder / "sweep.json"
    file.write_text(json.dumps(config))
    said: subprocess.CompletedProcess[str] = own.hermes("sweep", "run", str(file))
    runs = (word for word in said.stdout.split() if word.startswith(f"{config['name']}-"))
    if (run := next(runs, None)) is None:
        raise NotMeasuredError(f"the sweep was not started: {said.stdout}{said.stderr}")
    return MachineSweep(own, run)


def _switch(sweep: MachineSweep, turn: switch.Turn) -> switch.Switch:
    stamps = read_lines(sweep.trial(turn.follower) / "stamps.jsonl")
    line_s = next((s["line_s"] for s in stamps if s.get("line_s", 0.0) > turn.decided_s), None)
    moments = (
        switch.trial_exit_s(sweep, turn),
        switch.next_begins_s(sweep, turn),
        line_s,
    )
    return switch.Switch(turn.decided_s, turn.resumed, False, None, moments)


def _tries(own: MachinesStack, sweep: str) -> list[int]:
    with contextlib.closing(own.rest()) as rest:
        path = f"/api/v2/dags/hermes_sweep/dagRuns/{sweep}/taskInstances"
        tasks = rest.get(path, params={"limit": 1000}).json()["task_instances"]
    return [t["try_number"] for t in tasks if t["task_id"] == "trial" and t["map_index"] >= 0]
