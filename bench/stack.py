"""A stack of `hermes up` for one benchmark, and sweeps in it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.measure import (
    SCRIPTS,
    Figures,
    NotMeasuredError,
    environment,
    read_lines,
)
from hermes_ops.stack.lifecycle import signals_ignored

HERMES = Path(sys.executable).parent / "hermes"
UP_TIMEOUT_S = 400.0
FREE_PORTS = ("--airflow-port", "0", "--mlflow-port", "0")


@dataclass(frozen=True, slots=True)
class Stack:
    """A state folder and the stack that is started in it."""

    home: Path

    def hermes(self, *arguments: object, timeout_s: float = 180.0) -> str:
        """Return the output of `hermes ARGUMENTS`; raise NotMeasuredError with it if that fails."""
        process = subprocess.Popen(
            [str(part) for part in (HERMES, *arguments)],
            env=environment(HERMES_HOME=str(self.home)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            with signals_ignored():  # `hermes up` that is told to end stops what it has started
                process.terminate()
                process.communicate()
            raise
        if process.returncode != 0:
            raise NotMeasuredError(f"hermes {arguments[0]} ended with {process.returncode}: {said}")
        return said

    def up(self, slots: int, *options: object) -> None:
        """Start the stack."""
        self.hermes("up", "--slots", slots, *FREE_PORTS, *options, timeout_s=UP_TIMEOUT_S)

    def down(self) -> None:
        """Stop the stack."""
        self.hermes("down")

    def start(self, config: Figures) -> Sweep:
        """Start a sweep, given as the content of its file."""
        file = self.home / f"{config['name']}.json"
        file.write_text(json.dumps(config))
        said = self.hermes("sweep", "run", file)
        found = re.search(r"Sweep (\S+) has started", said)
        if found is None:
            raise NotMeasuredError(f"hermes sweep run said: {said}")
        return Sweep(self.home, found[1])


@contextlib.contextmanager
def folder() -> Iterator[Stack]:
    """Yield a stack in a new state folder, not started yet; stop and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="hermes-bench-", ignore_cleanup_errors=True) as home:
        stack = Stack(Path(home))
        try:
            yield stack
        finally:
            with signals_ignored():
                stack.down()


@contextlib.contextmanager
def running(slots: int, *options: object) -> Iterator[Stack]:
    """Yield a running stack."""
    with folder() as stack:
        stack.up(slots, *options)
        yield stack


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep, read from its files: that costs the stack nothing."""

    home: Path
    id: str

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.home / "sweeps" / self.id

    def trial(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / "trials" / str(number)

    def decisions(self) -> list[dict[str, Any]]:
        """Return the controller's decisions, oldest first."""
        return read_lines(self.folder / "decisions.jsonl")

    def task_log(self, number: int) -> list[tuple[float, str]]:
        """Return (Unix seconds, text) of a trial's task log, all tries together, oldest first."""
        logs = self.home / "airflow" / "logs" / "dag_id=hermes_sweep" / f"run_id={self.id}"
        place = logs / "task_id=trial" / f"map_index={number}"
        lines = [line for file in place.glob("attempt=*.log") for line in read_lines(file)]
        return sorted(
            (datetime.fromisoformat(line["timestamp"]).timestamp(), str(line["event"]))
            for line in lines
            if "timestamp" in line
        )


def stub_sweep(
    name: str, trials: int, *arguments: object, pause_s: tuple[float, float] | float
) -> Figures:
    """Return a sweep file of different stubs; `pause_s` are the seconds of an epoch."""
    space: Figures = {"rate": {"type": "uniform", "low": 0.5, "high": 1.5}}
    pause = str(pause_s)
    if isinstance(pause_s, tuple):
        space["pause"] = {"type": "uniform", "low": pause_s[0], "high": pause_s[1]}
        pause = "{pause}"
    command = ["python", "stub.py", "--rate", "{rate}", "--pause", pause, *map(str, arguments)]
    return {
        "name": name,
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "random",
            "seed": 1,
            "max_trials": trials,
            "space": space,
        },
        "trial": {"command": command, "directory": str(SCRIPTS)},
        "budget": {"max_epochs": 1_000_000},  # never the reason to end: the script ends by itself
    }


def first_after(moments: list[tuple[float, str]], text: str, after_s: float) -> float | None:
    """Return when a text was first logged after a moment."""
    return next((time_s for time_s, said in moments if time_s > after_s and text in said), None)


def settle(seconds: float) -> None:
    """Wait until a stack that has just come up is quiet."""
    time.sleep(seconds)
