"""The best model of a trial, as a file that Keras can load."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hermes_ops.trial import state
from hermes_ops.trial.signature import write_signature

if TYPE_CHECKING:
    from hermes_ops.trial.session import Session

NAME = "model.keras"


def keep_best(session: Session) -> None:
    """Save the model as it was at its best epoch; as it is now where no objective says better.

    A later fit of the same trial replaces the file only if it was better. A model that Keras cannot
    save is said once and costs nothing else.
    """
    runtime, model = session.runtime, session.model
    path = runtime.folder / "model" / NAME
    if session.best_epoch is None and runtime.best is not None and path.exists():
        return
    try:
        path.parent.mkdir(exist_ok=True)
        _save_at_best(session, model, str(path))
    except Exception as error:
        runtime.say_once(f"the model could not be saved: {type(error).__name__}: {error}")
        return
    try:
        write_signature(model, path.parent)
    except Exception as error:
        runtime.say_once(f"the model has no signature for MLflow: {error}")


def _save_at_best(session: Session, model: Any, path: str) -> None:
    found = {k: v for k, v in state.variables(model).items() if k.startswith("k/model/")}
    best = _best_values(session)
    now = dict(state.read(found)) if best else {}
    state.assign(found, best)
    try:
        temporary = os.path.join(os.path.dirname(path), f".tmp-{NAME}")
        model.save(temporary)
        os.replace(temporary, path)
    finally:
        state.assign(found, now)


def _best_values(session: Session) -> dict[str, Any]:
    """The variables of the best epoch, if its checkpoint is not simply the present."""
    if session.best_epoch is None or session.best_epoch + 1 == session.epoch:
        return {}
    store, number = session.runtime.store, session.number
    best = store.newest(lambda header: bool(header.get("best")) and header["fit"] == number)
    if best is None:
        return {}
    arrays = best.arrays(state.make_array)
    return {key: value for key, value in arrays.items() if key.startswith("k/model/")}
