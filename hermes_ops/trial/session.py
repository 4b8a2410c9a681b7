"""One call of `fit`: resumed where it was, reported, checkpointed, stopped at a batch."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Mapping
from typing import Any, Protocol

from hermes_ops.trial import state
from hermes_ops.trial.best_model import keep_best
from hermes_ops.trial.callback_files import CallbackFiles
from hermes_ops.trial.channel import send
from hermes_ops.trial.data import keeps_hidden_random_state, seeded, why_no_two_runs_are_alike
from hermes_ops.trial.runtime import Runtime
from hermes_ops.trial.store import Checkpoint
from hermes_ops.trial.training_state import TrainingState


class Backend(Protocol):
    """What differs between Keras 2 and Keras 3."""

    def build(self, session: Session) -> bool:
        """Make every variable exist; False if that must wait for the first batch."""

    def why_boundary_only(self, session: Session) -> str | None:
        """Why this fit can be resumed at the start of an epoch only; None if at any batch."""

    def train_step(self, session: Session) -> Any:
        """The traced training step; None if it is not traced."""

    def dataset(self, session: Session) -> Any:
        """The tf.data pipeline that the script has given; None if the data are anything else."""

    def batches(self, session: Session) -> int | None:
        """Batches in an epoch, None if not known yet."""

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Let `fit` begin at an epoch."""


