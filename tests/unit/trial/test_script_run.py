"""Which params of a script the trial's run has already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hermes_ops.trial.files import Folder
from hermes_ops.trial.mlflow.hook import ScriptRun, same_meaning


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("48", "48.0"),
        ("true", "True"),
        ("null", "None"),
        ("1e-05", "0.00001"),
        ('["a", 1]', "['a', 1]"),
        ('{"a": [true]}', "{'a': [True]}"),
        ("adam", "adam"),
        ('"adam"', "adam"),
    ],
)
def test_two_spellings_of_one_value(one: str, other: str) -> None:
    assert same_meaning(one, other)
    assert same_meaning(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [("48", "49"), ("true", "False"), ("adam", "Adam"), ("[1, 2]", "[2, 1]"), ("(" * 10_000, "")],
)
def test_two_values(one: str, other: str) -> None:
    assert not same_meaning(one, other)


@pytest.mark.parametrize(
    ("uri", "is_same"),
    [
        ("http://127.0.0.1:5000", True),
        ("http://localhost:5000/", True),
        ("http://[::1]:5000", True),
        ("http://localhost.example:5000", False),
        ("http://localhost:5001", False),
        ("sqlite:///own.db", False),
        (None, False),
    ],
)
def test_the_trial_s_server_is_known_by_each_name_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, is_same: bool
) -> None:
    monkeypatch.setenv("HERMES_MLFLOW_RUN_ID", "abc")
    monkeypatch.setenv("HERMES_MLFLOW_URI", "http://127.0.0.1:5000/")
    run = ScriptRun(Folder(tmp_path))
    assert run.is_at(uri) is is_same
    assert run.is_own(SimpleNamespace(tracking_uri=uri), "abc") is is_same
    assert not run.is_own(SimpleNamespace(tracking_uri=uri), "another")


def test_a_param_that_the_run_has_is_left_out_and_named_once_if_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ScriptRun(Folder(tmp_path))
    has = {"rate": "0.1", "deep": "true", "key": "hunter2"}

    def new(**params: str) -> list[str]:
        entries = [SimpleNamespace(key=key, value=value) for key, value in params.items()]
        return [param.key for param in run.new_params(entries, lambda: has)]

    assert new(rate="0.10", deep="True", key="swordfish", seed="1") == ["seed"]
    assert new(key="swordfish", seed="1", rate="0.1") == ["seed", "rate"]
    assert new(seed="2") == []
    said = "hermes: MLflow keeps the values that were logged first: "
    assert capsys.readouterr().out == f"{said}key\n{said}seed\n"


@pytest.mark.parametrize(("value", "step"), [("abc", 1), (None, 1), ([0.5, 0.4], 1), (0.5, "one")])
def test_an_objective_that_is_no_number_is_left_to_mlflow_which_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, step: object
) -> None:
    monkeypatch.setenv("HERMES_OBJECTIVE", "val_loss")
    run = ScriptRun(Folder(tmp_path))
    assert not run.record_value(True, "abc", "val_loss", value, step)
    assert run.record_value(True, "abc", "val_loss", "0.5", 1)
    assert len(Folder(tmp_path).logged_values.read_text().splitlines()) == 1
