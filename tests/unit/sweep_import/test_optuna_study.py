"""Optuna studies, made by Optuna itself, as sweep files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import parse
from hermes_ops.errors import ConfigError, HermesError
from hermes_ops.sweep_import import import_sweep
from hermes_ops.sweep_import.draft import Draft, DraftOptions
from hermes_ops.sweep_import.optuna_study import convert

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)

NOTHING = DraftOptions()


def objective(trial: Any) -> float:
    x = trial.suggest_float("x", 0.0, 1.0)
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    units = trial.suggest_int("units", 16, 64, step=16)
    trial.suggest_int("depth", 1, 8, log=True)
    trial.suggest_categorical("kind", ["a", "b", None])
    for step in range(5):
        trial.report(x + step, step)
    return float((x - 0.3) ** 2 + rate + units / 1000)


def study(folder: Path, name: str = "mine", direction: str = "minimize", trials: int = 12) -> Path:
    file = folder / "optuna.db"
    made = optuna.create_study(
        storage=f"sqlite:///{file}",
        study_name=name,
        direction=direction,
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    made.optimize(objective, n_trials=trials)
    return file


def told(draft: Draft) -> str:
    return "\n".join(map(str, draft.notes))


def test_the_space_of_a_study_is_the_space_of_the_sweep(tmp_path: Path) -> None:
    draft = convert(str(study(tmp_path)), NOTHING)
    assert draft.sweep["search"]["space"] == {
        "x": {"type": "uniform", "low": 0.0, "high": 1.0},
        "rate": {"type": "loguniform", "low": 0.0001, "high": 0.1},
        "units": {"type": "quantised", "low": 16, "high": 64, "step": 16},
        "depth": {"type": "log_integer", "low": 1, "high": 8},
        "kind": {"type": "choice", "values": ["a", "b", None]},
    }
    config = parse(draft.sweep, "x", None)
    assert (config.name, config.budget.max_epochs, config.search.max_trials) == ("mine", 5, 20)
    assert "objective.metric" in told(draft)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_trials_come_first_best_one_first(tmp_path: Path, direction: str) -> None:
    file = study(tmp_path, direction=direction)
    draft = import_sweep(str(file), DraftOptions(points=3))
    loaded = optuna.load_study(study_name="mine", storage=f"sqlite:///{file}")
    best = sorted(loaded.trials, key=lambda t: t.value, reverse=direction == "maximize")[:3]
    assert draft.sweep["search"]["points_to_evaluate"] == [t.params for t in best]
    assert draft.sweep["objective"]["direction"] == direction


def test_a_study_of_more_good_trials_than_the_sweep_has_fills_the_sweep_with_the_best(
    tmp_path: Path,
) -> None:
    file = study(tmp_path)
    sweep = import_sweep(str(file), DraftOptions(max_trials=3)).sweep
    best = import_sweep(str(file), NOTHING).sweep["search"]["points_to_evaluate"][:3]
    assert sweep["search"]["points_to_evaluate"] == best


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("penalty", [float("inf"), float("-inf")])
def test_a_trial_with_an_infinite_value_is_not_tried_again(
    tmp_path: Path, direction: str, penalty: float
) -> None:
    file = study(tmp_path, direction=direction, trials=2)
    made = optuna.load_study(study_name="mine", storage=f"sqlite:///{file}")
    made.optimize(lambda trial: objective(trial) + penalty, n_trials=1)
    points = convert(str(file), NOTHING).sweep["search"]["points_to_evaluate"]
    assert made.trials[2].params not in points
    assert len(points) == 2


def test_a_study_is_read_and_never_written(tmp_path: Path) -> None:
    file = study(tmp_path, trials=3)
    before = file.read_bytes()
    import_sweep(str(file), NOTHING)
    import_sweep(f"sqlite:///{file}", NOTHING)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["optuna.db"]


def test_a_journal_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "journal.log"
    backend = optuna.storages.journal.JournalFileBackend(str(file))
    made = optuna.create_study(storage=optuna.storages.JournalStorage(backend), study_name="logged")
    made.optimize(objective, n_trials=2)
    assert import_sweep(str(file), NOTHING).sweep["name"] == "logged"


def test_of_several_studies_one_is_named(tmp_path: Path) -> None:
    study(tmp_path, "one", trials=1)
    file = study(tmp_path, "two", trials=1)
    with pytest.raises(ConfigError, match="'one', 'two'"):
        convert(str(file), NOTHING)
    assert convert(str(file), DraftOptions(study="two")).sweep["name"] == "two"
    with pytest.raises(ConfigError, match="no study 'three'"):
        convert(str(file), DraftOptions(study="three"))


def test_a_parameter_of_some_trials_and_a_range_that_changed_are_noted(tmp_path: Path) -> None:
    def changing(trial: Any) -> float:
        high = 1.0 if trial.number < 3 else 0.5
        value = trial.suggest_float("x", 0.0, high)
        if trial.number % 2:
            trial.suggest_float("momentum", 0.0, 0.9)
        return float(value)

    url = f"sqlite:///{tmp_path / 'o.db'}"
    optuna.create_study(storage=url, study_name="s").optimize(changing, n_trials=6)
    draft = import_sweep(url, NOTHING)
    assert draft.sweep["search"]["space"]["x"]["high"] == 0.5
    assert "search.space.x: its range changed" in told(draft)
    assert "search.space.momentum: 3 of 6 trials have it" in told(draft)
    assert "complete trials do not fit" in told(draft)


def branching(trial: Any) -> float:
    """A value of a choice brings a choice, of which a value brings a number; two bring another."""
    x = trial.suggest_float("x", 0.0, 1.0)
    if trial.suggest_categorical("optimizer", ["adam", "sgd", None]) == "sgd":
        if trial.suggest_categorical("nesterov", [True, False]):
            x += trial.suggest_float("momentum", 0.0, 0.9)
    else:
        trial.suggest_float("beta", 0.5, 0.9)
    if x > 0.9:
        raise optuna.TrialPruned
    return float(x)


def test_a_parameter_that_one_value_of_a_choice_brings_is_under_that_value(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'o.db'}"
    made = optuna.create_study(
        storage=url, study_name="s", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    made.optimize(branching, n_trials=60)
    draft = import_sweep(url, DraftOptions(points=60, max_trials=60))
    space = draft.sweep["search"]["space"]
    momentum = {"type": "uniform", "low": 0.0, "high": 0.9}
    nesterov = {
        "type": "choice",
        "values": [{"value": True, "space": {"momentum": momentum}}, False],
    }
    sgd = {"value": "sgd", "space": {"nesterov": nesterov}}
    assert space["optimizer"]["values"] == ["adam", sgd, None]
    assert list(space) == ["x", "optimizer", "beta"]
    assert "search.space.momentum: under 'True' of nesterov" in told(draft)
    assert "move it under that choice" in told(draft)  # beta: two values bring it


def test_the_best_trials_of_each_branch_of_a_study_are_points(tmp_path: Path) -> None:
    def of_two(trial: Any) -> float:
        if trial.suggest_categorical("optimizer", ["adam", "sgd"]) == "adam":
            return 0.5
        return float(trial.suggest_float("momentum", 0.0, 0.9))

    url = f"sqlite:///{tmp_path / 'o.db'}"
    made = optuna.create_study(
        storage=url, study_name="s", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    made.optimize(of_two, n_trials=12)
    draft = import_sweep(url, NOTHING)
    points = draft.sweep["search"]["points_to_evaluate"]
    complete = sorted(made.trials, key=lambda t: t.value)
    assert points == list({str(t.params): t.params for t in complete}.values())[:10]
    assert "do not fit" not in told(draft)


def test_several_objectives_and_a_study_without_trials_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'o.db'}"
    optuna.create_study(storage=url, study_name="pareto", directions=["minimize", "maximize"])
    optuna.create_study(storage=url, study_name="empty")
    with pytest.raises(ConfigError, match="2 objectives"):
        convert(url, DraftOptions(study="pareto"))
    with pytest.raises(ConfigError, match="no trial with parameters"):
        convert(url, DraftOptions(study="empty"))


def test_a_missing_file_is_not_made_and_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    for source in (str(tmp_path / "none.db"), f"sqlite:///{tmp_path / 'none.db'}"):
        with pytest.raises(ConfigError, match="no such file"):
            convert(source, NOTHING)
    assert list(tmp_path.iterdir()) == []
    other = tmp_path / "other.db"
    other.write_bytes(b"SQLite format 3\x00" + bytes(200))
    with pytest.raises(HermesError) as raised:
        import_sweep(str(other), NOTHING)
    assert "\n" not in str(raised.value)


def test_an_address_of_postgresql_without_a_driver_takes_the_one_of_the_extra() -> None:
    pytest.importorskip("psycopg2")
    with pytest.raises(HermesError, match="StorageInternalError"):  # nobody listens there
        convert("postgresql://me@127.0.0.1:9/optuna", NOTHING)


@pytest.mark.parametrize(
    ("address", "cure"),
    [
        ("mysql://me@db/optuna", "pymysql"),
        ("postgresql+pg8000://me@db/optuna", r"hermes-ops\[postgresql\]"),
    ],
)
def test_a_driver_that_is_not_installed_is_said_with_the_cure(address: str, cure: str) -> None:
    with pytest.raises(HermesError, match=f"driver of this database is not installed.*{cure}"):
        convert(address, NOTHING)


def test_the_password_of_a_database_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(HermesError) as raised:
        convert("postgresql://me:sw0rdfish@127.0.0.1:1/none", NOTHING)
    assert "sw0rdfish" not in str(raised.value)
    assert "me:***@127.0.0.1" in str(raised.value)


def test_two_parameters_whose_names_become_the_same_are_refused_by_both_names(
    tmp_path: Path,
) -> None:
    def two(trial: Any) -> float:
        return float(trial.suggest_float("a b", 0, 1) + trial.suggest_float("a_b", 0, 2))

    url = f"sqlite:///{tmp_path / 'o.db'}"
    optuna.create_study(storage=url, study_name="s").optimize(two, n_trials=2)
    with pytest.raises(ConfigError) as raised:
        import_sweep(url, NOTHING)
    problem = raised.value.problems[0]
    assert "'a b'" in problem.found
    assert "'a_b'" in problem.found
    assert "rename one of them" in problem.fix


def test_a_parameter_that_gets_another_name_is_noted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'o.db'}"
    made = optuna.create_study(storage=url, study_name="s")
    made.optimize(lambda trial: float(trial.suggest_int("units l0", 1, 8)), n_trials=1)
    draft = import_sweep(url, NOTHING)
    assert list(draft.sweep["search"]["space"]) == ["units_l0"]
    assert "search.space.units_l0: was named 'units l0'" in told(draft)


def test_the_home_of_a_user_who_does_not_exist_is_no_such_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        convert("~nosuchuser/optuna.db", NOTHING)
