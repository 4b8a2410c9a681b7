"""Run a call of `fit` as the trial needs it: skipped, resumed, or from its beginning."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hermes_ops.trial.event_channel import announce
from hermes_ops.trial.keras.backend import KerasBackend
from hermes_ops.trial.keras.cache_locks import note_caches, shared_caches
from hermes_ops.trial.keras.callback_files import (
    shared_files,
    shares_directory,
    take_out_backups,
)
from hermes_ops.trial.keras.checkpoint_files import RAISED
from hermes_ops.trial.keras.fit_calls import (
    FitCall,
    describe_call,
    fit_number,
    note_begun,
    with_begun,
)
from hermes_ops.trial.keras.output_order import announce_before_printing
from hermes_ops.trial.keras.runtime import KerasRuntime, runtime
from hermes_ops.trial.keras.session import FitSession
from hermes_ops.trial.keras.training_state import MismatchError

Original = Callable[..., Any]


def run_fit(backend: KerasBackend, original: Original, model: Any, args: Any, kwargs: Any) -> Any:
    """Do what `original(model, *args, **kwargs)` does, beginning where the trial stands."""
    process = runtime()
    if not process.claim_process():
        process.say_once(f"this fit is not watched: {process.why_not_watched()}")
        return original(model, *args, **kwargs)
    process.ranks.check(model)
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    folder = process.folder
    for warning in (
        take_out_backups(call.arguments),
        shared_files(call.arguments, folder),
        shared_caches(call.arguments, folder, shares_directory(folder)),
    ):
        if warning is not None:
            process.say_once(warning)
    if process.group.is_leader:
        note_caches(folder, call.arguments)
    number = _count_call(process, describe_call(call.arguments))
    records = process.resumed.get("records", [])
    if number < len(records) and not records[number].get(RAISED):
        return _skip(process, backend, original, call, records[number])
    return _train(process, backend, original, call)


def _count_call(process: KerasRuntime, call: FitCall) -> int:
    """Count a call of `fit`, and those before it that a resumed script has left out."""
    number, records = process.fit_count, process.resumed.get("records", [])
    earlier_calls = with_begun(process.folder, process.resumed.get("calls", ()))
    if not process.group.is_distributed:  # its ranks would have to agree
        number = _number(process, earlier_calls, len(records), call)
    left_out = range(process.fit_count, number)
    process.records += records[left_out.start : left_out.stop]
    process.calls += [*earlier_calls[left_out.start : left_out.stop], call]
    process.fit_count = number + 1
    process.note_call()
    if left_out:
        first = left_out.start + 1
        calls = f"call {first}" if first == number else f"calls {first} to {number}"
        process.say_once(
            f"the script leaves out fit {calls}, which it has completed before the stop: the next "
            f"one is taken for call {number + 1}"
        )
    return number


def _number(
    process: KerasRuntime, earlier_calls: Sequence[FitCall], complete: int, call: FitCall
) -> int:
    number = fit_number(earlier_calls, process.fit_count, complete, call)
    if number is None:
        process.store.keep(())
        raise MismatchError(
            f"the script has left out fit call {complete + 1}, in which it was stopped: the trial "
            "restarts from scratch"
        )
    return number


def _skip(
    process: KerasRuntime,
    backend: KerasBackend,
    original: Original,
    call: inspect.BoundArguments,
    record: Any,
) -> Any:
    """Restore the model and the history of a fit that an earlier segment has completed."""
    model, number = next(iter(call.arguments.values())), process.fit_count - 1
    process.records.append(record)
    final = process.store.newest(lambda h: bool(h.get("final")) and h["fit"] == number)
    if final is None:
        process.store.keep(())
        raise MismatchError(
            f"the state after fit call {number + 1} cannot be read: the trial restarts from scratch"
        )
    session = FitSession(process, backend, model, call.arguments, final)
    session.is_trained = True
    start = int(call.arguments.get("initial_epoch") or 0)
    call.arguments.update(callbacks=None, verbose=0, epochs=start)
    result = _call(process, original, call, session)
    session.put_back_end(record)
    return result


def _train(
    process: KerasRuntime, backend: KerasBackend, original: Original, call: inspect.BoundArguments
) -> Any:
    arguments = call.arguments
    number, resume = process.fit_count - 1, process.resume
    here = resume is not None and resume.header["fit"] == number and not resume.header["final"]
    model = next(iter(arguments.values()))
    if here and resume is not None:
        _count_as_before(process, arguments, resume.header)
    session = FitSession(process, backend, model, arguments, resume if here else None)
    session.is_repeated = number < len(process.resumed.get("records", []))
    start = session.first_epoch
    spent = process.max_epochs is not None and process.steps_before >= process.max_epochs
    if session.ended_before or spent:
        if spent and not session.ended_before and session.epochs > start:
            process.say_limit("this fit and all later ones train no epoch")
        session.is_trained = True
        arguments["epochs"] = start
    elif here:
        backend.begin_at(arguments, session.resume_epoch)
    if process.group.is_leader:
        note_begun(process.folder, number, process.calls[-1])
    session.prepare()
    before = signal.getsignal(signal.SIGTERM)
    result = _call(process, original, call, session)
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    return result


def _count_as_before(
    process: KerasRuntime, arguments: dict[str, Any], header: Mapping[str, Any]
) -> None:
    """Let a resumed fit count its epochs from where it began, to where it was to end.

    A script that resumes its training by itself begins at a later epoch, or asks for those that
    are left. More epochs than before are another limit. With another number of processes the
    epochs may be shared out among them.
    """
    first, epochs = (int(arguments.get(name) or 0) for name in ("initial_epoch", "epochs"))
    first_before, epochs_before = header.get("first_epoch", first), header.get("epochs", epochs)
    is_shorter = epochs < epochs_before and header.get("size", 1) == process.group.size
    if first == first_before and not is_shorter:
        return
    arguments["initial_epoch"] = first_before
    if is_shorter:
        arguments["epochs"] = epochs_before
    process.say_once(
        f"the script resumes its training by itself too: this fit is called for the epochs {first} "
        f"to {epochs}, and was for {first_before} to {epochs_before}. It goes on where it was "
        "stopped, and ends where it was to end"
    )


def _call(
    process: KerasRuntime, original: Original, call: inspect.BoundArguments, session: FitSession
) -> Any:
    process.session = session
    try:
        try:
            result = original(*call.args, **call.kwargs)
        except BaseException:
            session.on_error()
            raise
        session.on_return()
        return result
    finally:
        process.session = None
        process.ranks.mark_end()


def running(source: Any = None) -> FitSession | None:
    """Return the session of the running `fit`; with `source`, only if that is its training data."""
    session: FitSession | None = runtime().session
    if session is None or (source is not None and session.source is not source):
        return None
    return session


def wrap_callbacks(kind: Any) -> None:
    """Let the session hear of the epochs after all callbacks have, and see what they write."""
    _wrap_epochs(kind)
    begin, end = kind.on_train_begin, kind.on_train_end

    def on_train_begin(self: Any, logs: Any = None) -> None:
        session = running()
        if session is None or session.callbacks is not None:
            begin(self, logs)
            return
        with session.files.watch():
            begin(self, logs)
        announce_before_printing(self)
        session.on_begin(self)

    def on_train_end(self: Any, logs: Any = None) -> None:
        with _watched(self):
            end(self, logs)

    kind.on_train_begin, kind.on_train_end = on_train_begin, on_train_end


def _wrap_epochs(kind: Any) -> None:
    epoch_begin, epoch_end = kind.on_epoch_begin, kind.on_epoch_end

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        with _watched(self) as session:
            epoch_begin(self, epoch, logs)
        if session is not None:
            session.on_epoch_begin(epoch)

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        with _watched(self) as session:
            if session is not None and logs:
                session.ranks.average(logs)
                announce(logs)  # a callback that logs them to MLflow leaves that to Hermes
            epoch_end(self, epoch, logs)
        if session is not None:
            session.on_epoch_end(epoch, logs)

    kind.on_epoch_begin, kind.on_epoch_end = on_epoch_begin, on_epoch_end


@contextlib.contextmanager
def _watched(callbacks: Any) -> Iterator[FitSession | None]:
    """Yield the session that has these callbacks, with its files watched; None for any others."""
    session = running()
    if session is None or session.callbacks is not callbacks:
        yield None
        return
    with session.files.watch():
        yield session


# -- training outside fit -------------------------------------------------------------------------
# It is reported at its first step, or, after a call of `fit`, once it takes long.

_OPTIMIZERS = (
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply"),
    ("keras.src.optimizers.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("keras.src.optimizers.optimizer_experimental.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("keras.optimizer_v2.optimizer_v2", "OptimizerV2", "apply_gradients"),
)


def report_own_loops(model: Any, package: str) -> None:
    """Let training steps outside `fit` be told of; `package` is Keras' own."""
    _note_calls(model, "train_on_batch")
    for module, kind, method in _OPTIMIZERS:
        if module.split(".")[0] == package:
            try:
                optimizer = getattr(importlib.import_module(module), kind)
            except (ImportError, AttributeError):
                continue
            _note_calls(optimizer, method)
            return


def _note_calls(kind: Any, name: str) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if running() is None:
            runtime().note_own_step()
        return original(self, *args, **kwargs)

    setattr(kind, name, noted)
