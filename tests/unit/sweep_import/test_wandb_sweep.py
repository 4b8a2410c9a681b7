"""W&B sweep configurations as sweep files."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hermes_ops.config import parse
from hermes_ops.config.sweep_warnings import config_warnings
from hermes_ops.errors import ConfigError
from hermes_ops.sweep_import.draft import Draft, DraftOptions
from hermes_ops.sweep_import.wandb_sweep import convert

NOTHING = DraftOptions()


def sweep(**changes: Any) -> dict[str, Any]:
    return {
        "program": "train.py",
        "method": "bayes",
        "name": "my sweep",
        "run_cap": 30,
        "metric": {"name": "val_acc", "goal": "maximize", "target": 0.9},
        "parameters": {"lr": {"min": 0.0001, "max": 0.1}},
        "early_terminate": {"type": "hyperband", "max_iter": 27},
        **changes,
    }


def converted(options: DraftOptions = NOTHING, **changes: Any) -> Draft:
    draft = convert(sweep(**changes), "sweep.yaml", options)
    draft.check()
    return draft


def parameter(spec: dict[str, Any]) -> Any:
    return converted(parameters={"p": spec}).sweep["search"]["space"]["p"]


def told(draft: Draft) -> str:
    return "\n".join(map(str, draft.notes))


def test_what_a_sweep_says_is_what_the_sweep_file_says() -> None:
    draft = converted()
    config = parse(draft.sweep, "x", None)
    assert (config.name, config.objective.metric) == ("my-sweep", "val_acc")
    assert (config.objective.direction.value, config.objective.target) == ("maximize", 0.9)
    assert (config.search.algorithm.value, config.search.max_trials) == ("tpe", 30)
    assert config.trial.command == ("python", "train.py", "--lr={lr}")
    assert (config.budget.max_epochs, config.early_stop.value) == (27, "asha")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"value": 3}, {"type": "choice", "values": [3]}),
        ({"values": ["a", "b"]}, {"type": "choice", "values": ["a", "b"]}),
        ({"min": 1, "max": 8}, {"type": "integer", "low": 1, "high": 8}),
        ({"min": 0.0, "max": 1}, {"type": "uniform", "low": 0.0, "high": 1.0}),
        ({"distribution": "int_uniform", "min": 2, "max": 2}, {"type": "choice", "values": [2]}),
        (
            {"distribution": "q_uniform", "min": 16, "max": 128, "q": 16},
            {"type": "quantised", "low": 16, "high": 128, "step": 16},
        ),
        (
            {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
            {"type": "loguniform", "low": 0.001, "high": 0.1},
        ),
        (
            {"distribution": "inv_log_uniform_values", "min": 0.001, "max": 0.1},
            {"type": "loguniform", "low": 0.001, "high": 0.1},
        ),
        (
            {"distribution": "q_log_uniform_values", "min": 8, "max": 256, "q": 1},
            {"type": "log_integer", "low": 8, "high": 256},
        ),
        (
            {"distribution": "q_uniform", "min": 1, "max": 64, "q": 8},
            {"type": "quantised", "low": 0, "high": 64, "step": 8},
        ),
        (
            {"distribution": "q_uniform", "min": 0.25, "max": 1, "q": 0.1},
            {"type": "quantised", "low": 0.2, "high": 1.0, "step": 0.1},
        ),
        (
            {"distribution": "q_normal", "mu": 10, "sigma": 2, "q": 3},
            {"type": "quantised", "low": 3, "high": 15, "step": 3},
        ),
        (
            {"distribution": "q_beta", "a": 2, "b": 5, "q": 0.25},
            {"type": "quantised", "low": 0.0, "high": 1.0, "step": 0.25},
        ),
        (
            {"distribution": "q_log_uniform_values", "min": 0.2, "max": 64, "q": 1},
            {"type": "log_integer", "low": 1, "high": 64},
        ),
        ({"distribution": "beta", "a": 2, "b": 5}, {"type": "uniform", "low": 0.0, "high": 1.0}),
        (
            {"distribution": "normal", "mu": 1, "sigma": 0.5},
            {"type": "uniform", "low": -0.5, "high": 2.5},
        ),
        (
            {"distribution": "q_normal", "mu": 10, "sigma": 2, "q": 2},
            {"type": "quantised", "low": 4, "high": 16, "step": 2},
        ),
    ],
)
def test_each_distribution_becomes_the_parameter_that_draws_the_same_values(
    spec: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert parameter(spec) == expected


@pytest.mark.parametrize(
    ("distribution", "low", "high"), [("log_uniform", -7, -2), ("inv_log_uniform", 2, 7)]
)
def test_bounds_that_are_exponents_become_the_values(
    distribution: str, low: float, high: float
) -> None:
    found = parameter({"distribution": distribution, "min": low, "max": high})
    assert found["type"] == "loguniform"
    assert found["low"] == pytest.approx(math.exp(-7))
    assert found["high"] == pytest.approx(math.exp(-2))


def test_what_changes_the_search_is_noted() -> None:
    draft = converted(
        parameters={
            "a": {"values": [1, 2], "probabilities": [0.9, 0.1]},
            "b": {"distribution": "normal", "mu": 0, "sigma": 1},
            "l r": {"min": 0.1, "max": 0.2},
            "outer": {"parameters": {"inner": {"values": [1, 2]}}},
        }
    )
    assert "search.space.a: `probabilities` are left out" in told(draft)
    assert "search.space.b: was normal" in told(draft)
    assert "search.space.l_r: was named 'l r'" in told(draft)
    assert set(draft.sweep["search"]["space"]) == {"a", "b", "l_r", "outer.inner"}


def test_a_logarithmic_range_of_whole_steps_has_whole_numbers_that_a_script_can_read_as_such() -> (
    None
):
    spec = {"distribution": "q_log_uniform_values", "min": 32, "max": 256, "q": 8}
    batch_size = {"type": "quantised", "low": 32, "high": 256, "step": 8}
    assert parameter(spec) == parameter({**spec, "q": 8.0}) == batch_size
    assert "all multiples of 8 are equally likely" in told(converted(parameters={"p": spec}))
    rate = {"distribution": "q_log_uniform_values", "min": 0.1, "max": 1.0, "q": 0.1}
    assert parameter(rate) == {"type": "loguniform", "low": 0.1, "high": 1.0}


def test_a_grid_of_more_combinations_than_runs_becomes_a_random_choice_of_them() -> None:
    parameters = {"a": {"values": [1, 2, 3]}, "b": {"min": 1, "max": 4}}
    draft = converted(method="grid", run_cap=5, parameters=parameters)
    assert (draft.sweep["search"]["algorithm"], draft.sweep["search"]["max_trials"]) == (
        "random",
        5,
    )
    assert "the grid has 12 combinations; `random` tries 5 of them, each once" in told(draft)
    whole = converted(DraftOptions(max_trials=12), method="grid", run_cap=5, parameters=parameters)
    assert whole.sweep["search"]["algorithm"] == "grid"


def test_a_metric_without_a_goal_has_no_direction_so_that_the_check_warns_of_an_accuracy() -> None:
    draft = converted(metric={"name": "accuracy"})
    assert draft.sweep["objective"] == {"metric": "accuracy"}
    (warning,) = config_warnings(parse(draft.sweep, "x", None), None)
    assert warning.path == ("objective", "direction")


def test_the_goal_of_another_metric_than_the_stated_one_is_noted() -> None:
    notes = told(converted(DraftOptions(metric="loss")))
    assert "objective.direction: is that of 'val_acc': check it" in notes
    assert "objective.target: is that of 'val_acc': check it" in notes
    assert "check it" not in told(converted(DraftOptions(metric="val_acc")))


def test_values_that_are_lists_become_the_texts_that_an_agent_passes_with_a_note() -> None:
    layers, extra = {"values": [[64, 64], [128]]}, {"value": {"a": 1, "b": "x"}}
    draft = converted(parameters={"layers": layers, "extra": extra, "n": {"values": [1, 2]}})
    space = draft.sweep["search"]["space"]
    assert space["layers"]["values"] == ["[64, 64]", "[128]"]
    assert space["extra"]["values"] == ["{'a': 1, 'b': 'x'}"]
    for name, is_noted in {"layers": True, "extra": True, "n": False}.items():
        assert (f"search.space.{name}: lists and mappings are texts now" in told(draft)) == is_noted


@pytest.mark.parametrize("values", [[True, False], [None, 10]])
def test_a_value_that_is_written_otherwise_for_the_script_than_by_an_agent_is_noted(
    values: list[object],
) -> None:
    draft = converted(parameters={"p": {"values": values}})
    assert draft.sweep["search"]["space"]["p"]["values"] == values
    assert "search.space.p: the script gets `true`, `false` and an empty text" in told(draft)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"distribution": "q_uniform", "min": 1, "max": 64, "q": 8}, "is 0 to 64"),
        ({"distribution": "q_log_uniform_values", "min": 0.2, "max": 64}, "starts at 1"),
        ({"distribution": "q_log_normal", "mu": 3, "sigma": 0.5, "q": 4}, "multiples of 4"),
    ],
)
def test_rounding_to_multiples_that_changes_a_range_is_noted(
    spec: dict[str, Any], text: str
) -> None:
    assert text in told(converted(parameters={"p": spec}))


def test_bounds_that_are_multiples_already_are_not_noted() -> None:
    spec = {"distribution": "q_uniform", "min": 16, "max": 128, "q": 16}
    assert "search.space" not in told(converted(parameters={"p": spec}))


@pytest.mark.parametrize(
    "spec",
    [
        {"min": 0.1, "max": 0.0001},
        {"min": 8, "max": 1},
        {"distribution": "q_uniform", "min": 64, "max": 8, "q": 8},
        {"distribution": "log_uniform_values", "min": 0.1, "max": 0.001},
        {"distribution": "q_log_uniform_values", "min": 256, "max": 16},
    ],
)
def test_reversed_bounds_are_refused_and_become_no_constant(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"search\.space\.p.*low below high.*swap them"):
        converted(parameters={"p": spec})


@pytest.mark.parametrize(
    ("parameters", "both"),
    [
        ({"l r": {"value": 1}, "l_r": {"value": 2}}, ("parameters.l r", "parameters.l_r")),
        (
            {"a.b": {"value": 1}, "a": {"parameters": {"b": {"value": 2}}}},
            ("parameters.a.b", "parameters.a.parameters.b"),
        ),
        ({"学習率": {"value": 1}, "層": {"value": 2}}, ("学習率", "層")),
    ],
)
def test_two_parameters_whose_names_become_the_same_are_refused_by_both_names(
    parameters: dict[str, Any], both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(parameters=parameters)
    assert all(name in str(raised.value) for name in both)
    assert "rename one of them" in raised.value.problems[0].fix


def test_what_the_sweep_does_not_say_is_noted_and_can_be_stated() -> None:
    missing: dict[str, Any] = dict.fromkeys(("metric", "run_cap", "early_terminate", "program"))
    draft = converted(**missing)
    for place in ("objective.metric", "search.max_trials", "budget.max_epochs", "--script"):
        assert place in told(draft)
    stated = DraftOptions(name="n", metric="loss", script="run.py", max_epochs=5, max_trials=7)
    config = parse(converted(stated, **missing).sweep, "x", None)
    assert (config.name, config.objective.metric, config.trial.command[1]) == (
        "n",
        "loss",
        "run.py",
    )
    assert (config.budget.max_epochs, config.search.max_trials) == (5, 7)
    assert "--" not in told(converted(stated, **missing))


def test_a_grid_without_a_cap_has_all_its_combinations() -> None:
    parameters = {
        "a": {"values": [1, 2, 3]},
        "b": {"min": 1, "max": 4},
        "c": {"distribution": "q_uniform", "min": 0.1, "max": 0.5, "q": 0.1},
    }
    draft = converted(method="grid", run_cap=None, parameters=parameters)
    assert draft.sweep["search"]["max_trials"] == 60


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (None, ["python", "train.py", "--lr={lr}"]),
        (["${env}", "python3", "${program}", "${args}"], ["python3", "train.py", "--lr={lr}"]),
        ("${interpreter} ${program} ${args_no_hyphens}", ["python", "train.py", "lr={lr}"]),
        (
            ["torchrun", "${program}", "--cfg={a: 1}", "${args_no_boolean_flags}"],
            ["torchrun", "train.py", "--cfg={{a: 1}}", "--lr={lr}"],
        ),
    ],
)
def test_the_command_s_macros_are_replaced_and_braces_stay_text(
    command: Any, expected: list[str]
) -> None:
    assert converted(command=command).sweep["trial"]["command"] == expected


def test_values_as_json_have_no_counterpart_and_the_way_is_named() -> None:
    draft = converted(command=["python", "${program}", "${args_json}"])
    assert "HERMES_PARAM_<NAME>" in told(draft)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"method": "annealing"}, "method"),
        ({"parameters": {}}, "parameters"),
        ({"parameters": {"p": 3}}, "parameters.p"),
        ({"parameters": {"p": {"values": "abc"}}}, "parameters.p.values"),
        ({"parameters": {"p": {"min": 1}}}, "parameters.p"),
        ({"parameters": {"p": {"distribution": "q_uniform", "min": 1}}}, "parameters.p"),
        ({"parameters": {"p": {"distribution": "cauchy"}}}, "parameters.p.distribution"),
        ({"metric": {"name": "x", "goal": "up"}}, "metric.goal"),
        ({"metric": "loss"}, "metric"),
        ({"metric": {"name": ["loss"]}}, "objective.metric"),
        ({"parameters": {"p": {"min": 0, "max": 1 << 20_000}}}, "parameters.p.max"),
        ({"method": ["random"]}, "method"),
        ({"early_terminate": {"max_iter": "27 epochs"}}, "early_terminate.max_iter"),
        ({"command": 5}, "command"),
        ({"command": {"a": "b"}}, "command"),
        ({"command": ["python", ["train.py"]]}, "command[1]"),
        ({"program": ["train.py"]}, "program"),
        ({"parameters": {"p": {"distribution": "int_uniform", "min": 0.5, "max": 2}}}, "p.min"),
        ({"parameters": {"p": {"distribution": "uniform", "min": 0, "max": math.inf}}}, "p.max"),
        ({"parameters": {"p": {"distribution": "log_uniform_values", "min": 0}}}, "p.min"),
        ({"parameters": {"p": {"distribution": "normal", "sigma": -1}}}, "p.sigma"),
        ({"parameters": {"p": {"distribution": "log_uniform", "min": 1, "max": 1e6}}}, "p"),
    ],
)
def test_what_cannot_be_converted_is_one_error_that_names_its_place(
    changes: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(**changes)
    assert place in raised.value.problems[0].where
    assert raised.value.problems[0].fix


@pytest.mark.parametrize("step", [0, -2, "8", math.nan])
@pytest.mark.parametrize("distribution", ["q_uniform", "q_normal", "q_log_uniform_values"])
def test_a_step_that_is_not_above_0_is_refused_by_its_place(
    distribution: str, step: object
) -> None:
    spec = {"distribution": distribution, "min": 1, "max": 64, "q": step}
    with pytest.raises(ConfigError) as raised:
        converted(method="grid", run_cap=None, parameters={"p": spec})
    assert raised.value.problems[0].where == "parameters.p.q"


def test_a_grid_of_more_steps_than_can_be_counted_is_refused() -> None:
    spec = {"distribution": "q_uniform", "min": 0, "max": 1e300, "q": 1e-300}
    with pytest.raises(ConfigError):
        converted(method="grid", run_cap=None, parameters={"p": spec})


def test_a_grid_over_a_range_of_floats_is_refused_by_the_sweep_file_s_own_check() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.yaml is not valid"):
        converted(method="grid")
