"""The exported schema, the trigger form's parameters, the reference and the preview."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hermes_ops.config import (
    SweepConfig,
    check_preview,
    dag_params_schema,
    json_schema,
    load_file,
    parse,
)
from hermes_ops.config.problems import PARAMETERS, SECTIONS, fields_by_key

ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs/sweep-file.md").read_text()
POD_REFERENCE = (ROOT / "docs/kubernetes.md").read_text()
FENCES = re.findall(r"^```yaml\n(.*?)^```", REFERENCE, re.DOTALL | re.MULTILINE)
WHOLE, CHOICE, CONSTRAINTS, SHORTEST = (
    next(text for text in FENCES if text.startswith(first))
    for first in ("name: digits", "optimizer:", "constraints:", "name: shortest")
)


def grid(**search: Any) -> SweepConfig:
    data: dict[str, Any] = {
        "name": "grid",
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "grid",
            "max_trials": 9,
            "space": {
                "units": {"type": "integer", "low": 1, "high": 3},
                "kind": {"type": "choice", "values": ["a", None]},
            },
            **search,
        },
        "trial": {"command": ["x"], "gpus": 2, "time_limit_seconds": 100, "max_failures": 1},
        "budget": {"max_epochs": 5},
    }
    return parse(data, "test", None)


def test_the_exported_schema_is_the_models() -> None:
    exported = json.loads((ROOT / "docs/sweep.schema.json").read_text())
    assert exported == json_schema(), (
        "write docs/sweep.schema.json anew: json.dumps(json_schema(), indent=2)"
    )


@pytest.mark.parametrize("example", [WHOLE, SHORTEST], ids=["whole", "shortest"])
def test_the_examples_of_the_reference_are_valid(tmp_path: Path, example: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(example)
    config = load_file(path)
    assert check_preview(config).trials
    jsonschema.validate(json.loads(config.to_json()), json_schema())


def test_the_choice_and_the_constraints_of_the_reference_are_valid() -> None:
    numbers = ["batch_size", "accumulation", "learning_rate", "warmup", "layers", "heads"]
    space = {name: {"type": "integer", "low": 0, "high": 64} for name in numbers}
    search = {"space": {**space, **yaml.safe_load(CHOICE)}, **yaml.safe_load(CONSTRAINTS)}
    config = grid(algorithm="tpe", **search)
    assert list(config.search.constraints) == yaml.safe_load(CONSTRAINTS)["constraints"]
    assert check_preview(config).trials


def test_the_sweep_with_conditions_among_the_examples_is_valid() -> None:
    trials = check_preview(load_file(ROOT / "examples/sgd/conditional.yaml")).trials
    assert {"l1_ratio" in trial for trial in trials} == {True, False}


def test_the_reference_speaks_of_every_key_and_every_type() -> None:
    keys = {
        ".".join([*map(str, section), name])
        for section, model in SECTIONS.items()
        for name in fields_by_key(model)
    }
    named = set(re.findall(r"^\| `([a-z_.]+)` \|", REFERENCE, re.MULTILINE))
    assert not any(key.startswith("trial.pod.") for key in named)
    named |= set(re.findall(r"^\| `(trial\.pod\.[a-z_.]+)` \|", POD_REFERENCE, re.MULTILINE))
    assert named - set(PARAMETERS) == keys - {
        "objective", "search", "trial", "budget", "nightly", "checkpoints", "model"
    }  # fmt: skip
    assert set(PARAMETERS) <= named


def test_each_parameter_of_the_form_is_self_contained_and_has_a_valid_default() -> None:
    params = dag_params_schema()
    assert list(params) == list(fields_by_key(SweepConfig))
    for schema in params.values():
        assert "$ref" not in json.dumps(schema)
        jsonschema.validate(schema.pop("default"), schema)


def test_the_defaults_of_the_form_are_a_valid_sweep() -> None:
    data = {key: schema["default"] for key, schema in dag_params_schema().items()}
    assert parse(data, "form", None).name == "my-sweep"


def test_a_preview_lists_the_whole_of_a_small_grid_and_its_cost() -> None:
    preview = check_preview(grid())
    assert len({tuple(trial.items()) for trial in preview.trials}) == len(preview.trials) == 6
    assert "all the trials" in preview.note
    assert (preview.cost.trials, preview.cost.epochs) == (6, 30)
    assert preview.cost.gpu_seconds == 6 * 100 * 2 * (1 + 1)
    assert preview.cost.wall_clock_seconds is None


def test_a_preview_of_tpe_marks_the_trials_that_results_decide() -> None:
    preview = check_preview(grid(algorithm="tpe", startup_trials=3))
    assert len(preview.trials) == 9
    assert preview.note == (
        "These are all the trials. From number 3 on they depend on the results."
    )
    marked = [n for n in range(9) if f"  {n}: " in preview.render()]
    assert marked == list(range(9))
    assert preview.render().count("(depends on the results)") == 6


def test_a_preview_of_random_search_has_as_many_trials_as_asked_for() -> None:
    preview = check_preview(grid(algorithm="random", max_trials=50), 10)
    assert len(preview.trials) == 10
    assert preview.note == "40 more trials."


def test_a_preview_of_nights_without_a_seed_says_that_each_draws_others() -> None:
    def note(schedule: str | None, **search: Any) -> str:
        document = json.loads(grid(algorithm="random", max_trials=2).to_json())
        del document["search"]["seed"]
        document["search"] |= search
        return check_preview(parse({**document, "schedule": schedule}, "x", None)).note

    told = "Each night draws others: the file has no search.seed."
    assert told in note("0 2 * * *")
    for other in (note(None), note("0 2 * * *", seed=0)):
        assert told not in other


def test_a_preview_of_a_warm_start_says_that_earlier_sweeps_change_the_first_trials() -> None:
    told = "Where there are earlier sweeps, their 3 best come first"
    assert check_preview(grid(warm_start=3)).note.endswith(f"{told}.")
    document = json.loads(grid(algorithm="random", max_trials=4, warm_start=3).to_json())
    del document["search"]["seed"]
    note = check_preview(parse(document, "x", None)).note
    assert note.endswith(f"{told}, and others are drawn: the file has no search.seed.")
    assert told not in check_preview(grid()).note


def test_known_points_stand_first_in_a_preview() -> None:
    point = {"units": 3, "kind": None}
    assert check_preview(grid(points_to_evaluate=[point])).trials[0] == point


@pytest.mark.parametrize(
    ("budget", "bound"),
    [
        ({"gpu_seconds": 50}, 50.0),
        ({"wall_clock_seconds": 100, "max_parallel": 3}, 600.0),
        ({"wall_clock_seconds": 100}, 2400.0),
    ],
)
def test_the_least_bound_on_gpu_time_counts(budget: dict[str, float], bound: float) -> None:
    data = json.loads(grid().to_json())
    data["budget"] |= budget
    assert check_preview(parse(data, "test", None)).cost.gpu_seconds == bound


def test_the_text_of_a_preview_holds_the_file_the_trials_and_the_cost() -> None:
    config = grid()
    shown = check_preview(config).render()
    assert shown.startswith(config.to_yaml())
    assert "  0: units=1  kind=a\n" in shown
    assert "wall-clock seconds   no bound" in shown
    assert yaml.safe_load(config.to_yaml())["name"] == "grid"
