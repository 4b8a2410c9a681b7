"""Which format a source has, and what `hermes sweep import` does with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hermes_ops import cli
from hermes_ops.cli import assemble
from hermes_ops.config import load_file
from hermes_ops.errors import ConfigError
from hermes_ops.sweep_import import DraftOptions, SourceFormat, import_sweep

NOTHING = DraftOptions()
WANDB = """
program: train.py
method: random
run_cap: 4
metric: {name: loss}
parameters: {lr: {distribution: log_uniform_values, min: 1e-4, max: 0.1}}
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1", "neither"),
        ("[1, 2]", "no mapping"),
        ("search: {}\ntrial: {}", "a sweep file of Hermes"),
        ("a: [", "valid"),
        ("method: grid\nmethod: random\nparameters: {}", "again"),
    ],
)
def test_a_file_of_another_kind_is_one_error(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=found):
        import_sweep(str(file), NOTHING)


def test_a_format_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(WANDB)
    with pytest.raises(ConfigError, match=r"spec\.parameters"):
        import_sweep(str(file), NOTHING, SourceFormat.KATIB)


def test_json_is_read_as_yaml_is(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"method": "grid", "parameters": {"p": {"values": [1, 2]}}}))
    assert import_sweep(str(file), NOTHING).sweep["search"]["max_trials"] == 2


def test_the_command_writes_a_file_that_check_accepts_and_never_over_another(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "w.yaml", tmp_path / "sweep.yaml"
    source.write_text(WANDB)
    arguments = ["sweep", "import", str(source), "--out", str(out), "--max-epochs", "3"]
    result = CliRunner().invoke(assemble(), arguments)
    assert result.exit_code == 0, result.output
    assert load_file(out).budget.max_epochs == 3
    assert "trial.command: the script must print its metrics" in out.read_text()
    before = out.read_text()
    again = CliRunner().invoke(assemble(), arguments)
    assert again.exit_code != 0
    assert out.read_text() == before


def test_without_a_file_the_sweep_is_printed_as_one_valid_document(tmp_path: Path) -> None:
    source, out = tmp_path / "w.yaml", tmp_path / "sweep.yaml"
    source.write_text(WANDB.replace("lr:", '"l\\nr":'))
    result = CliRunner().invoke(assemble(), ["sweep", "import", str(source)])
    assert result.exit_code == 0, result.output
    out.write_text(result.stdout)
    assert set(load_file(out).search.space) == {"l_r"}


@pytest.mark.parametrize("name", ["none/sweep.yaml", "a" * 300])
def test_a_file_that_cannot_be_written_is_one_line_with_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "w.yaml"
    source.write_text(WANDB)
    arguments = ["sweep", "import", str(source), "--out", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", ["hermes", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hermes: {tmp_path / name}: ")
    assert line.endswith("correct the path, or its permissions")
    assert [path.name for path in tmp_path.iterdir()] == ["w.yaml"]


@pytest.mark.parametrize(
    ("source", "found", "fix"),
    [
        ("/proc/self/mem", "Input/output error|Permission denied", "make the file readable"),
        ("a" * 300, "File name too long", "check the path"),
        ("~nosuchuser/sweep.yaml", "no such file", "check the path"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_error_with_the_remedy(
    source: str, found: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        import_sweep(source, NOTHING)
    assert re.fullmatch(found, raised.value.problems[0].found)
    assert raised.value.problems[0].fix.startswith(fix)
