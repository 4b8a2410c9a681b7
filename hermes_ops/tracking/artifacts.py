"""Artifacts of a run through the tracking server's artifact proxy, and models in MLflow.

A trial's best model becomes an MLflow model, and a version in the registry. Documents
that MLflow keeps are checked when they are read: whoever may write there may have replaced them.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, urlsplit

from hermes_ops.confined_folder import DOCUMENT_BYTES, ConfinedFolder
from hermes_ops.errors import ConfigError, HermesError, Problem, Refused, Unavailable
from hermes_ops.tracking.rest import EXISTS, RestClient, quoted

_PROXY = "/api/2.0/mlflow-artifacts/artifacts"
_BLOCK_BYTES = 1 << 20
_MOST_SHOWN = 20
_log = logging.getLogger(__name__)


class Artifacts:
    """Artifacts of the runs of one server. Paths are relative, with `/`.

    For a server that does not proxy its store (`--no-serve-artifacts`) the MLflow library is
    imported and used; it needs the store's own credentials.
    """

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest
        self._roots: dict[str, str] = {}

    def write(self, run_id: str, path: str, data: bytes) -> None:
        """Store `data` as the artifact `path`, replacing an older one."""
        root = self._proxied(run_id)
        if root is not None:
            self._put(f"{root}/{quote(path)}", lambda: iter([data]), len(data))
            return
        with TemporaryDirectory() as folder:
            file = Path(folder) / PurePosixPath(path).name
            file.write_bytes(data)
            parent = str(PurePosixPath(path).parent)
            _by_library("log_artifact", self._rest.uri, run_id, file, parent.lstrip("."))

    def write_folder(self, run_id: str, folder: Path, path: str) -> None:
        """Store every regular file under `folder` below the artifact `path`; skip links."""
        root, source = self._proxied(run_id), ConfinedFolder(folder)
        if left_out := list(source.left_out()):
            shown = ", ".join(left_out[:_MOST_SHOWN])
            _log.warning("Not uploaded from %s, as they are no regular files: %s", folder, shown)
        for name in source.files():
            target = PurePosixPath(path) / name
            if root is None:
                self._copy_by_library(run_id, source, name, str(target.parent))
            else:
                self._put_file(f"{root}/{quote(str(target))}", source, name)

    def fetch(self, run_id: str, path: str) -> bytes:
        """Return the content of an artifact; raise Refused when there is none.

        So is one that is too large for a document: whoever may write to MLflow has made it.
        """
        root = self._proxied(run_id)
        if root is not None:
            return self._rest.read(f"{root}/{quote(path)}", DOCUMENT_BYTES)
        with TemporaryDirectory() as folder:
            local_path = _by_library("download_artifacts", self._rest.uri, run_id, path, folder)
            return ConfinedFolder(Path(local_path).parent).read(Path(local_path).name)

    def has(self, run_id: str, name: str) -> bool:
        """Return whether there is an artifact of that name at the top level."""
        return any(entry["path"] == name for entry in self._entries(run_id, ""))

    def files(self, run_id: str, path: str = "") -> tuple[str, ...]:
        """Return the paths of all files below `path`, sorted; none when it does not exist."""
        paths: list[str] = []
        for entry in self._entries(run_id, path):
            is_folder = entry.get("is_dir", False)
            paths.extend(self.files(run_id, entry["path"]) if is_folder else [entry["path"]])
        return tuple(sorted(paths))

    def _entries(self, run_id: str, path: str) -> Iterator[dict[str, Any]]:
        query = {"run_id": run_id, **({"path": path} if path else {})}
        return self._rest.get_pages("artifacts/list", query, "files")

    def download(self, run_id: str, path: str, folder: Path) -> tuple[Path, ...]:
        """Copy the artifacts below `path` into `folder`, keeping their paths; return the files."""
        written = []
        for name in self.files(run_id, path):
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise Refused(f"The artifact {name!r} of run {run_id} would leave {folder}.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.fetch(run_id, name))
            written.append(target)
        return tuple(written)

    def _put_file(self, url: str, folder: ConfinedFolder, name: str) -> None:
        def blocks() -> Iterator[bytes]:
            with folder.open(name) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    yield block

        self._put(url, blocks, folder.size_bytes(name))

    def _copy_by_library(self, run_id: str, folder: ConfinedFolder, name: str, target: str) -> None:
        """Pass a copy to MLflow's library, which would follow a link that replaces the file."""
        with TemporaryDirectory() as scratch, folder.open(name) as stream:
            copy = Path(scratch) / PurePosixPath(name).name
            with copy.open("wb") as written:
                shutil.copyfileobj(stream, written, _BLOCK_BYTES)
            _by_library("log_artifact", self._rest.uri, run_id, copy, target)

    def _put(self, url: str, blocks: Callable[[], Iterator[bytes]], size_bytes: int) -> None:
        self._rest.send("PUT", url, content=blocks, headers={"Content-Length": str(size_bytes)})

    def _proxied(self, run_id: str) -> str | None:
        """Return the path of the run's artifacts on the server; None when it does not proxy."""
        if run_id not in self._roots:
            run = self._rest.get("runs/get", {"run_id": run_id})["run"]
            self._roots[run_id] = run["info"]["artifact_uri"]
        parts = urlsplit(self._roots[run_id])
        if parts.scheme != "mlflow-artifacts":
            return None
        return f"{_PROXY}/{quote(parts.path.strip('/'))}"


