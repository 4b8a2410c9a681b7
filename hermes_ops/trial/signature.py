"""What goes into a Keras model and what comes out, for the model's signature in MLflow."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

NAME = "signature.json"
_PACKAGES = ("keras", "tensorflow", "tensorflow-cpu", "numpy")


def write_signature(model: Any, folder: Path) -> None:
    """Write the signature beside the saved model; ValueError when the model has none.

    A model that is not built from inputs (a subclass) knows none.
    """
    document = {
        "keras": importlib.metadata.version("keras"),
        "requirements": _requirements(),
        "inputs": _tensors(model, "inputs"),
        "outputs": _tensors(model, "outputs"),
    }
    (folder / NAME).write_text(json.dumps(document), encoding="utf-8")


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


def _requirements() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
