"""Whatever is thrown at the model, there is a valid config or a ConfigError, and nothing else."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes_ops.config import SweepConfig, check_preview, json_schema, load_file, parse
from hermes_ops.errors import ConfigError


def keys(schema: object) -> set[str]:
    """Every key that the schema of the sweep file knows, wherever it stands."""
    if isinstance(schema, list):
        return set().union(*map(keys, schema))
    if not isinstance(schema, dict):
        return set()
    own = schema.get("properties", {})
    return set(own).union(*map(keys, schema.values()))


KEY_NAMES = sorted(keys(json_schema()))
SOME_WORDS = (
    "grid random tpe uniform loguniform integer log_integer quantised choice minimize maximize"
    " median asha none {rate} {{ } 0\x000 @daily 1e-4 process pod skip replace Always NoExecute"
    " s3://b/p s3://u:p@b"
    " UTC Mars/Base ../.. /etc 4Gi -1Mi latest v1 rate<1 rate**9**9 (((( __class__ {{ds}}"
)
KEYS = st.sampled_from(KEY_NAMES)
WORDS = st.sampled_from(SOME_WORDS.split(" "))
SURROGATES = st.integers(0xD800, 0xDFFF).map(chr)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | WORDS
    | SURROGATES
    | st.integers(-3, 20)
)
TREES = st.recursive(
    SCALARS | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS | st.text(max_size=4) | st.integers(), inner, max_size=6)
    ),
    max_leaves=25,
)
VALID: dict[str, Any] = {
    "name": "digits",
    "owner": "ann",
    "class": "normal",
    "deadline": "1d 12h",
    "objective": {"metric": "val_loss", "direction": "minimize", "target": None},
    "metrics": [
        {
            "name": "latency_ms",
            "direction": "minimize",
            "pattern": "took (?P<value>b)",
            "at_most": 20,
            "at_least": 0.5,
        },
        {"name": "accuracy"},
    ],
    "search": {
        "algorithm": "random",
        "warm_start": 2,
        "constraints": ["batch * units <= 9000", "rate < 0.1"],
        "startup_trials": 2,
        "seed": 7,
        "max_trials": 16,
        "points_to_evaluate": [
            {"rate": 0.01, "units": 32, "batch": 32, "kind": None, "few": 2, "slope": 0}
        ],
        "space": {
            "rate": {"type": "loguniform", "low": 0.0001, "high": 0.1},
            "units": {"type": "log_integer", "low": 16, "high": 256},
            "batch": {"type": "quantised", "low": 16, "high": 64, "step": 16},
            "kind": {"type": "choice", "values": ["adam", 1, 2.5, True, None]},
            "few": {"type": "integer", "low": 1, "high": 4},
            "slope": {"type": "uniform", "low": -1.5, "high": 1},
        },
    },
    "trial": {
        "python": "/usr/bin/python3",
        "command": ["python", "train.py", "{rate}"],
        "directory": "/tmp",
        "workspace": "shared",
        "environment": {"DATA": "x"},
        "gpus": {"min": 1, "max": 2, "sizes": [1, 2]},
        "workers": "one_per_gpu",
        "scale_learning_rate": "hermes",
        "resize": "epoch",
        "tf_config": True,
        "batch": {"parameter": "batch", "min": 16, "max": 64, "per_gpu_max": 64},
        "preemptible": False,
        "metric_pattern": "(?P<name>a)=(?P<value>b)",
        "tensorboard": "runs",
        "secrets": ["DATA"],
        "time_limit_seconds": 60,
        "finish_seconds": 60,
        "max_failures": 0,
        "run_in": "pod",
        "pod": {
            "image": "registry/trial:1",
            "pull_policy": "Never",
            "pull_secrets": ["registry"],
            "namespace": "trials",
            "template_file": "/opt/pod.yaml",
            "claim": "hermes-trials",
            "claim_folder": "hermes/sweeps",
            "checkpoint_claims": {"node-a": "checkpoints-a"},
            "gang_service": "hermes-gangs",
            "requests": {"cpu": "2", "memory": "4Gi"},
            "limits": {"memory": "8Gi"},
            "gpu_resource": "nvidia.com/gpu",
            "node_selector": {"gpu": "a100"},
            "tolerations": [{"key": "gpu", "value": "reserved", "effect": "NoSchedule"}],
            "priority_class": "low",
            "service_account": "trial",
            "secrets": ["licence"],
            "environment": {"MLFLOW_TRACKING_URI": "http://m"},
            "volumes": [
                {"mount": "/data", "claim": "data", "read_only": False},
                {"mount": "/config", "config_map": "c"},
                {"mount": "/secret", "secret": "s"},
                {"mount": "/dev/shm", "memory": "1Gi"},
            ],
            "user": 1000,
            "read_only_root": True,
            "start_timeout_seconds": 600,
            "deferrable": True,
        },
    },
    "budget": {
        "max_epochs": 20,
        "wall_clock_seconds": 7200,
        "gpu_seconds": 5.5,
        "max_parallel": 2,
        "failed_trials": 1,
        "count_diverged": True,
        "same_failures": 5,
    },
    "checkpoints": {
        "keep_seconds": 3600,
        "keep_last": 3,
        "max_gigabytes": 1.5,
        "store": "s3://bucket/prefix",
    },
    "model": {"register_as": "digits", "alias": "champion"},
    "nightly": {"timezone": "Europe/Berlin", "overlap": "queue", "warm_start": False, "compare": 3},
    "weight": 2,
    "early_stop": "asha",
    "pool": "gpus",
    "schedule": "0 2 * * 1-5",
}
PATIENT = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def places(data: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    if isinstance(data, dict):
        here: list[tuple[Any, Any]] = [(data, key) for key in data]
    else:
        here = [(data, i) for i in range(len(data))] if isinstance(data, list) else []
    return here + [place for container, key in here for place in places(container[key])]


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """The valid sweep with one to three places changed, removed, renamed or doubled."""
    data = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(data)))
        match draw(st.sampled_from(["change", "change", "remove", "rename", "add"])):
            case "change":
                container[key] = draw(TREES)
            case "remove":
                del container[key]
            case "rename" if isinstance(container, dict):
                container[draw(KEYS | st.text(max_size=5) | st.integers())] = container.pop(key)
            case "add" if isinstance(container, dict):
                container[draw(KEYS | st.text(max_size=5))] = draw(TREES)
    return data


def config_or_problems(make: Callable[[], SweepConfig]) -> SweepConfig | str:
    """The config or the whole message; any other exception is the failure looked for."""
    try:
        return make()
    except ConfigError as error:
        return str(error) if error.problems else ""


def parsed(data: object) -> SweepConfig | str:
    return config_or_problems(lambda: parse(data, "generated", None))


def holds(config: SweepConfig) -> bool:
    """True when it reads back the same, and has a preview."""
    again = parse(json.loads(config.to_json()), "again", None)
    return again == config and bool(check_preview(config, 3).render())


def test_the_sweep_that_is_mutated_is_valid() -> None:
    config = parsed(VALID)
    assert isinstance(config, SweepConfig), config
    assert holds(config)


def test_every_key_of_the_sweep_file_is_mutated() -> None:
    assert set(KEY_NAMES) - {key for _, key in places(VALID)} == set()


@settings(PATIENT, max_examples=400)
@given(TREES | mutations())
@example({**VALID, "trial": {**VALID["trial"], "secrets": True}})
def test_any_tree_is_a_sweep_or_refused(data: object) -> None:
    before = repr(data)
    config = parsed(data)
    assert holds(config) if isinstance(config, SweepConfig) else config
    assert repr(data) == before


@PATIENT
@given(
    st.text(max_size=60)
    | mutations().map(repr)
    | mutations().map(lambda d: json.dumps(d, default=str))
)
def test_any_text_is_a_sweep_file_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("sweep.yaml", "sweep.json"):
            path = Path(folder, name)
            path.write_bytes(text.encode(errors="surrogatepass"))
            assert config_or_problems(functools.partial(load_file, path))


NUMBERS = st.floats(-1e100, 1e100) | st.integers(-(2**53), 2**53)


@PATIENT
@given(
    kind=st.sampled_from(["uniform", "loguniform", "integer", "log_integer", "quantised"]),
    bounds=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    number=st.integers(0, 50),
)
def test_a_range_that_is_accepted_gives_values_that_it_allows(
    kind: str, bounds: tuple[float, float, float], number: int
) -> None:
    data = copy.deepcopy(VALID)
    step = {"step": bounds[2]} if kind == "quantised" else {}
    data["search"]["space"] = {"rate": {"type": kind, "low": bounds[0], "high": bounds[1], **step}}
    data["search"]["points_to_evaluate"] = []
    config = parsed(data)
    if isinstance(config, SweepConfig):
        assert holds(config)
        ((_, parameter),) = config.search.to_space()
        value = parameter.from_unit(number / 50)
        assert parameter.canonical(value) == value
        assert 0.0 <= parameter.to_unit(value) <= 1.0
