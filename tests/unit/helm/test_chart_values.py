"""The chart's values and their schema, and what the images hold; no cluster and no helm needed."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bench.pod_cluster import IMAGE_INPUTS
from hermes_ops.config import PodSpec

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/hermes-ops"
IMAGES = ROOT / "helm/images"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def mappings(values: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The place of every mapping of the values."""
    if isinstance(values, dict):
        yield at
        for key, value in values.items():
            yield from mappings(value, (*at, key))


def changed(at: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    """The default values with one more or another value."""
    fresh = copy.deepcopy(VALUES)
    inner = fresh
    for name in at:
        inner = inner[name]
    inner[key] = value
    return fresh


def faults(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What the schema has against the values: the place and the reason of each fault."""
    found = jsonschema.Draft7Validator(SCHEMA).iter_errors(values)
    return [(".".join(map(str, fault.absolute_path)), fault.message) for fault in found]


# Maps whose keys are the user's own words.
FREE = {
    ("policy", "options"), ("airflow", "config"), ("metrics", "serviceMonitor", "labels"),
    ("metrics", "dashboard", "labels"), ("metrics", "rules", "labels"),
    ("networkPolicy", "dns", "podLabels"), ("trials", "template", "metadata"),
    ("commonLabels",),
    ("trials", "template", "spec"),
}  # fmt: skip


def is_strict(at: tuple[str, ...]) -> bool:
    return at not in FREE and at[-1:] not in (("nodeSelector",), ("requests",), ("limits",))


def test_the_defaults_are_valid() -> None:
    assert faults(VALUES) == []


@pytest.mark.parametrize("at", [m for m in mappings(VALUES) if is_strict(m)], ids=".".join)
def test_a_name_that_is_no_value_is_refused_wherever_it_stands(at: tuple[str, ...]) -> None:
    ((place, reason),) = faults(changed(at, "tpyo", 1))
    assert place == ".".join(at)
    assert "'tpyo' was unexpected" in reason


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pool.slots", 0),
        ("pool.slots", "4"),
        ("pool.name", "my pool"),
        ("pool.nodes", "node-a: 2"),
        ("policy.name", "FIFO!"),
        ("images.airflow.pullPolicy", "Sometimes"),
        ("controller.replicas", 0),
        ("storage.accessMode", "ReadWriteOften"),
        ("storage.accessMode", "ReadWriteOncePod"),  # several pods mount it
        ("storage.size", "50 gigabytes"),
        ("airflow.enabled", "yes"),
        ("airflow.baseUrl", "localhost:8080"),
        ("airflow.databaseRole", "x; DROP TABLE dag"),
        ("airflow.scheduler.resources", {"requests": {"cpu": "many"}}),
        ("airflow.tolerations", [{"key": "gpu", "effect": "NoWay"}]),
        ("airflow.config", {"core": "fast"}),
        ("metrics.port", 80),
        ("metrics.serviceMonitor.interval", "often"),
        ("metrics.rules.runbookUrl", "docs: page"),
        ("poolSync.periodSeconds", 0),
        ("networkPolicy.ingressNamespaces", "default"),
        ("mlflow.url", "mlflow:5000"),
        ("images.airflow.digest", "latest"),
        ("images.airflow.tag", "0.1.0@sha256"),
        ("images.airflow.repository", "registry.example/airflow:0.1.0"),  # a tag goes into `tag`
        ("images.mlflow.repository", "https://registry.example/mlflow"),
        ("images.mlflow.digest", "sha256:abc"),
        ("trials.namespace.name", "My_Trials"),
        ("trials.namespace.enabled", "no"),
        ("trials.allowed.secrets", "wandb"),
        ("commonLabels", {"app.kubernetes.io/component": "controller"}),
        ("commonLabels", {"cost-center": 7}),
        ("fullnameOverride", "My_Name"),
        ("fullnameOverride", "2026"),
        ("nameOverride", "Hermes Ops"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(path: str, value: Any) -> None:
    *at, key = path.split(".")
    places = [place for place, _ in faults(changed(tuple(at), key, value))]
    assert places
    assert all(place.startswith(path) for place in places)


ROOTS = {(): SCHEMA, **{(name,): inner for name, inner in SCHEMA["properties"].items()}}
SECTIONS = [(*at, name) for at, inner in ROOTS.items() for name in inner.get("required", ())]


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_a_section_that_is_written_without_content_is_refused_by_its_name(
    section: tuple[str, ...],
) -> None:
    """Helm takes null as: this value has no default. Without `trials.allowed` all is allowed."""
    *at, key = section
    values = changed(tuple(at), key, None)
    inner = values
    for name in at:
        inner = inner[name]
    del inner[key]
    assert (".".join(at), f"{key!r} is a required property") in faults(values)


def test_an_airflow_that_is_already_there_must_be_named() -> None:
    values = changed(("airflow",), "enabled", False)
    assert {place for place, _ in faults(values)} == {
        "existingAirflow.url", "existingAirflow.passwordSecret", "existingAirflow.databaseSecret"
    }  # fmt: skip
    values["existingAirflow"] |= {"url": "http://a", "passwordSecret": "p", "databaseSecret": "d"}
    assert faults(values) == []


def test_an_mlflow_that_is_already_there_must_be_named() -> None:
    values = changed(("mlflow",), "enabled", False)
    assert {place for place, _ in faults(values)} == {"mlflow.url"}
    values["mlflow"]["url"] = "https://mlflow.example"
    assert faults(values) == []


def test_the_log_in_of_an_mlflow_that_is_already_there_must_be_named() -> None:
    values = changed(("mlflow",), "enabled", False)
    values["mlflow"] |= {"url": "https://mlflow.example"}
    values["mlflow"]["auth"] |= {"enabled": True, "user": "svc-hermes"}
    assert {place for place, _ in faults(values)} == {"mlflow.auth.existingSecret"}
    values["mlflow"]["auth"] |= {"existingSecret": "log-in", "trialsSecret": "trials"}
    assert faults(values) == []


def test_the_user_of_this_charts_mlflow_has_no_other_name() -> None:
    values = changed(("mlflow", "auth"), "user", "svc-hermes")
    assert {place for place, _ in faults(values)} == {"mlflow.auth.user"}


def test_every_value_of_the_schema_has_a_default() -> None:
    def missing(schema: dict[str, Any], values: Any, at: str) -> Iterator[str]:
        for key, inner in schema.get("properties", {}).items():
            if key not in values:
                yield f"{at}{key}"
            elif isinstance(values[key], dict):
                yield from missing(inner, values[key], f"{at}{key}.")

    pods = {f"trials.pod.{name}" for name in PodSpec.model_fields}
    assert set(missing(SCHEMA, VALUES, "")) == {"global", *pods}


WORDS = frozenset({"title", "description", "default", "examples"})


def as_value(found: Any, *, is_field: bool = True) -> Any:
    """A schema of the sweep file as one of the chart's values: without words, null as a type."""
    if isinstance(found, list):
        return [as_value(item) for item in found]
    if not isinstance(found, dict):
        return found
    kept = {k: v for k, v in found.items() if not (is_field and k in WORDS)}
    kinds = kept.get("anyOf", ())
    if is_field and len(kinds) == 2 and kinds[1] == {"type": "null"} and "type" in kinds[0]:
        return as_value({**kinds[0], "type": [kinds[0]["type"], "null"]})
    named = {k: as_value(v, is_field=k not in ("properties", "$defs")) for k, v in kept.items()}
    return {**named, "additionalProperties": False} if "patternProperties" in named else named


def pod_definitions() -> dict[str, Any]:
    found: dict[str, Any] = as_value(PodSpec.model_json_schema()["$defs"], is_field=False)
    return found


def chart_schema() -> dict[str, Any]:
    found = PodSpec.model_json_schema()
    return {
        key: as_value(found[key], is_field=key != "properties")
        for key in ("type", "additionalProperties", "properties")
    }


def test_defaults_of_trials_pods_are_checked_like_the_section_of_the_sweep_file() -> None:
    """Otherwise a mistake is found by the plan of each sweep."""
    assert SCHEMA["properties"]["trials"]["properties"]["pod"] == chart_schema()
    assert {name: SCHEMA["$defs"][name] for name in pod_definitions()} == pod_definitions()


@pytest.mark.parametrize(
    "section",
    [
        {"requests": {"cpu": 2}},
        {"limits": {"memory": "8 Gi"}},
        {"environment": {"DEBUG": True}},
        {"volumes": [{"mount": "/data", "configmap": "scripts"}]},
        {"tolerations": [{"effect": "NoSchedule"}]},
        {"deferrable": "yes"},
        {"pull_policy": "Sometimes"},
        {"checkpoint_claims": {"Node_A": "claim"}},
        {"secrets": "wandb"},
    ],
)
def test_a_default_of_trials_pods_that_no_sweep_could_have_is_refused(
    section: dict[str, Any],
) -> None:
    assert faults(changed(("trials",), "pod", section))


def test_a_default_of_trials_pods_that_sweeps_may_have_is_taken() -> None:
    section = {
        "image": "i",
        "requests": {"cpu": "2", "memory": "4Gi"},
        "environment": {"A": "1"},
        "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        "volumes": [{"mount": "/data", "claim": "data", "read_only": False}],
        "checkpoint_claims": {"node-a": "claim-a"},
        "priority_class": None,
        "user": 1001,
    }
    assert faults(changed(("trials",), "pod", section)) == []


def test_no_value_holds_a_secret() -> None:
    named = [".".join((*at, key)) for at in mappings(VALUES) for key in _at(at)]
    secret = [n for n in named if re.search(r"(?i)(password|token|key)$", n)]
    assert secret == []


def _at(at: tuple[str, ...]) -> dict[str, Any]:
    inner = VALUES
    for name in at:
        inner = inner[name]
    return inner


# -- images --------------------------------------------------------------------------------------


def closures() -> Any:
    spec = importlib.util.spec_from_file_location("packages", IMAGES / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lists_of_the_images_are_what_their_roots_need() -> None:
    """Write them anew with `python helm/images/packages.py`."""
    module = closures()
    for file, roots in module.ROOTS.items():
        assert tuple((IMAGES / file).read_text().split()) == module.closure(roots), file


def test_every_package_of_an_image_is_pinned_with_its_hash() -> None:
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.M))
    for file in closures().ROOTS:
        assert set((IMAGES / file).read_text().split()) - pinned == set(), file


@pytest.mark.parametrize("file", sorted(IMAGES.glob("*/Dockerfile")), ids=lambda p: p.parent.name)
def test_an_image_has_two_stages_an_argument_for_its_base_and_no_root(file: Path) -> None:
    text = file.read_text()
    assert "ARG PYTHON_IMAGE=python:3.11-slim-bookworm" in text
    assert len(re.findall(r"^FROM ", text, re.M)) >= 2
    assert re.findall(r"^USER (\S+)", text, re.M)[-1:] not in ([], ["root"], ["0"])
    assert "--require-hashes" in text or "pip install" not in text


def test_the_trial_image_holds_every_module_that_a_trial_imports() -> None:
    copied = re.findall(r"hermes_ops/[\w./]+", (IMAGES / "trial/Dockerfile").read_text())
    for file in (ROOT / "hermes_ops/trial").rglob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (hermes_ops[\w.]+)", file.read_text(), re.M):
            module = name.replace(".", "/")
            held = name.startswith("hermes_ops.trial") or f"{module}.py" in copied
            assert held, f"{file.name} imports {name}"
            if not name.startswith("hermes_ops.trial"):
                assert f"{module}.py" in IMAGE_INPUTS, "tests would take an image without it"
