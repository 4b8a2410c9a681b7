"""Files of a run: written, listed and read through the tracking server's artifact proxy."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, urlsplit

from hermes_ops.confined_folder import ConfinedFolder
from hermes_ops.errors import HermesError, Refused, Unavailable
from hermes_ops.tracking.rest import RestClient

_PROXY = "/api/2.0/mlflow-artifacts/artifacts"
_BLOCK_BYTES = 1 << 20
_MOST_SHOWN = 20
_log = logging.getLogger(__name__)


class Artifacts:
    """Artifacts of the runs of one server. Paths are relative, with `/`.

    A server that does not proxy its store (`--no-serve-artifacts`) is reached by the MLflow
    library, which is imported then, and which needs the store's own credentials.
    """

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest
        self._roots: dict[str, str] = {}

    def write(self, run_id: str, path: str, data: bytes) -> None:
        """Store `data` as the artifact `path`, in the place of an older one."""
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
        """Store every regular file under `folder` below the artifact `path`; links are left out."""
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

    def read(self, run_id: str, path: str) -> bytes:
        """Return one artifact; Refused when there is none."""
        root = self._proxied(run_id)
        if root is not None:
            return self._rest.send("GET", f"{root}/{quote(path)}").content
        with TemporaryDirectory() as folder:
            found = _by_library("download_artifacts", self._rest.uri, run_id, path, folder)
            return Path(found).read_bytes()

    def has(self, run_id: str, name: str) -> bool:
        """Return whether there is an artifact of that name at the top level."""
        return any(entry["path"] == name for entry in self._entries(run_id, ""))

    def files(self, run_id: str, path: str = "") -> tuple[str, ...]:
        """Return the paths of all files below `path`, sorted; none when it does not exist."""
        found: list[str] = []
        for entry in self._entries(run_id, path):
            is_folder = entry.get("is_dir", False)
            found.extend(self.files(run_id, entry["path"]) if is_folder else [entry["path"]])
        return tuple(sorted(found))

    def _entries(self, run_id: str, path: str) -> Iterator[dict[str, Any]]:
        query = {"run_id": run_id, **({"path": path} if path else {})}
        while True:
            answer = self._rest.get("artifacts/list", query)
            yield from answer.get("files", ())
            token = answer.get("next_page_token", "")
            if not token:
                return
            query = {**query, "page_token": token}

    def download(self, run_id: str, path: str, folder: Path) -> tuple[Path, ...]:
        """Copy the artifacts below `path` into `folder`, keeping their paths; return the files."""
        written = []
        for name in self.files(run_id, path):
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise Refused(f"The artifact {name!r} of run {run_id} would leave {folder}.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.read(run_id, name))
            written.append(target)
        return tuple(written)

    def _put_file(self, url: str, folder: ConfinedFolder, name: str) -> None:
        def blocks() -> Iterator[bytes]:
            with folder.open(name) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    yield block

        self._put(url, blocks, folder.size_bytes(name))

    def _copy_by_library(self, run_id: str, folder: ConfinedFolder, name: str, target: str) -> None:
        """Hand MLflow's library a copy: it would follow a link that takes the file's place."""
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
