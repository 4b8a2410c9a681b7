"""What a newcomer reads of a mistake: the user's own value as it should stand, in plain words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import load_file, parse
from hermes_ops.errors import ConfigError, Problem

SWEEP: dict[str, Any] = {
    "name": "digits",
    "objective": {"metric": "val_loss"},
    "search": {
        "algorithm": "tpe",
        "max_trials": 6,
        "space": {"lr": {"type": "uniform", "low": 0.0, "high": 1.0}},
    },
    "trial": {"command": ["python", "train.py", "{lr}"]},
    "budget": {"max_epochs": 2},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The sweep with another value at `section.key`."""
    data = copy.deepcopy(SWEEP)
    holder = data
    *sections, key = path.split(".")
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[key] = value
    return data


def problems(data: object) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(data, "test", None)
    return {problem.where: problem for problem in caught.value.problems}


ENVIRONMENT = "trial.environment"
N = "search.space.n"

VALUES: list[tuple[str, Any, str]] = [
    (f"{ENVIRONMENT}.PORT", 8080, 'put it in quotes: `PORT: "8080"`'),
    (f"{ENVIRONMENT}.DEBUG", True, 'put it in quotes: `DEBUG: "true"`'),
    (f"{ENVIRONMENT}.RATE", 1e-4, 'put it in quotes: `RATE: "0.0001"`'),
    (f"{ENVIRONMENT}.X", None, 'write `X: ""` for an empty text'),
    ("name", 12, 'put it in quotes: `name: "12"`'),
    ("name", "my sweep!", "for example `name: my-sweep`"),
    ("search.max_trials", 20.0, "write `max_trials: 20`"),
    ("search.max_trials", "20", "write it without quotes: `max_trials: 20`"),
    ("search.algorithm", "TPE", "did you mean tpe?"),
    ("search.algorithm", "bayesian", "did you mean tpe?"),
    ("search.constraints", "lr < 1", 'write a list: `constraints: ["lr < 1"]`'),
    ("objective.direction", "max", "did you mean maximize?"),
    ("objective.direction", "Minimize", "did you mean minimize?"),
    ("objective", "val_loss", 'for example `objective: {"metric": "val_loss"}`'),
    ("objective.target", "0.5", "write it without quotes: `target: 0.5`"),
    ("trial.gpus", "2", "write it without quotes: `gpus: 2`"),
    ("trial.preemptible", "yes", "write `preemptible: true`"),
    ("trial.command", "python 'my train.py'", '`command: ["python", "my train.py"]`'),
    ("deadline", 8, "write for example 2026-12-01T08:00:00+01:00, or a duration such as 8h"),
    ("deadline", "tomorrow", "write for example 2026-12-01T08:00:00+01:00"),
    ("deadline", "2026-12-01T08:00:00", "write for example 2026-12-01T08:00:00+01:00"),
    ("budget.wall_clock_seconds", "2h", "write the seconds: `wall_clock_seconds: 7200`"),
    ("budget.gpu_seconds", "30 min", "write the seconds: `gpu_seconds: 1800`"),
    (N, [1, 2], "write `n: {type: choice, values: [1, 2]}`"),
    (N, 3, 'for example `n: {"type": "uniform"'),
]


@pytest.mark.parametrize(("path", "value", "fix"), VALUES, ids=lambda v: str(v)[:40])
def test_the_fix_shows_the_value_as_it_should_stand(path: str, value: Any, fix: str) -> None:
    assert fix in problems(changed(path, value))[path].fix


UNIFORM = {"type": "uniform", "low": 0, "high": 1}
WHOLE = {"type": "integer", "low": 1, "high": 9}

PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({**WHOLE, "low": 1.0}, ".low", "write `low: 1`"),
    ({**WHOLE, "low": 1.5}, ".low", "use the type uniform"),
    ({**WHOLE, "high": "9"}, ".high", "without quotes: `high: 9`"),
    ({**WHOLE, "step": 2}, ".step", "use quantised: {type: quantised, low: 1, high: 9, step: 2}"),
    ({**UNIFORM, "step": 0.1}, ".step", "{type: quantised, low: 0, high: 1, step: 0.1}"),
    ({**UNIFORM, "q": 0.1}, ".q", "{type: quantised, low: 0, high: 1, step: 0.1}"),
    ({**UNIFORM, "type": "loguniform", "low": 0.1, "step": 1}, ".step", "has no steps"),
    ({**WHOLE, "log": True}, ".log", "the type log_integer is logarithmic"),
    ({**UNIFORM, "log": True}, ".log", "the type loguniform is logarithmic"),
    ({**UNIFORM, "low": "1e-4"}, ".low", "without quotes: `low: 1e-4`"),
    ({"type": "uniform", "min": 0, "max": 1}, ".min", "did you mean low?"),
    ({"type": "uniform", "values": [1]}, ".values", "`type: choice`"),
    ({"type": "choice", "options": [1]}, ".options", "did you mean values?"),
    ({"type": "choice", "low": 1}, ".low", "list `values`"),
    ({**UNIFORM, "type": "float"}, ".type", "did you mean uniform?"),
    ({**UNIFORM, "type": "randint"}, ".type", "did you mean integer?"),
    ({**UNIFORM, "type": "categorical"}, ".type", "did you mean choice?"),
    ({**UNIFORM, "type": "quniform"}, ".type", "did you mean quantised?"),
    ({**WHOLE, "low": 9}, "", "{type: choice, values: [9]}"),
    ({**WHOLE, "low": 10}, "", "swap them"),
    ({"type": "quantised", "low": 0, "high": 1, "step": 2}, "", "write a smaller step"),
]


@pytest.mark.parametrize(("spec", "where", "fix"), PARAMETERS, ids=str)
def test_the_fix_of_a_parameter_names_what_is_meant(
    spec: dict[str, Any], where: str, fix: str
) -> None:
    assert fix in problems(changed(N, spec))[f"{N}{where}"].fix


KEYS: list[tuple[str, str]] = [
    ("objective.goal", "did you mean direction?"),
    ("search.n_trials", "did you mean max_trials?"),
    ("search.parameters", "did you mean space?"),
    ("trial.script", "did you mean command?"),
    ("trial.env", "did you mean environment?"),
    ("trial.parameters", "write it as search.space"),
    ("trial.max_epochs", "write it as budget.max_epochs"),
    ("epochs", "write it as budget.max_epochs"),
    ("direction", "write it as objective.direction"),
    ("gpus", "write it as trial.gpus"),
    ("search.search", "move what it holds to search, which is never nested"),
    ("nonsense_of_mine", "remove the key"),
]


@pytest.mark.parametrize(("path", "fix"), KEYS)
def test_an_unknown_key_is_told_where_it_belongs(path: str, fix: str) -> None:
    assert fix in problems(changed(path, 1))[path].fix


@pytest.mark.parametrize(("key", "meant"), [("max", "at_most"), ("minimum", "at_least")])
def test_a_bound_of_a_metric_by_another_word_is_told_the_word_for_it_here(
    key: str, meant: str
) -> None:
    found = problems(changed("metrics", [{"name": "latency", key: 5}]))
    assert found[f"metrics[0].{key}"].fix == f"did you mean {meant}?"
    assert problems(changed("trial.max", 5))["trial.max"].fix == "write it as trial.gpus.max"
    assert problems(changed("budget.maximum", 5))["budget.maximum"].fix == "remove the key"


@pytest.mark.parametrize("size", [100, 10])
def test_a_grid_of_very_many_points_is_counted_or_said_to_be_more(size: int) -> None:
    choice = {"type": "choice", "values": list(range(size))}
    data = changed("search.space", {f"p{n}": choice for n in range(size)})
    data["search"]["algorithm"], data["trial"]["command"] = "grid", ["x"]
    found = problems(data)["search.max_trials"]
    assert "more than 10^12" in found.found if size == 100 else "10,000,000,000" in found.found
    assert "digits" not in str(found)
    assert found.fix.startswith("use a coarser grid")


def test_a_number_of_many_digits_is_shown_as_a_power() -> None:
    assert problems(changed("search.max_trials", 10**400))["search.max_trials"].found == (
        "about 10^400"
    )


