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
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.event_channel import announce, bad_values, send
from hermes_ops.trial.files import is_first_time, trial_seeds
from hermes_ops.trial.group import TrialRank, rank_seed
from hermes_ops.trial.keras import checkpoint_files
from hermes_ops.trial.keras.cache_locks import release_locks
from hermes_ops.trial.keras.checkpoint_files import Checkpoint, CheckpointFiles
from hermes_ops.trial.keras.fit_calls import FitCall, calls_before, has_failed, note_calls
from hermes_ops.trial.keras.ranks import fit_ranks, started_horovod
from hermes_ops.trial.keras.temporary_files import remove_temporary_files
from hermes_ops.trial.metrics import Metric, MetricsFile
from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.retention import KEEP_VARIABLE

_KEPT = 2
_UNRESUMABLE = "unresumable"
DISK_ERROR = 74  # EX_IOERR
ENDING_S = 4.0
"""Seconds that a script has to end by itself if it is told to stop after a `fit`. If it were
stopped in its last lines, the trial would wait for GPUs and start again only for these lines."""
OWN_LOOP_S = 60.0
"""Seconds that training outside `fit` may take between two calls of `fit` before it is reported."""
_UNWATCHED = (
    "(train_on_batch, or a loop of its own) and is not watched: its values are read from the "
    "output, and it is not preemptible unless it writes checkpoints to $HERMES_CHECKPOINT_DIR"
)


