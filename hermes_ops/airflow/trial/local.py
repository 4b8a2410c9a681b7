"""A segment of a trial as a process on this machine.

It is launched while Airflow still starts the task: Airflow reads the DAG file and makes several
requests before it calls the operator. Meanwhile the interpreter of the trial's process starts, for
the lease in the local records. It touches nothing before the operator has found that lease in
Airflow's store and lets it begin.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from hermes_ops.airflow.folders import TrialFolder, home, read_lease
from hermes_ops.airflow.identity import sweep_id
from hermes_ops.airflow.machines import on_this_machine
from hermes_ops.airflow.records import ONE_PER_GPU, Lease
from hermes_ops.config.pod import RUN_IN_VARIABLE, RunIn
from hermes_ops.errors import HermesError
from hermes_ops.moved_paths import MovedPaths
from hermes_ops.trial.environment import InheritanceRule, guard_supervisor
from hermes_ops.trial.outcome import INFRASTRUCTURE, PREEMPTED
from hermes_ops.trial.processes.record import KILL_AFTER_S, end_processes
from hermes_ops.trial.processes.tree import Process, process_of
from hermes_ops.trial.segment_records import trained_s
from hermes_ops.trial.workspace import SHARED

GRACE_S = 30.0
"""Seconds that a script has to checkpoint after it was told to stop."""

FINAL_GRACE_S = 5.0
"""Seconds that a script has to end once its trial has ended for good: no checkpoint is needed."""

LINE_BYTES = 65_536
KILLED_WITHIN_S = 10.0
STATUS_PERIOD_S = 5.0
_KILLED = -9
_STOPPED_AT_START = -15
"""hermes-trial dies of SIGTERM only while its interpreter starts: its script has not begun."""

START_ALONE_S = 0.25
"""Seconds that a segment's start has the processor to itself: writing to Airflow's database
meanwhile would delay a script whose GPU idles."""


def trial_environment(
    lease: Lease, folder: TrialFolder, sweep: str, number: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return hermes-trial's environment: the listed variables of the worker, and the trial's own.

    The setting HERMES_TRIAL_ENVIRONMENT of that worker names further variables.
    """
    kept = InheritanceRule.from_environment(inherited).inherited(inherited)
    kept.setdefault("HERMES_HOME", str(home()))  # where the worker has none, it is the default
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode a framework starts twice as slowly
    return {**kept, **trial_variables(lease, folder, sweep, number)}


def trial_variables(lease: Lease, folder: TrialFolder, sweep: str, number: int) -> dict[str, str]:
    """Return the variables that Hermes and the sweep set for the script, for hermes-trial."""
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
    return {**ours, **guard_supervisor(lease.environment)}


def trial_command(lease: Lease, folder: TrialFolder, pool: str) -> list[str]:
    """Return the command line of hermes-trial, which runs the script."""
    command = [sys.executable, "-P", "-m", "hermes_ops.trial"]
    options = trial_options(lease, folder, home() / "gpus" / pool)
    standby = home() / "standby.sock"
    if standby.exists():
        options += [f"--standby={standby}"]
    return [*command, *options, "--on-word", "--", *lease.command]


def trial_options(lease: Lease, folder: TrialFolder, gpu_locks: Path) -> list[str]:
    """Return the options of hermes-trial for a lease."""
    options = ["--dir", str(folder.path)]
    options += ["--epoch", str(lease.epoch), "--grace", str(GRACE_S)]
    if lease.gpus:
        options += ["--gpus", ",".join(str(g) for g in lease.gpus)]
        options += ["--gpu-locks", str(gpu_locks)]
    if lease.worker_count > 1:
        options += ["--workers", str(lease.worker_count)]
    elif lease.workers == ONE_PER_GPU:
        options += ["--torchrun"]
    if lease.workers == ONE_PER_GPU and lease.tf_config:
        options += ["--tf-config"]
    optional = {  # each with its value in one word, which may begin with a dash
        "--objective": lease.objective,
        "--time-limit": lease.time_limit_s,
        "--max-epochs": lease.max_epochs,
        "--finish-seconds": lease.finish_s,
        "--metric-pattern": lease.metric_pattern,
        "--python": lease.python,
        "--workspace": lease.workspace if lease.workspace != SHARED else None,
    }
    return options + [f"{name}={value}" for name, value in optional.items() if value is not None]


def located(lease: Lease, moved: MovedPaths) -> Lease:
    """Return the lease with its paths as they are on this host, which may not be its first."""
    if not moved.pairs:
        return lease
    return replace(
        lease,
        directory=moved.apply(lease.directory),
        python=moved.apply(lease.python) if lease.python else lease.python,
        command=tuple(moved.apply(word) for word in lease.command),
        environment=moved.apply_to(lease.environment),
    )


@dataclass(frozen=True, slots=True)
class KillDeadline:
    """The times (monotonic, in seconds) after which a process that still runs counts as hanging.

    hermes-trial itself keeps the grace and the time limit. Its own end is due a little later.
    """

    after_stop_s: float = inf
    after_limit_s: float = inf

    def stopped(self, now_s: float, grace_s: float) -> KillDeadline:
        """Return the deadline after a stop: the grace after the first one, none after a second."""
        left_s = grace_s if self.after_stop_s == inf else 0.0
        return replace(self, after_stop_s=min(self.after_stop_s, now_s + left_s + KILL_AFTER_S))

    def limited(self, now_s: float, left_s: float, grace_s: float) -> KillDeadline:
        """Return the deadline for `left_s` of the time limit, then the grace for a checkpoint."""
        return replace(self, after_limit_s=now_s + max(0.0, left_s) + grace_s + KILL_AFTER_S)

    @property
    def next_s(self) -> float:
        """The time at which the process is to be killed."""
        return min(self.after_stop_s, self.after_limit_s)