class Session:
    """A running `fit`; `epoch` and `batch` count what is complete."""

    def __init__(
        self,
        runtime: Runtime,
        backend: Backend,
        model: Any,
        arguments: Mapping[str, Any],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.runtime = runtime
        self.backend = backend
        self.model = model
        self._arguments = dict(arguments)
        self.number = runtime.begun - 1
        self.first_epoch = int(arguments.get("initial_epoch") or 0)
        self.epochs = int(arguments.get("epochs") or 1)
        self.steps_per_epoch = arguments.get("steps_per_epoch")
        self.shuffle = arguments.get("shuffle", True)
        self.checkpoint = checkpoint
        header: Mapping[str, Any] = checkpoint.header if checkpoint else {}
        self.resume_epoch = int(header.get("epoch", self.first_epoch))
        self.resume_batch = int(header.get("batch", 0))
        self.resume_batches = header.get("batches")
        self.ended_before = bool(header.get("stopped"))
        self.skipping = bool(header.get("final"))
        self.epoch = self.resume_epoch
        self.source: Any = None  # the training data's iterator or handler
        self.adapter: Any = None
        self.callbacks: Any = None
        self.begun = False
        self.permutations: Any = None
        self.boundary_reason: str | None = None
        self.best_epoch: int | None = None
        data = checkpoint.objects() if checkpoint else None
        self.objects: Mapping[str, Any] = pickle.loads(data) if data else {}  # noqa: S301 - ours
        self.state: TrainingState
        self.files = CallbackFiles(
            self._own_callbacks(),
            self.objects.get("files") or {},
            runtime.folder,
            self.number,
            runtime.writes,
        )
        self._steps_before = runtime.steps_before
        self._evaluated = False
        self._lengths: dict[str, int] = {}

    # -- the beginning -------------------------------------------------------------------------

    def on_begin(self, callbacks: Any) -> None:
        """All callbacks have begun: put back what was, and take SIGTERM over."""
        self.callbacks = callbacks
        restore_s = 0.0
        saved = self.objects.get("pipeline")
        dataset = self.backend.dataset(self)
        self.state = TrainingState(self.model, self._callbacks(), self._arguments, dataset, saved)
        if self.checkpoint is not None:
            started_s = time.monotonic()
            if not self.backend.build(self):
                self.boundary_reason = "its model cannot be built before its first batch"
            if not self.skipping:  # else the end of `fit` puts the state back
                self.files.put_back()
                self._restore()
                self.state.pipeline.put_back_start()
                self._report_history()
            restore_s = time.monotonic() - started_s
            send({"kind": "restored", "seconds": restore_s})
        self.begun = True
        if self.skipping:
            return
        self.boundary_reason = self.boundary_reason or self.backend.why_boundary_only(self)
        if self.boundary_reason is None and self.state.shares_with_pipeline():
            self.boundary_reason = "its model uses variables that its tf.data pipeline changes too"
        self._say_limits(dataset)
        self.runtime.listen()
        started = os.environ.get("HERMES_STARTED_S")
        is_first = started is not None and self.number == 0
        startup_s = time.time() - float(started or 0.0) - restore_s if is_first else None
        is_new = self.checkpoint is None and not self.runtime.records
        reason = self.runtime.unresumable or (self.boundary_reason if is_new else None)
        event = {"kind": "hook", "preemptible": reason is None, "reason": reason or ""}
        send({**event, "startup_s": startup_s})

    def _say_limits(self, dataset: Any) -> None:
        unlike = why_no_two_runs_are_alike(
            dataset, self._arguments.get("validation_data"), bool(self.steps_per_epoch)
        )
        if unlike:
            self.runtime.say_once(f"no two runs of this fit are alike, stopped or not: {unlike}")
        if self.boundary_reason:
            self.runtime.say_once(
                f"this fit is resumed at the start of an epoch only: {self.boundary_reason}"
            )

    def _restore(self) -> None:
        assert self.checkpoint is not None
        found = self.state.variables(self.backend.train_step(self))
        state.assign(found, self.checkpoint.arrays(state.make_array))
        members = self._callbacks()
        for callback, saved in zip(members, self.objects["callbacks"]):  # noqa: B905 - Python 3.9
            if saved["type"] == type(callback).__name__:
                state.write_callback(callback, saved["state"])
        self.best_epoch = self.objects.get("best_epoch")
        self.state.write_objects(self.objects)

    def prepare_files(self) -> None:
        """Before the callbacks begin: their files are as they were at the checkpoint."""
        self.files.prepare()
        for path in self.files.missing():
            self.runtime.say_once(f"{path}, which a callback wrote before the stop, is gone")

    def put_back_objects(self) -> None:
        """Put back what is no variable: code that repeats an earlier epoch may have changed it."""
        self.state.write_objects(self.objects)

    def _callbacks(self) -> list[Any]:
        if not self.skipping:
            return list(getattr(self.callbacks, "callbacks", ()))
        return self._own_callbacks()

    def _own_callbacks(self) -> list[Any]:
        own = self._arguments.get("callbacks") or ()
        return list(getattr(own, "callbacks", own if isinstance(own, (list, tuple)) else [own]))

    def _history(self) -> Any:
        return getattr(self.model, "history", None)

    def _report_history(self) -> None:
        """Say again what was said before; the metrics file drops what it has."""
        history = self._history()
        epochs = list(getattr(history, "epoch", ()))
        for index, epoch in enumerate(epochs):
            values = {
                name: float(series[index])
                for name, series in history.history.items()
                if len(series) == len(epochs) and _is_number(series[index])
            }
            self.runtime.report(self._step(epoch + 1), values)

    @property
    def is_first_epoch(self) -> bool:
        """Whether the epoch that runs is the first one of this fit in this process."""
        return self.epoch == self.resume_epoch

    # -- epochs --------------------------------------------------------------------------------

    def _step(self, epoch: int) -> int:
        return self._steps_before + epoch - self.first_epoch

    def on_epoch_begin(self, epoch: int) -> None:
        """In the first epoch after a stop in mid-epoch: undo what the callbacks have done again."""
        self.epoch = epoch
        if self.resuming_at(epoch) and self.resume_batch:
            self._restore()
        history = dict(getattr(self._history(), "history", {}))
        self._lengths = {name: len(series) for name, series in history.items()}

    def resuming_at(self, epoch: int) -> bool:
        """Whether this epoch is the one in which the fit goes on."""
        return self.checkpoint is not None and epoch == self.resume_epoch

    def evaluations_before(self) -> int:
        """How many validations the epochs before the stop had; asked for a second time, none."""
        if self.checkpoint is None or self._evaluated:
            return 0
        self._evaluated = True
        every = self._arguments.get("validation_freq", 1)
        epochs = range(self.first_epoch, self.resume_epoch)
        if isinstance(every, int):
            return sum((epoch + 1) % every == 0 for epoch in epochs)
        return sum(epoch + 1 in every for epoch in epochs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """Report, checkpoint, and end here if asked to."""
        self.epoch = epoch + 1
        if epoch == self.first_epoch and self.epochs > epoch + 1:
            self.state.look()
        values = self._values(logs or {})
        good = self.runtime.report(self._step(epoch + 1), values)
        if not good:
            return  # the trial is about to be failed; NaN is not worth keeping
        limit = self.runtime.max_epochs
        if limit is not None and self._step(epoch + 1) >= limit:
            self.model.stop_training = True
        best = self._is_best(values)
        if best:
            self.best_epoch = epoch
        last = self.model.stop_training or epoch + 1 >= self.epochs
        if self.runtime.stop or not last:
            self.save(batch=0, best=best, objective=self._objective(values))
        if self.runtime.stop and not last:
            self.runtime.leave()

    def on_first_batch(self) -> None:
        """The training step has been traced: say what of it cannot be put back."""
        step = self.backend.train_step(self)
        if step is not None and seeded() and keeps_hidden_random_state(step):
            self.runtime.say_once(
                "the training step draws random numbers by operations whose state cannot be kept "
                "(tf.random.* in a layer): after a stop they begin anew; use keras.random"
            )

    def _values(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The epoch's logs, and what callbacks have added to them, which only the history has."""
        found = dict(logs)
        for name, series in dict(getattr(self._history(), "history", {})).items():
            if len(series) > self._lengths.get(name, 0):
                found[name] = series[-1]
        return {name: float(value) for name, value in found.items() if _is_number(value)}

    def _objective(self, values: Mapping[str, float]) -> float | None:
        return values.get(self.runtime.objective or "")

    def _is_best(self, values: Mapping[str, float]) -> bool:
        value = self._objective(values)
        if value is None:
            return False
        if os.environ.get("HERMES_DIRECTION") == "maximize":
            value = -value
        if self.runtime.best is None or value < self.runtime.best:
            self.runtime.best = value
            return True
        return False

    def stop_here(self, batch: int) -> None:
        """SIGTERM has come and so many batches of the epoch are done: checkpoint and end."""
        exact = self.boundary_reason is None and self.backend.batches(self) is not None
        if exact and batch:
            self.save(batch=batch, best=False, objective=None)
        elif batch and not exact:
            reason = self.boundary_reason or "the number of its batches is not known yet"
            self.runtime.say_once(f"stopped in mid-epoch, goes on at its start: {reason}")
        self.runtime.leave()

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, batch: int, best: bool, objective: float | None, final: bool = False) -> None:
        """Take the state now; it is written beside the training."""
        started_s = time.monotonic()
        header = {
            "fit": self.number,
            "epoch": self.epoch,
            "batch": batch,
            "batches": self.backend.batches(self),
            "step": self._step(self.epoch),
            "stopped": bool(self.model.stop_training),
            "final": final,
            "best": best,
            "objective": objective if objective is not None and math.isfinite(objective) else None,
        }
        arrays = state.read(self.state.variables(self.backend.train_step(self)))
        objects = {
            "callbacks": [
                {"type": type(c).__name__, "state": state.read_callback(c)}
                for c in self._callbacks()
            ],
            **self.state.read_objects(),
            "files": self.files.read(),
            "pipeline": self.state.pipeline.saved(in_epoch=batch > 0),
            "records": self.runtime.records,
            "best_epoch": self.best_epoch,
            "best_value": self.runtime.best,
        }
        for failure in self.state.failures():
            self.runtime.say_once(f"the state of an object could not be kept: {failure}")
        data = pickle.dumps(objects, protocol=4)
        send({"kind": "model", "tensor_skew": state.tensor_skew(self.model)})
        self.runtime.writer.submit(header, arrays, data, time.monotonic() - started_s)

    def on_return(self) -> None:
        """`fit` has come to its end: keep its state and the best model."""
        history = self._history()
        epochs = len(getattr(history, "epoch", ()))
        if self.skipping:
            return
        record = {
            "epochs": epochs,
            "history": dict(getattr(history, "history", {})),
            "epoch": list(getattr(history, "epoch", ())),
        }
        self.epoch = self.first_epoch + epochs
        self.runtime.writer.wait()
        if epochs:
            keep_best(self)
        self.runtime.records.append(record)
        if self.runtime.unresumable is None:
            self.save(batch=0, best=False, objective=None, final=True)
            self.runtime.writer.wait()
            self.runtime.check_budget()
        send({"kind": "trained", "step": self._step(self.epoch)})
        if self.runtime.stop:
            self.runtime.end_soon()

    def put_back_end(self, record: Mapping[str, Any]) -> None:
        """A fit that was complete before: its last state again, and its history."""
        self._restore()
        self.state.pipeline.put_back_end()
        self.files.put_back()
        self.model.stop_training = self.ended_before
        history = self._history()
        if history is not None:
            history.history, history.epoch = dict(record["history"]), list(record["epoch"])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