class KerasRuntime:
    """The hook's state in this process; a trial's first process that calls `fit` is watched."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["HERMES_TRIAL_DIR"])
        self.objective = os.environ.get("HERMES_OBJECTIVE")
        limit = os.environ.get("HERMES_MAX_EPOCHS")
        self.max_epochs = int(limit) if limit else None
        self.kept = int(os.environ.get(KEEP_VARIABLE) or _KEPT)
        self.group = TrialRank.from_environment(os.environ)
        self.ranks = fit_ranks(self.group)
        self.metrics = MetricsFile(Path(os.environ["HERMES_METRICS_FILE"]))
        self.stop = False
        self.session: Any = None
        self.records: list[dict[str, Any]] = []  # the fits that are over
        self.resume: Checkpoint | None = None
        self.resumed: dict[str, Any] = {}
        self.best: float | None = None  # of the objective; lower is better
        self.fit_count = 0
        self.calls: list[FitCall] = []  # of `fit`, as many as there were
        self.samples: int | None = 0  # trained on by all ranks; None: not known
        self.was_distributed = self.group.is_distributed  # in this segment, or in an earlier one
        self.scaled_optimizers: list[weakref.ref[Any]] = []  # their learning rate fits this size
        self.writes: dict[str, int] = {}  # by path: how often callbacks have opened a file to write
        self.later_files: dict[str, bytes] = {}  # by path: as they were when the trial was stopped
        self.unresumable: str | None = None  # why the trial cannot be resumed
        self._budget_bytes = int(
            os.environ.get(checkpoint_files.BUDGET_VARIABLE) or checkpoint_files.BUDGET_BYTES
        )
        self.writer = CheckpointWriter(self)
        self._pid = os.getpid()
        self._owner: int | None = None
        self._said: set[str] = set()
        self._own_loop_after: int | None = None  # the calls of `fit` before a step outside of them

    # -- which process is watched ----------------------------------------------------------------

    def claim_process(self) -> bool:
        """Return whether this process is the one that is watched; the first call claims that.

        It is not if it is a forked worker, if a call of `fit` is running, or if another process of
        the trial has the claim.
        """
        if os.getpid() != self._pid or self.session is not None:
            return False
        if self._owner is None:
            handle = os.open(self._lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return False
            self._owner = handle
            self._load()
            if not self._go_on_counting(handle):
                os.close(handle)
                self._owner, self.resume, self.resumed = None, None, {}
                return False
        return True

    def _go_on_counting(self, handle: int) -> bool:
        """Count the calls of the segment's earlier processes; False if their end is not known."""
        if self.group.is_distributed:
            return True
        records = self.resumed.get("records", [])
        before = calls_before(handle, len(records))
        if before is None:
            return False
        self.fit_count = before
        self.records = list(records[:before])
        self.calls = list(self.resumed.get("calls", ())[:before])
        note_calls(handle, before)
        return True

    def note_call(self) -> None:
        """Record that a call of `fit` has been counted."""
        if self._owner is not None and not self.group.is_distributed:
            note_calls(self._owner, self.fit_count)

    def _lock_path(self) -> Path:
        """Return the lock of this rank's one process that is watched."""
        if self.group.is_leader:
            return self.folder / "hook.lock"
        return Path(self.group.folder) / f"{self.group.rank}.lock"

    def why_not_watched(self) -> str:
        """Return why a call of `fit` is not watched."""
        if os.getpid() != self._pid:
            return "it runs in a process that the script has forked"
        if self.session is not None:
            return "it runs inside another fit"
        return "another process of the trial has called fit first"

    def note_own_step(self) -> None:
        """Report training outside `fit`, with its consequence, at its first step.

        After a call of `fit` it may be only some steps before the next call: then it is reported
        once it has taken OWN_LOOP_S.
        """
        if os.getpid() != self._pid or self._own_loop_after == self.fit_count:
            return
        self._own_loop_after = self.fit_count
        if self.fit_count == 0:
            self.say_once(f"this training runs outside fit {_UNWATCHED}")
        elif not self.group.is_distributed:
            timer = threading.Timer(OWN_LOOP_S, self._report_own_loop, (self.fit_count,))
            timer.daemon = True
            timer.start()

    def _report_own_loop(self, fit_count: int) -> None:
        """Report the trial as not preemptible until its next `fit`: a stop would lose its training.

        Nothing is reported if the script writes checkpoints of its own.
        """
        if self.session is not None or fit_count != self.fit_count or self._owner is None:
            return
        if self.unresumable is not None or self.store.has_others():
            return
        self.say_once(f"the training after fit call {fit_count} runs outside fit {_UNWATCHED}")
        reason = "it trains outside fit: after a stop it resumes from the end of its last fit"
        send({"kind": "hook", "preemptible": False, "reason": reason, "startup_s": None})

    def _load(self) -> None:
        """Find where the trial stands; only the owner may look, as unfinished files are removed.

        Followers look too, and remove nothing.
        """
        is_follower = not self.group.is_leader
        if not is_follower:
            shutil.rmtree(self.folder / _UNRESUMABLE, ignore_errors=True)
            release_locks(self.folder)
        self.store = CheckpointFiles(Path(os.environ["HERMES_CHECKPOINT_DIR"]), is_follower)
        headers = self.store.headers()
        for serial in sorted(headers, reverse=True):
            checkpoint = self.store.load(serial)
            resumed = pickle.loads(checkpoint.objects()) if checkpoint else {}  # noqa: S301 - ours
            if checkpoint and checkpoint_files.is_complete(headers, resumed["records"]):
                self.resume, self.resumed = checkpoint, resumed
                break
        self.best = self.resumed.get("best_value")
        if self.resume is not None:
            self.samples = self.resume.header.get("samples")
            self.was_distributed |= bool(self.resume.header.get("was_distributed"))
        self._delete_torn()

    @property
    def steps_before(self) -> int:
        """Epochs completed in the fits before this one."""
        return sum(int(record["epochs"]) for record in self.records)

    def ends_replay(self, fit: int) -> bool:
        """Tell whether this call of `fit` is the first to train after replayed ones."""
        replayed = len(self.resumed.get("records", []))
        return 0 < replayed == fit and self.group.is_leader

    # -- SIGTERM -------------------------------------------------------------------------------

    def handle_sigterm(self) -> None:
        """Take SIGTERM over, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, _: object) -> None:
        if os.getpid() == self._pid and self.session is not None:
            self.stop = True
            return
        if os.getpid() == self._pid and self._follows():
            self._stop_follower()
            return
        if os.getpid() == self._pid and self._owner is not None and self.store.serials():
            if not self.records or self.stop:
                self.exit_preempted()
            self.end_soon()
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _follows(self) -> bool:
        """Tell whether this is a follower that trains with the others, not its subprocess."""
        if self.group.is_leader:
            return False
        return self._owner is not None or started_horovod() is not None

    def _stop_follower(self) -> None:
        """Leave when the leader does: at a batch of a `fit`, or after the last one."""
        self.stop = True
        if self.records:
            self.end_soon()

    def end_soon(self) -> None:
        """Let the script end by itself after a complete `fit`, or leave unless it trains again.

        A further `fit` ends at its first batch.
        """
        self.stop = True
        timer = threading.Timer(ENDING_S, self._exit_if_idle)
        timer.daemon = True
        timer.start()

    def _exit_if_idle(self) -> None:
        if self.session is None:
            self.exit_preempted()

    def at_exit(self) -> None:
        """Keep the script's exit code: from its end on, SIGTERM does not replace it any more.

        Python puts back what a signal does by default before it tears its modules down, which with
        TensorFlow takes a second; only a signal that is ignored stays so.
        """
        if os.getpid() == self._pid and self._owner is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if not (has_failed() or self.group.is_distributed):
                note_calls(self._owner, self.fit_count, has_ended=True)

    def exit_preempted(self) -> None:
        """End the process as preempted; the user's `finally` and atexit code is not run."""
        self.writer.wait()
        remove_temporary_files()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(PREEMPTED)

    # -- reporting -----------------------------------------------------------------------------

    def say_once(self, text: str) -> None:
        """Print a line, once in the trial: a later segment does not say it again.

        Followers print it into their own logs, in each segment.
        """
        if text not in self._said:
            self._said.add(text)
            if self.group.is_leader and not is_first_time(self.folder, text):
                return
            print(f"hermes: {text}", flush=True)

    def say_limit(self, effect: str) -> None:
        """Print once how the limit of epochs affects a call of `fit`."""
        self.say_once(
            f"{effect}: budget.max_epochs ({self.max_epochs}) counts the epochs of all calls of "
            "fit, and they are trained. Raise it if the script is to train more"
        )

    def report(self, step: int, values: Mapping[str, float]) -> bool:
        """Write an epoch's values; False if the objective is NaN or infinite.

        Followers write nothing.
        """
        announce(values)
        if self.group.is_leader:
            self.metrics.append(Metric(name, value, step) for name, value in values.items())
        bad = {n: v for n, v in values.items() if v - v != 0.0}
        bad_values(bad, step)
        return self.objective not in bad

    # -- checkpoints ---------------------------------------------------------------------------

    def _delete_torn(self) -> None:
        """Delete what is newer than the newest valid checkpoint: it is torn and must not count."""
        newest = self.resume.serial if self.resume is not None else 0
        self.store.keep(serial for serial in self.store.serials() if serial <= newest)

    def retained(self) -> set[int]:
        """Return the serials of the checkpoints to keep."""
        return checkpoint_files.retained(self.store.headers(), self.kept)

    def check_budget(self) -> None:
        """Delete the states after a `fit` if they exceed their budget: no resume any more."""
        finals = checkpoint_files.final_states(self.store.headers())
        sizes = self.store.sizes_bytes()
        ends = {fit: sizes[serial] for fit, serial in finals.items()}
        if not checkpoint_files.exceeds(ends, self._budget_bytes):
            return
        self.unresumable = checkpoint_files.why_not_resumable(len(ends), self._budget_bytes)
        self.say_once(f"this trial is not preemptible any more: {self.unresumable}")
        event = {"kind": "hook", "preemptible": False, "reason": self.unresumable}
        send({**event, "startup_s": None})
        self.store.keep(())
        self.store = CheckpointFiles(self.folder / _UNRESUMABLE)

    def disk_failed(self, error: OSError) -> None:
        """End as failed after a checkpoint that could not be written; the one before it is kept."""
        remove_temporary_files()
        print(
            f"hermes: a checkpoint could not be written: [Errno {error.errno}] {error.strerror}: "
            f"{self.store._directory}: free some space there; the checkpoint before it is kept",
            flush=True,
        )
        os._exit(DISK_ERROR)


class CheckpointWriter:
    """Write checkpoints in a background thread, one at a time."""

    def __init__(self, runtime: KerasRuntime) -> None:
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
            fits = header["fit"] + bool(header["final"])
            send({"kind": "checkpoint", "step": header["step"], "seconds": seconds, "fits": fits})
        except OSError as error:
            self._runtime.disk_failed(error)


_runtime: KerasRuntime | None = None


def runtime() -> KerasRuntime:
    """Return the process's runtime, made at the first call."""
    global _runtime  # noqa: PLW0603 - one a process, by its nature
    if _runtime is None:
        _runtime = KerasRuntime()
    return _runtime


def install_handlers() -> None:
    """Handle SIGTERM in good order from the import of Keras on."""
    runtime().handle_sigterm()
    atexit.register(runtime().at_exit)


def shuffle_seed(fit: int) -> int:
    """Return the seed of a fit's permutations; each rank has its own."""
    return rank_seed(trial_seeds()["shuffle"] + fit, runtime().group.rank)