@dataclass(slots=True)
class LocalSegment:
    """A segment's hermes-trial process: starts it, forwards its output, stops it, waits for it."""

    lease: Lease
    folder: TrialFolder
    sweep: str
    number: int
    pool: str
    emit: Callable[[str], None]
    holder: None = field(default=None, init=False)  # a process stays with the task that started it
    handed_over: bool = field(default=False, init=False)
    trouble: str = field(default="", init=False)
    ran_s: float | None = field(default=None, init=False)  # its own records say it
    _launched: bool = field(default=False, init=False)
    _process: subprocess.Popen[bytes] = field(init=False)
    _reader: threading.Thread | None = field(default=None, init=False)
    _exited: IO[bytes] = field(init=False)  # becomes readable when the process exits
    _guard: Process | None = field(default=None, init=False)
    _final_grace_ends_s: float = inf
    _deadline: KillDeadline = field(default_factory=KillDeadline, init=False)
    _limit_checked_s: float = field(default=-inf, init=False)
    _killed_code: int | None = field(default=None, init=False)
    _segments_before: int = field(default=0, init=False)  # its own is on record before its script

    def __post_init__(self) -> None:
        """Replace the lease's paths by those of this host, and its GPUs by their indices here.

        A restore may have moved the paths.
        """
        here = located(self.lease, MovedPaths.load(home()))
        self.lease = on_this_machine(here, os.environ)

    def prepare(self) -> None:
        """Launch the process, which touches nothing before `start`; `start` reports any error."""
        with contextlib.suppress(OSError):
            self._launch()

    def stands_for(self, other: LocalSegment) -> bool:
        """Return whether the other one is for the same lease, folder and pool."""
        return (self.lease, self.folder, self.pool) == (other.lease, other.folder, other.pool)

    def start(self) -> None:
        """Have the process begin; HermesError when it cannot be started."""
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
        self._segments_before = len(self.folder.segments())
        self._send_begin()
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
        self._guard = process_of(self._process.pid)
        self._launched = True

    def _send_begin(self) -> None:
        word = self._process.stdin
        if word is not None:
            with contextlib.suppress(OSError), word:  # one that has died is noticed by its exit
                word.write(b"\n")

    @property
    def pid(self) -> int:
        """The process id of hermes-trial."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after that time; kill it if it hangs."""
        now_s = time.monotonic()
        if now_s >= self._final_grace_ends_s:
            self._final_grace_ends_s = inf
            self.stop()  # a second time: the guard then waits no longer
        self._check_limit(now_s)
        if self._process.poll() is None:
            wait([self._exited.fileno()], seconds)
        if self._process.poll() is None and time.monotonic() >= self._deadline.next_s:
            self._kill()
        if self._killed_code is not None:
            return self._killed_code
        code = self._process.poll()
        if code == _KILLED and len(self.folder.segments()) <= self._segments_before:
            self.trouble = "hermes-trial was killed before its script had begun"
            return INFRASTRUCTURE
        return PREEMPTED if code == _STOPPED_AT_START else code

    def stop(self) -> None:
        """Tell it to checkpoint and exit."""
        self._deadline = self._deadline.stopped(time.monotonic(), GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def _check_limit(self, now_s: float) -> None:
        """Set the deadline of its time limit, once it has begun to train."""
        limit_s = self.lease.time_limit_s
        is_due = now_s >= self._limit_checked_s + STATUS_PERIOD_S
        if limit_s is None or self._deadline.after_limit_s < inf or not is_due:
            return
        self._limit_checked_s = now_s
        if self.folder.status().get("pid") == self._process.pid:
            left_s = limit_s - trained_s(self.folder.segments())
            self._deadline = self._deadline.limited(now_s, left_s, GRACE_S)

    def _kill(self) -> None:
        """Kill every process of a hanging trial: it resumes later, or fails at its time limit."""
        is_stopped = self._deadline.after_stop_s <= time.monotonic()
        left = end_processes(self.folder.path, self._guard, KILLED_WITHIN_S)
        self._killed_code = PREEMPTED if is_stopped else _KILLED
        limit = "" if is_stopped else f"time limit: {self.lease.time_limit_s:g} s are over; "
        self.trouble = f"{limit}hermes-trial did not end in time: all its processes were killed"
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self.trouble += f", and these cannot be: {pids}"
        self.emit(self.trouble)

    def hurry(self) -> None:
        """Shorten the grace period to FINAL_GRACE_S: the trial has ended for good."""
        self._final_grace_ends_s = time.monotonic() + FINAL_GRACE_S

    def finish(self) -> None:
        """Stop the process if it runs, kill it after the grace, close the pipes."""
        if not self._launched:
            return
        if self._process.poll() is None:
            self.stop()
            while self.wait(1.0) is None:  # it is killed when its time is over
                pass
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._exited.close()
        if self._reader is not None:
            self._reader.join(timeout=5.0)
        elif self._process.stdout is not None:
            self._process.stdout.close()

    def release(self) -> None:
        """End the process with its task: the next try could not take it over."""
        self.finish()

    def _forward(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        if stream is None:
            return
        with stream:
            while line := stream.readline(LINE_BYTES):
                self.emit(line.decode(errors="replace").rstrip("\n"))


_prestarted: list[LocalSegment] = []  # of this process, which is one task's


def start_process(about: Mapping[str, Any]) -> None:
    """Launch the process of a task's trial, if this machine has a local record of its lease.

    :param about: the task's `dag_id`, `run_id`, `task_id` and `map_index`; without one of them
        nothing is launched
    """
    number = about.get("map_index")
    names = [about.get(name) for name in ("dag_id", "run_id", "task_id")]
    if not isinstance(number, int) or number < 0 or None in names:
        return
    if os.environ.get(RUN_IN_VARIABLE, RunIn.PROCESS) != RunIn.PROCESS:
        return  # of a lease for a process the operator says why it may not run
    sweep = sweep_id(*map(str, names))
    folder = TrialFolder.from_sweep(sweep, number)
    lease = read_lease(folder)
    if lease is not None and lease.pool and not lease.templated:
        segment = LocalSegment(lease, folder, sweep, number, lease.pool, print)
        segment.prepare()
        _prestarted.append(segment)


def take_process() -> LocalSegment | None:
    """Return the prestarted process, once; the caller has it begin, or finishes it."""
    return _prestarted.pop() if _prestarted else None