def _by_library(call: str, uri: str, run_id: str, *arguments: object) -> str:
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise HermesError(
            "This MLflow server does not proxy its artifacts, and the mlflow package is not "
            "installed here. Install it, or start the server with --serve-artifacts."
        ) from error
    try:
        return str(getattr(MlflowClient(uri), call)(run_id, *map(str, arguments)))
    except (MlflowException, OSError) as error:
        raise Unavailable(f"The artifact store of run {run_id} failed: {error}") from error


MLMODEL = "MLmodel"
KERAS_FILE, SIGNATURE_FILE = "model.keras", "signature.json"
_FLAVOR_SINCE = 3  # MLflow's flavor `keras` loads models of Keras 3 and later


def package_model(folder: Path, run_id: str) -> bool:
    """Write the file MLmodel where there is none; return False if the folder is no MLflow model.

    The hook of Keras 3 leaves the files that are needed, `model.keras` and its signature. A folder
    that the script saved by `mlflow.<flavor>.save_model` is a model already.
    """
    files = ConfinedFolder(folder)
    if files.has(MLMODEL):
        return True
    try:
        description = json.loads(files.read(SIGNATURE_FILE))
        major = int(description["keras"].split(".")[0])
        if not files.has(KERAS_FILE) or major < _FLAVOR_SINCE:
            return False
        _describe(files, run_id, description)
    except FileNotFoundError:
        return False
    except Exception:  # the model itself is complete without its description
        _log.exception("The model in %s could not be described to MLflow", folder)
        return False
    return True


def _describe(folder: ConfinedFolder, run_id: str, description: dict[str, Any]) -> None:
    from mlflow.models import Model
    from mlflow.models.signature import ModelSignature

    signature = ModelSignature(
        inputs=_schema(description["inputs"]), outputs=_schema(description["outputs"])
    )
    model = Model(artifact_path="model", run_id=run_id, signature=signature)
    model.add_flavor(
        "keras",
        data=KERAS_FILE.removesuffix(".keras"),
        keras_version=description["keras"],
        keras_backend="tensorflow",
        save_exported_model=False,
    )
    version = platform.python_version()
    model.add_flavor("python_function", loader_module="mlflow.keras", python_version=version)
    requirements = "\n".join(["mlflow", *description["requirements"]]) + "\n"
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


class Registry:
    """Registered models of one server. Every method is safe to repeat."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def register(self, name: str, run_id: str, path: str, tags: Mapping[str, str]) -> str:
        """Return the version of the artifact `path` of a run, creating it if there is none."""
        try:
            self._rest.post("registered-models/create", {"name": name})
        except Refused as error:
            if error.code != EXISTS:
                raise
        info = self._rest.get("runs/get", {"run_id": run_id})["run"]["info"]
        source = f"{info['artifact_uri'].rstrip('/')}/{path}"
        for version in self._versions(name, run_id):
            if version["source"] == source:
                return str(version["version"])
        body = {
            "name": name,
            "source": source,
            "run_id": run_id,
            "tags": [{"key": k, "value": v} for k, v in tags.items()],
        }
        created = self._rest.post("model-versions/create", body)["model_version"]
        return str(created["version"])

    def point(self, name: str, alias: str, version: str) -> None:
        """Point an alias of the model to that version."""
        body = {"name": name, "alias": alias, "version": version}
        self._rest.post("registered-models/alias", body)

    def _versions(self, name: str, run_id: str) -> list[dict[str, Any]]:
        words = f"name = {quoted(name)} and run_id = {quoted(run_id)}"
        answer = self._rest.get("model-versions/search", {"filter": words, "max_results": 100})
        return list(answer.get("model_versions", ()))


SWEEP_FILE = "sweep.yaml"


def fetch_sweep_file(artifacts: Artifacts, parent_run_id: str, sweep: str) -> object:
    """Return the sweep file of a sweep's run as plain data, which is not validated.

    Raise Refused where there is none, ConfigError for a text that is no sweep file's, Unavailable.
    """
    from hermes_ops.config.files import LARGEST_FILE_BYTES, read_yaml

    most_bytes = 4 * LARGEST_FILE_BYTES  # written with all defaults
    source = f"{SWEEP_FILE} of {sweep}"
    content = artifacts.fetch(parent_run_id, SWEEP_FILE)
    if len(content) > most_bytes:
        raise _not_ours(source, f"{len(content):,} bytes", most_bytes)
    try:
        return read_yaml(content.decode(), source).data
    except UnicodeDecodeError as error:
        raise _not_ours(source, f"no UTF-8 at byte {error.start}", most_bytes) from error


def _not_ours(source: str, found: str, most_bytes: int) -> ConfigError:
    allowed = f"UTF-8 of at most {most_bytes:,} bytes"
    fix = "restore the artifact, or delete the sweep's run in MLflow"
    return ConfigError(source, (Problem(SWEEP_FILE, found, allowed, fix),))


def json_objects(content: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a document with one a line; skip what is none."""
    objects = []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects
