"""Inside the script's process: which fit runs, what is resumed, and the end on SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial import fit_states
from hermes_ops.trial.channel import announce, bad_values, send
from hermes_ops.trial.entropy import entropy
from hermes_ops.trial.keeping import KEEP_VARIABLE
from hermes_ops.trial.metrics import Metric, MetricsFile
from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.said import is_first_time
from hermes_ops.trial.store import Checkpoint, Store

_KEPT = 2
_UNRESUMABLE = "unresumable"
DISK_ERROR = 74  # EX_IOERR
ENDING_S = 4.0
"""Seconds that a script which is told to stop after a `fit` has to come to its own end: stopped in
its last lines a trial would wait for GPUs, and start all over, for nothing but these lines."""


class Runtime:
    """One a process: the first process of a trial that calls `fit` is looked after."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["HERMES_TRIAL_DIR"])
        self.objective = os.environ.get("HERMES_OBJECTIVE")
        limit = os.environ.get("HERMES_MAX_EPOCHS")
        self.max_epochs = int(limit) if limit else None
        self.kept = int(os.environ.get(KEEP_VARIABLE) or _KEPT)
        self.metrics = MetricsFile(Path(os.environ["HERMES_METRICS_FILE"]))
        self.stop = False
        self.session: Any = None
        self.records: list[dict[str, Any]] = []  # the fits that are complete
        self.resume: Checkpoint | None = None
        self.resumed: dict[str, Any] = {}
        self.best: float | None = None  # of the objective; lower is better
        self.begun = 0
        self.writes: dict[str, int] = {}  # by path: how often callbacks have opened a file to write
        self.unresumable: str | None = None  # why the trial cannot be resumed
        self._budget_bytes = int(
            os.environ.get(fit_states.BUDGET_VARIABLE) or fit_states.BUDGET_BYTES
        )
        self.writer = Writer(self)
        self._pid = os.getpid()
        self._owner: int | None = None
        self._said: set[str] = set()

    # -- who is looked after -------------------------------------------------------------------

    def mine(self) -> bool:
        """Whether this process is the one: neither a forked worker nor a second script."""
        if os.getpid() != self._pid or self.session is not None:
            return False
        if self._owner is None:
            handle = os.open(self.folder / "hook.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return False
            self._owner = handle
            self._load()
        return True

    def why_not_mine(self) -> str:
        """Why a call of `fit` is not looked after."""
        if os.getpid() != self._pid:
            return "it runs in a process that the script has forked"
        if self.session is not None:
            return "it runs inside another fit"
        return "another process of the trial has called fit first"

    def tell_own_loop(self) -> None:
        """A training step outside `fit`: say what that means, unless the script calls `fit` too."""
        if os.getpid() == self._pid and self.begun == 0:
            self.say_once(
                "this training runs outside fit (train_on_batch, or a loop of its own) and is not "
                "watched: its values are read from the output, and it is not preemptible unless it "
                "writes checkpoints to $HERMES_CHECKPOINT_DIR"
            )

    def _load(self) -> None:
        """Find where the trial stands; only the owner may look, as unfinished files are removed."""
        shutil.rmtree(self.folder / _UNRESUMABLE, ignore_errors=True)
        self.store = Store(Path(os.environ["HERMES_CHECKPOINT_DIR"]))
        headers = self.store.headers()
        for serial in sorted(headers, reverse=True):
            checkpoint = self.store.load(serial)
            resumed = pickle.loads(checkpoint.objects()) if checkpoint else {}  # noqa: S301 - ours
            if checkpoint and fit_states.is_complete(headers, len(resumed["records"])):
                self.resume, self.resumed = checkpoint, resumed
                break
        self.best = self.resumed.get("best_value")
        self._drop_torn()

    @property
    def steps_before(self) -> int:
        """Epochs completed in the fits before this one."""
        return sum(int(record["epochs"]) for record in self.records)

    # -- SIGTERM -------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take SIGTERM over, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, _: object) -> None:
        if os.getpid() == self._pid and self.session is not None:
            self.stop = True
            return
        if os.getpid() == self._pid and self._owner is not None and self.store.serials():
            if not self.records or self.stop:
                self.leave()
            self.end_soon()
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end_soon(self) -> None:
        """A `fit` is complete: let the script end by itself, or leave unless it trains again.

        A further `fit` ends at its first batch.
        """
        self.stop = True
        timer = threading.Timer(ENDING_S, self._leave_idle)
        timer.daemon = True
        timer.start()

    def _leave_idle(self) -> None:
        if self.session is None:
            self.leave()

    def at_exit(self) -> None:
        """The script has come to its end: from now on SIGTERM takes its exit code from it no more.

        Python puts back what a signal does by default before it tears its modules down, which with
        TensorFlow takes a second; only a signal that is ignored stays so.
        """
        if os.getpid() == self._pid and self._owner is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def leave(self) -> None:
        """End the process as preempted; the user's `finally` and atexit code is not run."""
        self.writer.wait()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(PREEMPTED)

    # -- reporting -----------------------------------------------------------------------------

    def say_once(self, text: str) -> None:
        """Print a line, once in the trial: a later segment does not say it again."""
        if text not in self._said:
            self._said.add(text)
            if not is_first_time(self.folder, text):
                return
            print(f"hermes: {text}", flush=True)

    def report(self, step: int, values: Mapping[str, float]) -> bool:
        """Write an epoch's values; False if the objective is NaN or infinite."""
        announce(values)
        self.metrics.append(Metric(name, value, step) for name, value in values.items())
        bad = {n: v for n, v in values.items() if v - v != 0.0}
        bad_values(bad, step)
        return self.objective not in bad

    # -- checkpoints ---------------------------------------------------------------------------

    def _drop_torn(self) -> None:
        """What is newer than the newest valid checkpoint is torn: it must not count as kept."""
        newest = self.resume.serial if self.resume is not None else 0
        self.store.keep(serial for serial in self.store.serials() if serial <= newest)

    def retained(self) -> set[int]:
        """The checkpoints to keep."""
        return fit_states.retained(self.store.headers(), self.kept)

    def check_budget(self) -> None:
        """After a `fit`: where the states need more room than there is, keep none to resume by."""
        finals, sizes = fit_states.final_states(self.store.headers()), self.store.sizes_bytes()
        ends = {fit: sizes[serial] for fit, serial in finals.items()}
        if not fit_states.exceeds(ends, self._budget_bytes):
            return
        self.unresumable = fit_states.why_not_resumable(len(ends), self._budget_bytes)
        self.say_once(f"this trial is not preemptible any more: {self.unresumable}")
        event = {"kind": "hook", "preemptible": False, "reason": self.unresumable}
        send({**event, "startup_s": None})
        self.store.keep(())
        self.store = Store(self.folder / _UNRESUMABLE)

    def disk_failed(self, error: OSError) -> None:
        """A checkpoint could not be written: end as failed, with the one before it kept."""
        print(
            f"hermes: a checkpoint could not be written: [Errno {error.errno}] {error.strerror}: "
            f"{self.store._directory}: free some space there; the checkpoint before it is kept",
            flush=True,
        )
        os._exit(DISK_ERROR)


class Writer:
    """Writes checkpoints beside the training, one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread: threading.Thread | None = None

    def submit(
        self,
        header: Mapping[str, Any],
        arrays: list[tuple[str, Any]],
        objects: bytes,
        taken_s: float,
    ) -> None:
        """Start writing; waits for the write before it."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(header, arrays, objects, taken_s), name="hermes-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        header: Mapping[str, Any],
        arrays: list[tuple[str, Any]],
        objects: bytes,
        taken_s: float,
    ) -> None:
        started_s = time.monotonic()
        try:
            self._runtime.store.write(header, arrays, objects)
            self._runtime.store.keep(self._runtime.retained())
            seconds = taken_s + time.monotonic() - started_s
            if self._runtime.unresumable is not None:
                return
            send({"kind": "checkpoint", "step": header["step"], "seconds": seconds})
        except OSError as error:
            self._runtime.disk_failed(error)


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The process's runtime, made at the first call."""
    global _runtime  # noqa: PLW0603 - one a process, by its nature
    if _runtime is None:
        _runtime = Runtime()
    return _runtime


def prepare() -> None:
    """Called when Keras is imported: from now on SIGTERM ends the process in good order."""
    runtime().listen()
    atexit.register(runtime().at_exit)


def shuffle_seed(fit: int) -> int:
    """The seed of a fit's permutations."""
    return (entropy()["shuffle"] + fit) % 2**31
