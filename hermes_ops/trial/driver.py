"""Runs a call of `fit` as the trial needs it: skipped, resumed, or from its beginning."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hermes_ops.trial.channel import announce
from hermes_ops.trial.keras_backup import shared_files, take_out_backups
from hermes_ops.trial.runtime import Runtime, runtime
from hermes_ops.trial.session import Backend, Session
from hermes_ops.trial.state import MismatchError

Original = Callable[..., Any]


def run_fit(backend: Backend, original: Original, model: Any, args: Any, kwargs: Any) -> Any:
    """Do what `original(model, *args, **kwargs)` does, beginning where the trial stands."""
    process = runtime()
    if not process.mine():
        process.say_once(f"this fit is not watched: {process.why_not_mine()}")
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
        process.store.keep(())
        raise MismatchError(
            f"the state after fit call {number + 1} cannot be read: the trial starts anew"
        )
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
    session.prepare_files()
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


def running(source: Any = None) -> Session | None:
    """The session of the running `fit`; with `source`, only if that is its training data."""
    session: Session | None = runtime().session
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
                announce(logs)  # a callback that logs them to MLflow leaves that to Hermes
            epoch_end(self, epoch, logs)
        if session is not None:
            session.on_epoch_end(epoch, logs)

    kind.on_epoch_begin, kind.on_epoch_end = on_epoch_begin, on_epoch_end


@contextlib.contextmanager
def _watched(callbacks: Any) -> Iterator[Session | None]:
    """The session whose callbacks these are, with its files watched; None if they are others."""
    session = running()
    if session is None or session.callbacks is not callbacks:
        yield None
        return
    with session.files.watch():
        yield session
