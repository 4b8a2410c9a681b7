"""One call of `fit`: resumed where it was, reported, checkpointed, stopped at a batch."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

from hermes_ops.trial.event_channel import send
from hermes_ops.trial.group import GroupError
from hermes_ops.trial.keras.backend import KerasBackend
from hermes_ops.trial.keras.best_model import FitEnd, keep_best, values_now
from hermes_ops.trial.keras.callback_files import (
    CallbackFiles,
    match_callbacks,
    path_attributes,
    renamed_paths,
)
from hermes_ops.trial.keras.checkpoint_files import RAISED, Checkpoint
from hermes_ops.trial.keras.output_order import after_replay
from hermes_ops.trial.keras.pipeline import (
    keeps_hidden_random_state,
    seeded,
    why_no_two_runs_are_alike,
)
from hermes_ops.trial.keras.ranks import EpochVote, may_be_resized, rank_parts
from hermes_ops.trial.keras.resize import (
    EpochShape,
    FitRate,
    SizeChange,
    arrays_of_rank,
    fingerprints,
    objects_of_rank,
    resized_callbacks,
    resized_python,
    resumed_batch,
    size_dependent,
)
from hermes_ops.trial.keras.runtime import KerasRuntime
from hermes_ops.trial.keras.training_state import (
    MismatchError,
    TrainingState,
    assign_variables,
    given_data,
    make_array,
    may_differ_by_rank,
    plain_history,
    read_callback,
    read_variables,
    tensor_skew,
    write_callback,
)

_SAMPLES = "samples"
"""The metric of the samples that all processes of a trial have trained on."""


class FitSession:
    """A running `fit`; `epoch` and `batch` count what is complete."""

    def __init__(
        self,
        runtime: KerasRuntime,
        backend: KerasBackend,
        model: Any,
        arguments: Mapping[str, Any],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.runtime = runtime
        self.ranks = runtime.ranks
        self.backend = backend
        self.model = model
        self._arguments = dict(arguments)
        self.number = runtime.fit_count - 1
        self.first_epoch = int(arguments.get("initial_epoch") or 0)
        self.epochs = int(arguments.get("epochs") or 1)
        self.steps_per_epoch = arguments.get("steps_per_epoch")
        self.shuffle = arguments.get("shuffle", True)
        self.validation_data = arguments.get("validation_data")
        self.validation_steps = arguments.get("validation_steps")
        self.checkpoint = checkpoint
        header: Mapping[str, Any] = checkpoint.header if checkpoint else {}
        self.resume_epoch = int(header.get("epoch", self.first_epoch))
        self.resume_batch = int(header.get("batch", 0))
        self.change = SizeChange(self._size_before(header), runtime.group.size)
        self._shape_before = EpochShape(header.get("batches"), header.get("batch_size"))
        self.ended_before = bool(header.get("stopped"))
        self.is_replayed = bool(header.get("final"))
        self.is_trained = False  # all epochs are over: `fit` is called with 0 epochs
        self.is_repeated = False  # it raised an error before the stop: it is run again, not saved
        self.epoch = self.resume_epoch
        self.source: Any = None  # the training data's iterator or handler
        self.adapter: Any = None
        self.callbacks: Any = None
        self.has_begun = False
        self.permutations: Any = None
        self.boundary_reason: str | None = None
        self.best_epoch: int | None = None
        self._best_values: dict[str, Any] | None = None  # of that epoch, if it is the last
        self.objects = self._saved_objects()
        self.rate = FitRate(model, runtime, self.change, header)
        self.fingerprints: Mapping[str, str] = {}
        self._is_resizable = False
        self._dependent: frozenset[str] = frozenset()
        self.state: TrainingState
        self.files = CallbackFiles(
            self._own_callbacks(),
            self.objects.get("files") or {},
            runtime.folder,
            self.number,
            runtime.writes,
            later=runtime.later_files,
            is_reader=not runtime.group.is_leader,
        )
        self._steps_before = runtime.steps_before
        self._evaluated = False
        self._lengths: dict[str, int] = {}
        self._texts: list[dict[str, Any]] = []  # of callbacks, as the script gives them
        self._given: dict[int, dict[str, str]] = {}  # to callbacks, as the fit begins

    def _saved_objects(self) -> dict[str, Any]:
        """Return the objects of this rank in the checkpoint, without arrays; empty without one."""
        data = self.checkpoint.objects() if self.checkpoint else None
        saved = pickle.loads(data) if data else {}  # noqa: S301 - ours
        return objects_of_rank(saved, self.runtime.group.rank, self.change.is_same)

    def _size_before(self, header: Mapping[str, Any]) -> int:
        return int(header.get("size", 1)) if header else self.runtime.group.size

    # -- the beginning -------------------------------------------------------------------------

    def on_begin(self, callbacks: Any) -> None:
        """Restore the state once all callbacks have begun, and handle SIGTERM."""
        self.callbacks = callbacks
        restore_s = 0.0
        saved = self.objects.get("pipeline")
        dataset = self.backend.dataset(self)
        self.state = TrainingState(self.model, self._callbacks(), self._arguments, dataset, saved)
        self._given = {id(callback): given_data(callback) for callback in self._callbacks()}
        self._texts = path_attributes(self._own_callbacks())
        self._compare_with_others()
        if self.checkpoint is not None:
            started_s = time.monotonic()
            if not self.backend.build(self):
                self.boundary_reason = "its model cannot be built before its first batch"
            if not self.is_replayed:  # else the end of `fit` puts the state back
                self._follow_paths()
                self.files.put_back()
                self._restore()
                self.state.pipeline.put_back_start()
                self._report_history()
            restore_s = time.monotonic() - started_s
            send({"kind": "restored", "seconds": restore_s})
        self.has_begun = True
        if self.is_replayed:
            return
        self.boundary_reason = self.boundary_reason or self.backend.why_boundary_only(self)
        if self.boundary_reason is None and self.state.shares_with_pipeline():
            self.boundary_reason = "its model uses variables that its tf.data pipeline changes too"
        self._say_limits(dataset)
        self.runtime.handle_sigterm()
        started = os.environ.get("HERMES_STARTED_S")
        is_first = started is not None and self.number == 0
        startup_s = time.time() - float(started or 0.0) - restore_s if is_first else None
        is_new = self.checkpoint is None and not self.runtime.records
        reason = self.runtime.unresumable or (self.boundary_reason if is_new else None)
        event = {"kind": "hook", "preemptible": reason is None, "reason": reason or ""}
        with after_replay(self.runtime.folder, self.runtime.ends_replay(self.number)):
            send({**event, "startup_s": startup_s, "again": self.is_repeated})

    def _compare_with_others(self) -> None:
        """Check that all ranks go on from one checkpoint, and find what depends on their number."""
        serial = None if self.checkpoint is None else self.checkpoint.serial
        if len(set(self.ranks.gather(serial))) > 1:
            raise GroupError(
                "the processes of the trial do not see the same checkpoint: "
                "$HERMES_CHECKPOINT_DIR must be one folder for all of them"
            )
        self._is_resizable = may_be_resized(self.runtime.group)
        if not self._is_resizable:
            return
        python = self.state.read_objects()["python"]
        self.fingerprints = fingerprints(self._callback_states(), python)
        if self.checkpoint is None or self.change.is_same:
            return
        self._dependent = size_dependent(self.objects.get("fingerprints") or {}, self.fingerprints)
        kinds = [type(callback).__name__ for callback in self._callbacks()]
        is_same = kinds == [entry["type"] for entry in self.objects["callbacks"]]
        saved = self.objects.get("python") or {}
        self.objects["python"] = resized_python(saved, self._dependent, is_same)
        if not self.is_replayed:
            now, before = self.change.now, self.change.before
            print(f"hermes: goes on with {now} workers instead of {before}", flush=True)

    @property
    def resume_batches(self) -> int | None:
        """The batches of an epoch by the checkpoint; None if batches have another size now."""
        before, size = self._shape_before, self.backend.batch_size(self)
        is_alike = self.change.is_same and before.batch_size in (None, size)
        return before.batches if is_alike else None

    def resumed_batch(self, batches: int | None, batch_size: int | None) -> int:
        """Return the batch at which the resumed epoch, which has this shape now, continues."""
        now = EpochShape(batches, batch_size)
        return resumed_batch(self.resume_batch, self.change, self._shape_before, now)

    def is_stop_due(self) -> bool:
        """Tell, once before each batch, whether this process leaves before it."""
        return self.ranks.is_stop_due(self.runtime.stop)

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
        variables = self.state.variables(self.backend.train_step(self))
        arrays = self.checkpoint.arrays(make_array)
        rank, is_same = self.runtime.group.rank, self.change.is_same
        assign_variables(variables, arrays_of_rank(arrays, self.objects, rank, is_same))
        self._restore_callbacks()
        self.best_epoch = self.objects.get("best_epoch")
        self.state.write_objects(self.objects)
        self.rate.restore()

    def _restore_callbacks(self) -> None:
        members, saved = self._callbacks(), self.objects["callbacks"]
        if self.change.is_same:
            for callback, entry in match_callbacks(members, saved):
                write_callback(callback, entry["state"])
            return
        for callback, state in resized_callbacks(members, saved, self._dependent):
            write_callback(callback, state)

    def prepare(self) -> None:
        """Restore the callbacks' files of the checkpoint, before the callbacks begin."""
        self.rate.begin()
        self._follow_paths()
        if self.checkpoint is not None:
            self.files.put_forward()
        self.files.prepare()
        for path in self.files.missing():
            self.runtime.say_once(f"{path}, which a callback wrote before the stop, is gone")

    def _follow_paths(self) -> None:
        """Continue files at the paths to which callbacks write now: these may contain the time."""
        self.files.follow(renamed_paths(self._own_callbacks(), self.objects.get("texts")))

    def put_back_objects(self) -> None:
        """Restore objects other than variables: repeating earlier epochs may have changed them."""
        self.state.write_objects(self.objects)

    def _callbacks(self) -> list[Any]:
        if not self.is_replayed:
            return list(getattr(self.callbacks, "callbacks", ()))
        return self._own_callbacks()

    def _own_callbacks(self) -> list[Any]:
        callbacks = self._arguments.get("callbacks") or ()
        if hasattr(callbacks, "callbacks"):  # a CallbackList that the script has made
            return list(callbacks.callbacks)
        return list(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])

    def _history(self) -> Any:
        return getattr(self.model, "history", None)

    def _report_history(self) -> None:
        """Report the restored history; the metrics file drops what it has."""
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
        """Tell whether the epoch that runs is the first one of this fit in this process."""
        return self.epoch == self.resume_epoch

    # -- epochs --------------------------------------------------------------------------------

    def _step(self, epoch: int) -> int:
        return self._steps_before + epoch - self.first_epoch

    def on_epoch_begin(self, epoch: int) -> None:
        """Undo what callbacks have repeated, in the first epoch after a stop in mid-epoch."""
        self.epoch = epoch
        if self.resuming_at(epoch) and self.resume_batch:
            self._restore()
        history = dict(getattr(self._history(), "history", {}))
        self._lengths = {name: len(series) for name, series in history.items()}

    def resuming_at(self, epoch: int) -> bool:
        """Tell whether this epoch is the one in which the fit goes on."""
        return self.checkpoint is not None and epoch == self.resume_epoch

    def evaluations_before(self) -> int:
        """Count the validations of the epochs before the stop; 0 at the second call."""
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
            self.state.find_objects()
        values = {**self._values(logs or {}), **self._count_epoch()}
        good = self.runtime.report(self._step(epoch + 1), values)
        limit = self.runtime.max_epochs
        if good and limit is not None and self._step(epoch + 1) >= limit:
            self._end_at_limit(epoch)
        vote = EpochVote(good, bool(self.model.stop_training), self.runtime.stop)
        vote = self.ranks.agree(vote)
        if not vote.good:
            return  # the trial is about to be failed; NaN is not worth keeping
        if vote.ended:
            self.model.stop_training = True
        best, last = self._update_best(values), vote.ended or epoch + 1 >= self.epochs
        if best:
            self._note_best(epoch, last)
        if vote.stop or not last:
            self.save(batch=0, best=best, objective=self._objective(values))
        if vote.stop and not last:
            self._leave()

    def _end_at_limit(self, epoch: int) -> None:
        self.model.stop_training = True
        if epoch + 1 < self.epochs:
            self.runtime.say_limit(f"this fit ends after {epoch + 1} of {self.epochs} epochs")

    def _note_best(self, epoch: int, last: bool) -> None:
        """Remember the best epoch; the last one has no checkpoint, so its variables as well."""
        self.best_epoch = epoch
        if last and self.runtime.group.is_leader:
            self._best_values = values_now(self.model)

    def _count_epoch(self) -> dict[str, float]:
        """Count the samples of the epoch that is over; return the metric of a distributed trial."""
        self._count_samples(self.backend.batches(self), self.epoch - 1)
        samples = self.runtime.samples
        if samples is None or not self.runtime.was_distributed:
            return {}
        return {_SAMPLES: float(samples)}

    def _count_samples(self, batches: int | None, epoch: int) -> None:
        """Add what all ranks have trained on in an epoch, up to `batches` of each rank."""
        if not self._is_resizable:
            self.runtime.samples = None
            return
        begun, size = 0, self.backend.batch_size(self)
        if epoch == self.resume_epoch:
            begun = self.resumed_batch(self.backend.batches(self), size)
        by_rank = self.ranks.gather(
            None if batches is None else self.backend.samples(self, begun, batches)
        )
        before = self.runtime.samples
        self.runtime.samples = None if before is None or None in by_rank else before + sum(by_rank)

    def _leave(self) -> None:
        self.ranks.leave()
        self.runtime.exit_preempted()

    def on_first_batch(self) -> None:
        """Report which random operations of the traced training step cannot be restored."""
        step = self.backend.train_step(self)
        if step is not None and seeded() and keeps_hidden_random_state(step):
            self.runtime.say_once(
                "the training step draws random numbers by operations whose state cannot be kept "
                "(tf.random.* in a layer): after a stop they repeat; use keras.random"
            )

    def _values(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return the epoch's logs with what callbacks have added, which only the history has."""
        values = dict(logs)
        for name, series in dict(getattr(self._history(), "history", {})).items():
            if len(series) > self._lengths.get(name, 0):
                values[name] = series[-1]
        return {name: float(value) for name, value in values.items() if _is_number(value)}

    def _objective(self, values: Mapping[str, float]) -> float | None:
        return values.get(self.runtime.objective or "")

    def _update_best(self, values: Mapping[str, float]) -> bool:
        """Return whether the objective is better than all before; if so, remember it."""
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
        """Checkpoint and end at SIGTERM, after `batch` batches of the epoch."""
        is_known = self.boundary_reason is None and self.backend.batches(self) is not None
        exact = all(self.ranks.gather(is_known))
        if exact and batch:
            self._count_samples(batch, self.epoch)
            self.save(batch=batch, best=False, objective=None)
        elif batch and not exact:
            reason = self.boundary_reason or "the number of its batches is not known yet"
            self.runtime.say_once(f"stopped in mid-epoch, goes on at its start: {reason}")
        self._leave()

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, batch: int, best: bool, objective: float | None, final: bool = False) -> None:
        """Read the state now; a background thread writes it, if this is the leader."""
        if self.is_repeated:
            return
        started_s = time.monotonic()
        header = {
            "fit": self.number,
            "first_epoch": self.first_epoch,
            "epochs": self.epochs,
            "epoch": self.epoch,
            "batch": batch,
            "batches": self.backend.batches(self),
            "step": self._step(self.epoch),
            "stopped": bool(self.model.stop_training),
            "final": final,
            "best": best,
            "objective": objective if objective is not None and math.isfinite(objective) else None,
            "size": self.runtime.group.size,
            "batch_size": self.backend.batch_size(self),
            "samples": self.runtime.samples,
            "was_distributed": self.runtime.was_distributed,
            **self.rate.header(),
        }
        variables = self.state.variables(self.backend.train_step(self))
        of_rank = {
            "callbacks": self._callback_states(),
            **self.state.read_objects(),
            "pipeline": self.state.pipeline.saved(in_epoch=batch > 0),
        }
        parts = self._parts(variables, of_rank)
        if not self.runtime.group.is_leader:
            return
        arrays = read_variables(variables)
        objects = {
            **of_rank,
            "files": self.files.read(),
            "texts": self._texts,
            "records": self.runtime.records,
            "calls": self.runtime.calls,
            "best_epoch": self.best_epoch,
            "best_value": self.runtime.best,
            "fingerprints": self.fingerprints,
            "ranks": parts,
        }
        for failure in self.state.failures():
            self.runtime.say_once(f"the state of an object could not be kept: {failure}")
        data = pickle.dumps(objects, protocol=4)
        send({"kind": "model", "tensor_skew": tensor_skew(self.model)})
        self.runtime.writer.submit(header, arrays, data, time.monotonic() - started_s)

    def _callback_states(self) -> list[dict[str, Any]]:
        return [
            {"type": type(c).__name__, "state": read_callback(c, self._given.get(id(c)))}
            for c in self._callbacks()
        ]

    def _parts(
        self, variables: Mapping[str, Any], of_rank: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return what each rank has of its own: nothing if there is one rank."""
        if not self.runtime.group.is_distributed:
            return []
        local = {k: v for k, v in variables.items() if may_differ_by_rank(k, v)}
        arrays = dict(read_variables(local))
        parts, is_complete = rank_parts(self.ranks, self.runtime.group.rank, arrays, of_rank)
        if not is_complete:
            self.runtime.say_once(
                "variables that differ from rank to rank need more than 64 MiB of each: after a "
                "stop all ranks continue with those of rank 0"
            )
        return parts

    def on_return(self) -> None:
        """Keep the state and the best model at the end of `fit`."""
        history = self._history()
        epochs = len(getattr(history, "epoch", ()))
        if self.is_replayed:
            return
        self._check_repeated()
        record = {
            "epochs": epochs,
            "history": plain_history(getattr(history, "history", {})),
            "epoch": list(getattr(history, "epoch", ())),
        }
        self.epoch = self.first_epoch + epochs
        self._state_epochs(history)
        self.runtime.writer.wait()
        if epochs and self.runtime.group.is_leader:
            end = FitEnd(self.number, self.best_epoch, self._best_values)
            keep_best(self.runtime, self.model, end)
        self.runtime.records.append(record)
        if self.ranks.gather(self.runtime.unresumable)[0] is None:
            self.save(batch=0, best=False, objective=None, final=True)
            self._keep_end()
        send({"kind": "trained", "step": self._step(self.epoch)})
        if self.runtime.stop:
            self.runtime.end_soon()

    def on_error(self) -> None:
        """Record a fit that ends with an error: the script may catch it and call `fit` again."""
        if not self.is_replayed:
            epochs = self.epoch - self.first_epoch
            self.runtime.records.append({"epochs": epochs, RAISED: True})

    def _check_repeated(self) -> None:
        if self.is_repeated:
            self.runtime.store.keep(())
            raise MismatchError(
                f"fit call {self.number + 1} ended with an error before the stop, and does not "
                "now: the trial restarts from scratch"
            )

    def _keep_end(self) -> None:
        if self.runtime.group.is_leader:
            self.runtime.writer.wait()
            self.runtime.check_budget()

    def put_back_end(self, record: Mapping[str, Any]) -> None:
        """Restore the last state and the history of a fit that was complete before."""
        self.backend.repeat_fit(self)
        self._restore()
        self.state.pipeline.put_back_end()
        self._follow_paths()
        self.files.put_back_end()
        self.model.stop_training = self.ended_before
        history = self._history()
        if history is not None:
            history.history, history.epoch = dict(record["history"]), list(record["epoch"])
        self._state_epochs(history)

    def _state_epochs(self, history: Any) -> None:
        """Set the epochs in the history to those that the script requested, not those left."""
        params = getattr(history, "params", None)
        if isinstance(params, dict):
            history.params = {**params, "epochs": self.epochs}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
