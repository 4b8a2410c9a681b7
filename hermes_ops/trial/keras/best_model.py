"""The best model of a trial, as a file that Keras can load."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hermes_ops.trial.keras.runtime import KerasRuntime
from hermes_ops.trial.keras.training_state import (
    assign_variables,
    make_array,
    model_variables,
    read_variables,
)

NAME = "model.keras"


class FitEnd(NamedTuple):
    """The end of a call of `fit`: its number, and the index of the best epoch.

    `best_epoch` is None if no objective tells which epoch was the best. `best_values` are the
    variables of the model after that epoch, if no checkpoint has them.
    """

    number: int
    best_epoch: int | None
    best_values: Mapping[str, Any] | None = None


def keep_best(runtime: KerasRuntime, model: Any, end: FitEnd) -> None:
    """Save the model as it was at its best epoch; as it is now where no objective says better.

    A later fit of the same trial replaces the file only if it was better. A model that Keras cannot
    save is said once and costs nothing else.
    """
    path = runtime.folder / "model" / NAME
    if end.best_epoch is None and runtime.best is not None and path.exists():
        return
    try:
        path.parent.mkdir(exist_ok=True)
        _save_at_best(runtime, model, end, str(path))
    except Exception as error:
        runtime.say_once(f"the model could not be saved: {type(error).__name__}: {error}")
        return
    try:
        write_signature(model, path.parent)
    except Exception as error:
        runtime.say_once(f"the model has no signature for MLflow: {error}")


def _save_at_best(runtime: KerasRuntime, model: Any, end: FitEnd, path: str) -> None:
    variables = _variables(model)
    best = _best_values(runtime, end)
    now = dict(read_variables(variables)) if best else {}
    assign_variables(variables, best)
    temporary = os.path.join(os.path.dirname(path), f".tmp-{NAME}")
    try:
        model.save(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # what a full disk took of it
        assign_variables(variables, now)


def values_now(model: Any) -> dict[str, Any]:
    """Return the variables of a model that are saved with it, as arrays."""
    return dict(read_variables(_variables(model)))


def _variables(model: Any) -> dict[str, Any]:
    return {k: v for k, v in model_variables(model).items() if k.startswith("k/model/")}


def _best_values(runtime: KerasRuntime, end: FitEnd) -> Mapping[str, Any]:
    """Return the variables of the best epoch; empty if they are stored nowhere.

    Even if the last epoch was the best, the model may not have its variables now: a callback may
    have restored an epoch that was better by its own measure.
    """
    if end.best_epoch is None:
        return {}
    if end.best_values is not None:
        return end.best_values
    best = runtime.store.newest(
        lambda header: bool(header.get("best")) and header["fit"] == end.number
    )
    if best is None:
        return {}
    arrays = best.arrays(make_array)
    return {key: value for key, value in arrays.items() if key.startswith("k/model/")}


# -- the signature for MLflow ---------------------------------------------------------------------

SIGNATURE = "signature.json"
_PACKAGES = ("tensorflow", "tensorflow-cpu", "numpy")


def write_signature(model: Any, folder: Path) -> None:
    """Write the signature beside the saved model; ValueError when the model has none.

    A model that is not built from inputs (a subclass) knows none.
    """
    keras = _keras_of(model)
    document = {
        "keras": importlib.metadata.version(keras),
        "requirements": _requirements([keras, *_PACKAGES]),
        "inputs": _tensors(model, "inputs"),
        "outputs": _tensors(model, "outputs"),
    }
    (folder / SIGNATURE).write_text(json.dumps(document), encoding="utf-8")


def _tensors(model: Any, side: str) -> list[dict[str, Any]]:
    tensors = getattr(model, side, None)
    if tensors is None:
        raise ValueError(f"the model has no symbolic {side}")
    members = tensors.values() if isinstance(tensors, dict) else tensors
    members = members if isinstance(members, (list, tuple)) else list(members)
    return [_tensor(tensor) for tensor in members]


def _tensor(tensor: Any) -> dict[str, Any]:
    shape = [-1 if size is None else int(size) for size in tuple(tensor.shape)]
    dtype = getattr(tensor.dtype, "name", tensor.dtype)
    return {"name": str(tensor.name), "dtype": str(dtype), "shape": shape}


def _keras_of(model: Any) -> str:
    """Return the package that the model is of: tf_keras may be there beside Keras 3."""
    kinds = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    return "tf_keras" if "tf_keras" in kinds else "keras"


def _requirements(names: Sequence[str]) -> list[str]:
    requirements = []
    for name in names:
        try:
            requirements.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return requirements
