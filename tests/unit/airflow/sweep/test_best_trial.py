from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.sweep.sweep_report import REGISTERED_TAG, UNREGISTERED_TAG, log_best_model
from hermes_ops.config import parse
from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.errors import ConfigError, Refused
from hermes_ops.tracking.artifacts import Registry, package_model
from tests.unit.airflow.builders import SWEEP, sweep_file

SIGNATURE = {
    "keras": "3.9.0",
    "requirements": ["keras==3.9.0"],
    "inputs": [{"name": "x", "dtype": "float32", "shape": [-1, 8]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [-1, 10]}],
}


class Server:
    """An MLflow: what was stored at which run, the tags, the registry."""

    def __init__(self, refusal: Refused | None = None) -> None:
        self.stored: list[tuple[str, str]] = []
        self.tags: dict[str, str] = {}
        self.versions: list[tuple[str, str]] = []
        self.aliases: dict[str, str] = {}
        self.refusal = refusal
        self.registry = self

    def log_folder(self, run_id: str, folder: Path, path: str) -> None:
        self.stored += [(run_id, f"{path}/{f.name}") for f in sorted(folder.iterdir())]

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        assert run_id == "parent"
        self.tags |= tags

    def register(self, name: str, run_id: str, path: str, tags: Any) -> str:
        if self.refusal:
            raise self.refusal
        self.versions.append((name, run_id))
        return str(len(self.versions))

    def point(self, name: str, alias: str, version: str) -> None:
        self.aliases[f"{name}@{alias}"] = version


def logged(server: Any, model: dict[str, str] | None = None) -> None:
    trials = (TrialSummary(0, "finished", {}, best=0.5), TrialSummary(1, "finished", {}, best=0.2))
    summary = SweepSummary(SWEEP, "finished", trials, "loss", "minimize", 1.0)
    found: Any = SimpleNamespace(
        summary=summary,
        run=SimpleNamespace(ref=SimpleNamespace(parent_run_id="parent")),
        trials=tuple(SimpleNamespace(number=n, run_id=f"run-{n}") for n in (0, 1)),
    )
    config = parse(sweep_file(model=model or {}), "test", None)
    log_best_model(server, SWEEP, config, found)


def saved(*names: str, where: str = "model") -> Path:
    folder: Path = getattr(TrialFolder.from_sweep(SWEEP, 1), where)
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_the_best_trials_own_model_is_stored_and_registered_with_its_alias() -> None:
    saved("MLmodel")
    server = Server()
    logged(server, {"register_as": "digits", "alias": "champion"})
    assert server.stored == [("parent", "model/MLmodel"), ("run-1", "model/MLmodel")]
    assert server.versions == [("digits", "run-1")]
    assert server.aliases == {"digits@champion": "1"}
    assert server.tags == {REGISTERED_TAG: "models:/digits/1"}


def test_without_a_name_it_is_stored_and_not_registered() -> None:
    saved("MLmodel")
    server = Server()
    logged(server)
    assert server.stored == [("parent", "model/MLmodel")]
    assert server.versions == []


def test_checkpoints_are_stored_in_the_place_of_a_model_but_never_registered() -> None:
    saved("MLmodel", where="checkpoints")
    server = Server()
    logged(server, {"register_as": "digits"})
    assert server.stored == [("parent", "model/MLmodel")]
    assert server.versions == []
    assert "trial 1 left no MLflow model" in server.tags[UNREGISTERED_TAG]


def test_a_registry_that_refuses_costs_the_registration_alone() -> None:
    saved("MLmodel")
    server = Server(Refused("not yours", "PERMISSION_DENIED"))
    logged(server, {"register_as": "digits"})
    assert server.tags[UNREGISTERED_TAG] == "not yours"


def test_a_trial_that_left_nothing_stores_nothing() -> None:
    server = Server()
    logged(server, {"register_as": "digits"})
    assert (server.stored, server.tags) == ([], {})


def test_what_keras_left_becomes_a_model_with_its_signature(tmp_path: Path) -> None:
    (tmp_path / "model.keras").write_text("weights")
    (tmp_path / "signature.json").write_text(json.dumps(SIGNATURE))
    assert package_model(tmp_path, "run-1")
    text = (tmp_path / "MLmodel").read_text()
    assert "mlflow.keras" in text
    assert '"shape": [-1, 8]' in text
    assert "run_id: run-1" in text
    assert package_model(tmp_path, "run-1")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"model.keras": "w"},
        {"signature.json": json.dumps(SIGNATURE)},
        {"model.keras": "w", "signature.json": json.dumps({**SIGNATURE, "keras": "2.15.0"})},
        {"model.keras": "w", "signature.json": "{"},
    ],
)
def test_a_folder_that_mlflow_could_not_load_is_no_model(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert not package_model(tmp_path, "run-1")
    assert not (tmp_path / "MLmodel").exists()


class Rest:
    """The registry's REST interface with one model and its versions."""

    def __init__(self) -> None:
        self.models: set[str] = set()
        self.versions: list[dict[str, Any]] = []
        self.posted: list[str] = []

    def get(self, path: str, query: Any) -> Any:
        if path == "runs/get":
            return {"run": {"info": {"artifact_uri": "mlflow-artifacts:/1/run-1/artifacts"}}}
        assert query["filter"] == "name = 'digits' and run_id = 'run-1'"
        return {"model_versions": self.versions}

    def post(self, path: str, body: Any) -> Any:
        self.posted.append(path)
        if path == "registered-models/create":
            if body["name"] in self.models:
                raise Refused("there", "RESOURCE_ALREADY_EXISTS")
            self.models.add(body["name"])
        if path == "model-versions/create":
            self.versions.append({**body, "version": str(len(self.versions) + 1)})
            return {"model_version": self.versions[-1]}
        return {}


def test_a_model_is_registered_once_however_often_it_is_asked_for() -> None:
    rest: Any = Rest()
    registry = Registry(rest)
    for _ in range(2):
        assert registry.register("digits", "run-1", "model", {"hermes.sweep": SWEEP}) == "1"
    assert rest.posted.count("model-versions/create") == 1
    assert rest.versions[0]["source"] == "mlflow-artifacts:/1/run-1/artifacts/model"
    registry.point("digits", "champion", "1")
    assert rest.posted[-1] == "registered-models/alias"


@pytest.mark.parametrize(
    "model",
    [
        {"alias": "champion"},
        {"register_as": "a/b"},
        {"register_as": "digits", "alias": "latest"},
        {"register_as": "digits", "alias": "v3"},
        {"register_as": "digits", "alias": "3"},
    ],
)
def test_names_that_mlflow_refuses_are_refused_in_the_sweep_file(model: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="model"):
        parse(sweep_file(model=model), "test", None)
