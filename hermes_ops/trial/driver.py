"""Runs a call of `fit` as the trial needs it: skipped, resumed, or from its beginning."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from hermes_ops.trial.channel import announce
from hermes_ops.trial.keras_backup import shared_files, take_out_backups
from hermes_ops.trial.runtime import Runtime, runtime
from hermes_ops.trial.session import Backend, Session

Original = Callable[..., Any]


def run_fit(backend: Backend, original: Original, model: Any, args: Any, kwargs: Any) -> Any:
    """Do what `original(model, *args, **kwargs)` does, beginning where the trial stands."""
    process = runtime()
    if not process.mine():
        return original(model, *args, **kwargs)
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    for said in (
        take_out_backups(call.arguments),
        shared_files(call.arguments, process.folder),
    ):
        if said is not None:
            process.say_once(said)
    process.begun += 1
    process.model_number(model)
    number = process.begun - 1
    records = process.resumed.get("records", [])
    if number < len(records):
        return _skip(process, backend, original, call, records[number])
    return _train(process, backend, original, call)


def _skip(
    process: Runtime,
    backend: Backend,
    original: Original,
    call: inspect.BoundArguments,
    record: Any,
) -> Any:
    """A fit that was completed in an earlier segment: bring the model to its end."""
    model, number = next(iter(call.arguments.values())), process.begun - 1
    process.records.append(record)
    final = process.store.newest(lambda h: bool(h.get("final")) and h["fit"] == number)
    if final is None:
        return backend.history(model, record)
    session = Session(process, backend, model, call.arguments, final)
    start = int(call.arguments.get("initial_epoch") or 0)
    call.arguments.update(callbacks=None, verbose=0, epochs=start)
    result = _call(process, original, call, session)
    session.put_back_end(record)
    return result


def _train(
    process: Runtime, backend: Backend, original: Original, call: inspect.BoundArguments
) -> Any:
    arguments = call.arguments
    number, resume = process.begun - 1, process.resume
    here = resume is not None and resume.header["fit"] == number and not resume.header["final"]
    model = next(iter(arguments.values()))
    session = Session(process, backend, model, arguments, resume if here else None)
    start = session.first_epoch
    spent = process.max_epochs is not None and process.steps_before >= process.max_epochs
    if session.ended_before or spent:
        arguments["epochs"] = start
    elif here:
        backend.begin_at(arguments, session.resume_epoch)
    if here:
        _let_loggers_append(arguments.get("callbacks"))
    before = signal.getsignal(signal.SIGTERM)
    result = _call(process, original, call, session)
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    return result


def _call(
    process: Runtime, original: Original, call: inspect.BoundArguments, session: Session
) -> Any:
    process.session = session
    try:
        result = original(*call.args, **call.kwargs)
        session.on_return()
        return result
    finally:
        process.session = None


def _let_loggers_append(callbacks: Any) -> None:
    """A CSVLogger would begin its file anew."""
    members = getattr(callbacks, "callbacks", callbacks)
    for callback in members if isinstance(members, (list, tuple)) else [members]:
        filename = getattr(callback, "filename", None)
        if type(callback).__name__ == "CSVLogger" and filename and os.path.exists(filename):
            callback.append = True


def running(source: Any = None) -> Session | None:
    """The session of the running `fit`; with `source`, only if that is its training data."""
    session: Session | None = runtime().session
    if session is None or (source is not None and session.source is not source):
        return None
    return session


def wrap_callbacks(kind: Any) -> None:
    """Let the session hear of the epochs after all callbacks have."""
    begin, epoch_begin, epoch_end = kind.on_train_begin, kind.on_epoch_begin, kind.on_epoch_end

    def on_train_begin(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        session = running()
        if session is not None and session.callbacks is None:
            session.on_begin(self)

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        epoch_begin(self, epoch, logs)
        session = running()
        if session is not None and session.callbacks is self:
            session.on_epoch_begin(epoch)

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        session = running()
        is_own = session is not None and session.callbacks is self
        if is_own and logs:
            announce(logs)  # a callback that logs them to MLflow leaves that to Hermes
        epoch_end(self, epoch, logs)
        if session is not None and is_own:
            session.on_epoch_end(epoch, logs)

    kind.on_train_begin = on_train_begin
    kind.on_epoch_begin = on_epoch_begin
    kind.on_epoch_end = on_epoch_end
