"""A folder with a trial's best model becomes an MLflow model, with its signature."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hermes_ops.confined_folder import ConfinedFolder

log = logging.getLogger(__name__)

MLMODEL = "MLmodel"
KERAS_FILE, SIGNATURE_FILE = "model.keras", "signature.json"
_FLAVOR_SINCE = 3  # MLflow's flavor `keras` loads models of Keras 3 and later


def package(folder: Path, run_id: str) -> bool:
    """Write the file MLmodel where there is none; False where the folder is no model for MLflow.

    That needs what the hook of Keras 3 leaves, a `model.keras` with its signature. A folder that
    the script itself saved by `mlflow.<flavor>.save_model` is a model already.
    """
    files = ConfinedFolder(folder)
    if files.has(MLMODEL):
        return True
    try:
        told = json.loads(files.read(SIGNATURE_FILE))
        if not files.has(KERAS_FILE) or int(told["keras"].split(".")[0]) < _FLAVOR_SINCE:
            return False
        _write(files, run_id, told)
    except FileNotFoundError:
        return False
    except Exception:  # the model is there all the same, only without its description
        log.exception("The model in %s could not be described to MLflow", folder)
        return False
    return True


def _write(folder: ConfinedFolder, run_id: str, told: dict[str, Any]) -> None:
    from mlflow.models import Model
    from mlflow.models.signature import ModelSignature

    signature = ModelSignature(inputs=_schema(told["inputs"]), outputs=_schema(told["outputs"]))
    model = Model(artifact_path="model", run_id=run_id, signature=signature)
    model.add_flavor(
        "keras",
        data=KERAS_FILE.removesuffix(".keras"),
        keras_version=told["keras"],
        keras_backend="tensorflow",
        save_exported_model=False,
    )
    version = platform.python_version()
    model.add_flavor("python_function", loader_module="mlflow.keras", python_version=version)
    requirements = "\n".join(["mlflow", *told["requirements"]]) + "\n"
    folder.replace("requirements.txt", requirements.encode())
    with TemporaryDirectory() as scratch:  # MLflow would write through a link of that name
        model.save(str(Path(scratch) / MLMODEL))
        folder.replace(MLMODEL, (Path(scratch) / MLMODEL).read_bytes())


def _schema(tensors: list[dict[str, Any]]) -> Any:  # noqa: ANN401 - MLflow is untyped
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    named = len(tensors) > 1
    return Schema(
        [
            TensorSpec(np.dtype(t["dtype"]), tuple(t["shape"]), t["name"] if named else None)
            for t in tensors
        ]
    )