@pytest.mark.parametrize(
    ("name", "listed"), [("API_TOKEN", ()), ("DB_PASSWORD", ()), ("LICENCE", ()), ("X", ("X",))]
)
def test_a_value_that_may_be_secret_is_not_shown(name: str, listed: tuple[str, ...]) -> None:
    data = changed(f"{ENVIRONMENT}.{name}", 90210)
    data["trial"]["secrets"] = list(listed)
    (found,) = problems(data).values()
    assert "90210" not in str(found)
    assert f'put it in quotes: `{name}: "..."`' in found.fix


@pytest.mark.parametrize(
    "value",
    ["R 2 * * *", "r 2 * * *", "0 R * * *", "R(0-10) 2 * * *", "R/5 * * * *", "1,R 2 * * *",
     "H 2 * * *", "H(0-29)/10 H * * *"],
)  # fmt: skip
def test_a_schedule_that_is_drawn_by_chance_is_refused(value: str) -> None:
    found = problems(changed("schedule", value))["schedule"]
    assert "drawn by chance" in found.allowed
    assert "write a number" in found.fix


@pytest.mark.parametrize("value", ["@hourly", "0 2 * MAR THU", "0 2 L * *", "*/5 1-3 * * 1,3"])
def test_a_schedule_of_fixed_times_is_taken(value: str) -> None:
    assert parse(changed("schedule", value), "", None).schedule == value


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("{learning_rate}", "add learning_rate to search.space, or write `{{learning_rate}}`"),
        ('{"rate": 1}', 'write `{{"rate": 1}}` to mean the braces themselves'),
        ("{lrr}", "did you mean {lr}?"),
    ],
)
def test_braces_that_name_no_parameter_are_told_what_to_do(argument: str, fix: str) -> None:
    data = changed("trial.command", ["python", "train.py", argument])
    assert fix in problems(data)["trial.command[2]"].fix


def test_a_space_that_is_missing_is_one_problem() -> None:
    assert set(problems(changed("search.space", []))) == {"search.space"}


@pytest.mark.parametrize("section", ["objective", "search", "trial", "budget"])
def test_a_section_that_is_missing_is_shown_by_an_example(section: str) -> None:
    found = problems({key: value for key, value in SWEEP.items() if key != section})[section]
    assert found.allowed == "this section of the file"
    assert f"for example `{section}: {{" in found.fix


def test_a_placeholder_without_quotes_is_told_to_stand_in_them(tmp_path: Path) -> None:
    given = {"trial.command": ["python", "train.py", {"lr": None}]}
    assert 'put it in quotes: `"{lr}"`' in problems(changed(*given.popitem()))[
        "trial.command[2]"
    ].fix  # fmt: skip
    file = tmp_path / "sweep.yaml"
    for line, fix in [
        ("command: [python, --lr={lr}]", "in quotes"),
        ("name: @home", "in quotes"),
        ("name:\n\t- x", "not tabs"),
    ]:
        file.write_text(line)
        with pytest.raises(ConfigError) as caught:
            load_file(file)
        (problem,) = caught.value.problems
        assert fix in problem.fix
        assert "found found" not in str(problem)


@pytest.mark.parametrize(
    ("constraint", "fix"),
    [
        ("lr < 0.1 && lr > 0", "write and instead of &&"),
        ("lr < 0.1 || lr > 0.5", "write or instead of ||"),
        ("!(lr < 0.1)", "write not instead of !"),
        ("lr = 0.1", "write == instead of ="),
    ],
)
def test_the_signs_of_other_languages_are_told_what_they_are_here(
    constraint: str, fix: str
) -> None:
    found = problems(changed("search.constraints", [constraint]))["search.constraints[0]"]
    assert fix in found.fix


def test_the_words_for_what_is_allowed_are_plain() -> None:
    wrong = [("search.seed", -1), ("search.max_trials", 0), ("weight", 0), ("trial.python", 3),
             ("trial.preemptible", 3), ("search.seed", 1.5), ("objective.target", "x")]  # fmt: skip
    told = " ".join(str(problems(changed(*one))) for one in wrong)
    for word in ("valid string", "valid integer", "valid number", "valid boolean", "greater than"):
        assert word not in told
