"""One segment of a trial as a process on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from hermes_ops.airflow.folders import TrialFolder, home
from hermes_ops.airflow.records import Lease
from hermes_ops.errors import HermesError
from hermes_ops.trial.workspace import SHARED

GRACE_S = 30.0
"""Seconds that a script has to checkpoint after it was told to stop."""

FINAL_GRACE_S = 5.0
"""Seconds that a script has to end once its trial is over: its checkpoint is of no more use."""

HIDDEN_PREFIXES = (
    "AIRFLOW",
    "_AIRFLOW",
    "HERMES_",
    "__HERMES",
    "SUPERVISOR_",
    "FLASK_",
    "SQLALCHEMY",
)
"""Environment of the services, kept from the user's script: it names databases and secrets."""

KEPT = ("HERMES_HOME",)
LINE_BYTES = 65_536

START_ALONE_S = 0.25
"""Seconds that a segment's start has without us: what is written down meanwhile (in Airflow's
database, by processes that need the processor as well) would delay a script whose GPU idles."""


def trial_environment(
    lease: Lease, folder: TrialFolder, sweep: str, number: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """What the user's script finds in its environment."""
    kept = {k: v for k, v in inherited.items() if k in KEPT or not k.startswith(HIDDEN_PREFIXES)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode a framework starts twice as slowly
    return {**kept, **trial_variables(lease, folder, sweep, number)}


def trial_variables(lease: Lease, folder: TrialFolder, sweep: str, number: int) -> dict[str, str]:
    """Our part of it and the sweep's."""
    gpus = ",".join(str(g) for g in lease.gpus)
    ours = {
        "HERMES_SWEEP": sweep,
        "HERMES_TRIAL": str(number),
        "HERMES_GPUS": gpus,
        "CUDA_VISIBLE_DEVICES": gpus,
        "HERMES_CHECKPOINT_DIR": str(folder.checkpoints),
        "HERMES_METRICS_FILE": str(folder.metrics),
        "HERMES_OBJECTIVE": lease.objective,
        "HERMES_DIRECTION": lease.direction,
        "MLFLOW_RUN_ID": lease.run_id,
        "MLFLOW_EXPERIMENT_NAME": lease.experiment,
        "PYTHONUNBUFFERED": "1",
    }
    if lease.max_epochs is not None:
        ours["HERMES_MAX_EPOCHS"] = str(lease.max_epochs)
    if lease.anew:
        ours["HERMES_BEGAN_ANEW"] = str(lease.anew)
    return {**ours, **lease.environment}


def trial_command(lease: Lease, folder: TrialFolder, pool: str) -> list[str]:
    """The command line of the process that runs and guards the script."""
    command = [sys.executable, "-P", "-m", "hermes_ops.trial"]
    options = trial_options(lease, folder, home() / "gpus" / pool)
    standby = _standby_socket()
    if standby is not None:
        options += [f"--standby={standby}"]
    return [*command, *options, "--on-word", "--", *lease.command]


def trial_options(lease: Lease, folder: TrialFolder, gpu_locks: Path) -> list[str]:
    """The options of hermes-trial that the lease stands for."""
    options = ["--dir", str(folder.path)]
    options += ["--epoch", str(lease.epoch), "--objective", lease.objective]
    options += ["--grace", str(GRACE_S)]
    if lease.gpus:
        options += ["--gpus", ",".join(str(g) for g in lease.gpus)]
        options += ["--gpu-locks", str(gpu_locks)]
    optional = {
        "--time-limit": lease.time_limit_s,
        "--max-epochs": lease.max_epochs,
        "--finish-seconds": lease.finish_s,
        "--metric-pattern": lease.metric_pattern,
        "--python": lease.python,
        "--workspace": lease.workspace if lease.workspace != SHARED else None,
    }
    return options + [f"{name}={value}" for name, value in optional.items() if value is not None]


def _standby_socket() -> str | None:
    path = home() / "standby.sock"
    return str(path) if path.exists() else None


@dataclass(slots=True)
class LocalSegment:
    """The process of a segment: started, listened to, told to stop, waited for."""

    lease: Lease
    folder: TrialFolder
    sweep: str
    number: int
    pool: str
    emit: Callable[[str], None]
    holder: None = field(default=None, init=False)  # a process stays with the task that started it
    handed_over: bool = field(default=False, init=False)
    trouble: str = field(default="", init=False)
    _launched: bool = field(default=False, init=False)
    _process: subprocess.Popen[bytes] = field(init=False)
    _reader: threading.Thread | None = field(default=None, init=False)
    _exited: IO[bytes] = field(init=False)  # becomes readable when the process exits
    _patience_ends_s: float = inf

    def prepare(self) -> None:
        """Have its process ready to begin; it touches nothing yet. `start` reports any trouble."""
        with contextlib.suppress(OSError):
            self._launch()

    def stands_for(self, other: LocalSegment) -> bool:
        """Whether it is the same segment, made at another time."""
        return (self.lease, self.folder, self.pool) == (other.lease, other.folder, other.pool)

    def start(self) -> None:
        """Start it; HermesError when the process cannot be started at all."""
        if not Path(self.lease.directory).is_dir():
            raise HermesError(
                f"the working directory {self.lease.directory} does not exist: "
                "correct trial.directory in the sweep file."
            )
        self.folder.path.mkdir(parents=True, exist_ok=True)
        Path(self.folder.checkpoints).mkdir(exist_ok=True)
        try:
            if not self._launched:
                self._launch()
        except OSError as error:  # should it run already, it ends with this task
            raise HermesError(f"the trial's process cannot be started: {error}") from error
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()
        self._say_begin()
        self.wait(START_ALONE_S)

    def _launch(self) -> None:
        environment = trial_environment(
            self.lease, self.folder, self.sweep, self.number, os.environ
        )
        self._process = subprocess.Popen(
            trial_command(self.lease, self.folder, self.pool),
            cwd=self.lease.directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._exited = os.fdopen(os.pidfd_open(self._process.pid), "rb", buffering=0)
        self._launched = True

    def _say_begin(self) -> None:
        word = self._process.stdin
        if word is not None:
            with contextlib.suppress(OSError), word:  # one that has died is noticed by its exit
                word.write(b"\n")

    @property
    def pid(self) -> int:
        """The process id of the guard."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None when it still runs after that long."""
        if time.monotonic() >= self._patience_ends_s:
            self._patience_ends_s = inf
            self.stop()  # a second time: the guard then waits no longer
        if self._process.poll() is None:
            wait([self._exited.fileno()], seconds)
        return self._process.poll()

    def stop(self) -> None:
        """Tell it to checkpoint and exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def hurry(self) -> None:
        """Its trial is over: what it has not done after FINAL_GRACE_S is cut off."""
        self._patience_ends_s = time.monotonic() + FINAL_GRACE_S

    def finish(self) -> None:
        """Leave nothing behind: stop it if it runs, end it after the grace, close the pipe."""
        if not self._launched:
            return
        if self._process.poll() is None:
            self.stop()
            if self.wait(GRACE_S + 5.0) is None:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._exited.close()
        if self._reader is not None:
            self._reader.join(timeout=5.0)
        elif self._process.stdout is not None:
            self._process.stdout.close()

    def release(self) -> None:
        """A process ends with its task."""
        self.finish()

    def _forward(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        if stream is None:
            return
        with stream:
            while line := stream.readline(LINE_BYTES):
                self.emit(line.decode(errors="replace").rstrip("\n"))
