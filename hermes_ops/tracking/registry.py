"""MLflow's registry of models: versions and aliases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.errors import Refused
from hermes_ops.tracking.names import quoted
from hermes_ops.tracking.rest import RestClient


class Registry:
    """Registered models of one server; every method may be repeated."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def register(self, name: str, run_id: str, path: str, tags: Mapping[str, str]) -> str:
        """Return the version that is the artifact `path` of a run, made now if there is none."""
        try:
            self._rest.post("registered-models/create", {"name": name})
        except Refused as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
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
        made = self._rest.post("model-versions/create", body)["model_version"]
        return str(made["version"])

    def point(self, name: str, alias: str, version: str) -> None:
        """Let an alias of the model point to that version, from wherever it pointed."""
        body = {"name": name, "alias": alias, "version": version}
        self._rest.post("registered-models/alias", body)

    def _versions(self, name: str, run_id: str) -> list[dict[str, Any]]:
        words = f"name = {quoted(name)} and run_id = {quoted(run_id)}"
        answer = self._rest.get("model-versions/search", {"filter": words, "max_results": 100})
        return list(answer.get("model_versions", ()))
